"""What a process leaves for people."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from torchinstruments.records import Counters
from torchinstruments.store.columns import Origin
from torchinstruments.store.history_columns import history_columns
from torchinstruments.store.rank_documents import RankDocuments
from unit.store.material import claim, forward, identity, measurement, module, run_record

_NOW = "2026-01-01T00:00:00+00:00"


def in_time() -> bool:
    """There is time."""
    return True


def not_in_time() -> bool:
    """There is none."""
    return False


def begun() -> RankDocuments:
    """Returns the documents of a process that has attached and seen one sample."""
    documents = RankDocuments(identity(), claim(), 20)
    documents.at_attach(run_record(), [module(0)], Counters(), _NOW)
    documents.count(forward(0, measurement(0)))
    documents.add_rows(history_columns([(0, forward(0, measurement(0)))], Origin(0, 0, "1a2b3c4d")).table)
    return documents


def test_before_attach_there_is_nothing_to_close() -> None:
    """A writer that never started leaves no documents for people."""
    assert RankDocuments(identity(), claim(), 20).at_close((), in_time, [], Counters(), _NOW) == {}


def test_a_close_adds_summaries() -> None:
    """Both documents come by their names."""
    found = begun().at_close((), in_time, [module(0)], Counters(), _NOW)

    assert list(found) == ["result.json", "index.md"]
    assert len(json.loads(found["result.json"])[0]["tensors"]) == 1


def test_without_time_for_summaries_the_catalog_stands_and_the_page_says_so() -> None:
    """A model too large for the time that the close has is not waited for."""
    found = begun().at_close((), not_in_time, [module(0)], Counters(), _NOW)

    assert json.loads(found["result.json"])[0]["tensors"] == []
    assert b"time for 0 of 1 layers" in found["index.md"]


def test_after_rows_that_cannot_be_folded_there_are_no_summaries() -> None:
    """Half a summary would be a wrong one."""
    documents = begun()
    with pytest.raises(KeyError):
        documents.add_rows(pa.table({"sample_id": [1]}))
    documents.add_rows(pa.table({"sample_id": [1]}))

    found = documents.at_close((), in_time, [module(0)], Counters(), _NOW)

    assert json.loads(found["result.json"])[0]["tensors"] == []
    assert b"summarising failed (KeyError" in found["index.md"]


def test_rows_that_wait_and_cannot_be_folded_are_told_of_when_they_are() -> None:
    """The page says it as where rows are folded at once; nothing is folded after that."""
    documents = begun()
    odd = history_columns([(1, forward(1, measurement(0)))], Origin(0, 0, "1a2b3c4d"))
    assert odd.keyed is not None
    short = replace(odd.keyed.block, value=np.zeros(1))
    documents.add_rows(replace(odd, keyed=replace(odd.keyed, block=short)))
    with pytest.raises(ValueError, match="reshape"):
        documents.fold_rest()
    documents.fold_rest()

    found = documents.at_close((), in_time, [module(0)], Counters(), _NOW)

    assert json.loads(found["result.json"])[0]["tensors"] == []
    assert b"summarising failed (ValueError" in found["index.md"]
