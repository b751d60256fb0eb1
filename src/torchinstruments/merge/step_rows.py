"""The rows of ``steps`` of one rank, read once: how many attempts ended how, digests of them, and times."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.merge.own_work import Timings, TimingsTally
from torchinstruments.merge.ranges import (
    PartSpan,
    RangeTable,
    RangeTally,
    bits_of,
    row_digests,
    text_digests,
    widen,
)
from torchinstruments.merge.timeline import TimelineTally, outcome_code
from torchinstruments.records import GradSync, Outcome
from torchinstruments.store.inventory import PartFile
from torchinstruments.store.row_blocks import floats, integers
from torchinstruments.store.series import texts_of

__all__ = ["STEP_COLUMNS", "STEP_RANGE", "StepReading", "StepRows", "UnsynchronisedStep"]

STEP_RANGE = 1024
"""Attempts in a range of ``steps``."""

STEP_COLUMNS = (
    "generation",
    "rank",
    "process",
    "attempt",
    "optimizer",
    "optimizer_attempt",
    "micro_batches",
    "last_micro_batch_sync",
    "outcome",
    "found_inf",
    "scale_before",
    "scale_after",
    "gap_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "clock",
)

_UNSYNCHRONISED = frozenset({GradSync.LOCAL, GradSync.REDUCED_ONLY, GradSync.MIXED})


@dataclass(frozen=True, slots=True, order=True)
class UnsynchronisedStep:
    """A step that was applied though the gradients of its last micro-batch were not synchronised.

    Attributes:
        generation: Generation.
        attempt: Attempt.
        optimizer: Ordinal of the optimizer.
        grad_sync: What became of the gradients instead.
    """

    generation: int
    attempt: int
    optimizer: int
    grad_sync: str


@dataclass(frozen=True, slots=True)
class StepReading:
    """What was read of the ``steps`` of one rank.

    Attributes:
        attempts: Windows, of all generations.
        outcomes: `Outcome` to rows; an attempt has one for each optimizer that stepped in it, or one.
        num_unsynchronised: Steps applied after a last micro-batch that was not synchronised.
        first_unsynchronised: The first of them.
        ranges: Digests of the rows.
        spans: The parts that were read.
        timings: Of each generation.
        timeline: How its attempts ended, stretch by stretch.
    """

    attempts: int
    outcomes: dict[str, int]
    num_unsynchronised: int
    first_unsynchronised: UnsynchronisedStep | None
    ranges: RangeTable
    spans: tuple[PartSpan, ...]
    timings: tuple[Timings, ...]
    timeline: TimelineTally


class StepRows:
    """Gathers the ``steps`` of one rank, part by part in the order of writing (worker)."""

    def __init__(self) -> None:
        self._attempts = 0
        self._outcomes: Counter[str] = Counter()
        self._num_unsynchronised = 0
        self._first_unsynchronised: UnsynchronisedStep | None = None
        self._ranges = RangeTally(STEP_RANGE)
        self._spans: list[PartSpan] = []
        self._timings = TimingsTally()
        self._timeline = TimelineTally()
        self._last: tuple[str, int, int] = ("", -1, -1)

    def add(self, part: PartFile, rows: Iterable[pa.RecordBatch]) -> None:
        """Takes the rows of a part, all of which can be decoded."""
        bounds: dict[int, tuple[int, int]] = {}
        for batch in rows:
            if batch.num_rows:
                generation, attempt = integers(batch, "generation"), integers(batch, "attempt")
                widen(bounds, generation, attempt)
                self._add(part, batch, generation, attempt)
        self._spans += [PartSpan(part, one, *ends) for one, ends in sorted(bounds.items())]

    def finish(self) -> StepReading:
        """Returns what was read."""
        return StepReading(
            attempts=self._attempts,
            outcomes=dict(sorted(self._outcomes.items())),
            num_unsynchronised=self._num_unsynchronised,
            first_unsynchronised=self._first_unsynchronised,
            ranges=self._ranges.finish(),
            spans=tuple(self._spans),
            timings=self._timings.finish(),
            timeline=self._timeline,
        )

    def _add(
        self,
        part: PartFile,
        batch: pa.RecordBatch,
        generation: npt.NDArray[np.int64],
        attempt: npt.NDArray[np.int64],
    ) -> None:
        is_new = self._is_new(part, generation, attempt)
        self._attempts += int(is_new.sum())
        positions, outcomes = texts_of(batch.column("outcome"))
        for text, count in zip(outcomes, np.bincount(positions, minlength=len(outcomes)), strict=True):
            if count:
                self._outcomes[text] += int(count)
        codes = np.array([outcome_code(text) for text in outcomes], np.int64)[positions]
        scales = (floats(batch, "scale_before"), floats(batch, "scale_after"))
        self._timeline.add_steps(generation, attempt, codes, *scales)
        self._add_unsynchronised(batch, generation, attempt, positions, outcomes)
        names = ("optimizer", "optimizer_attempt", "micro_batches")
        columns = [attempt, *(integers(batch, name) for name in names), text_digests(outcomes)[positions]]
        columns += [bits_of(floats(batch, name)) for name in ("found_inf", "scale_before", "scale_after")]
        group = np.zeros(len(attempt), np.int64)
        self._ranges.add(generation, attempt, group, is_new, row_digests(columns))
        self._timings.add(batch, generation, attempt)

    def _is_new(
        self, part: PartFile, generation: npt.NDArray[np.int64], attempt: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Returns which rows are the first of their attempt: those of one attempt lie together."""
        is_new = np.ones(len(attempt), np.bool_)
        is_new[1:] = (attempt[1:] != attempt[:-1]) | (generation[1:] != generation[:-1])
        # An attempt may begin at the end of a part and go on in the next one.
        is_new[0] = self._last != (part.process, int(generation[0]), int(attempt[0]))
        self._last = (part.process, int(generation[-1]), int(attempt[-1]))
        return is_new

    def _add_unsynchronised(
        self,
        batch: pa.RecordBatch,
        generation: npt.NDArray[np.int64],
        attempt: npt.NDArray[np.int64],
        outcome_of: npt.NDArray[np.int64],
        outcomes: list[str],
    ) -> None:
        sync_of, syncs = texts_of(batch.column("last_micro_batch_sync"))
        is_loose = np.array([text in _UNSYNCHRONISED for text in syncs], np.bool_)[sync_of]
        is_applied = np.array([text == Outcome.APPLIED for text in outcomes], np.bool_)[outcome_of]
        found = np.flatnonzero(is_loose & is_applied)
        if len(found) == 0:
            return
        self._num_unsynchronised += len(found)
        optimizer = integers(batch, "optimizer")
        place = found[np.lexsort((optimizer[found], attempt[found], generation[found]))[0]]
        first = UnsynchronisedStep(
            int(generation[place]), int(attempt[place]), int(optimizer[place]), syncs[sync_of[place]]
        )
        held = self._first_unsynchronised
        self._first_unsynchronised = first if held is None else min(held, first)
