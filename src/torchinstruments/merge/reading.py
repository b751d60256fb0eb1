"""The map step: one rank, read part by part in the order of writing.

A part counts as a whole or not at all: it is decoded to its last row before its first row is summarised, so
that one that breaks in the middle is set aside by name and leaves no trace. Very large parts are decoded
twice instead of held.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from torchinstruments.errors import StorageDeniedError, StorageError
from torchinstruments.merge.alignment import SampleKeys, sample_keys
from torchinstruments.merge.failures import of_rank
from torchinstruments.merge.fingerprint_rows import FINGERPRINT_COLUMNS, FingerprintRows
from torchinstruments.merge.known_columns import DecodedRows, KnownColumns
from torchinstruments.merge.nonfinite_rows import (
    EVIDENCE_COLUMNS,
    NonfiniteReading,
    NonfiniteRows,
    Phase,
    PhaseEvidence,
    evidence_rows,
)
from torchinstruments.merge.parts import (
    OpenPart,
    check_all_columns,
    checked_batches,
    known_batches,
    open_part,
    reread,
)
from torchinstruments.merge.row_spans import GroupIds, RowSpan, group_ids, row_spans
from torchinstruments.merge.sources import opened
from torchinstruments.merge.step_rows import STEP_COLUMNS, StepRows
from torchinstruments.merge.tasks import Disagreement, ProcessRows, RankReading, RankTask
from torchinstruments.records import SampleState
from torchinstruments.store.documents import GONE, UnusableFileError
from torchinstruments.store.inventory import PartFile, SetAside
from torchinstruments.store.row_blocks import (
    SUMMARISED_COLUMNS,
    RowBlock,
    integers,
    microseconds,
)
from torchinstruments.store.sample_grids import KeyColumns, NumberedRows, SharedLayouts
from torchinstruments.store.schema import KEY_COLUMNS
from torchinstruments.store.series import TooManySeriesError, codes_of, texts_of
from torchinstruments.store.summaries import SummaryBuilder

__all__ = ["HISTORY_COLUMNS", "OVER_MEMORY", "SAMPLE_COLUMNS", "forget_layouts", "read_rank"]

MAX_HELD_ROWS = 1_000_000
"""Parts with more rows than this are decoded twice rather than held: about 100 bytes a row."""

MAX_DISAGREEMENTS = 100
"""Kinds of rows that say something else than their place, of one part; one with more is set aside."""

OVER_MEMORY = "over_memory_limit"
"""Why a part is set aside whose rows do not fit into the memory that there is."""

_SHARED = SharedLayouts()
_FOREIGN = "foreign_run"
_IDENTITY_COLUMNS = ("generation", "rank", "process")
HISTORY_COLUMNS = (*_IDENTITY_COLUMNS, *KEY_COLUMNS, *SUMMARISED_COLUMNS)
"""What is read of ``history``."""

_POSITION_COLUMNS = (
    "generation",
    "sample_id",
    "attempt",
    "forward_in_attempt",
    "forward_index",
    "timestamp",
)
SAMPLE_COLUMNS = (
    *_IDENTITY_COLUMNS,
    "sample_id",
    "attempt",
    "forward_in_attempt",
    "forward_index",
    "started_at",
    "state",
)
"""What is read of ``samples``."""

_KNOWN_HISTORY = KnownColumns("history", HISTORY_COLUMNS)
_KNOWN_SAMPLES = KnownColumns("samples", SAMPLE_COLUMNS)


def read_rank(task: RankTask) -> RankReading:
    """Reads a rank (worker: any thread, process or machine).

    Raises:
        StorageError: A store did not answer. A file that is bad by itself raises nothing and is set aside.
        ChangedPartError: A part turned out to be damaged in columns that only a closer look reads.
    """
    try:
        return _RankReader(task).read()
    except StorageError as error:
        raise of_rank(task.rank, error)  # noqa: B904 - it is the same error


def forget_layouts() -> None:
    """Lets go of what ranks of a merge shared in this process, once it is over (caller's thread)."""
    _SHARED.clear()
    _KNOWN_HISTORY.clear()
    _KNOWN_SAMPLES.clear()


@dataclass(slots=True)
class _ProcessTally:
    rows: Counter[str] = field(default_factory=Counter)
    generations: set[int] = field(default_factory=set)
    samples: list["_Samples"] = field(default_factory=list)
    in_history: list[tuple[PartFile, npt.NDArray[np.int64]]] = field(default_factory=list)
    row_groups: list[GroupIds] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Samples:
    """Rows of ``samples``, each array of shape ``[rows]``; `attempt` is -1 where there is none."""

    generation: npt.NDArray[np.int64]
    sample_id: npt.NDArray[np.int64]
    attempt: npt.NDArray[np.int64]
    forward_in_attempt: npt.NDArray[np.int64]
    forward_index: npt.NDArray[np.int64]
    started_at_us: npt.NDArray[np.int64]
    is_missed: npt.NDArray[np.bool_]


class _RankReader:
    def __init__(self, task: RankTask) -> None:
        self._task = task
        self._numbered = NumberedRows(_SHARED)
        self._builder = SummaryBuilder(task.window)
        self._tallies: dict[str, _ProcessTally] = {}
        self._set_aside: list[SetAside] = []
        self._num_foreign = 0
        self._disagreements: list[Disagreement] = []
        self._steps = StepRows()
        self._fingerprints = FingerprintRows()
        self._nonfinite = NonfiniteRows()

    def read(self) -> RankReading:
        for parts in self._task.parts.values():
            for part in parts:
                self._read_or_set_aside(part)
        has_unrecorded = False
        for tally in self._tallies.values():
            has_unrecorded |= self._add_unrecorded(tally)
        samples = [one for tally in self._tallies.values() for one in tally.samples]
        return RankReading(
            rank=self._task.rank,
            summaries=self._builder.finish(self._numbered.index),
            processes={process: _process_rows(tally) for process, tally in sorted(self._tallies.items())},
            keys=_keys(samples),
            set_aside=tuple(self._set_aside),
            foreign_parts=self._num_foreign,
            disagreements=tuple(self._disagreements),
            steps=self._steps.finish(),
            fingerprints=self._fingerprints.finish(),
            nonfinite=self._read_evidence(has_unrecorded=has_unrecorded),
            row_spans=tuple(span for tally in self._tallies.values() for span in _row_spans(tally)),
        )

    def _read_or_set_aside(self, part: PartFile) -> None:
        try:
            self._read_part(part)
        except UnusableFileError as error:
            reason = error.reason
        except FileNotFoundError:
            reason = GONE
        except StorageDeniedError as error:
            reason = UnusableFileError("unreadable", error).reason
        except StorageError:
            raise
        except TooManySeriesError as error:
            reason = UnusableFileError("schema_mismatch", error).reason
        except pa.ArrowMemoryError as error:
            reason = UnusableFileError(OVER_MEMORY, error).reason
        except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
            # Beyond the footer a damaged page surfaces as whatever the decoder trips over.
            reason = UnusableFileError("unreadable", error).reason
        else:
            return
        if reason == _FOREIGN:
            self._num_foreign += 1
        else:
            self._set_aside.append(SetAside(part.source, part.path, reason))

    def _read_part(self, part: PartFile) -> None:
        storage = opened(self._task.sources[part.source])
        with open_part(storage, part, self._task.run_id) as opened_part:
            file = opened_part.file
            if self._task.reads_all_columns:
                check_all_columns(file)
            if part.table == "history":
                self._read_history(part, opened_part)
            elif part.table == "samples":
                self._read_samples(part, opened_part)
            elif part.table == "steps":
                self._steps.add(part, self._read_compared(part, file, STEP_COLUMNS))
            else:
                self._fingerprints.add(part, self._read_compared(part, file, FINGERPRINT_COLUMNS))

    def _read_history(self, part: PartFile, opened_part: OpenPart) -> None:
        metadata = opened_part.file.metadata
        found: Counter[tuple[str, str, str]] = Counter()
        generations: set[int] = set()
        ids: list[npt.NDArray[np.int64]] = []
        nonfinite: list[dict[Phase, int]] = []

        def blocks() -> Iterator[RowBlock]:
            for rows in known_batches(opened_part, _KNOWN_HISTORY):
                self._compare(part, rows, found, generations)
                nonfinite.append(self._nonfinite.seen(rows))
                ids.append(_changes(integers(rows.batch, "sample_id")))
                yield from self._numbered.blocks(rows.batch, rows.made(KEY_COLUMNS, KeyColumns))

        chosen: Iterable[RowBlock]
        if metadata.num_rows <= MAX_HELD_ROWS:
            chosen = list(blocks())
        else:
            for _ in blocks():
                pass
            found.clear()
            ids.clear()
            nonfinite.clear()
            chosen = blocks()
        for block in chosen:
            self._builder.add(block)
        if ids:
            distinct = np.unique(np.concatenate(ids))
            self._tally(part).in_history.append((part, distinct))
            self._tally(part).row_groups += group_ids(part, metadata)
            self._nonfinite.add(part, nonfinite, distinct)
        self._note(part, metadata.num_rows, found, generations)

    def _read_compared(
        self, part: PartFile, file: pq.ParquetFile, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a table of which every part counts as a whole."""
        found: Counter[tuple[str, str, str]] = Counter()
        generations: set[int] = set()
        for batch in checked_batches(file, columns, MAX_HELD_ROWS):
            self._compare(part, DecodedRows(batch), found, generations)
            yield batch
        self._note(part, file.metadata.num_rows, found, generations)

    def _read_evidence(self, *, has_unrecorded: bool) -> NonfiniteReading:
        """Reads the first rows with values that are not finite; their parts were read to the end before."""
        first: list[PhaseEvidence] = []
        for phase, sample_id, parts in self._nonfinite.wanted():
            rows = (
                batch
                for part in parts
                for batch in reread(self._task.sources, self._task.run_id, part, EVIDENCE_COLUMNS)
            )
            found = evidence_rows(phase, sample_id, rows)
            if found is not None:
                first.append(found)
        return self._nonfinite.finish(first, has_unrecorded=has_unrecorded)

    def _add_unrecorded(self, tally: _ProcessTally) -> bool:
        """Adds the samples that only ``history`` knows, as after a kill between the two, or a lost part.

        Returns:
            Whether there are any.
        """
        found = False
        recorded = np.unique(
            np.concatenate([np.zeros(0, np.int64), *(one.sample_id for one in tally.samples)])
        )
        for part, ids in tally.in_history:
            missing = ids[~_contains(recorded, ids)]
            if len(missing):
                found = True
                tally.samples += self._samples_in_history(part, missing)
        return found

    def _samples_in_history(self, part: PartFile, ids: npt.NDArray[np.int64]) -> list[_Samples]:
        """Reads where the given samples of a part of ``history`` stand; it was read to its end before."""
        blocks: list[_Samples] = []
        for batch in reread(self._task.sources, self._task.run_id, part, _POSITION_COLUMNS):
            sample_id = integers(batch, "sample_id")
            _, first = np.unique(sample_id, return_index=True)
            chosen = first[np.isin(sample_id[first], ids)]
            blocks.append(
                _Samples(
                    generation=integers(batch, "generation")[chosen],
                    sample_id=sample_id[chosen],
                    attempt=integers(batch, "attempt")[chosen],
                    forward_in_attempt=integers(batch, "forward_in_attempt")[chosen],
                    forward_index=integers(batch, "forward_index")[chosen],
                    started_at_us=microseconds(batch, "timestamp")[chosen],
                    is_missed=np.zeros(len(chosen), np.bool_),
                )
            )
        return blocks

    def _read_samples(self, part: PartFile, opened_part: OpenPart) -> None:
        found: Counter[tuple[str, str, str]] = Counter()
        generations: set[int] = set()
        blocks: list[_Samples] = []
        for rows in known_batches(opened_part, _KNOWN_SAMPLES):
            self._compare(part, rows, found, generations)
            blocks.append(_samples(rows.batch))
        self._tally(part).samples += blocks
        self._note(part, opened_part.file.metadata.num_rows, found, generations)

    def _compare(
        self,
        part: PartFile,
        rows: DecodedRows,
        found: Counter[tuple[str, str, str]],
        generations: set[int],
    ) -> None:
        """Counts the rows of a batch that say something else than where they lie."""
        if rows.batch.num_rows == 0:
            return
        said = rows.made(_IDENTITY_COLUMNS, _said)
        expected = self._task.generations.get(part.process)
        generations.update(said.generations)
        if expected is not None:
            _count_others(found, "generation", said.generations, expected)
        _count_others(found, "rank", said.ranks, part.rank)
        for text, num_rows in said.processes:
            if text != part.process:
                found["process", text[:80], part.process] += num_rows
        if len(found) > MAX_DISAGREEMENTS or len(generations) > MAX_DISAGREEMENTS:
            raise UnusableFileError("misplaced", f"its rows are of more than {MAX_DISAGREEMENTS} processes")

    def _note(
        self, part: PartFile, num_rows: int, found: Counter[tuple[str, str, str]], generations: set[int]
    ) -> None:
        tally = self._tally(part)
        tally.rows[part.table] += num_rows
        tally.generations |= generations
        for (column, said, expected), rows in sorted(found.items()):
            self._disagreements.append(Disagreement(part.source, part.path, column, said, expected, rows))

    def _tally(self, part: PartFile) -> _ProcessTally:
        return self._tallies.setdefault(part.process, _ProcessTally())


@dataclass(frozen=True, slots=True)
class _Said:
    """What rows say of where they belong: each value, with the number of its rows."""

    generations: dict[int, int]
    ranks: dict[int, int]
    processes: list[tuple[str, int]]


def _said(batch: pa.RecordBatch) -> _Said:
    positions, texts = codes_of(batch.column("process"))
    return _Said(
        generations=_counted(batch.column("generation").to_numpy(zero_copy_only=False)),
        ranks=_counted(batch.column("rank").to_numpy(zero_copy_only=False)),
        processes=[(texts[place], rows) for place, rows in _counted(positions).items()],
    )


def _changes(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns each value that differs from the one before it: few, for rows of a sample lie together."""
    if len(values) == 0:
        return values
    return values[np.append(True, values[1:] != values[:-1])]


def _contains(values: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Returns which wanted values are among those that are sorted."""
    if len(values) == 0:
        return np.zeros(len(wanted), np.bool_)
    return values[np.minimum(np.searchsorted(values, wanted), len(values) - 1)] == wanted


def _counted(values: npt.NDArray[np.integer]) -> dict[int, int]:
    """Returns value to rows; nearly always there is one."""
    lowest, highest = int(values.min()), int(values.max())
    if lowest == highest:
        return {lowest: len(values)}
    distinct, counts = np.unique(values, return_counts=True)
    return dict(zip(distinct.tolist(), counts.tolist(), strict=True))


def _count_others(
    found: Counter[tuple[str, str, str]], column: str, rows_of: Mapping[int, int], expected: int
) -> None:
    for value, rows in rows_of.items():
        if value != expected:
            found[column, str(value), str(expected)] += rows


def _samples(batch: pa.RecordBatch) -> _Samples:
    positions, states = texts_of(batch.column("state"))
    is_missed = np.array([state == SampleState.MISSED for state in states], np.bool_)
    return _Samples(
        generation=integers(batch, "generation"),
        sample_id=integers(batch, "sample_id"),
        attempt=integers(batch, "attempt"),
        forward_in_attempt=integers(batch, "forward_in_attempt"),
        forward_index=integers(batch, "forward_index"),
        started_at_us=microseconds(batch, "started_at"),
        is_missed=is_missed[positions] if len(states) else np.zeros(0, np.bool_),
    )


def _row_spans(tally: _ProcessTally) -> list[RowSpan]:
    if not tally.row_groups:
        return []
    moments = [
        np.stack(
            [
                one.generation,
                one.attempt,
                np.where(one.attempt >= 0, one.forward_in_attempt, one.forward_index),
            ],
            axis=1,
        )
        for one in tally.samples
    ]
    ids = np.concatenate([one.sample_id for one in tally.samples])
    return row_spans(tally.row_groups, ids, np.concatenate(moments))


def _keys(samples: Sequence[_Samples]) -> SampleKeys:
    if not samples:
        return np.zeros((0, 3), np.int64)
    is_measured = ~np.concatenate([one.is_missed for one in samples])
    return sample_keys(
        np.concatenate([one.generation for one in samples])[is_measured],
        np.concatenate([one.attempt for one in samples])[is_measured],
        np.concatenate([one.forward_in_attempt for one in samples])[is_measured],
        np.concatenate([one.forward_index for one in samples])[is_measured],
    )


def _process_rows(tally: _ProcessTally) -> ProcessRows:
    ids = np.concatenate([np.zeros(0, np.int64), *(one.sample_id for one in tally.samples)])
    times = np.concatenate([np.zeros(0, np.int64), *(one.started_at_us for one in tally.samples)])
    missed = np.concatenate([np.zeros(0, np.bool_), *(one.is_missed for one in tally.samples)])
    has_samples = len(ids) > 0
    return ProcessRows(
        rows=dict(sorted(tally.rows.items())),
        generations=tuple(sorted(tally.generations)),
        # A sample whose state changed later has a row for each state.
        samples=len(np.unique(ids[~missed])),
        missed_samples=len(np.unique(ids[missed])),
        first_sample_id=int(ids.min()) if has_samples else None,
        last_sample_id=int(ids.max()) if has_samples else None,
        first_sample_at_us=int(times.min()) if has_samples else None,
        last_sample_at_us=int(times.max()) if has_samples else None,
    )
