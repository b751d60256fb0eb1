"""Measurements as columns, and the objects that are made of them."""

import copy
import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest

from torchinstruments.records import KeptFrames, Measurement, Scope, Signal
from torchinstruments.records.columns import as_columns
from unit.store.material import forward, measurement, with_columns

MEASURED = (
    measurement(3, values=(0.0, None, -2.25), reasons=("", "overflow", "")),
    measurement(4, Signal.INPUT, metrics=("a",), values=(None,), reasons=("",), shape=(), timestamp_us=7),
    measurement(5, Signal.OUTPUT_GRADIENT, metrics=(), values=(), backward_index=2),
    measurement(6, stage="applied", values=(1e300, -0.0, 5e-324)),
)


def test_objects_are_the_same_again() -> None:
    """Every field of each, a missing number with and without a reason among them."""
    columns = as_columns(MEASURED, KeptFrames())
    assert (columns.frame.num_scalars, columns.reasons) == (7, {1: "overflow"})
    assert columns.measurements() == MEASURED
    assert [str(value) for value in columns.measurements()[3].values] == ["1e+300", "-0.0", "5e-324"]
    assert as_columns((), KeptFrames()).measurements() == ()


def test_a_sample_makes_its_measurements_once_when_asked() -> None:
    """Whatever goes by its fields sees no difference."""
    given = forward(1, *MEASURED)
    for look in (asdict, repr, pickle.dumps, hash):
        assert look(with_columns(given, KeptFrames())) == look(given)
    sample = with_columns(given, KeptFrames())
    assert (sample.columns is not None, given.columns) == (True, None)
    assert sample.measurements is sample.measurements
    for same in (sample, copy.copy(sample), pickle.loads(pickle.dumps(sample)), replace(sample)):
        assert same == given
    assert all(type(one) is Measurement for one in sample.measurements)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(sample, "nonsense")  # noqa: B009 - a type checker knows that there is none


def test_the_same_measurements_have_one_frame() -> None:
    """In samples that take turns; of shapes that change, only these are new."""
    frames = KeptFrames()
    first, other = as_columns(MEASURED, frames), as_columns(MEASURED[:2], frames)
    later = as_columns(tuple(replace(one, timestamp_us=9) for one in MEASURED), frames)
    assert later.frame is first.frame is not other.frame
    assert later.shapes is first.shapes
    assert later.timestamp_us.tolist() == [9] * 4
    wider = as_columns(tuple(replace(one, shape=(5,)) for one in MEASURED), frames)
    assert (wider.frame is first.frame, wider.shapes) == (True, [(5,)] * 4)
    assert as_columns(MEASURED[:2], frames).frame is other.frame
    assert (
        as_columns((replace(MEASURED[0], scope=Scope.UNKNOWN), *MEASURED[1:]), frames).frame
        is not first.frame
    )


def test_what_is_kept_is_bounded() -> None:
    """Of frames that all differ the last few are kept, of large ones the last."""
    frames = KeptFrames()
    ten = [as_columns([measurement(layer)], frames) for layer in range(10)]
    assert [
        as_columns([measurement(one.frame.described[0].layer_index)], frames).frame is one.frame
        for one in ten[:1:-1]
    ] == [True] * 8
    large = [measurement()] * 32_768
    assert as_columns(large, frames).frame is as_columns(large, frames).frame
    assert as_columns([measurement(9)], frames).frame is not ten[9].frame


def test_numbers_are_arrays() -> None:
    """No object stands for a number."""
    columns = as_columns(MEASURED, KeptFrames())
    assert (columns.values.dtype, columns.timestamp_us.dtype) == (np.float64, np.int64)


def test_no_sink_can_change_what_the_others_get() -> None:
    """The arrays are the same ones for all, the folder among them, which stores them later."""
    columns = as_columns(MEASURED, KeptFrames())
    for numbers in (columns.values, columns.timestamp_us):
        with pytest.raises(ValueError, match="read-only"):
            numbers[0] = 1
