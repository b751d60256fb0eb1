"""Reading one document, and refusing it."""

from pathlib import Path

import pytest

from torchinstruments.store.catalog import ModuleCatalog, decode_catalog
from torchinstruments.store.documents import (
    MAX_DOCUMENT_BYTES,
    UnusableFileError,
    decode_document,
    decode_generation,
    decode_run,
    read_document,
)
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.manifest import encode_document
from unit.store.material import generation_record, module, run_record


def test_documents_decode_to_what_was_encoded() -> None:
    """Run, generation and catalog survive the way through JSON."""
    catalog = ModuleCatalog(
        schema_version=1, run_id="run-1", generation=0, rank=0, process="1a2b3c4d", modules=(module(0),)
    )

    assert decode_document(encode_document(run_record()), decode_run) == run_record()
    assert decode_document(encode_document(generation_record()), decode_generation) == generation_record()
    assert decode_document(encode_document(catalog), decode_catalog) == catalog


def test_a_document_without_a_version_is_refused() -> None:
    """It may be of anybody."""
    with pytest.raises(UnusableFileError, match=r"schema_mismatch: .* required field `schema_version`"):
        decode_document(b"{}", decode_run)


def test_a_reason_is_one_line_of_bounded_length() -> None:
    """It stands in reports and in JSON."""
    error = UnusableFileError("unreadable", "a\nb " + "x" * 1000)

    assert error.reason.startswith("unreadable: a b xxx")
    assert len(error.reason) == 200


def test_a_document_is_read_only_up_to_its_bound(tmp_path: Path) -> None:
    """A size that a listing tells is believed before the file is opened."""
    (tmp_path / "a.json").write_bytes(b"{}")
    storage = LocalStorage(str(tmp_path))

    assert read_document(storage, "a.json", 2) == b"{}"
    with pytest.raises(UnusableFileError, match="too_large"):
        read_document(storage, "a.json", MAX_DOCUMENT_BYTES + 1)


def test_a_document_that_is_gone_is_refused(tmp_path: Path) -> None:
    """A file may vanish between listing and reading."""
    with pytest.raises(UnusableFileError, match="unreadable: it is gone"):
        read_document(LocalStorage(str(tmp_path)), "a.json", 2)
