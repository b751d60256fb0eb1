"""Numbers for series."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchinstruments.store.series import SeriesIndex, SeriesKey, TooManySeriesError

_names = st.text("abc", max_size=3)
_keys = st.builds(SeriesKey, _names, st.integers(0, 300), _names, _names, _names, _names)


def batch_of(keys: list[SeriesKey]) -> pa.RecordBatch:
    """Returns a batch with these keys; every text column is a dictionary of its own."""
    columns = {
        name: pa.array([key[place] for key in keys], pa.int32() if name == "call_index" else pa.string())
        for place, name in enumerate(SeriesKey._fields)
    }
    encoded = [
        column if name == "call_index" else column.dictionary_encode() for name, column in columns.items()
    ]
    return pa.RecordBatch.from_arrays(encoded, list(columns))


@settings(deadline=None)
@given(st.lists(st.lists(_keys, max_size=30), max_size=5))
def test_numbers_stand_for_keys(batches: list[list[SeriesKey]]) -> None:
    """Over any batches a number always stands for the same key, and each key has one number."""
    index = SeriesIndex()
    for keys in batches:
        numbers = index.number(batch_of(keys)).tolist()
        assert [index.keys[number] for number in numbers] == keys
    assert len(set(index.keys)) == len(index.keys)


def test_keys_beyond_a_word_are_refused() -> None:
    """Keys that do not fit a word are refused, and so is a negative call index."""
    index = SeriesIndex()
    many = [f"{i}" for i in range(3000)]
    keys = [SeriesKey(text, 2**31 - 1, text, text, "", "") for text in many]
    with pytest.raises(TooManySeriesError, match="bits"):
        index.number(batch_of(keys))
    with pytest.raises(TooManySeriesError, match="call_index"):
        SeriesIndex().number(batch_of([SeriesKey("", -1, "", "", "", "")]))


def test_keys_beyond_a_word_are_beyond_the_bound() -> None:
    """An index with a bound refuses nothing: what it cannot tell apart has no number."""
    assert SeriesIndex(5).number(batch_of([SeriesKey("", -1, "", "", "", "")])).tolist() == [-1]


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(st.lists(_keys, max_size=30), max_size=5))
def test_beyond_a_bound_only_the_first_series_have_numbers(
    bound: int, batches: list[list[SeriesKey]]
) -> None:
    """A key that has a number keeps it; of the others only so many get one as the bound allows."""
    index = SeriesIndex(bound)
    for keys in batches:
        before = list(index.keys)
        numbers = index.number(batch_of(keys)).tolist()
        assert index.keys[: len(before)] == before
        assert len(index) == min(bound, len({*before, *keys}))
        for key, number in zip(keys, numbers, strict=True):
            assert number == (index.keys.index(key) if key in index.keys else -1)


def test_beyond_a_bound_nothing_is_kept() -> None:
    """Texts that come when the bound is reached take no memory."""
    index = SeriesIndex(1)
    index.number(batch_of([SeriesKey("a", 0, "output", "", "output", "mean")]))
    index.number(batch_of([SeriesKey(f"{i}", i, "output", "", "output", "mean") for i in range(100)]))
    assert len(index._texts["layer"]) == 1
