"""Small tensors measured together."""

import math
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from torchinstruments.statistics import packing
from torchinstruments.statistics.bins import BinRule
from torchinstruments.statistics.host import measure_on_host
from torchinstruments.statistics.measured import Measured
from torchinstruments.statistics.packing import MAX_PACKED_ENTRIES, PackedBlock, PackedPlace, SmallTensors

RULES = (BinRule(6), BinRule(3, (-0.5, 0.5)))
DTYPES = tuple(packing._ROW_DTYPES)


def randoms(num_entries: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Returns entries of which some are zero and, where the dtype can be, some are not finite."""
    entries = torch.randn(num_entries, generator=torch.Generator().manual_seed(seed)) * 5
    entries[::5] = 0.0
    if dtype.is_floating_point:
        entries[1::11], entries[2::13], entries[3::17] = math.nan, math.inf, -math.inf
        return entries.to(dtype)
    return entries.abs().to(dtype)


def alone(tensor: torch.Tensor, rules: tuple[BinRule, ...] = ()) -> Measured:
    """Returns what a look at this tensor alone gives."""
    return measure_on_host(tensor, is_ordered=True, rules=rules, max_scratch_bytes=1 << 28)


def place_of(small: SmallTensors, tensor: torch.Tensor, rules: tuple[BinRule, ...] = ()) -> PackedPlace:
    """Adds a tensor that must be taken."""
    place = small.add(tensor, rules)
    assert place is not None
    return place


def check(found: Measured, expected: Measured) -> None:
    """Compares: moments to rounding, everything else exactly."""
    for name in ("num_entries", "num_zero", "num_nonfinite", "minimum", "maximum", "quartiles"):
        assert getattr(found.facts, name) == getattr(expected.facts, name)
    for name in ("mean", "std", "total", "total_of_squares"):
        right = getattr(expected.facts.moments, name)
        assert getattr(found.facts.moments, name) == pytest.approx(right, rel=1e-13, abs=1e-13)
    for one, other in zip(found.binned, expected.binned, strict=True):
        assert (one.edges.tolist(), one.up_to.tolist()) == (other.edges.tolist(), other.up_to.tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_size_are_measured_as_if_alone(dtype: torch.dtype) -> None:
    """Powers of two and their neighbours, with histograms and without, in one collection."""
    small = SmallTensors()
    tensors = [
        randoms(size, dtype, seed=size) for size in (1, 2, 15, 16, 17, 31, 255, 256, 257, 1000, 4095, 4096)
    ]
    places = [(place_of(small, tensor, RULES), place_of(small, tensor)) for tensor in tensors]
    small.measure()
    for tensor, (binned, plain) in zip(tensors, places, strict=True):
        check(binned.measured(), alone(tensor, RULES))
        check(plain.measured(), alone(tensor))


def test_each_tensor_has_the_histograms_that_it_asked_for_in_that_order() -> None:
    """Neighbours with other wishes, and the same wish twice, do not get mixed up."""
    small = SmallTensors()
    tensor = randoms(20, torch.float32)
    wishes = [RULES, RULES[::-1], RULES[:1], (RULES[0], RULES[0])]
    places = [place_of(small, tensor, wish) for wish in wishes]
    small.measure()
    for place, wish in zip(places, wishes, strict=True):
        assert [one.edges.size for one in place.measured().binned] == [rule.num_bins + 1 for rule in wish]


def test_the_numbers_of_a_tensor_do_not_depend_on_its_neighbours() -> None:
    """Not even in the last bit: ranks with the same tensor compare equal, whatever else they measured."""
    tensor = randoms(200, torch.float32)
    lonely, crowded = SmallTensors(), SmallTensors()
    first = place_of(lonely, tensor)
    for seed in range(100):
        place_of(crowded, randoms(129 + seed, torch.float32, seed) * 1e30)
    second = place_of(crowded, tensor)
    lonely.measure()
    crowded.measure()
    assert first.measured() == second.measured()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.zeros(MAX_PACKED_ENTRIES + 1),
        torch.tensor([0, 2**53]),
        torch.tensor([-(2**53), 5]),
        torch.tensor([-(2**63), 2**63 - 1]),
        torch.tensor([1, 2**64 - 1], dtype=torch.uint64),
    ],
)
def test_what_is_empty_too_large_or_too_wide_is_not_taken(tensor: torch.Tensor) -> None:
    """float64 does not hold every whole number of 64 bits."""
    assert SmallTensors().add(tensor) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([2**53 - 1, 1 - 2**53, 0, 3]),
        torch.tensor([2**53 - 1, 2**53 - 3, 7], dtype=torch.uint64),
        torch.arange(30_000, 30_200).view(10, 20).t(),
    ],
)
def test_whole_numbers_that_float64_holds_are_measured_as_if_alone(tensor: torch.Tensor) -> None:
    """Ids of tokens are, and the largest whose neighbours are too."""
    small = SmallTensors()
    place = place_of(small, tensor, RULES)
    small.measure()
    check(place.measured(), alone(tensor, RULES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32], ids=str)
def test_a_tensor_is_taken_however_it_lies_in_memory(dtype: torch.dtype) -> None:
    """Transposed, strided, expanded, and without dimensions."""
    base = randoms(120, dtype).view(12, 10)
    tensors = [base.t(), base[::3, 1::2], base[:, :1].expand(12, 7), base[4, 4]]
    small = SmallTensors()
    places = [place_of(small, tensor) for tensor in tensors]
    small.measure()
    for tensor, place in zip(tensors, places, strict=True):
        check(place.measured(), alone(tensor.contiguous()))


def test_values_are_those_of_the_moment_when_a_tensor_was_added() -> None:
    """What happens to its memory afterwards is not seen."""
    small, tensor = SmallTensors(), torch.tensor([1.0, 2.0])
    place = place_of(small, tensor)
    tensor.fill_(9.0)
    small.measure()
    assert place.measured().facts.maximum == 2.0


@pytest.mark.parametrize("size", [1e300, 1e-300, 5e-324])
def test_extreme_float64_is_scaled_row_by_row(size: float) -> None:
    """Squares that leave float64 do not spoil the deviation, nor an ordinary neighbour."""
    small = SmallTensors()
    extreme = place_of(small, torch.tensor([-size, size, size, -size], dtype=torch.float64))
    ordinary = place_of(small, torch.tensor([1.0, 3.0], dtype=torch.float64))
    small.measure()
    assert extreme.measured().facts.moments.std == pytest.approx(size, rel=1e-15)
    assert ordinary.measured().facts.moments.std == 1.0


def test_a_full_matrix_is_measured_at_once_and_lets_its_memory_go() -> None:
    """However many tensors come, no more than one matrix of their length is held."""
    small = SmallTensors()
    num_rows = packing._BLOCK_ENTRIES // 1024
    places = [place_of(small, torch.full((1024,), float(number))) for number in range(3 * num_rows + 1)]
    assert len(small._open) == 1
    assert [place.block for place in places[:num_rows]] == [places[0].block] * num_rows
    assert places[num_rows].block is not places[0].block
    assert not hasattr(places[0].block, "_rows")
    assert places[5].measured().facts.maximum == 5.0
    with pytest.raises(RuntimeError, match="never measured"):
        places[-1].measured()
    small.measure()
    assert small._open == {}
    assert places[-1].measured().facts.maximum == float(3 * num_rows)


def test_a_matrix_that_cannot_be_measured_is_named_by_all_of_its_tensors_and_costs_no_other() -> None:
    """What was raised is raised once for all, and stands where each result would be."""
    small = SmallTensors()
    broken, other = place_of(small, torch.ones(20)), place_of(small, torch.ones(100))
    broken.block._sizes.append(10**6)
    with pytest.raises(ExceptionGroup, match="small tensors could not be measured"):
        small.measure()
    with pytest.raises(RuntimeError, match="IndexError"):
        broken.measured()
    assert other.measured().facts.maximum == 1.0


def test_a_program_that_lets_numpy_raise_is_not_interrupted() -> None:
    """Rows of NaN and infinities pass without a FloatingPointError."""
    small = SmallTensors()
    with np.errstate(all="raise"):
        places = [place_of(small, torch.tensor(row)) for row in ([math.nan, math.inf], [1e-40, 1e38])]
        small.measure()
    assert places[0].measured().facts.num_nonfinite == 2


def test_a_tensor_that_comes_while_another_is_copied_is_not_put_into_its_row() -> None:
    """The handler of a signal may run the model in the middle of a hook; what it adds is measured alone."""
    small, inside = SmallTensors(), list[PackedPlace | None]()

    def each_line(_frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            inside.append(small.add(torch.full((20,), 7.0)))
        return each_line

    def trace(frame: FrameType, _event: str, _argument: object) -> Any:
        return each_line if frame.f_code is PackedBlock.add.__code__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        place = small.add(torch.full((20,), 2.0))
    finally:
        sys.settrace(before)
    small.measure()
    assert place is not None
    assert place.measured().facts.moments.mean == 2.0
    assert len(inside) > 5
    assert {*inside} == {None}
