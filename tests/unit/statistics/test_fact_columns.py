"""Statistics of many rows at once, against those of one tensor."""

import math
import struct
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from torchinstruments.records import Absent
from torchinstruments.statistics.fact_columns import FactColumns, moment_table, profile_table
from torchinstruments.statistics.facts import (
    MOMENT_METRICS,
    PROFILE_METRICS,
    Facts,
    moment_values,
    named_values,
)
from torchinstruments.statistics.measuring import FactsReducer
from torchinstruments.statistics.packing import SmallTensors
from torchinstruments.statistics.profile import ExactProfile
from torchinstruments.statistics.reducers import finite_fraction, max_abs, mean, rms, std

FINITE = st.floats(allow_nan=False, allow_infinity=False)
ROW = st.tuples(
    st.integers(0, 9),
    st.integers(0, 4095),
    st.sampled_from([0, 0, 0, 1024, -1000]),
    st.tuples(FINITE, st.floats(0.0, allow_nan=False, allow_infinity=False), FINITE),
    st.lists(FINITE, min_size=8, max_size=8),
)


def bits(values: Mapping[str, float | Absent]) -> dict[str, bytes | Absent]:
    """Returns values that differ where a single bit does, the sign of a zero among them."""
    return {
        name: value if isinstance(value, Absent) else struct.pack("<d", value)
        for name, value in values.items()
    }


@settings(max_examples=300, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6))
def test_a_row_has_the_numbers_of_its_tensor_to_the_last_bit(
    rows: list[tuple[int, int, int, tuple[float, float, float], list[float]]],
) -> None:
    """Whatever was found: no finite entry, extremes that overflow, entries of opposite signs."""
    num_finite = np.array([row[1] for row in rows])
    sums = np.array([row[3] for row in rows])
    columns = FactColumns(
        num_entries=num_finite + np.array([max(row[0], row[1] == 0) for row in rows]),
        num_zero=num_finite // 3,
        num_finite=num_finite,
        total=sums[:, 0],
        total_squares=sums[:, 1],
        scaled_pivot=sums[:, 2],
        exponent=np.array([row[2] for row in rows], dtype=np.int32),
        ordered=np.sort(np.array([row[4] for row in rows]), axis=1)[:, [0, 7, 1, 2, 3, 4, 5, 6]],
    )
    profiles, moments = profile_table(columns), moment_table(columns)
    for row in range(len(rows)):
        facts = columns.facts(row)
        assert bits(dict(zip(PROFILE_METRICS, profiles.row(row), strict=True))) == bits(named_values(facts))
        assert bits(dict(zip(MOMENT_METRICS, moments.row(row), strict=True))) == bits(moment_values(facts))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_a_packed_tensor_gives_a_reducer_what_its_facts_give(dtype: torch.dtype) -> None:
    """Rows of one matrix, some without a finite entry or with extremes, for every reducer of the package."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) * 100 for size in range(33, 65)]
    if dtype.is_floating_point:
        tensors[3].fill_(math.nan)
        tensors[4][::2] = -math.inf
        tensors[5] *= 1e35
        tensors[6] *= 1e-44
        if dtype is torch.float64:
            tensors[7] *= 1e304
            tensors[8] *= 1e-310
    small = SmallTensors()
    places = [small.add(tensor.to(dtype)) for tensor in tensors]
    small.measure()
    for reducer in (ExactProfile(), mean(), std(), rms(), max_abs(), finite_fraction()):
        assert isinstance(reducer, FactsReducer)
        for place in places:
            assert place is not None
            found = place.values(reducer)
            assert tuple(found) == reducer.metrics
            assert bits(found) == bits(reducer.values(place.measured().facts))


def test_what_float64_cannot_hold_is_missing_alone() -> None:
    """The deviation overflows; the row's other numbers, and the row beside it, are there."""
    columns = FactColumns(
        num_entries=np.array([4, 4]),
        num_zero=np.array([0, 0]),
        num_finite=np.array([4, 4]),
        total=np.array([0.0, 0.0]),
        total_squares=np.array([16.0, 16.0]),
        scaled_pivot=np.array([0.0, 0.0]),
        exponent=np.array([1024, 0], dtype=np.int32),
        ordered=np.tile([-1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], (2, 1)),
    )
    table = profile_table(columns)
    assert table.row(0) == [0.0, Absent("overflow"), -1.0, 3.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert table.row(1) == [0.0, 2.0, -1.0, 3.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_a_reducer_without_a_table_is_asked_for_each_tensor() -> None:
    """One that fails for one tensor fails for that one alone."""

    class Halved(FactsReducer):
        """Half of the highest entry of a tensor of two."""

        @property
        @override
        def metrics(self) -> tuple[str, ...]:
            return ("half",)

        @override
        def values(self, facts: Facts) -> Mapping[str, float | Absent]:
            if facts.num_entries != 2:
                raise ValueError("not two")
            return {"half": facts.maximum / 2}

    small = SmallTensors()
    two, three = small.add(torch.tensor([1.0, 4.0])), small.add(torch.ones(3))
    small.measure()
    assert two is not None
    assert three is not None
    with pytest.raises(ValueError, match="not two"):
        three.values(Halved())
    assert two.values(Halved()) == {"half": 2.0}
