"""The default reducer: nine statistics, exact over all finite entries, at any size and of any real dtype.

What "exact" means: minimum, maximum, the fractions and the entries between which a quartile lies are those of
the tensor, without sampling and without rounding. Mean and deviation are accumulated in float64 (float32 on
devices without it) around the median, and are right to the last few bits even for a small spread at a large
offset. The deviation is that of the population, quartiles interpolate linearly, and the fractions refer to
all entries of the tensor, those that are not finite included. Negative zero is a zero.

A thread that flushes denormal numbers (``torch.set_flush_denormal``) sees them as zeros here too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from torchinstruments.records import Absent
from torchinstruments.statistics.fact_columns import FactColumns, ValueTable, profile_table
from torchinstruments.statistics.facts import PROFILE_METRICS, Facts, named_values, profile_numbers
from torchinstruments.statistics.measuring import MAX_SCRATCH_BYTES, FactsReducer

__all__ = ["MAX_SCRATCH_BYTES", "PROFILE_METRICS", "ExactProfile"]


@dataclass(frozen=True, slots=True)
class ExactProfile(FactsReducer):
    """Measures mean, population std, min, max, p25, p50, p75, zero_fraction and nonfinite_fraction.

    An empty tensor has none of them (``empty``); one without a finite entry has the two fractions, and
    ``no_finite_entries`` for the rest.

    On the CPU, tensors are sorted, selected from or counted by NumPy in the calling thread. Which of the
    first two is faster for large tensors is tried once, and changes no number. The peak of scratch is one
    copy, or two where both fit and unlucky data is selected from (float16 and bfloat16 below 65,536 entries:
    one in float32); 8-bit and larger 16-bit tensors need about 3 MB, and a tensor whose copy would exceed
    ``max_scratch_bytes`` is read several times instead, with about 50 MB. At most 6 MB are kept for the next
    tensor.
    """

    @property
    @override
    def metrics(self) -> tuple[str, ...]:
        """Names of the nine statistics."""
        return PROFILE_METRICS

    @property
    @override
    def is_ordered(self) -> bool:
        """Quartiles need an order."""
        return True

    @override
    def values(self, facts: Facts) -> Mapping[str, float | Absent]:
        """Returns the nine statistics."""
        return named_values(facts)

    @override
    def numbers(self, facts: Facts) -> Sequence[float] | None:
        """Returns the nine statistics where nothing is missing."""
        return profile_numbers(facts)

    @override
    def table(self, columns: FactColumns) -> ValueTable:
        """Returns the nine statistics of many tensors."""
        return profile_table(columns)
