"""The section ``steps`` of ``result.json`` and ``steps.parquet``: whether all ranks did the same steps."""

import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.merge.ranges import Block, BlockTask, RangeFold
from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.merge.sources import Source
from torchinstruments.merge.step_blocks import (
    OUTCOMES,
    AttemptDisagreement,
    Difference,
    IncompleteAttempt,
    StepBlock,
)
from torchinstruments.merge.step_rows import STEP_RANGE, StepReading, UnsynchronisedStep
from torchinstruments.records import Outcome

__all__ = ["STEPS_FILE", "STEPS_SCHEMA", "StepFold"]

STEPS_FILE = "steps.parquet"

MAX_SHOWN = 100
"""Attempts whose disagreements stand in ``result.json``."""

STEPS_SCHEMA = pa.schema(
    [
        pa.field("generation", pa.int32(), nullable=False),
        pa.field("attempt", pa.int64(), nullable=False),
        pa.field("optimizer", pa.int32()),
        pa.field("optimizer_step", pa.int32()),
        pa.field("column", pa.string(), nullable=False),
        pa.field("place", pa.int32()),
        pa.field("value", pa.float64()),
        pa.field("outcome", pa.string()),
        pa.field("num_ranks", pa.int32(), nullable=False),
        pa.field("ranks", pa.string(), nullable=False),
        pa.field("unavailable_reason", pa.string(), nullable=False),
    ]
)
"""Columns of ``steps.parquet``: one row for each value that ranks hold where one was due."""

_GROUP_ROWS = 36_000


class _Table:
    """Encodes ``steps.parquet`` block by block; nothing of a block stays but its encoded bytes."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._writer = pq.ParquetWriter(self._buffer, STEPS_SCHEMA, compression="zstd", store_schema=False)
        self._rows: list[tuple[object, ...]] = []

    def add(self, found: AttemptDisagreement) -> None:
        for one in found.differences:
            key = (found.generation, found.attempt, one.optimizer, one.optimizer_step, one.column)
            for place, held in enumerate(one.split.values):
                is_outcome = one.column == "outcome"
                value = None if is_outcome else float(held.value)
                outcome = OUTCOMES[int(held.value)].value if is_outcome else None
                self._rows.append((*key, place, value, outcome, len(held.ranks), ranks_text(held.ranks), ""))
            for reason, ranks in (
                ("further_values", one.split.further_ranks),
                ("no_value", one.ranks_without_value),
                ("no_row", found.ranks_without_row),
            ):
                if ranks:
                    self._rows.append((*key, None, None, None, len(ranks), ranks_text(ranks), reason))
        if len(self._rows) >= _GROUP_ROWS:
            self._write()

    def encoded(self) -> bytes:
        self._write()
        self._writer.close()
        return self._buffer.getvalue()

    def _write(self) -> None:
        if self._rows:
            columns = [
                pa.array(column, one.type)
                for column, one in zip(zip(*self._rows, strict=True), STEPS_SCHEMA, strict=True)
            ]
            self._writer.write_table(pa.Table.from_arrays(columns, schema=STEPS_SCHEMA))
            self._rows = []


@dataclass(slots=True)
class StepFold:
    """Gathers the steps of all ranks, then the blocks in which they are not the same."""

    _ranges: RangeFold = field(default_factory=lambda: RangeFold(STEP_RANGE))
    _ranks: list[dict[str, object]] = field(default_factory=list)
    _without: list[int] = field(default_factory=list)
    _unsynchronised: list[tuple[UnsynchronisedStep, int, int]] = field(default_factory=list)
    _table: _Table = field(default_factory=_Table)
    _covered: set[tuple[int, int]] = field(default_factory=set)
    _compared: int = 0
    _incomplete: int = 0
    _first_incomplete: IncompleteAttempt | None = None
    _ambiguous: set[int] = field(default_factory=set)
    _disagreeing: int = 0
    _shown: list[dict[str, object]] = field(default_factory=list)

    def add_rank(self, rank: int, reading: StepReading) -> None:
        """Takes what was read of a rank; ranks come in ascending order."""
        if not reading.spans:
            self._without.append(rank)
            return
        self._ranges.add(rank, reading.ranges, reading.spans)
        counts = {one.value: reading.outcomes.get(one.value, 0) for one in Outcome}
        self._ranks.append(
            {
                "rank": rank,
                "attempts": reading.attempts,
                **counts,
                "unsynchronised_steps": reading.num_unsynchronised,
            }
        )
        first = reading.first_unsynchronised
        if first is not None:
            self._unsynchronised.append((first, rank, reading.num_unsynchronised))

    def tasks(self, run_id: str, sources: tuple[Source, ...]) -> Iterable[BlockTask]:
        """Returns the stretches that have to be compared rank beside rank, once all ranks were added."""
        blocks: list[Block]
        blocks, self._covered = self._ranges.blocks()
        return self._ranges.tasks(blocks, run_id, sources)

    def add_block(self, block: StepBlock) -> None:
        """Takes what was found in a stretch; stretches come in the order of `tasks`."""
        self._compared += block.compared
        self._add_incomplete(block.incomplete, block.first_incomplete)
        self._ambiguous |= set(block.ambiguous_ranks)
        self._disagreeing += len(block.disagreements)
        for one in block.disagreements:
            self._table.add(one)
            if len(self._shown) < MAX_SHOWN:
                self._shown.append(_attempt_record(one))

    def record(self) -> dict[str, object]:
        """Returns the section, once all blocks were added."""
        self._add_uniform()
        return {
            "same_steps": self._disagreeing == 0 if self._compared else None,
            "compared_attempts": self._compared,
            "first_disagreement": self._shown[0] if self._shown else None,
            "disagreeing_attempts": self._disagreeing,
            "incomplete_attempts": self._incomplete,
            "first_incomplete": _incomplete_record(self._first_incomplete),
            "ranks_without_steps": ranks_text(self._without),
            "ambiguous_ranks": ranks_text(self._ambiguous),
            "unsynchronised_steps": self._unsynchronised_record(),
            "ranks": self._ranks,
            "disagreements": self._shown,
            "disagreements_in": STEPS_FILE,
        }

    def encoded(self) -> bytes:
        """Returns ``steps.parquet``; nothing can be added afterwards."""
        return self._table.encoded()

    def _add_uniform(self) -> None:
        """Counts the ranges whose rows are the same on every rank that has any."""
        due = self._ranges.generation_ranks()
        for one in self._ranges.ranges():
            if (one.generation, one.number) in self._covered:
                continue
            self._compared += one.attempts if one.num_ranks > 1 else 0
            absent = due[one.generation] & ~one.ranks
            if absent:
                without = tuple(self._ranges.ranks_in(absent))
                self._add_incomplete(one.attempts, IncompleteAttempt(one.generation, one.first, without))

    def _add_incomplete(self, number: int, first: IncompleteAttempt | None) -> None:
        self._incomplete += number
        held = self._first_incomplete
        if first is not None and (
            held is None or (first.generation, first.attempt) < (held.generation, held.attempt)
        ):
            self._first_incomplete = first

    def _unsynchronised_record(self) -> dict[str, object]:
        if not self._unsynchronised:
            return {"steps": 0, "ranks": "", "first": None}
        first = min(one for one, _, _ in self._unsynchronised)
        place = (first.generation, first.attempt, first.optimizer)
        together = [
            (rank, one.grad_sync)
            for one, rank, _ in self._unsynchronised
            if (one.generation, one.attempt, one.optimizer) == place
        ]
        return {
            "steps": sum(number for _, _, number in self._unsynchronised),
            "ranks": ranks_text(rank for _, rank, _ in self._unsynchronised),
            "first": {
                "generation": first.generation,
                "attempt": first.attempt,
                "optimizer": first.optimizer,
                "ranks": ranks_text(rank for rank, _ in together),
                "grad_sync": sorted({sync for _, sync in together}),
            },
        }


def _attempt_record(found: AttemptDisagreement) -> dict[str, object]:
    return {
        "generation": found.generation,
        "attempt": found.attempt,
        "differences": [_difference_record(one) for one in found.differences],
        "ranks_without_row": ranks_text(found.ranks_without_row),
    }


def _difference_record(one: Difference) -> dict[str, object]:
    def shown(value: float) -> object:
        if one.column == "outcome":
            return OUTCOMES[int(value)].value
        if not math.isfinite(value):
            return str(value)
        return int(value) if one.optimizer is None else value

    return {
        "column": one.column,
        "optimizer": one.optimizer,
        "optimizer_step": one.optimizer_step,
        **one.split.record(shown),
        "ranks_without_value": ranks_text(one.ranks_without_value),
    }


def _incomplete_record(found: IncompleteAttempt | None) -> dict[str, object] | None:
    if found is None:
        return None
    return {
        "generation": found.generation,
        "attempt": found.attempt,
        "ranks_without_row": ranks_text(found.ranks_without_row),
    }
