"""Numbers that lie side by side before anyone reads them."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from typing_extensions import override

from torchinstruments.records import Absent
from torchinstruments.statistics.facts import MOMENT_METRICS, Facts, profile_numbers
from torchinstruments.statistics.held import Look, Seen
from torchinstruments.statistics.host import measure_on_host
from torchinstruments.statistics.measured import Measured
from torchinstruments.statistics.measuring import FactsReducer
from torchinstruments.statistics.number_rows import NumberRows
from torchinstruments.statistics.packing import SmallTensors
from torchinstruments.statistics.profile import ExactProfile
from torchinstruments.statistics.reducers import MomentReducer


def measured(tensor: torch.Tensor) -> Measured:
    """Returns what a look at a tensor alone gives."""
    return measure_on_host(tensor, is_ordered=True, max_scratch_bytes=1 << 28)


def numbers_of(tensor: torch.Tensor) -> list[float]:
    """Returns the nine statistics of a tensor of which none is missing."""
    found = profile_numbers(measured(tensor).facts)
    assert found is not None
    return [*found]


class Later(Look):
    """A look that a device has not sent yet when it is added."""

    def __init__(self, result: Measured) -> None:
        self.result = result

    @override
    def measured(self) -> Measured:
        return self.result

    @override
    def values(self, reducer: FactsReducer) -> Mapping[str, float | Absent]:
        return reducer.values(self.result.facts)


class Wrong(FactsReducer):
    """Makes of a tensor what it is told to."""

    made: Sequence[float] | None = None

    @property
    @override
    def metrics(self) -> tuple[str, ...]:
        return ("a", "b")

    @override
    def numbers(self, facts: Facts) -> Sequence[float] | None:
        if facts.num_entries == 1:
            raise ValueError("one entry")
        return {2: (1.0,), 3: (1.0, 2.0, 3.0), 4: (1.0, math.inf), 5: (-2.0, 7.0), 6: None}[facts.num_entries]


@pytest.mark.parametrize(
    "reducer", [ExactProfile(), *(MomentReducer(metric=metric) for metric in MOMENT_METRICS)], ids=str
)
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5001),
        torch.randn(5000).to(torch.bfloat16),
        torch.full((5000,), 0.1),
        -torch.zeros(5),
        torch.tensor([1.5, math.nan, -2.5, math.inf]),
        torch.full((3,), math.nan),
        torch.empty(0),
        torch.arange(-7, 5002),
        torch.tensor([2**62, -5]),
        torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64),
        torch.tensor([1.7e308, 1.7e308, 1.6e308], dtype=torch.float64),
        torch.tensor([5e-324, 0.0, 1e-310], dtype=torch.float64),
    ],
)
def test_numbers_are_the_values_to_the_last_bit(reducer: FactsReducer, tensor: torch.Tensor) -> None:
    """Where they are not all there and finite, which they are not where one is missing, values are asked."""
    facts = measured(tensor).facts
    values, numbers = reducer.values(facts), reducer.numbers(facts)
    assert tuple(values) == reducer.metrics
    if numbers is None or not np.isfinite(numbers).all():
        is_missing = any(isinstance(value, Absent) for value in values.values())
        assert is_missing or not tensor.is_floating_point() or tensor.abs().max() == 1.7e308
    else:
        assert np.array(numbers).tobytes() == np.array([*values.values()], np.float64).tobytes()


def test_numbers_are_there_as_soon_as_a_tensor_is_added() -> None:
    """They are the ones that the reducer makes, and nothing is left to be read."""
    rows = NumberRows(ExactProfile())
    tensors = [torch.randn(size) for size in (5000, 6000)]
    assert [rows.add(measured(tensor)) for tensor in tensors] == [0, 1]
    assert (len(rows), rows.is_filled) == (2, True)
    assert rows.values().tolist() == [*numbers_of(tensors[0]), *numbers_of(tensors[1])]
    assert rows.numbers(1) == tuple(numbers_of(tensors[1]))


def test_what_comes_in_while_numbers_are_made_has_a_row_of_its_own() -> None:
    """A signal's handler may run the model in the middle of a hook: each index is of its own tensor."""
    inside: list[int] = []

    class Interrupted(MomentReducer):
        @override
        def numbers(self, facts: Facts) -> Sequence[float] | None:
            if facts.num_entries == 5000:
                inside.append(rows.add(measured(torch.full((6000,), 7.0))))
            return super().numbers(facts)

    rows = NumberRows(Interrupted(metric="mean"))
    outside = rows.add(measured(torch.full((5000,), 2.0)))
    assert (rows.numbers(outside), rows.numbers(inside[0])) == ((2.0,), (7.0,))


def test_what_comes_later_is_filled_in_where_it_belongs() -> None:
    """Rows of matrices and what a device sends lie between the others."""
    rows, small = NumberRows(ExactProfile()), SmallTensors()
    large, little, other, sent = (torch.randn(size) for size in (5000, 20, 25, 7000))
    for found in (small.add(little), measured(large), Later(measured(sent)), small.add(other)):
        rows.add(found)
    assert not rows.is_filled
    assert (rows.numbers(0), rows.numbers(2)) == (None, None)
    small.measure()
    read = rows.read()
    assert read.values[1:3].tolist() == [numbers_of(large), numbers_of(sent)]
    np.testing.assert_allclose(read.values[[0, 3]], [numbers_of(little), numbers_of(other)], rtol=1e-12)
    assert (read.reasons, read.unread) == ({}, [])


def test_a_value_that_a_matrix_lacks_has_its_reason() -> None:
    """At the row that the tensor has here."""
    rows, small = NumberRows(ExactProfile()), SmallTensors()
    rows.add(measured(torch.randn(5000)))
    rows.add(small.add(torch.full((3,), math.nan)))
    small.measure()
    read = rows.read()
    assert read.reasons == {(1, column): "no_finite_entries" for column in range(7)}
    assert np.isnan(read.values).tolist() == [[False] * 9, [True] * 7 + [False] * 2]
    assert rows.numbers(1) is None


def test_what_has_to_be_read_alone_says_so() -> None:
    """Numbers that are missing, and a look that could not be taken; the look is kept, if there is one."""
    rows = NumberRows(ExactProfile())
    rows.add(measured(torch.randn(5000)))
    rows.add(measured(torch.full((5000,), math.nan)))
    rows.add(None)
    read = rows.read()
    assert read.unread == [1, 2]
    assert np.isnan(read.values[1:]).all()
    look = rows.look(1)
    assert isinstance(look, Seen)
    assert look.result.facts.num_nonfinite == 5000
    assert rows.look(2) is None


@pytest.mark.parametrize("num_entries", [1, 2, 3, 4, 6])
def test_nothing_that_a_reducer_makes_gets_a_neighbour_wrong(num_entries: int) -> None:
    """It raises, makes too few or too many numbers, one that is none, or nothing: nothing leaves the hook."""
    rows = NumberRows(Wrong())
    for size in (5, num_entries, 5):
        rows.add(measured(torch.ones(size)))
    read = rows.read()
    assert read.values[[0, 2]].tolist() == [[-2.0, 7.0]] * 2
    assert (np.isnan(read.values[1]).all(), read.unread) == (True, [1])
