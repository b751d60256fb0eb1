"""What an address says before anybody connects: its scheme, its secrets, whether it is local.

An address is a path of this host, a URL, or a chain of URLs in fsspec's way,
``simplecache::s3://bucket/run``, whose last link ends with the path of the run.
"""

import os
import pickle
import re
import sys
from collections.abc import Mapping
from urllib.parse import quote, unquote

from torchinstruments.errors import ConfigurationError
from torchinstruments.store.texts import encodable

__all__ = [
    "beside",
    "check_storage_options",
    "check_url",
    "check_writable",
    "is_remote",
    "local_path",
    "needs_this_process",
    "redact",
    "schemes",
    "scrub",
    "secrets_of",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LOST_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)")
_LOCAL = frozenset({"file", "local"})
# In these the text before "@" names a container, not a user.
_CONTAINER_BEFORE_AT = frozenset({"abfs", "abfss", "wasb", "wasbs"})
_WITH_QUERY = frozenset({"http", "https"})
_KNOWN_REMOTE = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory", "http", "https", "hdfs"}
)
_WITH_BUCKET = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"})
_WITH_HOST = frozenset({"http", "https", "ftp", "sftp", "ssh"})
_SECRET_NAME = re.compile(
    r"key|secret|token|passw|credential|sas|connection_string|auth|headers|cookies|private|username",
    re.IGNORECASE,
)
_SHORTEST_SECRET = 6


def schemes(url: str) -> tuple[str, ...]:
    """Returns the scheme of every link, outermost first, in lower case; empty for a path of this host."""
    if _SCHEME.search(url) is None:
        return ()
    found: list[str] = []
    for link in url.split("::"):
        match = _SCHEME.match(link)
        found.append(match[1].lower() if match else link.lower())
    return tuple(found)


def is_remote(url: str) -> bool:
    """Returns whether an address needs a filesystem client; paths and ``file://`` do not."""
    return any(scheme not in _LOCAL for scheme in schemes(url))


def local_path(url: str) -> str:
    """Returns the absolute path of a local address. Nothing is decoded, as in fsspec: ``%20`` stays."""
    path = _SCHEME.sub("", url, count=1) if schemes(url) else url
    return os.path.abspath(os.path.expanduser(path))


def redact(url: str) -> str:
    """Returns an address without user info, query and fragment, in every link of a chain.

    Paths of this host and ``file://`` URLs have none of these and stay as they are.
    """
    if not is_remote(url):
        return url
    return "::".join(_redact_link(link) for link in url.split("::"))


def _redact_link(link: str) -> str:
    match = _SCHEME.match(link)
    if match is None or match[1].lower() in _LOCAL:
        return link
    rest = re.split(r"[?#]", link[match.end() :], maxsplit=1)[0]
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    if at and match[1].lower() in _CONTAINER_BEFORE_AT and ":" not in user:
        host = authority
    return f"{match[0]}{host}{slash}{path}"


def check_url(url: str) -> None:
    """Refuses an address that would be taken for another one than was meant.

    Raises:
        ConfigurationError: It is no text, is empty, has a character that no name can have, lost a slash on
            its way through a path object, names no bucket, host or folder, or has a query or fragment that an
            object store would take as a part of the name.
    """
    if not isinstance(url, str):
        raise ConfigurationError(
            f"the address of the run is {url!r}, which is no text; give a folder, or a URL such as "
            f"s3://bucket/run"
        )
    if "\0" in url or encodable(url) != url:
        raise ConfigurationError(
            f"the address of the run, {redact(url)!r}, has a character that no path or URL can have, a NUL "
            f"or a lone surrogate; give another one"
        )
    if not url.strip():
        raise ConfigurationError(
            "the address of the run is empty; give a folder, or a URL such as s3://bucket/run"
        )
    lost = _LOST_SLASH.match(url)
    if lost is not None and lost[1].lower() in _KNOWN_REMOTE:
        raise ConfigurationError(
            f"{url!r} looks like a URL that lost a slash, as happens in a pathlib.Path; "
            f"give it as text, with {lost[1]}://"
        )
    for link in url.split("::") if is_remote(url) else ():
        match = _SCHEME.match(link)
        if match and match[1].lower() not in _LOCAL | _WITH_QUERY and re.search(r"[?#]", link):
            raise ConfigurationError(
                f"the URL {redact(url)!r} was given with a query or a fragment, which {match[1]}:// would "
                f"take as a part of the name; leave it out, and give settings in storage_options"
            )
    _require_place(url)


def check_storage_options(storage_options: object) -> None:
    """Refuses settings of a store that are none; their values may be secret, so that only the type is shown.

    Raises:
        ConfigurationError: It is no mapping from text.
    """
    if storage_options is None:
        return
    if not isinstance(storage_options, Mapping) or not all(isinstance(name, str) for name in storage_options):
        raise ConfigurationError(
            f"storage_options is of type {type(storage_options).__name__} and no mapping from names to "
            f"values; give a dict such as {{'key': ..., 'secret': ...}}, or None"
        )


def check_writable(url: str) -> None:
    """Refuses an address that can be read and never written.

    Raises:
        ConfigurationError: It is a web address.
    """
    for scheme in schemes(url):
        if scheme in _WITH_QUERY:
            raise ConfigurationError(
                f"nothing can be written to {redact(url)!r}, since {scheme}:// can only be read; give a "
                f"folder, or the URL of a store such as s3://bucket/run"
            )


def _require_place(url: str) -> None:
    """Refuses a URL that ends where the place should begin, such as ``s3://``."""
    links = url.split("::") if schemes(url) else []
    for link in links:
        match = _SCHEME.match(link)
        if match is None:
            continue
        scheme = match[1].lower()
        rest = link[match.end() :]
        for named, word in ((_WITH_BUCKET, "bucket"), (_WITH_HOST, "host")):
            if scheme in named and not rest.partition("/")[0].strip():
                raise ConfigurationError(
                    f"the URL {redact(url)!r} names no {word}; give one, as in {match[0]}{word}/run"
                )
        if link is links[-1] and scheme != "memory" and not rest.strip():
            raise ConfigurationError(f"the URL {redact(url)!r} names no folder; give one after {match[0]}")


def beside(url: str, run_id: str) -> str:
    """Returns the address of the folder that a run takes where another run holds `url` already."""
    return f"{url.rstrip('/')}/run-{run_id}"


def needs_this_process(url: str, storage_options: Mapping[str, object] | None) -> bool:
    """Returns whether only this process can reach an address, so that no helper process can do it.

    That is so for ``memory://``, for a scheme that the program registered itself in this process, and where
    `storage_options` hold an object that cannot be sent to another process.
    """
    links = schemes(url)
    if "memory" in links:
        return True
    registry = sys.modules.get("fsspec.registry")
    if registry is not None and any(
        scheme in registry.registry and scheme not in registry.known_implementations for scheme in links
    ):
        return True
    try:
        pickle.dumps(dict(storage_options or {}))
    except Exception:  # noqa: BLE001 - any object may refuse in its own way, and each refusal is the answer
        return True
    return False


def secrets_of(url: str, storage_options: Mapping[str, object] | None) -> tuple[str, ...]:
    """Returns the texts that must not appear in any file or message, longest first."""
    found: set[str] = set()
    together: set[str] = set()
    for link in url.split("::"):
        match = _SCHEME.match(link)
        if match is None:
            continue
        rest = re.split(r"[?#]", link[match.end() :], maxsplit=1)
        user, at, _ = rest[0].partition("/")[0].rpartition("@")
        found.update(rest[1:])
        if at and (match[1].lower() not in _CONTAINER_BEFORE_AT or ":" in user):
            found.update(user.split(":"))
            together.add(f"{user}@")
    _collect_secrets(storage_options or {}, found, is_secret=False)
    # A short one is found where it stands in the address; anywhere else it may be a part of any word.
    found = {text for text in found if len(text) >= _SHORTEST_SECRET} | together
    # Clients decode what an address holds and encode what they send; messages have either.
    found |= {unquote(text) for text in found} | {quote(text, safe="") for text in found}
    return tuple(sorted(found, key=lambda text: (-len(text), text)))


def _collect_secrets(value: object, found: set[str], *, is_secret: bool) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _collect_secrets(inner, found, is_secret=is_secret or bool(_SECRET_NAME.search(str(name))))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            _collect_secrets(inner, found, is_secret=is_secret)
    elif is_secret and isinstance(value, str):
        found.add(value)


def scrub(text: str, secrets: tuple[str, ...]) -> str:
    """Returns a text in which every secret is replaced by three asterisks."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text
