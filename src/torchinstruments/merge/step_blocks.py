"""A stretch of ``steps`` of all ranks side by side: on which attempts they disagree, and in what."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchinstruments.merge.block_rows import block_batches, is_ambiguous
from torchinstruments.merge.ranges import Block, BlockTask
from torchinstruments.merge.splits import Split, split_of
from torchinstruments.records import Outcome
from torchinstruments.store.row_blocks import floats
from torchinstruments.store.series import texts_of

__all__ = [
    "COMPARED",
    "OUTCOMES",
    "AttemptDisagreement",
    "Difference",
    "IncompleteAttempt",
    "StepBlock",
    "compare_steps",
]

COMPARED = ("outcome", "found_inf", "scale_before", "scale_after", "micro_batches", "optimizer_steps")
"""What ranks are compared in: four of each optimizer's step, two of the whole attempt."""

_INTEGER_COLUMNS = ("attempt", "optimizer", "optimizer_attempt", "micro_batches")
_FLOAT_COLUMNS = ("found_inf", "scale_before", "scale_after")
_COLUMNS = ("generation", *_INTEGER_COLUMNS, "outcome", *_FLOAT_COLUMNS)
_OF_ATTEMPT = ("micro_batches", "optimizer_steps")
OUTCOMES = (Outcome.APPLIED, Outcome.SKIPPED, Outcome.ABANDONED)
"""Outcomes that are known, and so are compared."""

_NO_OPTIMIZER = -1

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which ranks disagree on an attempt.

    Attributes:
        optimizer: Ordinal of the optimizer; None for what is said of the whole attempt.
        optimizer_step: Ordinal of its step in the attempt; None likewise.
        column: One of `COMPARED`.
        split: Who holds what; an outcome by its place in `OUTCOMES`.
        ranks_without_value: Ranks that were there and have no value, or one that is not known.
    """

    optimizer: int | None
    optimizer_step: int | None
    column: str
    split: Split
    ranks_without_value: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttemptDisagreement:
    """An attempt on which ranks disagree.

    Attributes:
        generation: Generation.
        attempt: Attempt.
        differences: At least one.
        ranks_without_row: Ranks that have steps in this generation, and none of this attempt.
    """

    generation: int
    attempt: int
    differences: tuple[Difference, ...]
    ranks_without_row: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IncompleteAttempt:
    """An attempt that not all ranks with steps in its generation have.

    Attributes:
        generation: Generation.
        attempt: Attempt.
        ranks_without_row: Those that have no row of it.
    """

    generation: int
    attempt: int
    ranks_without_row: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepBlock:
    """What was found in a stretch.

    Attributes:
        compared: Attempts that at least two ranks have.
        incomplete: Attempts that some rank has no row of.
        first_incomplete: The first of them.
        ambiguous_ranks: Ranks of which two processes have rows of one attempt; those rows are not compared.
        disagreements: By attempt.
    """

    compared: int
    incomplete: int
    first_incomplete: IncompleteAttempt | None
    ambiguous_ranks: tuple[int, ...]
    disagreements: tuple[AttemptDisagreement, ...]


def compare_steps(task: BlockTask) -> tuple[StepBlock, ...]:
    """Compares stretches of steps, each by itself (worker: any thread, process or machine).

    Raises:
        StorageError: A store did not answer.
        ChangedPartError: A part cannot be read any more, or not in these columns.
    """
    columns = _read(task)
    return tuple(_compared(columns.rows(block), block.generation, task.ranks) for block in task.blocks)


def _compared(rows: "_Rows", generation: int, ranks: tuple[int, ...]) -> StepBlock:
    if len(rows.attempt) == 0:
        return StepBlock(0, 0, None, (), ())
    presence = _Presence(rows)
    is_incomplete = presence.counts < len(ranks)
    first = None
    if bool(is_incomplete.any()):
        attempt = int(presence.attempts[np.argmax(is_incomplete)])
        first = IncompleteAttempt(generation, attempt, presence.without(attempt, ranks))
    clean = rows.chosen(~rows.is_ambiguous)
    found = _differences(clean, presence) if len(clean.attempt) else {}
    return StepBlock(
        compared=int((presence.counts > 1).sum()),
        incomplete=int(is_incomplete.sum()),
        first_incomplete=first,
        ambiguous_ranks=tuple(np.unique(rows.rank[rows.is_ambiguous]).tolist()),
        disagreements=tuple(
            AttemptDisagreement(
                generation,
                attempt,
                tuple(sorted(found[attempt], key=_by_place)),
                presence.without(attempt, ranks),
            )
            for attempt in sorted(found)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows sorted by attempt, rank, optimizer and its tries; each array of shape ``[rows]``."""

    attempt: _Integers
    rank: _Integers
    optimizer: _Integers
    micro_batches: _Integers
    values: dict[str, _Floats]
    is_ambiguous: npt.NDArray[np.bool_]

    def chosen(self, places: npt.NDArray[np.generic]) -> "_Rows":
        return _Rows(
            self.attempt[places],
            self.rank[places],
            self.optimizer[places],
            self.micro_batches[places],
            {name: values[places] for name, values in self.values.items()},
            self.is_ambiguous[places],
        )


@dataclass(frozen=True, slots=True)
class _Columns:
    """Rows of all stretches as they were read: whole numbers and others, by column."""

    whole: dict[str, npt.NDArray[np.integer]]
    values: dict[str, _Floats]

    def rows(self, block: Block) -> _Rows:
        """Returns the rows of one stretch."""
        attempt = self.whole["attempt"]
        places = np.flatnonzero((attempt >= block.first) & (attempt <= block.last))
        whole = {name: column[places].astype(np.int64) for name, column in self.whole.items()}
        attempt, rank = whole["attempt"], whole["rank"]
        rows = _Rows(
            attempt,
            rank,
            whole["optimizer"],
            whole["micro_batches"],
            {name: column[places] for name, column in self.values.items()},
            is_ambiguous(rank, attempt, whole["process"]),
        )
        return rows.chosen(np.lexsort((whole["optimizer_attempt"], whole["optimizer"], rank, attempt)))


def _read(task: BlockTask) -> _Columns:
    whole: dict[str, list[npt.NDArray[np.integer]]] = {
        name: [] for name in ("rank", "process", *_INTEGER_COLUMNS)
    }
    values: dict[str, list[_Floats]] = {name: [] for name in ("outcome", *_FLOAT_COLUMNS)}
    for one, process, batch in block_batches(task, _COLUMNS):
        whole["rank"].append(np.full(batch.num_rows, one, np.int32))
        whole["process"].append(np.full(batch.num_rows, process, np.int32))
        for name in _INTEGER_COLUMNS:
            # As wide as in the file: these wait until their block is compared.
            whole[name].append(batch.column(name).to_numpy(zero_copy_only=False))
        positions, outcomes = texts_of(batch.column("outcome"))
        # An outcome that is not known is no value.
        codes = [float(OUTCOMES.index(text)) if text in OUTCOMES else np.nan for text in outcomes]
        values["outcome"].append(np.array(codes)[positions])
        for name in _FLOAT_COLUMNS:
            values[name].append(floats(batch, name))
    return _Columns(
        {name: np.concatenate(found) if found else np.zeros(0, np.int64) for name, found in whole.items()},
        {name: np.concatenate(found) if found else np.zeros(0) for name, found in values.items()},
    )


class _Presence:
    """Which ranks have rows of which attempt."""

    def __init__(self, rows: _Rows) -> None:
        is_first = _changes(rows.attempt, rows.rank)
        attempt, self._rank = rows.attempt[is_first], rows.rank[is_first]
        self._starts = np.flatnonzero(_changes(attempt))
        self.attempts = attempt[self._starts]
        self.counts = np.diff(np.append(self._starts, len(attempt)))

    def ranks(self, attempt: int) -> list[int]:
        place = int(np.searchsorted(self.attempts, attempt))
        start = int(self._starts[place])
        return self._rank[start : start + int(self.counts[place])].tolist()

    def beside(self, attempt: int, ranks: _Integers) -> tuple[int, ...]:
        """Returns the ranks with a row of an attempt that are not among some of them."""
        there = self.ranks(attempt)
        if len(there) == len(ranks):
            return ()
        return tuple(sorted(set(there) - set(ranks.tolist())))

    def without(self, attempt: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        there = set(self.ranks(attempt))
        if len(there) == len(ranks):
            return ()
        return tuple(rank for rank in ranks if rank not in there)


def _differences(rows: _Rows, presence: _Presence) -> dict[int, list[Difference]]:
    found: dict[int, list[Difference]] = {}
    is_first = _changes(rows.attempt, rows.rank)
    starts = np.flatnonzero(is_first)
    attempt, rank = rows.attempt[starts], rows.rank[starts]
    steps = np.add.reduceat((rows.optimizer != _NO_OPTIMIZER).astype(np.float64), starts)
    whole = np.full(len(starts), _NO_OPTIMIZER)
    for name, values in (
        ("micro_batches", rows.micro_batches[starts].astype(np.float64)),
        ("optimizer_steps", steps),
    ):
        _compare(name, (attempt, whole, whole), rank, values, presence, found)
    runs = np.flatnonzero(_changes(rows.attempt, rows.rank, rows.optimizer))
    lengths = np.diff(np.append(runs, len(rows.attempt)))
    ordinal = np.arange(len(rows.attempt)) - np.repeat(runs, lengths)
    keys = (rows.attempt, rows.optimizer, ordinal)
    for name in _FLOAT_COLUMNS:
        _compare(name, keys, rows.rank, rows.values[name], presence, found)
    _compare("outcome", *_with_stepless(keys, rows), presence, found)
    return found


def _with_stepless(
    keys: tuple[_Integers, _Integers, _Integers], rows: _Rows
) -> tuple[tuple[_Integers, _Integers, _Integers], _Integers, _Floats]:
    """Returns keys, ranks and outcomes in which a rank without a step stands beside those that stepped.

    Where no optimizer stepped on a rank, its row of the attempt is compared with every step of the others.
    """
    attempt, optimizer, _ = keys
    outcome = rows.values["outcome"]
    is_stepless = optimizer == _NO_OPTIMIZER
    stepped = np.unique(np.stack([key[~is_stepless] for key in keys], axis=1), axis=0)
    low = np.searchsorted(stepped[:, 0], attempt)
    number = np.where(is_stepless, np.searchsorted(stepped[:, 0], attempt, side="right") - low, 0)
    repeated = np.repeat(np.arange(len(attempt)), number)
    offset = np.arange(len(repeated)) - np.repeat(np.cumsum(number) - number, number)
    added = stepped[low[repeated] + offset]
    kept = number == 0
    joined = [np.concatenate([key[kept], added[:, place]]) for place, key in enumerate(keys)]
    ranks = np.concatenate([rows.rank[kept], rows.rank[repeated]])
    return (joined[0], joined[1], joined[2]), ranks, np.concatenate([outcome[kept], outcome[repeated]])


def _compare(
    name: str,
    keys: tuple[_Integers, _Integers, _Integers],
    rank: _Integers,
    values: _Floats,
    presence: _Presence,
    found: dict[int, list[Difference]],
) -> None:
    """Finds the keys under which ranks hold different values; a rank without a value is not compared."""
    there = np.flatnonzero(~np.isnan(values))
    if len(there) == 0:
        return
    order = there[np.lexsort((rank[there], *(key[there] for key in reversed(keys))))]
    attempt, optimizer, ordinal = (key[order] for key in keys)
    held, ranks = values[order], rank[order]
    starts = np.flatnonzero(_changes(attempt, optimizer, ordinal))
    ends = np.append(starts[1:], len(order))
    differs = np.minimum.reduceat(held, starts) != np.maximum.reduceat(held, starts)
    for start, end in zip(starts[differs].tolist(), ends[differs].tolist(), strict=True):
        one = int(attempt[start])
        is_whole = name in _OF_ATTEMPT
        found.setdefault(one, []).append(
            Difference(
                optimizer=None if is_whole else int(optimizer[start]),
                optimizer_step=None if is_whole else int(ordinal[start]),
                column=name,
                split=split_of(held[start:end], ranks[start:end]),
                ranks_without_value=presence.beside(one, ranks[start:end]),
            )
        )


def _changes(*keys: _Integers) -> npt.NDArray[np.bool_]:
    """Returns where any of some columns differs from the row before."""
    differs = np.ones(len(keys[0]), np.bool_)
    differs[1:] = False
    for key in keys:
        differs[1:] |= key[1:] != key[:-1]
    return differs


def _by_place(one: Difference) -> tuple[int, int, int]:
    # What is said of the whole attempt comes last: it seldom is news beside an outcome.
    if one.optimizer is None or one.optimizer_step is None:
        return (2**31, 0, COMPARED.index(one.column))
    return (one.optimizer, one.optimizer_step, COMPARED.index(one.column))
