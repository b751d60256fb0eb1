"""The answers of ``result.json`` that people ask for first, as typed records.

Each is made of its section on demand. What a record leaves out stands in the section.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

__all__ = [
    "Alignment",
    "CheckFinding",
    "Coverage",
    "Divergence",
    "Ending",
    "Extremum",
    "FirstNonfinite",
    "FirstSeen",
    "HeldValue",
    "LateRank",
    "ModeSplit",
    "OwnWork",
    "SetAsideFile",
    "StepDifference",
    "StepDisagreement",
    "WidestSeries",
    "answer",
    "answers",
]

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class SetAsideFile:
    """A file that was left out.

    Attributes:
        file: Its path.
        reason: A code, with or without detail.
    """

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class Alignment:
    """Whether the ranks measured the same forwards.

    Attributes:
        key: Columns by which a forward is known between ranks.
        samples: Forwards that any rank measured.
        samples_common_to_all_ranks: Those that all ranks with samples measured.
        share_common_to_all_ranks: Their share; None without samples.
    """

    key: tuple[str, ...]
    samples: int
    samples_common_to_all_ranks: int
    share_common_to_all_ranks: float | None


@dataclass(frozen=True, slots=True)
class Ending:
    """What ended processes before their time.

    Attributes:
        kind: Class name of an exception, or ``SIGTERM``.
        ranks: Set of the ranks that ended so, as text, ``0-7,12``.
        num_ranks: How many they are.
    """

    kind: str
    ranks: str
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was expected, and what was there.

    Attributes:
        complete: Whether nothing is missing and nothing was set aside.
        expected_ranks: Ranks that should have left something.
        present_ranks: Ranks that did.
        missing_ranks: Ranks that did not.
        interrupted_ranks: Ranks with a process that ended without a close.
        running_ranks: Ranks with a process that writes still.
        ended_by: Exceptions and signals that ended processes, those of the fewest ranks first.
        quarantined: Files that were set aside.
        rows_dropped: Rows that the ranks gave up.
        alignment: Whether they measured the same forwards.
    """

    complete: bool
    expected_ranks: tuple[int, ...]
    present_ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    interrupted_ranks: tuple[int, ...]
    running_ranks: tuple[int, ...]
    ended_by: tuple[Ending, ...]
    quarantined: tuple[SetAsideFile, ...]
    rows_dropped: int
    alignment: Alignment


@dataclass(frozen=True, slots=True)
class HeldValue:
    """A value, and the ranks that hold it.

    Attributes:
        value: The value; a digest is 16 hex digits.
        ranks: Set of ranks as text, ``0-7,12``.
        num_ranks: How many they are.
    """

    value: float | int | str
    ranks: str
    num_ranks: int


@dataclass(frozen=True, slots=True)
class StepDifference:
    """One thing in which ranks disagree on an attempt.

    Attributes:
        column: ``outcome``, ``found_inf``, ``scale_before``, ``scale_after``, ``micro_batches`` or
            ``optimizer_steps``.
        optimizer: Ordinal of the optimizer; None for what is said of the whole attempt.
        values: Who holds what, the value of the fewest ranks first.
    """

    column: str
    optimizer: int | None
    values: tuple[HeldValue, ...]


@dataclass(frozen=True, slots=True)
class StepDisagreement:
    """An attempt on which ranks disagree.

    Attributes:
        generation: Generation.
        attempt: Attempt.
        differences: At least one.
        ranks_without_row: Set of ranks that have no row of it.
    """

    generation: int
    attempt: int
    differences: tuple[StepDifference, ...]
    ranks_without_row: str


@dataclass(frozen=True, slots=True)
class ModeSplit:
    """A forward that ranks ran in different modes, so that it is not compared between them.

    Attributes:
        generation: Generation.
        attempt: Attempt; None where there is none.
        forward_in_attempt: Ordinal of the forward in it; None likewise.
        forward_index: Ordinal of the forward where there is no attempt, else None.
        layer: The first of the layers that were in different modes, by name.
        num_layers: How many they are.
        values: Which ranks were in ``train`` or ``eval``, or had layers in either, ``eval,train``; that of
            the fewest ranks first.
    """

    generation: int
    attempt: int | None
    forward_in_attempt: int | None
    forward_index: int | None
    layer: str
    num_layers: int
    values: tuple[HeldValue, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """A tensor that differs between ranks that have to hold the same.

    Attributes:
        generation: Generation in which it differs first.
        attempt: Attempt in which it differs first.
        tensor: Its name.
        replica_key: Which ranks, and what they share.
        values: Who holds what, the digest of the fewest ranks first.
        healed: Whether it was equal after that; None where that is not known.
    """

    generation: int
    attempt: int
    tensor: str
    replica_key: str
    values: tuple[HeldValue, ...]
    healed: bool | None


@dataclass(frozen=True, slots=True)
class FirstNonfinite:
    """The first moment at which NaN or infinity stood anywhere.

    Attributes:
        phase: ``forward``, ``backward``, ``reduced`` or ``applied``.
        before_reduction: Whether the rank is the one where it was born.
        generation: Generation.
        attempt: Attempt; None where there is none.
        forward_in_attempt: Ordinal of the forward in it; None likewise.
        forward_index: Ordinal of the forward where there is no attempt, else None.
        rank: The lowest rank that shows it.
        ranks: Set of all ranks that show it then.
        layer: Its first layer.
        signal: What was measured of the layer.
        stage: Stage of a parameter gradient.
        tensor_path: Which tensor of the layer.
        nonfinite_fraction: Share of the tensor's entries.
    """

    phase: str
    before_reduction: bool
    generation: int
    attempt: int | None
    forward_in_attempt: int | None
    forward_index: int | None
    rank: int
    ranks: str
    layer: str
    signal: str
    stage: str
    tensor_path: str
    nonfinite_fraction: float


@dataclass(frozen=True, slots=True)
class LateRank:
    """The rank of a generation that is latest by its own work.

    Attributes:
        rank: The rank.
        host: Its host; None where no generation record names it.
        gap_s: Median seconds over its attempts, from the end of one to the next forward.
        other_s: Median seconds in forward, backward and optimizer together, with what it waits there.
        late_by_s: `gap_s` against the median of ranks.
        late_by_mads: The same in multiples of the median deviation of ranks; None where that is 0.
        share_of_attempt: The same as a share of an attempt's time.
        later_share: In what share of the common attempts its gap was longer than the median of ranks.
    """

    rank: int
    host: str | None
    gap_s: float
    other_s: float
    late_by_s: float
    late_by_mads: float | None
    share_of_attempt: float | None
    later_share: float


@dataclass(frozen=True, slots=True)
class OwnWork:
    """Which ranks of a generation are late by their own work, and which wait for them.

    Attributes:
        generation: Generation.
        judged: Whether the times of its ranks could be held beside each other.
        unavailable_reason: Why not; empty where they could.
        late_ranks: Set of ranks that are late, as text.
        waiting_ranks: Set of ranks that wait for them.
        latest: The latest rank, where it is late.
    """

    generation: int
    judged: bool
    unavailable_reason: str
    late_ranks: str
    waiting_ranks: str
    latest: LateRank | None


@dataclass(frozen=True, slots=True)
class FirstSeen:
    """Where a kind of finding of training checks was seen first.

    Attributes:
        generation: Generation.
        attempt: Attempt; None where the finding has none.
        rank: The lowest rank that saw it then.
        process: Which process of the rank, 8 hex digits.
        finding: The finding as the rank's own report has it.
    """

    generation: int
    attempt: int | None
    rank: int
    process: str
    finding: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """A kind of finding of training checks.

    Attributes:
        code: Stable name of what was found.
        check: The check that found it.
        severity: ``critical``, ``warning`` or ``info``.
        ranks: Set of the ranks that saw it, as text, ``0-7,12``.
        ranks_that_did_not_see_it: Set of the other ranks with checks.
        first: Where it was seen first.
    """

    code: str
    check: str
    severity: str
    ranks: str
    ranks_that_did_not_see_it: str
    first: FirstSeen


@dataclass(frozen=True, slots=True)
class Extremum:
    """A value that is lowest or highest over ranks.

    Attributes:
        rank: The lowest rank that has it.
        value: The value.
    """

    rank: int
    value: float


@dataclass(frozen=True, slots=True)
class WidestSeries:
    """A series, at the forward at which one rank is furthest from the median over ranks.

    Attributes:
        layer: Layer.
        call_index: Ordinal of its call.
        signal: What was measured of it.
        stage: Stage of a parameter gradient.
        tensor_path: Which tensor of the layer.
        metric: Statistic.
        rank: The furthest rank.
        value: Its value.
        mads: Its distance from `median_of_ranks`, in multiples of `mad_of_ranks`; None where
            `unavailable_reason` says why.
        unavailable_reason: ``mad_is_zero``, half of the ranks or more hold `median_of_ranks`; ``overflow``;
            else empty.
        median_of_ranks: Lower median over ranks, so a value that some rank has.
        mad_of_ranks: Lower median over ranks of the distance from it; None beyond double precision.
        lowest: Lowest value over ranks.
        highest: Highest value over ranks.
        num_ranks: Ranks with a value.
        generation: Generation.
        attempt: Attempt; None where there is none.
        forward_in_attempt: Ordinal of the forward in it; None likewise.
        forward_index: Ordinal of the forward where there is no attempt, else None.
        differs_in: What is not the same on all of these ranks, as ``grad_sync,loss_scale``.
    """

    layer: str
    call_index: int
    signal: str
    stage: str
    tensor_path: str
    metric: str
    rank: int
    value: float
    mads: float | None
    unavailable_reason: str
    median_of_ranks: float
    mad_of_ranks: float | None
    lowest: Extremum
    highest: Extremum
    num_ranks: int
    generation: int
    attempt: int | None
    forward_in_attempt: int | None
    forward_index: int | None
    differs_in: str


def answer(section: object, field: str, kind: type[_Record]) -> _Record | None:
    """Returns a field of a section as a record; None where it is null."""
    assert isinstance(section, Mapping)
    value = section[field]
    return None if value is None else msgspec.convert(value, kind)


def answers(section: object, field: str, kind: type[_Record]) -> tuple[_Record, ...]:
    """Returns a list of a section as records."""
    assert isinstance(section, Mapping)
    return tuple([msgspec.convert(one, kind) for one in section[field]])
