"""Numbers for series."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchinstruments.merge.series import SeriesIndex, SeriesKey, TooManySeriesError

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
