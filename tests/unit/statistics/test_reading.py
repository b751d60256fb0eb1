"""Scalars of all tensors of a batch at once, against those of each tensor read alone."""

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from typing_extensions import override

from torchinstruments.records import Absent
from torchinstruments.statistics.batching import MeasuredScalars, ScalarBatch
from torchinstruments.statistics.contract import Reducer, Scalar
from torchinstruments.statistics.facts import Facts
from torchinstruments.statistics.measuring import FactsReducer
from torchinstruments.statistics.packing import PackedBlock
from torchinstruments.statistics.profile import ExactProfile
from torchinstruments.statistics.reading import ScalarTable
from torchinstruments.statistics.reducers import default_reducers, mean, rms

GENERATOR = torch.Generator().manual_seed(5)
SMALL = [torch.randn(size, generator=GENERATOR) for size in (1, 16, 17, 300, 4096)]
LARGE = [torch.randn(5000, generator=GENERATOR).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
ODD = [
    torch.empty(0),
    torch.full((4,), math.nan),
    torch.full((6000,), math.inf),
    torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64),
    torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64).repeat(3000),
    torch.tensor([2**62, -5], dtype=torch.int64),
    torch.arange(9000),
    torch.tensor([1.0, -math.inf, 3.0]),
    -torch.zeros(5000),
]


class Picky(FactsReducer):
    """The number of entries, but for tensors of 17."""

    @property
    @override
    def metrics(self) -> tuple[str, ...]:
        return ("entries",)

    @override
    def values(self, facts: Facts) -> Mapping[str, float | Absent]:
        if facts.num_entries == 17:
            raise ValueError("17 entries")
        return {"entries": float(facts.num_entries) if facts.num_entries else Absent("empty")}

    @property
    @override
    def is_ordered(self) -> bool:
        return False


class Own:
    """A user's reducer, whose metrics depend on the tensor."""

    def __call__(self, tensor: torch.Tensor) -> Mapping[str, Scalar]:
        """Returns one or two numbers."""
        return {"size": tensor.numel(), **({"first": tensor[0]} if tensor.numel() > 16 else {})}


def absent(place: int) -> MeasuredScalars:
    """Returns what stands for a tensor that was not measured."""
    return MeasuredScalars(("x", "y"), (None, None), (f"no_gradient: {place}", ""))


def tensor_by_tensor(table: ScalarTable) -> list[tuple[tuple[str, ...], bytes, tuple[str, ...]]]:
    """Returns metrics, the bits of the values, and reasons of each tensor."""
    found, start = [], 0
    for metrics in table.metrics:
        stop = start + len(metrics)
        reasons = tuple(table.reasons.get(place, "") for place in range(start, stop))
        found.append((metrics, table.values[start:stop].tobytes(), reasons))
        start = stop
    assert start == len(table.values)
    assert set(table.reasons) <= set(range(start))
    return found


@pytest.mark.parametrize("tensors", [SMALL, LARGE, [*SMALL, *LARGE], [*SMALL, *ODD, *LARGE]])
@pytest.mark.parametrize(
    "reducers", [default_reducers(), (ExactProfile(), rms()), (mean(),), (Picky(),), (Own(),), (Own(), rms())]
)
def test_all_at_once_are_the_same_as_each_alone(
    reducers: tuple[Reducer, ...], tensors: list[torch.Tensor]
) -> None:
    """Packed or not, with values that are missing, and with tensors that were not measured between them."""
    batch = ScalarBatch(reducers, lambda *_: None)
    indices = [batch.add(tensor) for tensor in tensors]
    batch.seal()
    wanted = [*reversed(indices), -1, indices[0], -1]
    alone = [absent(place) if index < 0 else batch.read(index) for place, index in enumerate(wanted)]
    expected = [(one.metrics, np.array(one.values, np.float64).tobytes(), one.reasons) for one in alone]
    assert tensor_by_tensor(batch.read_all(wanted, absent)) == expected
    assert tensor_by_tensor(batch.read_all(indices, absent)) == expected[len(indices) - 1 :: -1]


def test_a_matrix_that_could_not_be_measured_says_so_for_each_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tensors beside it have their numbers."""

    def fail(*_: object) -> None:
        raise MemoryError("too large")

    batch = ScalarBatch(default_reducers(), lambda *_: None)
    indices = [batch.add(torch.ones(3)), batch.add(torch.ones(5000))]
    monkeypatch.setattr(PackedBlock, "_measure", fail)
    batch.seal()
    table = batch.read_all(indices, absent)
    assert np.isnan(table.values).tolist() == [True] * 9 + [False] * 9
    assert set(table.reasons) == set(range(9))
    assert set(table.reasons.values()) == {"reducer_error: RuntimeError: MemoryError: too large"}


def test_of_nothing_there_is_nothing() -> None:
    """A part without observations has an empty table."""
    table = ScalarBatch(default_reducers(), lambda *_: None).read_all([], absent)
    assert (table.metrics, table.values.tolist(), table.reasons) == ([], [], {})
