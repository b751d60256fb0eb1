"""What an address says before anybody connects."""

import os
import threading
from pathlib import Path

import pytest

from torchinstruments.errors import ConfigurationError
from torchinstruments.store import urls


@pytest.mark.parametrize(
    ("url", "remote"),
    [
        ("stats", False),
        ("/data/a::b", False),
        ("~/runs", False),
        ("file:///data/run", False),
        ("local:///data/run", False),
        ("s3://bucket/run", True),
        ("memory://run", True),
        ("simplecache::s3://bucket/run", True),
        ("simplecache::file:///data/run", True),
    ],
)
def test_remote_addresses_are_told_from_local_ones(url: str, remote: bool) -> None:
    """Paths and file URLs need no client; everything else does."""
    assert urls.is_remote(url) is remote


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("ftp://user:pass@host:21/run?token=abc#part", "ftp://host:21/run"),
        ("ftp://us@er:p@ss@host/run", "ftp://host/run"),
        ("https://host/run?X-Amz-Signature=abc", "https://host/run"),
        ("simplecache::ftp://user:pass@host/run?x=1", "simplecache::ftp://host/run"),
        ("zip://inner#x::ftp://user:pass@host/run.zip?x=1", "zip://inner::ftp://host/run.zip"),
        (
            "abfs://container@account.dfs.core.windows.net/run",
            "abfs://container@account.dfs.core.windows.net/run",
        ),
        ("abfs://name:pass@account.dfs.core.windows.net/run", "abfs://account.dfs.core.windows.net/run"),
        ("/data/run#1?2@3", "/data/run#1?2@3"),
        ("file:///data/run#1", "file:///data/run#1"),
    ],
)
def test_redaction_leaves_no_secret(url: str, shown: str) -> None:
    """User info, query and fragment go, in every link; names that only look like them stay."""
    assert urls.redact(url) == shown
    assert urls.redact(shown) == shown


@pytest.mark.parametrize(
    "url", ["", "  ", "s3:/bucket/run", "s3://bucket/run?x=1", "simplecache::s3://bucket/run#1"]
)
def test_an_address_that_means_another_one_is_refused(url: str) -> None:
    """An empty one, one that lost a slash in a path object, and one with a query say so."""
    with pytest.raises(ConfigurationError):
        urls.check_url(url)


@pytest.mark.parametrize(
    ("url", "missing"),
    [
        ("s3://", "bucket"),
        ("s3:///run", "bucket"),
        ("S3A:// /run", "bucket"),
        ("gs://", "bucket"),
        ("abfs://", "bucket"),
        ("simplecache::s3://", "bucket"),
        ("s3:///a.zip::memory://run", "bucket"),
        ("https:///run", "host"),
        ("sftp://", "host"),
        ("file://", "folder"),
        ("hdfs://", "folder"),
    ],
)
def test_a_url_that_ends_where_the_place_begins_is_refused(url: str, missing: str) -> None:
    """The sentence says what is missing and where it goes."""
    with pytest.raises(ConfigurationError, match=rf"names no {missing}; give one"):
        urls.check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "runs",
        "/data/run?x#1",
        "file:///data/run",
        "s3://bucket",
        "s3://bucket/run",
        "https://host/a?b=c",
        "memory://",
        "hdfs:///run",
        "zip://::s3://bucket/run.zip",
        "abfs://container@account.dfs.core.windows.net/run",
    ],
)
def test_a_sound_address_passes(url: str) -> None:
    """A query is only refused where it would become a part of a name."""
    urls.check_url(url)


def test_a_refused_query_is_not_repeated() -> None:
    """The message about a query leaves out what may be a secret."""
    with pytest.raises(ConfigurationError) as caught:
        urls.check_url("s3://bucket/run?token=s3cret-token")
    assert "s3cret-token" not in str(caught.value)


@pytest.mark.parametrize("url", ["~/a b", "file://~/a b"])
def test_a_local_address_is_made_absolute(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home folder is filled in, and nothing else is decoded."""
    monkeypatch.setenv("HOME", "/home/somebody")
    assert urls.local_path(url) == "/home/somebody/a b"
    assert urls.local_path("file:///a%20b") == "/a%20b"
    assert urls.local_path("a/../b") == os.path.join(os.getcwd(), "b")


def test_secrets_of_options_and_addresses_are_found() -> None:
    """Whatever names itself a key, a token or a password is one, at any depth."""
    found = urls.secrets_of(
        "ftp://someone:hunter2222@host/run?sig=signature-text",
        {
            "key": "access-key",
            "secret": "secret-key",
            "client_kwargs": {"endpoint_url": "http://127.0.0.1:9000", "aws_session_token": "session-token"},
            "anon": False,
        },
    )
    expected = {"someone", "hunter2222", "access-key", "secret-key", "session-token", "sig=signature-text"}
    encoded = {"sig%3Dsignature-text", "someone%3Ahunter2222%40"}
    assert set(found) == {*expected, *encoded, "someone:hunter2222@"}
    assert urls.scrub("refused: secret-key and access-key", found) == "refused: *** and ***"


def test_secrets_are_found_encoded_and_decoded() -> None:
    """A client decodes the password of an address and encodes a token; both forms are hidden."""
    found = urls.secrets_of("ftp://someone:p%40ss+w%2Frd@host/run", {"token": "a/b=c d/e"})
    said = "530 p@ss+w/rd, p%40ss+w%2Frd: a/b=c d/e, a%2Fb%3Dc%20d%2Fe"
    assert urls.scrub(said, found) == "530 ***, ***: ***, ***"


@pytest.mark.parametrize("url", ["s3://me:pw@host/run", "simplecache::s3://me:pw@host/run"])
def test_a_short_password_is_hidden_where_it_stands_in_the_address(url: str) -> None:
    """A client may take it for a part of the bucket; the same letters in other words stay."""
    said = 'Invalid bucket name "me:pw@host", http://store/me%3Apw%40host: some pwd'
    assert urls.scrub(said, urls.secrets_of(url, None)) == (
        'Invalid bucket name "***host", http://store/***host: some pwd'
    )


def test_an_address_without_secrets_has_none() -> None:
    """Nothing is taken for a secret in a plain address."""
    assert urls.secrets_of("abfs://container@account/run", None) == ()
    assert urls.secrets_of("s3://bucket/run", {"client_kwargs": {"endpoint_url": "http://store:9000"}}) == ()


def test_what_only_this_process_reaches_is_known(tmp_path: Path) -> None:
    """Memory, schemes registered here, and options that cannot be sent elsewhere stay in this process."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    fsspec.register_implementation("madehere", MemoryFileSystem, clobber=True)
    assert urls.needs_this_process("memory://x", None)
    assert urls.needs_this_process("simplecache::memory://x", None)
    assert urls.needs_this_process("madehere://x", None)
    assert urls.needs_this_process("s3://bucket/x", {"session": threading.Lock()})
    assert not urls.needs_this_process("s3://bucket/x", {"key": "k"})
    assert not urls.needs_this_process(str(tmp_path), None)


def test_a_run_beside_another_has_its_name() -> None:
    """The folder beside is named after the run, whether or not the address ends with a slash."""
    assert urls.beside("s3://bucket/run/", "night-7") == "s3://bucket/run/run-night-7"
    assert urls.beside("/data", "night-7") == "/data/run-night-7"
