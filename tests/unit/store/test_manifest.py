"""The manifest as a document."""

import json

import msgspec
import pytest

from torchinstruments.config import HistoryConfig
from torchinstruments.records import Counters
from torchinstruments.store.manifest import Manifest, decode_manifest, encode_document
from torchinstruments.store.writer import RankWriter
from unit.store.material import MemoryTarget, claim, identity, run_record


def written() -> bytes:
    """Returns a manifest as a writer leaves it."""
    target = MemoryTarget()
    RankWriter(identity(), claim(), HistoryConfig(), target, counters=lambda: Counters(forwards=5)).start(
        run_record(), ()
    )
    return target.last("process-")


def test_a_manifest_decodes_to_what_was_encoded() -> None:
    """Nothing is lost between writer and reader."""
    manifest = decode_manifest(written())

    assert encode_document(manifest) == written_like(manifest)
    assert manifest.counters.forwards == 5


def written_like(manifest: Manifest) -> bytes:
    """Returns the manifest after one more way through JSON."""
    return encode_document(decode_manifest(encode_document(manifest)))


def test_a_document_is_strict_json_for_people() -> None:
    """It is indented, ends with a newline, and any JSON reader takes it."""
    data = written()

    assert data.endswith(b"}\n")
    assert b'\n  "rank": 0' in data
    assert json.loads(data)["host"] == "node-a"


def test_a_manifest_of_a_later_release_with_more_fields_is_read() -> None:
    """Unknown fields are ignored."""
    document = json.loads(written())
    document["further"] = [1, 2]

    assert decode_manifest(json.dumps(document).encode()).rank == 0


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"rank": "x"}'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    """The error is the one that readers catch."""
    with pytest.raises(msgspec.DecodeError):
        decode_manifest(data)
