"""One look at a tensor for everything that wants to know something of it.

A `FactsReducer` is a reducer whose values follow from the facts of a tensor: the exact profile, and ``mean``
to ``finite_fraction``. A batch looks at a tensor once for all of them and for the histograms; called by
itself, such a reducer looks alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from torchinstruments.records import Absent
from torchinstruments.statistics.bins import BinRule
from torchinstruments.statistics.contract import Packed
from torchinstruments.statistics.device import pack_facts
from torchinstruments.statistics.fact_columns import FactColumns, ValueTable
from torchinstruments.statistics.facts import Facts
from torchinstruments.statistics.host import measure_on_host
from torchinstruments.statistics.measured import Measured

__all__ = ["MAX_SCRATCH_BYTES", "FactsReducer", "look"]

MAX_SCRATCH_BYTES = 256 * 2**20
"""Memory that the measuring of one tensor may take for the time that it lasts."""


@dataclass(frozen=True, slots=True)
class FactsReducer:
    """A reducer whose values follow from the facts of a tensor.

    Attributes:
        max_scratch_bytes: Bound of the memory that one look takes, on the host and on an accelerator.
    """

    max_scratch_bytes: int = MAX_SCRATCH_BYTES

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names that every call returns."""
        raise NotImplementedError

    @property
    def is_ordered(self) -> bool:
        """Whether the values need an order of the entries."""
        raise NotImplementedError

    def values(self, facts: Facts) -> Mapping[str, float | Absent]:
        """Returns values by metric, each finite or with the reason why it is missing (any thread)."""
        raise NotImplementedError

    def numbers(self, facts: Facts) -> Sequence[float] | None:
        """Returns the values in the order of `metrics` where nothing is missing (training thread, hot path).

        Returns:
            The numbers of `values`; None, or one that is not finite among them, where `values` has a reason.
        """
        values = self.values(facts)
        found = [value for value in values.values() if not isinstance(value, Absent)]
        return found if tuple(values) == self.metrics and len(found) == len(values) else None

    def table(self, columns: FactColumns) -> ValueTable | None:  # noqa: ARG002 - a seam
        """Returns the values of many tensors at once (writer thread).

        Returns:
            For each row its values in the order of `metrics`, equal to those of `values`; None where the
            reducer makes them one tensor at a time.
        """
        return None

    def __call__(self, tensor: torch.Tensor, /) -> Mapping[str, float | Absent]:
        """Returns values by metric.

        On an accelerator this reads the result on the host and so waits for the device; an observer never
        calls it there, but looks once for all reducers and leaves the numbers on the device.

        Args:
            tensor: Detached, strided, of a real dtype and any shape.
        """
        measured = look(tensor, is_ordered=self.is_ordered, max_scratch_bytes=self.max_scratch_bytes)
        return self.values(measured.facts)

    def pack(self, tensor: torch.Tensor, /) -> Packed:
        """Starts the work on the tensor's device, without a host read (training thread, hot path).

        Args:
            tensor: Detached, strided, of a real dtype and any shape.
        """
        packed = pack_facts(tensor, is_ordered=self.is_ordered, max_scratch_bytes=self.max_scratch_bytes)
        return Packed(packed.scalars, partial(_values_of_numbers, self, packed.finish))


def look(
    tensor: torch.Tensor,
    *,
    is_ordered: bool,
    rules: Sequence[BinRule] = (),
    max_scratch_bytes: int = MAX_SCRATCH_BYTES,
) -> Measured:
    """Returns what there is to know of a tensor; on an accelerator it waits for the device.

    Args:
        tensor: Detached, strided, of a real dtype and any shape.
        is_ordered: Whether quartiles are wanted.
        rules: The histograms that are wanted.
        max_scratch_bytes: Bound of the memory that it takes.
    """
    if tensor.device.type == "cpu":
        return measure_on_host(
            tensor, is_ordered=is_ordered, rules=rules, max_scratch_bytes=max_scratch_bytes
        )
    packed = pack_facts(tensor, is_ordered=is_ordered, rules=rules, max_scratch_bytes=max_scratch_bytes)
    return packed.finish(packed.scalars.cpu().tolist())


def _values_of_numbers(
    reducer: FactsReducer, finish: Callable[[Sequence[float]], Measured], numbers: Sequence[float]
) -> Mapping[str, float | Absent]:
    """Returns the values of one reducer from the numbers of its packed facts (writer thread)."""
    return reducer.values(finish(numbers).facts)
