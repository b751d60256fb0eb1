"""The claim of a run's folder: who may write there, as which run, as which generation.

``run.json`` is created exclusively, so of all that come exactly one wins. Who finds the same run id there
joins as the next generation; who finds another run goes to a folder beside it. A generation's number is taken
the same way, by creating ``generations/NNN.json``.

A claim never raises: what the user has to correct comes back as `Claim.failure`, a store that does not answer
as an unverified claim with a notice. The leader passes either on to all ranks.

For a remote store the claim is made in a process of its own, ``python -m torchinstruments.store.claim``, so
that no network client ever lives in the training process. Address and options reach it through its standard
input alone.
"""

import errno
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from torchinstruments.errors import (
    ConfigurationError,
    RunFormatError,
    StorageDeniedError,
    StorageError,
    StorageNotFoundError,
    StorageUnreachableError,
)
from torchinstruments.records import Claim, GenerationRecord, Member, RunRecord
from torchinstruments.store import layout
from torchinstruments.store.children import child_arguments, child_environment
from torchinstruments.store.deadlines import call_in_time
from torchinstruments.store.documents import UnusableFileError, decode_document, decode_generation, decode_run
from torchinstruments.store.filesystem import LocalStorage, Storage, open_storage
from torchinstruments.store.manifest import encode_document
from torchinstruments.store.texts import encode_json
from torchinstruments.store.urls import (
    beside,
    check_url,
    check_writable,
    is_remote,
    local_path,
    needs_this_process,
    redact,
    scrub,
    secrets_of,
)

__all__ = [
    "CLAIM_TIMEOUT_S",
    "SAMPLE_IDS_PER_GENERATION",
    "ClaimRequest",
    "claim_in_child",
    "claim_run",
    "claim_url",
    "ensure_generation",
    "ensure_run",
    "run_url",
    "write_members",
]

CLAIM_TIMEOUT_S = 45.0
"""Seconds after which a claim in a child process is given up, and the run starts unverified."""

SAMPLE_IDS_PER_GENERATION = 1_000_000_000
"""Generation g numbers its samples from g times this, on every rank."""

_MAX_TRIES = 100
_REREAD_S = 0.5
_MAX_STDERR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """What the leader wants to claim.

    Attributes:
        run: The record to create ``run.json`` with; its nonce makes it this leader's own.
        world_size: Ranks of the generation that starts.
        leader_process: 8 hex digits of the leader.
        started_at: ISO 8601, UTC.
        run_id_is_given: Whether the run id comes from the user or a launcher, not from the leader.
        may_fail: Whether what the user configured wrongly may be a failure. False after a restart, where it
            must not end the training: the claim is then unverified, with a notice.
        assumed_generation: The generation to go on with where the store cannot be asked.
        lowest_generation: At least this number, though the folder may know of fewer: hosts without a shared
            folder have one each, and the leader need not be on the same one after a restart.
        members: Those that are known at the claim: the leader itself, since a generation may be over before
            its leader has heard of anybody.
        only_try: Only find out whether the folder can be used, and leave nothing there; for a process that
            cannot know its rank yet, but whose user should hear of a mistake at once.
    """

    run: RunRecord
    world_size: int
    leader_process: str
    started_at: str
    run_id_is_given: bool = True
    may_fail: bool = True
    assumed_generation: int = 0
    lowest_generation: int = 0
    members: tuple[Member, ...] = ()
    only_try: bool = False


def claim_run(storage: Storage, request: ClaimRequest) -> Claim:
    """Claims the folder, or the one beside it, and a generation in it (attaching thread, or child process).

    Args:
        storage: The folder that the user asked for.
        request: What is wanted.

    Returns:
        The claim; with a failure, or unverified with a notice, where it could not be made.
    """
    try:
        if request.only_try:
            return _tried(storage, request)
        home = ensure_run(storage, request.run)
        began = _read_run(home) or request.run
        generation = _take_generation(home, request)
        other = _read_run(storage) if home.url != storage.url else None
    except (ConfigurationError, RunFormatError, StorageError, OSError) as error:
        return _without(storage.url, request, error)
    notice = ""
    if other is not None:
        notice = (
            f"{storage.url} holds run {other.run_id!r} already, so run {request.run.run_id!r} is kept "
            f"beside it, in {home.url}; give another output_dir"
        )
        if not request.run_id_is_given:
            notice += f", or run_id={other.run_id!r} to continue that run"
    return Claim(
        url=home.url,
        run_id=request.run.run_id,
        generation=generation,
        first_sample_id=generation * SAMPLE_IDS_PER_GENERATION,
        verified=True,
        notice=notice,
        alone=began.world_size == 1 or began.rank_policy == "rank0",
    )


def ensure_run(storage: Storage, record: RunRecord) -> Storage:
    """Sees to it that ``run.json`` says this run, and creates it where there is none.

    For the leader's claim, for hosts without a shared folder, and for an uploader whose run started
    unverified.

    Returns:
        The folder of the run: `storage` itself, or its child ``run-<run_id>`` where another run holds it.

    Raises:
        RunFormatError: A ``run.json`` is there that this release cannot read.
        StorageError: The store refused, or did not answer.
    """
    for home in (storage, storage.child(f"run-{record.run_id}")):
        present = _read_run(home)
        if present is None:
            if home.create(layout.RUN_FILE, encode_document(record)):
                return home
            present = _read_run(home)
        if present is not None and present.run_id == record.run_id:
            return home
    raise RunFormatError(
        f"{storage.url} holds another run, and so does its folder run-{record.run_id}; "
        f"give another output_dir"
    )


def ensure_generation(home: Storage, record: GenerationRecord) -> None:
    """Creates a generation's record where there is none; one that is there already is left alone.

    Raises:
        StorageError: The store refused, or did not answer.
    """
    try:
        home.read(layout.generation_file(record.generation))
    except FileNotFoundError:
        home.create(layout.generation_file(record.generation), encode_document(record))


def write_members(home: Storage, record: GenerationRecord) -> bool:
    """Replaces a generation's record by one that knows its members (leader's thread, or uploader).

    Args:
        home: The folder of the run.
        record: The record.

    Returns:
        False where another leader holds that generation, whose record then stays.

    Raises:
        StorageError: The store refused, or did not answer.
    """
    path = layout.generation_file(record.generation)
    try:
        present = decode_document(home.read(path), decode_generation)
    except FileNotFoundError:
        return home.create(path, encode_document(record))
    except UnusableFileError:
        return False
    if present.leader_process != record.leader_process:
        return False
    home.replace(path, encode_document(record))
    return True


def run_url(url: str, claim: Claim) -> str:
    """Returns the address of the claimed folder with whatever secrets the asked-for address holds.

    Args:
        url: The address that the user asked for.
        claim: What was claimed there; its own address is without secrets.
    """
    for candidate in (url, beside(url, claim.run_id)):
        shown = redact(candidate).rstrip("/") if is_remote(candidate) else local_path(candidate)
        if shown == claim.url:
            return candidate
    return claim.url


def claim_url(
    url: str,
    storage_options: Mapping[str, object] | None,
    request: ClaimRequest,
    *,
    timeout_s: float = CLAIM_TIMEOUT_S,
) -> Claim:
    """Opens an address in this process and claims it (attaching thread, or child process).

    Args:
        url: The address that the user asked for.
        storage_options: Settings in fsspec's dialect.
        request: What is wanted.
        timeout_s: Bound of the claim in seconds; one request has a third of it, and no less than a second.

    Returns:
        The claim, as `claim_run` makes it. It never raises: what cannot be opened is a failure too.
    """
    try:
        check_writable(url)
        storage = open_storage(url, storage_options, timeout_s=max(1.0, timeout_s / 3))
    except (ConfigurationError, StorageError) as error:
        return _without(_shown(url), request, error)
    return claim_run(storage, request)


def claim_in_child(
    url: str,
    storage_options: Mapping[str, object] | None,
    request: ClaimRequest,
    timeout_s: float = CLAIM_TIMEOUT_S,
) -> Claim:
    """Claims a remote address without bringing its client into this process (attaching thread).

    A local address, ``memory://`` and whatever only this process can reach are claimed here, in a thread.

    Args:
        url: The address that the user asked for.
        storage_options: Settings in fsspec's dialect.
        request: What is wanted.
        timeout_s: Bound in seconds; silence makes the claim unverified.

    Returns:
        The claim; never raises for what a store or a child does.
    """
    try:
        check_url(url)
        check_writable(url)
    except ConfigurationError as error:
        return _without(redact(url), request, error)
    if not is_remote(url) or needs_this_process(url, storage_options):
        return _claim_in_thread(url, storage_options, request, timeout_s)
    secrets = secrets_of(url, storage_options)
    errand = pickle.dumps((url, dict(storage_options or {}), encode_json(request), timeout_s))
    try:
        done = subprocess.run(
            child_arguments("torchinstruments.store.claim"),
            input=errand,
            capture_output=True,
            timeout=timeout_s,
            env=child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _without(_shown(url), request, TimeoutError(f"no answer within {timeout_s:g} s"))
    except OSError as error:
        return _without(_shown(url), request, error)
    try:
        return msgspec.json.decode(done.stdout.rstrip().rpartition(b"\n")[2], type=Claim)
    except msgspec.DecodeError:
        said = scrub(done.stderr.decode(errors="replace").strip().rpartition("\n")[2], secrets)
        text = f"the claiming process ended with exit code {done.returncode}: {said[:_MAX_STDERR_CHARACTERS]}"
        return _without(_shown(url), request, StorageUnreachableError(text))


def _claim_in_thread(
    url: str, storage_options: Mapping[str, object] | None, request: ClaimRequest, timeout_s: float
) -> Claim:
    def run() -> Claim:
        return claim_url(url, storage_options, request, timeout_s=timeout_s)

    try:
        return call_in_time(run, timeout_s, what="the claim")
    except TimeoutError as error:
        return _without(_shown(url), request, error)


def _tried(storage: Storage, request: ClaimRequest) -> Claim:
    """Returns the claim that may be made later.

    Raises:
        StorageError: The store refused, or did not answer.
        RunFormatError: A ``run.json`` is there that this release cannot read.
    """
    if isinstance(storage, LocalStorage):
        storage.prepare()
    storage.list(layout.GENERATIONS)
    _read_run(storage)
    return Claim(url=storage.url, run_id=request.run.run_id, generation=0, first_sample_id=0, verified=False)


def _read_run(home: Storage) -> RunRecord | None:
    for last_try in (False, False, True):
        try:
            return decode_document(home.read(layout.RUN_FILE), decode_run)
        except FileNotFoundError:
            return None
        except UnusableFileError as error:
            # Where a filesystem knows no hard links, a record may be caught while it is written.
            if not last_try and not error.reason.startswith("unknown_schema_version"):
                time.sleep(_REREAD_S)
                continue
            raise RunFormatError(
                f"{home.url}/{layout.RUN_FILE} is no record of a run that this release reads "
                f"({error.reason}); "
                f"give another output_dir, or use the release that wrote it"
            ) from None
    raise AssertionError("the last try returns or raises")


def _take_generation(home: Storage, request: ClaimRequest) -> int:
    for _ in range(_MAX_TRIES):
        numbers = [
            number
            for entry in home.list(layout.GENERATIONS)
            if (number := layout.parse_generation(entry.path.rpartition("/")[2])) is not None
        ]
        generation = max([request.lowest_generation - 1, *numbers]) + 1
        record = GenerationRecord(
            schema_version=request.run.schema_version,
            run_id=request.run.run_id,
            generation=generation,
            world_size=request.world_size,
            leader_process=request.leader_process,
            started_at=request.started_at,
            first_sample_id=generation * SAMPLE_IDS_PER_GENERATION,
            members=request.members,
        )
        if home.create(layout.generation_file(generation), encode_document(record)):
            return generation
    raise StorageUnreachableError(
        f"no generation of {home.url} could be claimed in {_MAX_TRIES} tries, since others took each first"
    )


def _without(url: str, request: ClaimRequest, error: Exception) -> Claim:
    """Returns what became of a claim that failed: a failure for the user's own mistake, else unverified."""
    claim = Claim(
        url=url,
        run_id=request.run.run_id,
        generation=request.assumed_generation,
        first_sample_id=request.assumed_generation * SAMPLE_IDS_PER_GENERATION,
        verified=False,
    )
    kind = _failure_kind(error)
    if kind and request.may_fail:
        return replace(claim, failure=str(error), failure_kind=kind)
    return replace(
        claim,
        notice=f"the run's folder {url} could not be claimed, so its claim is unverified for now: {error}",
    )


def _failure_kind(error: Exception) -> str:
    if isinstance(error, StorageUnreachableError):
        return ""
    if isinstance(error, StorageDeniedError):
        return "denied"
    if isinstance(error, StorageNotFoundError):
        return "not_found"
    if isinstance(error, (ConfigurationError, RunFormatError)) or (
        isinstance(error, StorageError)
        and (
            # a file where a folder is needed
            isinstance(error.__cause__, (NotADirectoryError, FileExistsError))
            or (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENAMETOOLONG)
        )
    ):
        return "configuration"
    return ""


def _shown(url: str) -> str:
    return redact(url).rstrip("/") if is_remote(url) else local_path(url)


def _main() -> int:
    """Reads one errand from standard input and writes one claim to standard output."""
    # Libraries print where they please, so the real standard output is kept apart for the claim.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with answer:
        url, storage_options, encoded, timeout_s = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the parent
        request = msgspec.json.decode(encoded, type=ClaimRequest)
        claim = claim_url(url, storage_options, request, timeout_s=timeout_s)
        answer.write(encode_json(claim) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
