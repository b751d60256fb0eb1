"""Which forwards, ranks and series of a run are pictured: chosen before anything is compared.

Forwards are taken at equal distances, and where something went wrong. With many ranks most forwards have the
values of a few ranks, and some of them also those of the furthest rank of every group of consecutive ranks.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchinstruments.merge.alignment import SampleKeys
from torchinstruments.merge.rank_sets import parse_ranks
from torchinstruments.merge.row_spans import Moment

__all__ = ["Pictured", "choose_pictured", "notable_forwards", "notable_ranks"]

MAX_FORWARDS = 200
"""Forwards of a run that are pictured."""

MAX_LINES = 16
"""Ranks that every forward has."""

MAX_GROUPS = 64
"""Groups of ranks in a forward that has them."""

MAX_ROWS = 8000
"""Series of a forward; what is beyond is left out, statistic by statistic."""

MAX_NUMBERS = 1_000_000
"""Numbers in the table, more or less: what its size goes by."""

_NUMBERS_OF_ROW = 6
_MIN_FORWARDS = 2
_RANKS_OF_A_KIND = 4
# Statistics that stay longest where there are more series than the table takes.
_FIRST_METRICS = (
    "std",
    "rms",
    "nonfinite_fraction",
    "finite_fraction",
    "mean",
    "max_abs",
    "max",
    "zero_fraction",
)


@dataclass(frozen=True, slots=True)
class Pictured:
    """What of a run is chosen for pictures.

    Attributes:
        moments: The forwards, ascending.
        detailed: Those of them that have a rank of every group.
        ranks: Ranks that every forward has.
        group_ranks: Consecutive ranks in a group.
        metrics: The statistics, None for all.
        max_rows: Series of a forward.
    """

    moments: tuple[Moment, ...]
    detailed: frozenset[Moment]
    ranks: tuple[int, ...]
    group_ranks: int
    metrics: frozenset[str] | None
    max_rows: int

    def between(self, first: Moment, last: Moment) -> bool:
        """Returns whether any forward lies in a stretch."""
        return any(first <= one <= last for one in self.moments)


def choose_pictured(
    samples: SampleKeys,
    series_by_metric: Mapping[str, int],
    all_ranks: Sequence[int],
    notable: Iterable[int],
    forwards: Collection[tuple[int, int, int]],
) -> Pictured:
    """Returns what of a run is pictured (offline).

    Args:
        samples: The forwards of all ranks, sorted.
        series_by_metric: Statistic to the number of its series.
        all_ranks: Ranks that measured anything, ascending.
        notable: Ranks to show first, the most notable first.
        forwards: Forwards to show whatever else is chosen; where there is no sample, the next one is.
    """
    metrics, num_rows = _chosen_metrics(series_by_metric)
    ranks = sorted(_spread_ranks(all_ranks, notable))
    size = num_rows * (_NUMBERS_OF_ROW + len(ranks))
    places = _places_of(samples, forwards)
    if len(all_ranks) <= MAX_LINES:
        number = min(max(MAX_NUMBERS // max(1, size), _MIN_FORWARDS), MAX_FORWARDS)
        shown = _evenly(len(samples), number) | places
        detailed, group_ranks = shown, 1
    else:
        number = min(max(MAX_NUMBERS // (2 * size), _MIN_FORWARDS), MAX_FORWARDS)
        shown = _evenly(len(samples), number) | places
        group_ranks = -(-(max(all_ranks) + 1) // MAX_GROUPS)
        of_groups = num_rows * min(MAX_GROUPS, len(all_ranks))
        number = min(max(MAX_NUMBERS // (2 * of_groups), 1), len(shown))
        ordered = sorted(shown)
        detailed = {ordered[one] for one in _evenly(len(ordered), number)} | places
    moments = {
        place: (row[0], row[1], row[2])
        for place, row in zip(sorted(shown), samples[sorted(shown)].tolist(), strict=True)
    }
    return Pictured(
        moments=tuple(moments.values()),
        detailed=frozenset(moments[one] for one in detailed),
        ranks=tuple(ranks),
        group_ranks=group_ranks,
        metrics=metrics,
        max_rows=MAX_ROWS,
    )


def notable_ranks(sections: Mapping[str, object], extreme: Iterable[int]) -> list[int]:
    """Returns the ranks that sections of ``result.json`` speak of, then those with most extrema."""
    found: list[int] = []
    first = _record(_record(sections["first_nonfinite"]).get("first"))
    found += _some_ranks(first.get("ranks"))
    difference = _record(sections["steps"]).get("first_disagreement")
    for one in _list(_record(difference).get("differences")):
        found += _fewest(one)
    found += _fewest(_record(sections["replicas"]).get("first_divergence"))
    for generation in _list(_record(sections["own_work"]).get("generations")):
        found += _some_ranks(_record(generation).get("late_ranks"))
    return list(dict.fromkeys([*found, *extreme]))


def notable_forwards(sections: Mapping[str, object]) -> list[tuple[int, int, int]]:
    """Returns where values were first not finite, ranks first disagreed and replicas first differed."""
    found: list[tuple[int, int, int]] = []
    for record in (
        _record(sections["first_nonfinite"]).get("first"),
        _record(sections["steps"]).get("first_disagreement"),
        _record(sections["replicas"]).get("first_divergence"),
    ):
        one = _record(record)
        if one:
            attempt = -1 if one.get("attempt") is None else _integer(one["attempt"])
            forward = one.get("forward_in_attempt") if attempt >= 0 else one.get("forward_index")
            found.append((_integer(one["generation"]), attempt, 0 if forward is None else _integer(forward)))
    return found


def _chosen_metrics(series_by_metric: Mapping[str, int]) -> tuple[frozenset[str] | None, int]:
    total = sum(series_by_metric.values())
    if total <= MAX_ROWS:
        return None, max(1, total)
    order = [name for name in _FIRST_METRICS if name in series_by_metric]
    order += [name for name in sorted(series_by_metric) if name not in order]
    chosen: list[str] = []
    number = 0
    for name in order:
        if chosen and number + series_by_metric[name] > MAX_ROWS:
            continue
        chosen.append(name)
        number += series_by_metric[name]
    return frozenset(chosen), min(number, MAX_ROWS)


def _spread_ranks(all_ranks: Sequence[int], notable: Iterable[int]) -> list[int]:
    present = set(all_ranks)
    if len(present) <= MAX_LINES:
        return list(all_ranks)
    # A few that nobody speaks of as well, so that there is something to hold the others against.
    spread = [all_ranks[one] for one in sorted(_evenly(len(all_ranks), MAX_LINES))]
    first = [rank for rank in notable if rank in present][: MAX_LINES - 2]
    return list(dict.fromkeys([*first, spread[0], spread[-1], *spread]))[:MAX_LINES]


def _evenly(size: int, number: int) -> set[int]:
    """Returns places at equal distances, the first and the last among them."""
    if size == 0:
        return set()
    return set(np.unique(np.linspace(0, size - 1, min(size, number)).round().astype(np.int64)).tolist())


def _places_of(samples: SampleKeys, forwards: Collection[tuple[int, int, int]]) -> set[int]:
    found: set[int] = set()
    for generation, attempt, forward in forwards:
        own = samples[:, 0] == generation
        is_later = own & (
            (samples[:, 1] > attempt) | ((samples[:, 1] == attempt) & (samples[:, 2] >= forward))
        )
        if bool(is_later.any()):
            found.add(int(np.argmax(is_later)))
    return found


def _fewest(split: object) -> list[int]:
    values = _list(_record(split).get("values"))
    return _some_ranks(_record(values[0]).get("ranks")) if values else []


def _some_ranks(text: object) -> list[int]:
    return sorted(parse_ranks(text))[:_RANKS_OF_A_KIND] if isinstance(text, str) and text else []


def _record(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []


def _integer(value: object) -> int:
    assert isinstance(value, int)
    return value
