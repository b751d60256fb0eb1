"""The claim of a folder: one winner, later generations, the place beside, and every way to fail."""

import subprocess
import sys
import threading
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from torchinstruments.errors import StorageUnreachableError
from torchinstruments.records import Claim, GenerationRecord, Member, RunRecord
from torchinstruments.store import claim as claim_module
from torchinstruments.store import layout
from torchinstruments.store.claim import (
    ClaimRequest,
    claim_in_child,
    claim_run,
    claim_url,
    ensure_generation,
    ensure_run,
    run_url,
    write_members,
)
from torchinstruments.store.documents import decode_generation, decode_run
from torchinstruments.store.filesystem import Storage, open_storage
from torchinstruments.store.manifest import encode_document
from torchinstruments.store.schema import SCHEMA_VERSION


def _run(run_id: str = "night-7") -> RunRecord:
    return RunRecord(
        schema_version=SCHEMA_VERSION,
        run_id=run_id,
        nonce=uuid.uuid4().hex,
        created_at="2026-01-02T03:04:05+00:00",
        versions={},
        sampling={},
        signals=("output",),
        statistics=("mean",),
        history={"buffer_rows": 8192, "window": 20},
        rank_policy="all",
        world_size=2,
        launcher="none",
    )


def _request(
    run_id: str = "night-7", *, may_fail: bool = True, given: bool = True, assumed: int = 0
) -> ClaimRequest:
    return ClaimRequest(
        run=_run(run_id),
        world_size=2,
        leader_process=uuid.uuid4().hex[:8],
        started_at="2026-01-02T03:04:05+00:00",
        run_id_is_given=given,
        may_fail=may_fail,
        assumed_generation=assumed,
    )


def _record(generation: int, leader: str, *, complete: bool = False) -> GenerationRecord:
    members = (Member(0, leader, "here", 0, observing=True),) if complete else ()
    return GenerationRecord(SCHEMA_VERSION, "night-7", generation, 2, leader, "", 0, members, complete)


def test_a_new_folder_is_claimed_as_generation_zero(tmp_path: Path) -> None:
    """The first leader makes run.json and the first generation's record."""
    storage = open_storage(str(tmp_path / "run"))
    request = _request()
    claim = claim_run(storage, request)
    assert claim == Claim(str(tmp_path / "run"), "night-7", 0, 0, verified=True)
    assert decode_run(storage.read("run.json")) == request.run
    record = decode_generation(storage.read("generations/000.json"))
    assert (record.generation, record.leader_process, record.members) == (0, request.leader_process, ())


def test_the_same_run_joins_as_the_next_generation(tmp_path: Path) -> None:
    """Each restart takes the next number, and its samples their own range of ids."""
    storage = open_storage(str(tmp_path))
    claims = [claim_run(storage, _request()) for _ in range(3)]
    assert [claim.generation for claim in claims] == [0, 1, 2]
    assert [claim.first_sample_id for claim in claims] == [0, 10**9, 2 * 10**9]
    assert not any(claim.notice for claim in claims)
    assert [entry.path for entry in storage.list("generations")] == [
        f"generations/00{n}.json" for n in range(3)
    ]


def test_a_folder_that_knows_of_fewer_generations_takes_the_number_that_is_due(tmp_path: Path) -> None:
    """The leader came from a host with a folder of its own; what the folder knows counts where it is more."""
    storage = open_storage(str(tmp_path))
    requests = [replace(_request(), lowest_generation=lowest) for lowest in (2, 0, 3, 7)]
    assert [claim_run(storage, request).generation for request in requests] == [2, 3, 4, 7]


def test_another_runs_folder_is_left_alone(tmp_path: Path) -> None:
    """A second run goes beside the first one, says so, and its restart finds the same place."""
    storage = open_storage(str(tmp_path))
    first = claim_run(storage, _request("first"))
    before = storage.walk()
    second = claim_run(storage, _request("second"))
    again = claim_run(storage, _request("second"))
    assert first.url == str(tmp_path)
    assert second.url == again.url == str(tmp_path / "run-second")
    assert (second.generation, again.generation) == (0, 1)
    assert f"{tmp_path} holds run 'first' already, so run 'second'" in second.notice
    assert "run-second" in second.notice
    assert [entry for entry in storage.walk() if not entry.path.startswith("run-second/")] == before


def test_a_made_run_id_hears_how_to_continue_the_other_run(tmp_path: Path) -> None:
    """Who gave no run id is told that giving one joins the run that is there."""
    storage = open_storage(str(tmp_path))
    claim_run(storage, _request("first"))
    assert "run_id='first'" in claim_run(storage, _request("second", given=False)).notice
    assert "run_id=" not in claim_run(storage, _request("third", given=True)).notice


def test_of_many_leaders_each_has_a_generation_of_its_own(tmp_path: Path) -> None:
    """Eight leaders of one run that come at once make one run.json and eight generations."""
    storage = open_storage(str(tmp_path))
    claims = _claim_at_once([storage] * 8, [_request() for _ in range(8)])
    assert sorted(claim.generation for claim in claims) == list(range(8))
    assert {claim.url for claim in claims} == {str(tmp_path)}


def test_of_many_runs_exactly_one_has_the_folder(tmp_path: Path) -> None:
    """Twenty rounds of eight runs for one new folder: one wins it, the others go beside, none fails."""
    for number in range(20):
        storage = open_storage(str(tmp_path / str(number)))
        claims = _claim_at_once([storage] * 8, [_request(f"run{n}") for n in range(8)])
        assert [claim.url for claim in claims].count(storage.url) == 1
        assert len({claim.url for claim in claims}) == 8
        assert all(claim.verified and claim.generation == 0 for claim in claims)


def test_a_number_is_not_taken_from_an_odd_file(tmp_path: Path) -> None:
    """What is no generation's record does not count as one; a large number does."""
    storage = open_storage(str(tmp_path))
    storage.replace("generations/notes.txt", b"")
    storage.replace("generations/1041.json", encode_document(_record(1041, "00000000")))
    assert claim_run(storage, _request()).generation == 1042


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty_file"),
        (b"{ not json", "not_json"),
        (b'{"schema_version": 99, "run_id": "night-7"}', "unknown_schema_version: 99"),
        (b'{"schema_version": 1}', "schema_mismatch"),
    ],
)
def test_a_run_file_that_cannot_be_read_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, word: str
) -> None:
    """What lies there is not written over; the sentence names it and the reason."""
    monkeypatch.setattr(claim_module, "_REREAD_S", 0.0)
    (tmp_path / "run.json").write_bytes(content)
    claim = claim_run(open_storage(str(tmp_path)), _request())
    assert claim.failure_kind == "configuration"
    assert word in claim.failure
    assert f"{tmp_path}/run.json" in claim.failure
    assert (tmp_path / "run.json").read_bytes() == content


def test_a_run_file_that_is_being_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a filesystem knows no hard links, half a record is read again a little later."""
    record = encode_document(_run())
    (tmp_path / "run.json").write_bytes(record[:20])

    def finish_writing(_seconds: float) -> None:
        (tmp_path / "run.json").write_bytes(record)

    monkeypatch.setattr(claim_module.time, "sleep", finish_writing)
    assert claim_run(open_storage(str(tmp_path)), _request()).generation == 0


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("{tmp}/file/run", "configuration", "a file stands where a folder is needed"),
        ("/proc/nowhere/run", "not_found", "/proc/nowhere/run/run.json"),
        ("gs://bucket/run", "configuration", "gcsfs"),
        ("nosuchscheme://bucket/run", "configuration", "nosuchscheme"),
    ],
)
def test_what_the_user_got_wrong_is_a_failure(tmp_path: Path, url: str, kind: str, words: str) -> None:
    """Each comes back as one sentence that names the place, for all ranks to raise."""
    (tmp_path / "file").write_text("")
    claim = claim_url(url.format(tmp=tmp_path), None, _request())
    assert (claim.failure_kind, claim.verified) == (kind, False)
    assert words in claim.failure
    assert "\n" not in claim.failure


def test_after_a_restart_nothing_is_a_failure(tmp_path: Path) -> None:
    """Where the training has begun already, the same trouble is a notice, and the generation a guess."""
    (tmp_path / "file").write_text("")
    claim = claim_url(f"{tmp_path}/file/run", None, _request(may_fail=False, assumed=3))
    assert (claim.failure, claim.verified) == ("", False)
    assert (claim.generation, claim.first_sample_id) == (3, 3 * 10**9)
    assert "a file stands" in claim.notice


def test_a_store_that_does_not_answer_leaves_the_claim_unverified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Being unreachable is nobody's mistake: the run starts, unverified, with a notice."""
    storage = open_storage(str(tmp_path))

    def fail(_path: str) -> bytes:
        raise StorageUnreachableError("no answer")

    monkeypatch.setattr(storage, "read", fail)
    claim = claim_run(storage, _request())
    assert (claim.failure, claim.verified) == ("", False)
    assert "no answer" in claim.notice


def test_a_host_with_a_folder_of_its_own_joins_the_agreed_run(tmp_path: Path) -> None:
    """It makes run.json where there is none, keeps the same run's, and goes beside another one's."""
    fresh, same, other = (open_storage(str(tmp_path / name)) for name in ("fresh", "same", "other"))
    earlier = _run()
    ensure_run(same, earlier)
    ensure_run(other, _run("another"))
    record = _run()
    assert ensure_run(fresh, record).url == fresh.url
    assert decode_run(fresh.read("run.json")) == record
    assert ensure_run(same, record).url == same.url
    assert decode_run(same.read("run.json")) == earlier
    assert ensure_run(other, record).url == f"{other.url}/run-night-7"


def test_members_are_written_by_the_generations_own_leader(tmp_path: Path) -> None:
    """The record is replaced by the one who made it, made where it is missing, and left alone otherwise."""
    storage = open_storage(str(tmp_path))
    ensure_generation(storage, _record(0, "aaaaaaaa"))
    ensure_generation(storage, _record(0, "bbbbbbbb"))
    assert not write_members(storage, _record(0, "bbbbbbbb", complete=True))
    assert write_members(storage, _record(0, "aaaaaaaa", complete=True))
    stored = decode_generation(storage.read(layout.generation_file(0)))
    assert (stored.leader_process, stored.members_complete, len(stored.members)) == ("aaaaaaaa", True, 1)
    assert write_members(storage, _record(1, "bbbbbbbb", complete=True))


def test_the_claimed_address_keeps_the_secrets_of_the_asked_one() -> None:
    """Ranks exchange an address without secrets; the one to connect with is found again from it."""
    asked = "ftp://user:password@host/run"
    assert run_url(asked, Claim("ftp://host/run", "r", 0, 0, verified=True)) == asked
    assert run_url(asked, Claim("ftp://host/run/run-r", "r", 0, 0, verified=True)) == f"{asked}/run-r"
    assert run_url("/a/../b", Claim("/b/run-r", "r", 0, 0, verified=True)) == "/a/../b/run-r"


def test_memory_is_claimed_in_this_process() -> None:
    """What no child could see is claimed here."""
    url = f"memory://{uuid.uuid4().hex}/run"
    claim = claim_in_child(url, None, _request())
    assert (claim.url, claim.verified) == (url, True)
    assert open_storage(url).read("run.json")


def test_a_claim_in_a_child_imports_no_client_here() -> None:
    """The training process asks a child and has no client afterwards; the child's failure comes back."""
    code = (
        "import sys; from torchinstruments.store.claim import claim_in_child, ClaimRequest\n"
        "from torchinstruments.records import RunRecord\n"
        "run = RunRecord(1, 'r', 'n', '', {}, {}, (), (), {}, 'all', 1, 'none')\n"
        "request = ClaimRequest(run, 1, '00000000', '')\n"
        "claim = claim_in_child('gs://bucket/run', {'token': 'x'}, request)\n"
        "assert claim.failure_kind == 'configuration', claim\n"
        "assert 'gcsfs' in claim.failure, claim\n"
        "print([name for name in ('fsspec', 's3fs', 'polars', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "code", ["raise SystemExit(7)", "print('not a claim')", "import time; time.sleep(60)"]
)
def test_a_child_that_fails_leaves_the_claim_unverified(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """One that dies, talks nonsense or hangs ends in a notice, within the time given."""

    def arguments(_module: str) -> list[str]:
        return [sys.executable, "-c", code]

    monkeypatch.setattr(claim_module, "child_arguments", arguments)
    claim = claim_in_child("s3://bucket/run", None, _request(), timeout_s=2.0)
    assert (claim.failure, claim.verified, claim.url) == ("", False, "s3://bucket/run")
    assert "unverified" in claim.notice


def test_a_childs_last_words_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dying child prints is repeated without the credentials that it was given."""

    def arguments(_module: str) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('refused the-secret-key')"]

    monkeypatch.setattr(claim_module, "child_arguments", arguments)
    claim = claim_in_child("s3://bucket/run", {"secret": "the-secret-key"}, _request())
    assert "refused ***" in claim.notice


def _claim_at_once(storages: list[Storage], requests: list[ClaimRequest]) -> list[Claim]:
    start = threading.Barrier(len(requests))
    claims: list[Claim] = []

    def run(storage: Storage, request: ClaimRequest) -> None:
        start.wait()
        claims.append(claim_run(storage, request))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(storages, requests, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return claims


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("a\0b", "has a character"),
        ("caf\udce9", "has a character"),
        ("https://user:secret@host/run", "nothing can be written to 'https://host/run'"),
        ("/tmp/" + "x" * 300, "longer than the filesystem allows"),
    ],
    ids=["NUL", "surrogate", "web", "too long"],
)
def test_an_address_that_can_never_be_written_is_a_failure(url: str, sentence: str) -> None:
    """The user has to correct it, so it is no unverified claim."""
    claimed = claim_in_child(url, None, _request())

    assert (claimed.failure_kind, sentence in claimed.failure) == ("configuration", True)
    assert "secret" not in repr(claimed)
