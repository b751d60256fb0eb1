"""The section ``own_work``: ranks that are late by their own work, told apart from those that wait for them.

A step that synchronises takes every rank as long as the slowest, so the length of an attempt names nobody.
``gap_s`` does: between the end of an attempt and the next forward a rank is alone with its data loading,
logging and checkpoints. Forward, backward and optimizer hold collectives, in which the others wait.

Of a long run a fixed choice of attempts is looked at, the same on every rank: those whose numbers have the
lowest digests. A choice at equal distances would fall in step with what a program does every so often.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.merge.ranges import row_digests
from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.store.row_blocks import floats
from torchinstruments.store.series import texts_of

__all__ = ["MAX_ATTEMPTS", "MIN_ATTEMPTS", "OwnWorkFold", "Timings", "TimingsTally", "lower_median"]

MAX_ATTEMPTS = 2048
"""Attempts of a generation that are looked at."""

MIN_ATTEMPTS = 10
"""With fewer attempts common to all ranks nothing is said."""

MIN_MADS = 5.0
"""A late rank lies further from the median than this many median deviations over ranks."""

MIN_SHARE = 0.05
"""A late rank loses at least this share of an attempt."""

MIN_LATER_SHARE = 0.75
"""In at least this share of the common attempts a late rank came later than the median of ranks.

Of two ranks the median deviation is 0, so that only this tells one that is late from noise.
"""

_FOR_LACK_OF_TIMES = ("no_timed_attempts", "single_rank", "few_common_attempts")
_MIN_WAITED_SHARE = 0.5
_MAX_SHOWN = 100

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timings:
    """The times of one rank in one generation; arrays have one entry an attempt.

    Attributes:
        generation: Generation.
        clocks: ``host`` and ``device``, those that occur.
        has_shared: Whether it has attempts, left out here, in which another model was trained.
        attempt: Attempts, ascending; at most `MAX_ATTEMPTS`.
        gap_s: From the end of the attempt before to its first forward.
        other_s: Forward, backward and optimizer together.
    """

    generation: int
    clocks: tuple[str, ...]
    has_shared: bool
    attempt: npt.NDArray[np.int64]
    gap_s: _Floats
    other_s: _Floats


class _Chosen:
    """Attempts of one generation with the lowest digests."""

    def __init__(self) -> None:
        self.clocks: set[str] = set()
        self.has_shared = False
        self._attempt: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._times: _Floats = np.zeros((3, 0))

    def add(self, attempt: npt.NDArray[np.int64], times: _Floats) -> None:
        attempts, where = np.unique(np.concatenate([self._attempt, attempt]), return_inverse=True)
        joined = np.concatenate([self._times, times], axis=1)
        # Gap and phases stand in every row of an attempt, the optimizer's time is each row's own.
        reduced = np.zeros((3, len(attempts)))
        reduced[0, where[::-1]] = joined[0, ::-1]
        reduced[1, where[::-1]] = joined[1, ::-1]
        np.add.at(reduced[2], where, joined[2])
        if len(attempts) > MAX_ATTEMPTS:
            digests = row_digests([attempts])
            kept = np.sort(np.argpartition(digests, MAX_ATTEMPTS)[:MAX_ATTEMPTS])
            attempts, reduced = attempts[kept], reduced[:, kept]
        self._attempt, self._times = attempts, reduced

    def timings(self, generation: int) -> Timings:
        gap, phases, optimizer = self._times
        clocks = tuple(sorted(self.clocks))
        return Timings(generation, clocks, self.has_shared, self._attempt, gap, phases + optimizer)


class TimingsTally:
    """Gathers the times of one rank (worker)."""

    def __init__(self) -> None:
        # A generation without times stands here, too, so that it can be told why nothing is said of it.
        self._chosen: dict[int, _Chosen] = {}

    def add(
        self, batch: pa.RecordBatch, generation: npt.NDArray[np.int64], attempt: npt.NDArray[np.int64]
    ) -> None:
        """Takes rows of ``steps``."""
        times = np.stack(
            [
                floats(batch, "gap_s"),
                floats(batch, "forward_s") + floats(batch, "backward_s"),
                floats(batch, "optimizer_s"),
            ]
        )
        # The first attempt of a process has none before it, and so no gap.
        is_timed = (attempt > 0) & np.isfinite(times).all(axis=0)
        is_shared = (attempt > 0) & batch.column("gap_s").is_null().to_numpy(zero_copy_only=False)
        positions, clocks = texts_of(batch.column("clock"))
        for one in np.unique(generation).tolist():
            rows = is_timed & (generation == one)
            chosen = self._chosen.setdefault(one, _Chosen())
            chosen.has_shared |= bool((is_shared & (generation == one)).any())
            if not rows.any():
                continue
            chosen.clocks |= {clocks[place] for place in np.unique(positions[rows]).tolist()}
            chosen.add(attempt[rows], times[:, rows])

    def finish(self) -> tuple[Timings, ...]:
        """Returns the times of each generation, ascending."""
        return tuple(self._chosen[one].timings(one) for one in sorted(self._chosen))


@dataclass(slots=True)
class OwnWorkFold:
    """Gathers the times of all ranks; memory is that of `MAX_ATTEMPTS` a rank and generation."""

    _timings: dict[int, dict[int, Timings]] = field(default_factory=dict)
    _hosts: dict[tuple[int, int], str] = field(default_factory=dict)

    def add(self, rank: int, timings: Sequence[Timings], hosts: Mapping[int, str]) -> None:
        """Takes the times of a rank, and its host in each generation; ranks come in ascending order."""
        for one in timings:
            self._timings.setdefault(one.generation, {})[rank] = one
        for generation, host in hosts.items():
            self._hosts[generation, rank] = host

    def record(self) -> dict[str, object]:
        """Returns the section."""
        late: dict[int, list[int]] = {}
        generations = [self._generation(one, late) for one in sorted(self._timings)]
        return {
            "min_common_attempts": MIN_ATTEMPTS,
            "min_mads": MIN_MADS,
            "min_share_of_attempt": MIN_SHARE,
            "min_later_share": MIN_LATER_SHARE,
            "generations": generations,
            "late_hosts": self._late_hosts(late),
        }

    def _generation(self, generation: int, late: dict[int, list[int]]) -> dict[str, object]:
        """Returns the record of a generation; one that can be judged has its late ranks put into `late`."""
        by_rank = {rank: one for rank, one in self._timings[generation].items() if len(one.attempt)}
        ranks = list(by_rank)
        clocks = sorted({clock for one in by_rank.values() for clock in one.clocks})
        common = by_rank[ranks[0]].attempt if ranks else np.zeros(0, np.int64)
        for one in by_rank.values():
            if not np.array_equal(one.attempt, common):
                common = np.intersect1d(common, one.attempt, assume_unique=True)
        reason = ""
        if not ranks:
            reason = "no_timed_attempts"
        elif len(ranks) < 2:
            reason = "single_rank"
        elif len(clocks) > 1:
            reason = "clock_differs"
        elif len(common) < MIN_ATTEMPTS:
            reason = "few_common_attempts"
        if reason in _FOR_LACK_OF_TIMES and any(one.has_shared for one in self._timings[generation].values()):
            reason = "other_model_trained"
        record: dict[str, object] = {
            "generation": generation,
            "judged": not reason,
            "unavailable_reason": reason,
            "clock": clocks[0] if len(clocks) == 1 else None,
            "ranks_with_times": ranks_text(ranks),
            "common_attempts": len(common),
        }
        if reason:
            return record | _NOTHING
        found, late[generation] = self._judged(generation, ranks, common)
        return record | found

    def _judged(
        self, generation: int, ranks: list[int], common: npt.NDArray[np.int64]
    ) -> tuple[dict[str, object], list[int]]:
        every_gap = np.zeros((len(ranks), len(common)))
        gaps, others, lengths = np.zeros(len(ranks)), np.zeros(len(ranks)), np.zeros(len(ranks))
        for place, rank in enumerate(ranks):
            one = self._timings[generation][rank]
            chosen = np.searchsorted(one.attempt, common)
            gap, other = one.gap_s[chosen], one.other_s[chosen]
            every_gap[place] = gap
            gaps[place], others[place] = np.median(gap), np.median(other)
            lengths[place] = np.median(gap + other)
        centre, attempt_s = lower_median(gaps), lower_median(lengths)
        late_by = gaps - centre
        mad = lower_median(np.abs(late_by))
        middle = np.partition(every_gap, (len(ranks) - 1) // 2, axis=0)[(len(ranks) - 1) // 2]
        later = np.mean(every_gap > middle, axis=1)
        is_late = (late_by > MIN_MADS * mad) & (late_by > 0) & (late_by >= MIN_SHARE * attempt_s)
        is_late &= later >= MIN_LATER_SHARE
        # A rank that is later by more, and not steadily, does not hide one that is late.
        latest = int(np.argmax(np.where(is_late, late_by, -np.inf) if is_late.any() else late_by))
        waited = others - others[latest]
        is_waiting = ~is_late & bool(is_late.any()) & (waited >= _MIN_WAITED_SHARE * late_by[latest])
        records = [
            {
                "rank": rank,
                "host": self._hosts.get((generation, rank)),
                "gap_s": float(gaps[place]),
                "other_s": float(others[place]),
                "late_by_s": float(late_by[place]),
                "late_by_mads": float(late_by[place] / mad) if mad > 0 else None,
                "share_of_attempt": float(late_by[place] / attempt_s) if attempt_s > 0 else None,
                "later_share": float(later[place]),
            }
            for place, rank in enumerate(ranks)
        ]
        furthest = np.lexsort((np.arange(len(ranks)), -late_by))[:_MAX_SHOWN].tolist()
        late = [ranks[place] for place in np.flatnonzero(is_late).tolist()]
        found: dict[str, object] = {
            "late_ranks": ranks_text(late),
            "waiting_ranks": ranks_text(ranks[place] for place in np.flatnonzero(is_waiting).tolist()),
            "attempt_s_median_of_ranks": attempt_s,
            "gap_s_median_of_ranks": centre,
            "gap_s_mad_of_ranks": mad,
            "ranks": [records[place] for place in furthest],
            "ranks_left_out": len(ranks) - len(furthest),
            "latest": records[latest] if is_late[latest] else None,
        }
        return found, late

    def _late_hosts(self, late: dict[int, list[int]]) -> list[dict[str, object]]:
        """Returns the hosts of late ranks, with the generations that they were late in."""
        found: dict[str, dict[int, list[int]]] = {}
        for generation, ranks in late.items():
            for rank in ranks:
                host = self._hosts.get((generation, rank))
                if host is not None:
                    found.setdefault(host, {}).setdefault(generation, []).append(rank)
        judged: dict[str, set[int]] = {}
        for (generation, _), host in self._hosts.items():
            if generation in late:
                judged.setdefault(host, set()).add(generation)
        return [
            {
                "host": host,
                "judged_generations": len(judged[host]),
                "late_in": [
                    {"generation": one, "ranks": ranks_text(ranks)} for one, ranks in by_generation.items()
                ],
            }
            for host, by_generation in sorted(found.items(), key=_by_generations_late)
        ]


def lower_median(values: _Floats) -> float:
    """Returns the middle value, the lower one of two: always one that a rank has."""
    return float(np.sort(values)[(len(values) - 1) // 2])


_NOTHING: dict[str, object] = {
    "late_ranks": "",
    "waiting_ranks": "",
    "attempt_s_median_of_ranks": None,
    "gap_s_median_of_ranks": None,
    "gap_s_mad_of_ranks": None,
    "ranks": [],
    "ranks_left_out": 0,
    "latest": None,
}


def _by_generations_late(entry: tuple[str, dict[int, list[int]]]) -> tuple[int, str]:
    return (-len(entry[1]), entry[0])
