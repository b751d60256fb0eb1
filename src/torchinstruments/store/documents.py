"""Reading the documents of a run: ``run.json``, generations, manifests, catalogs.

Nothing that a document says is trusted: it is bounded in size, of a known schema version and of the declared
shape, or it is refused with a reason code. Only ``run.json`` has to be readable, since nothing else says what
the rest of a folder means.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from torchinstruments.errors import RunFormatError, StorageDeniedError
from torchinstruments.records import GenerationRecord, RunRecord
from torchinstruments.store import layout
from torchinstruments.store.schema import SCHEMA_VERSION
from torchinstruments.store.storage import Storage

__all__ = [
    "GONE",
    "MAX_CHECKS_BYTES",
    "MAX_DOCUMENT_BYTES",
    "MAX_STATE_BYTES",
    "UnusableFileError",
    "decode_document",
    "decode_generation",
    "decode_run",
    "read_document",
    "read_run",
    "require_plain",
]

MAX_DOCUMENT_BYTES = 64 * 2**20
"""A JSON document larger than this is refused unread; a catalog of 100,000 layers has 30 MB."""

MAX_STATE_BYTES = 4 * 2**20
"""The same for ``run.json`` and for manifests, whose size does not grow with the run."""

MAX_CHECKS_BYTES = 16 * 2**20
"""The same for reports of checks, whose plain values take up to 25 times as much memory as text."""

_MAX_REASON_CHARACTERS = 200
_MAX_DEPTH = 32
_MAX_SAMPLE_ID = 2**63 - 1
_MAX_WINDOW = 10**12

GONE = "unreadable: it is gone"
"""Why a file is set aside that a listing has shown and that is not there any more."""

_Document = TypeVar("_Document")


class UnusableFileError(RunFormatError):
    """One file of a run that is to be left out.

    Attributes:
        reason: A reason code, with a detail after a colon where there is one: ``empty_file``, ``truncated``,
            ``not_json``, ``not_parquet``, ``foreign_run``, ``duplicate``, ``misplaced``, ``unreadable``,
            ``unknown_schema_version``, ``schema_mismatch``, ``too_large``.
    """

    def __init__(self, code: str, detail: object = "") -> None:
        text = " ".join(str(detail).split())
        self.reason = (f"{code}: {text}" if text else code)[:_MAX_REASON_CHARACTERS]
        super().__init__(self.reason)


def read_run(storage: Storage, size_bytes: int = 0) -> RunRecord:
    """Reads ``run.json`` (offline).

    Args:
        storage: The run's folder.
        size_bytes: Its size where a listing told it; one that is too large is not read.

    Raises:
        RunFormatError: There is none, it cannot be read, or its schema version is not known to this release.
        StorageError: The store refused or did not answer.
    """
    try:
        _require_size(size_bytes, MAX_STATE_BYTES)
        return decode_document(storage.read(layout.RUN_FILE), decode_run)
    except FileNotFoundError:
        raise RunFormatError(
            f"{storage.url} holds no run, for there is no {layout.RUN_FILE} in it; give the folder that "
            f"inject_observer wrote to"
        ) from None
    except UnusableFileError as error:
        code, _, detail = error.reason.partition(": ")
        if code == "unknown_schema_version":
            raise RunFormatError(
                f"the run in {storage.url} has schema version {detail}, and this release reads version "
                f"{SCHEMA_VERSION}; use the release that wrote it, or a newer one"
            ) from None
        raise RunFormatError(
            f"{layout.RUN_FILE} in {storage.url} cannot be read ({error.reason}); put back the original, "
            f"for it says what the rest of the folder is"
        ) from None


def read_document(storage: Storage, path: str, size_bytes: int, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Reads a document that a listing has shown (offline).

    Args:
        storage: The run's folder.
        path: The document below it.
        size_bytes: Its size, as the listing told it.
        max_bytes: A larger one is refused unread.

    Raises:
        UnusableFileError: It is too large, gone, or this one file may not be read.
        StorageError: The store did not answer.
    """
    _require_size(size_bytes, max_bytes)
    try:
        return storage.read(path)
    except FileNotFoundError:
        raise UnusableFileError("unreadable", "it is gone") from None
    except StorageDeniedError as error:
        raise UnusableFileError("unreadable", error) from None


def _require_size(size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise UnusableFileError("too_large", f"{size_bytes} bytes")


class _Versioned(msgspec.Struct):
    schema_version: int


def decode_document(data: bytes, decoder: Callable[[bytes], _Document]) -> _Document:
    """Decodes a document whose schema version is known.

    Args:
        data: Its bytes.
        decoder: `decode_run`, `decode_generation`, `manifest.decode_manifest` or `catalog.decode_catalog`.

    Raises:
        UnusableFileError: It is empty, no JSON, of an unknown schema version, or of another shape.
    """
    if not data:
        raise UnusableFileError("empty_file")
    try:
        version = msgspec.json.decode(data, type=_Versioned).schema_version
        if version != SCHEMA_VERSION:
            raise UnusableFileError("unknown_schema_version", version)
        return decoder(data)
    except msgspec.ValidationError as error:
        raise UnusableFileError("schema_mismatch", error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableFileError("not_json", error) from None


def decode_run(data: bytes) -> RunRecord:
    """Returns the run record that lies in some bytes; unknown fields are ignored.

    Raises:
        msgspec.DecodeError: The bytes are no JSON, or no run record.
    """
    record = msgspec.json.decode(data, type=RunRecord)
    _require_world(record.world_size)
    _require_number("history.window", record.history.get("window", 0), _MAX_WINDOW)
    require_plain("sampling", record.sampling)
    return record


def decode_generation(data: bytes) -> GenerationRecord:
    """Returns the generation record that lies in some bytes; unknown fields are ignored.

    Raises:
        msgspec.DecodeError: The bytes are no JSON, or no generation record.
    """
    record = msgspec.json.decode(data, type=GenerationRecord)
    _require_world(record.world_size)
    _require_number("first_sample_id", record.first_sample_id, _MAX_SAMPLE_ID)
    for member in record.members:
        _require_number("the rank of a member", member.rank, layout.MAX_RANK)
    return record


def require_plain(what: str, value: object) -> None:
    """Refuses a free-form value that is nested so deeply that no document could hold it any more.

    Raises:
        msgspec.ValidationError: It is.
    """
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[object] = []
        for one in level:
            if isinstance(one, Mapping):
                inner += one.values()
            elif isinstance(one, (list, tuple)):
                inner += one
        if not inner:
            return
        level = inner
    raise msgspec.ValidationError(f"{what} is nested more than {_MAX_DEPTH} levels deep")


def _require_world(size: int) -> None:
    if not 1 <= size <= layout.MAX_RANK + 1:
        raise msgspec.ValidationError(
            f"world_size is {size}, and a run has at least one rank, at most {layout.MAX_RANK + 1}"
        )


def _require_number(what: str, number: int, largest: int) -> None:
    if not 0 <= number <= largest:
        raise msgspec.ValidationError(f"{what} is {number}, and has to be from 0 to {largest}")
