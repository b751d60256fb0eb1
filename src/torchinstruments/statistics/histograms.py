"""Histograms of tensors: what is asked for, and what was measured.

A histogram counts the finite entries of a tensor between edges that are either fixed or span the tensor
itself. Its counts are exact and come from the same sort or count as the statistics beside it. Bins are open
to the right, the last one closed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Absent, Reason, storable
from torchinstruments.statistics.admission import admit
from torchinstruments.statistics.bins import Binned, BinRule, fixed_edges
from torchinstruments.statistics.facts import Facts
from torchinstruments.statistics.isolation import functions_off, isolated
from torchinstruments.statistics.measuring import look

__all__ = [
    "MAX_BINS",
    "HistogramRange",
    "HistogramReducer",
    "MeasuredHistogram",
    "absent_histogram",
    "due_histograms",
    "histogram",
    "measured_histogram",
    "validate_histograms",
]


MAX_BINS = 65_536
"""Bins that a histogram may have: each sample keeps two numbers for every one of them, for each tensor."""


class HistogramRange(Enum):
    """A range that is not two numbers."""

    DYNAMIC = "dynamic"
    """From the lowest to the highest finite entry of each tensor."""


@dataclass(frozen=True, slots=True)
class MeasuredHistogram:
    """One histogram of one tensor, as `HistogramRecord` stores it.

    Attributes:
        name: Name of the histogram.
        edges: Edges of the bins, float64, ascending, one more than there are bins; empty where there is a
            reason.
        counts: Finite entries in each bin.
        underflow: Finite entries below the first edge.
        overflow: Finite entries above the last edge.
        finite_count: Finite entries.
        nonfinite_count: NaN and infinite entries.
        minimum: Lowest finite entry; None where there is a reason.
        maximum: Highest finite entry; None where there is a reason.
        total: Sum of the finite entries; None where there is a reason.
        total_of_squares: Sum of their squares; None where there is a reason.
        unavailable_reason: ``""``, else a `Reason` with or without detail.
    """

    name: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    underflow: int
    overflow: int
    finite_count: int
    nonfinite_count: int
    minimum: float | None
    maximum: float | None
    total: float | None
    total_of_squares: float | None
    unavailable_reason: str = ""


@dataclass(frozen=True, slots=True)
class HistogramReducer:
    """One histogram that is taken of every tensor in focus; `histogram` makes it.

    A subclass may compute a histogram of its own in ``__call__``. It is given a copy of the tensor and
    isolated like a reducer, but it looks at the tensor by itself.

    Attributes:
        name: Its name, a part of its tag in TensorBoard; not blank.
        bins: Bins between the edges, from 1 to `MAX_BINS`.
        value_range: First and last edge, or `HistogramRange.DYNAMIC`. Entries outside of a fixed range are
            counted as underflow and overflow.
        every_n_samples: Taken of samples whose ordinal is a multiple of it.

    Raises:
        ConfigurationError: A value that cannot work.
    """

    name: str = "distribution"
    bins: int = 64
    value_range: tuple[float, float] | HistogramRange = HistogramRange.DYNAMIC
    every_n_samples: int = 1

    def __post_init__(self) -> None:
        """Checks every field."""
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigurationError(
                f"histogram name={self.name!r} is blank or no text; give a name such as 'distribution'"
            )
        object.__setattr__(self, "name", storable(self.name))
        for field in ("bins", "every_n_samples"):
            number = getattr(self, field)
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ConfigurationError(
                    f"histogram {field}={number!r} is not allowed; give a whole number of at least 1"
                )
        if self.bins > MAX_BINS:
            raise ConfigurationError(
                f"histogram bins={self.bins!r} is not allowed; give a whole number of at most {MAX_BINS}"
            )
        if self.value_range is not HistogramRange.DYNAMIC:
            object.__setattr__(self, "value_range", _checked_range(self.value_range, self.bins))

    @property
    def rule(self) -> BinRule:
        """How its bins are placed."""
        fixed = self.value_range
        return BinRule(self.bins, None if isinstance(fixed, HistogramRange) else fixed)

    def is_due(self, ordinal: int) -> bool:
        """Returns whether the sample with this ordinal has this histogram (training thread, hot path)."""
        return ordinal % self.every_n_samples == 0

    def __call__(self, tensor: torch.Tensor, /) -> MeasuredHistogram:
        """Returns the histogram of a tensor; on an accelerator this waits for the device.

        Args:
            tensor: Any tensor. One that cannot be measured has a histogram that says why.
        """
        with functions_off(), isolated(tensor):
            admitted = admit(tensor)
            if isinstance(admitted, Absent):
                return absent_histogram(self.name, admitted.reason)
            measured = look(admitted[0], is_ordered=False, rules=(self.rule,))
        return measured_histogram(self.name, measured.facts, measured.binned[0] if measured.binned else None)


def histogram(
    *,
    name: str = "distribution",
    bins: int = 64,
    value_range: tuple[float, float] | HistogramRange = HistogramRange.DYNAMIC,
    every_n_samples: int = 1,
) -> HistogramReducer:
    """Returns a histogram to be taken of every tensor in focus.

    Args:
        name: Its name, a part of its tag in TensorBoard.
        bins: Bins between the edges, at most `MAX_BINS`.
        value_range: First and last edge, or `HistogramRange.DYNAMIC`: from the lowest to the highest finite
            entry; equal ones are widened by one part in a hundred.
        every_n_samples: Taken of samples whose ordinal is a multiple of it; 1 for every sample.

    Raises:
        ConfigurationError: A blank name, fewer than one bin or sample, too many bins, or a range that is not
            two finite numbers in ascending order, far enough apart for distinct edges.
    """
    return HistogramReducer(name=name, bins=bins, value_range=value_range, every_n_samples=every_n_samples)


def validate_histograms(histograms: Iterable[HistogramReducer]) -> tuple[HistogramReducer, ...]:
    """Returns the histograms as a tuple if they can work together; none at all is allowed.

    Raises:
        ConfigurationError: Not a collection of histograms, or the same name twice.
    """
    if isinstance(histograms, (str, HistogramReducer)) or not isinstance(histograms, Iterable):
        raise ConfigurationError(
            f"histograms={histograms!r} is not a collection of histograms; "
            f"give a tuple, such as (histogram(),)"
        )
    given = tuple(histograms)
    for one in given:
        if not isinstance(one, HistogramReducer):
            raise ConfigurationError(
                f"histograms holds {one!r}, which is no histogram; give what histogram() returns"
            )
    names = [one.name for one in given]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(
                f"histograms holds the name {name!r} twice; give each histogram a name of its own"
            )
    return given


def due_histograms(histograms: Sequence[HistogramReducer], ordinal: int) -> tuple[HistogramReducer, ...]:
    """Returns those that the sample with this ordinal has (training thread, hot path)."""
    return tuple([one for one in histograms if one.is_due(ordinal)])


def measured_histogram(name: str, facts: Facts, binned: Binned | None) -> MeasuredHistogram:
    """Returns a histogram from what was measured (writer thread)."""
    moments = facts.moments
    if facts.num_entries == 0:
        return absent_histogram(name, Reason.EMPTY.value)
    if binned is None:
        return absent_histogram(name, Reason.NO_FINITE_ENTRIES.value, facts)
    if not math.isfinite(moments.total_of_squares) or not math.isfinite(moments.total):
        return absent_histogram(name, Reason.OVERFLOW.value, facts)
    up_to: list[int] = binned.up_to.tolist()
    return MeasuredHistogram(
        name=name,
        edges=tuple(binned.edges.tolist()),
        counts=tuple([above - below for below, above in pairwise(up_to)]),
        underflow=up_to[0],
        overflow=facts.num_finite - up_to[-1],
        finite_count=facts.num_finite,
        nonfinite_count=facts.num_nonfinite,
        minimum=float(facts.minimum),
        maximum=float(facts.maximum),
        total=moments.total,
        total_of_squares=moments.total_of_squares,
    )


def absent_histogram(name: str, reason: str, facts: Facts | None = None) -> MeasuredHistogram:
    """Returns a histogram that could not be had, with what is known of the tensor all the same."""
    return MeasuredHistogram(
        name=name,
        edges=(),
        counts=(),
        underflow=0,
        overflow=0,
        finite_count=0 if facts is None else facts.num_finite,
        nonfinite_count=0 if facts is None else facts.num_nonfinite,
        minimum=None,
        maximum=None,
        total=None,
        total_of_squares=None,
        unavailable_reason=reason,
    )


def _checked_range(value_range: object, bins: int) -> tuple[float, float]:
    """Returns a fixed range as two floats.

    Raises:
        ConfigurationError: It is none, or too narrow for so many bins.
    """
    problem = ConfigurationError(
        f"histogram value_range={value_range!r} is not allowed; give two finite numbers in ascending order, "
        f"such as (-1.0, 1.0), or HistogramRange.DYNAMIC"
    )
    if not isinstance(value_range, tuple) or len(value_range) != 2:
        raise problem
    if any(not isinstance(end, (int, float)) or isinstance(end, bool) for end in value_range):
        raise problem
    try:
        low, high = float(value_range[0]), float(value_range[1])
    except OverflowError:
        raise problem from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise problem
    edges = fixed_edges(bins, low, high)
    if not (edges[1:] > edges[:-1]).all():
        raise ConfigurationError(
            f"histogram value_range={value_range!r} is too narrow for {bins} bins, whose edges would not all "
            f"differ; give a wider range or fewer bins"
        )
    return low, high
