"""Two runs beside each other: which layers came and went, and where their numbers differ most.

It reads what the merge of each run left and nothing else. The formula of a change, and how ranks are paired,
stand in `changes`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchinstruments.errors import ConfigurationError
from torchinstruments.merge.change_entries import Entries
from torchinstruments.merge.changes import (
    MEASURES,
    changes_by_rank,
    values_gained,
    values_lost,
)
from torchinstruments.merge.merged_run import MergedRun, open_merged
from torchinstruments.merge.range_changes import changes_by_range
from torchinstruments.merge.rank_sets import ranks_text

if TYPE_CHECKING:
    import polars as pl

__all__ = ["COMPARISON_SCHEMA_VERSION", "LARGEST_CHANGE", "RunComparison", "compare_runs"]

COMPARISON_SCHEMA_VERSION = 1
"""Version of the document."""

LARGEST_CHANGE = 2.0
"""No change is larger: that between two numbers of one size and opposite signs."""

BY_RANK = "rank"
BY_RANGE = "range_over_ranks"


@dataclass(frozen=True, slots=True)
class RunComparison:
    """What differs between two runs.

    Attributes:
        result: The document, strict JSON: ``schema_version``, ``a``, ``b``, ``measure``, ``compared_by``,
            ``ranks_compared``, ``layers``, ``series``, ``conditions``, ``largest_changes``, ``lost_values``,
            ``gained_values``.
        complete: Whether both runs were complete when they were merged, and every condition could be judged.
        met: Metrics of the conditions that are met, in the order given.
    """

    result: Mapping[str, object]
    complete: bool
    met: tuple[str, ...]
    _changes: "pl.DataFrame" = field(repr=False, compare=False)

    def __repr__(self) -> str:
        """Returns one line."""
        sides = [self.result[side] for side in ("a", "b")]
        urls = [side["url"] if isinstance(side, Mapping) else side for side in sides]
        return f"RunComparison({urls[0]!r}, {urls[1]!r}, {self._changes.height} series, met={self.met!r})"

    def to_dict(self) -> dict[str, object]:
        """Returns the document."""
        return dict(self.result)

    def changes(self) -> "pl.DataFrame":
        """Returns one row a series, largest share of size first, as `changes` describes its columns."""
        return self._changes


def compare_runs(
    a: str,
    b: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    measure: str = "recent_window",
    max_change: Mapping[str, float] | None = None,
    shown: int = 100,
) -> RunComparison:
    """Compares two merged runs, series by series and rank by rank.

    Args:
        a: The run to compare with: its folder, the folder of its merged files, or ``result.json`` there.
        b: The other one.
        storage_options: In fsspec's dialect, for both.
        measure: ``recent_window``: the mean over the last samples of each series of a rank; or ``latest``:
            its last value.
        max_change: Conditions: metric to the largest change that is let pass, from 0 to 2. A condition is met
            where a series of that metric changed more, or lost its value.
        shown: Series that ``largest_changes`` and the lists beside it hold at most.

    Raises:
        ConfigurationError: An argument that cannot work, or a condition on a metric that neither run has.
        RunFormatError: A run was not merged yet, or what lies there cannot be read.
        StorageError: A store refused or did not answer.
    """
    if measure not in MEASURES:
        raise ConfigurationError(f"measure={measure!r} is not known; give {' or '.join(map(repr, MEASURES))}")
    if isinstance(shown, bool) or shown < 0:
        raise ConfigurationError(f"shown={shown!r} is not possible; give 0 or more")
    limits = dict(max_change or {})
    for metric, limit in limits.items():
        _check_limit(metric, limit)
    runs = (open_merged(a, storage_options), open_merged(b, storage_options))
    ranks = [rank for rank in runs[0].groups if rank in runs[1].groups]
    reason = ""
    if runs[0].world_size != runs[1].world_size:
        reason = "world_sizes_differ"
    elif not ranks:
        reason = "no_common_ranks"
    found = changes_by_range(*runs, measure) if reason else changes_by_rank(*runs, ranks, measure)
    conditions = _conditions(found, limits)
    is_by_rank = not reason
    changed = found.filter(found["change"] > 0)
    lost, gained = values_lost(found), values_gained(found)
    entries = Entries(runs, ranks if is_by_rank else None, measure)
    document: dict[str, object] = {
        "schema_version": COMPARISON_SCHEMA_VERSION,
        "a": _side(runs[0]),
        "b": _side(runs[1]),
        "measure": measure,
        "compared_by": BY_RANK if is_by_rank else BY_RANGE,
        "not_by_rank_reason": reason,
        "ranks_compared": ranks_text(ranks) if is_by_rank else "",
        "ranks_only_in_a": ranks_text(rank for rank in runs[0].groups if rank not in runs[1].groups),
        "ranks_only_in_b": ranks_text(rank for rank in runs[1].groups if rank not in runs[0].groups),
        "layers": _layers(*runs),
        "series": {
            "in_both": found.filter(found["has_a"] & found["has_b"]).height,
            "only_in_a": found.filter(~found["has_b"]).height,
            "only_in_b": found.filter(~found["has_a"]).height,
            "compared": found["change"].count(),
            "changed": changed.height,
            "lost_values": lost.height,
            "gained_values": gained.height,
            "not_compared": _not_compared(found),
        },
        "conditions": conditions,
        "largest_changes": entries.records(changed.head(shown)),
        "changes_left_out": max(0, changed.height - shown),
        "lost_values": entries.records(lost.head(shown)),
        "gained_values": entries.records(gained.head(shown)),
    }
    met = tuple(str(one["metric"]) for one in conditions if one["met"])
    is_judged = all(one["met"] is not None for one in conditions)
    return RunComparison(document, runs[0].complete and runs[1].complete and is_judged, met, found)


def _check_limit(metric: object, limit: object) -> None:
    is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    if not is_number or not math.isfinite(limit) or not 0 <= limit <= LARGEST_CHANGE:
        raise ConfigurationError(
            f"the largest change of {metric!r} is {limit!r}; give a number from 0 to 2, a share of the "
            f"larger magnitude of two numbers: 0.1 stands for 10 %, and 1 for a number that became 0"
        )


def _side(run: MergedRun) -> dict[str, object]:
    return {
        "url": run.url,
        "run_id": run.run_id,
        "created_at": run.created_at,
        "world_size": run.world_size,
        "ranks": ranks_text(run.groups),
        "window": run.window,
        "complete": run.complete,
    }


def _layers(a: MergedRun, b: MergedRun) -> dict[str, object]:
    return {
        "in_both": sum(layer in b.layers for layer in a.layers),
        "added": [{"layer": one, "type": kind} for one, kind in b.layers.items() if one not in a.layers],
        "removed": [{"layer": one, "type": kind} for one, kind in a.layers.items() if one not in b.layers],
        "type_changed": [
            {"layer": one, "type_a": kind, "type_b": b.layers[one]}
            for one, kind in a.layers.items()
            if one in b.layers and b.layers[one] != kind
        ],
    }


def _not_compared(found: "pl.DataFrame") -> dict[str, int]:
    counts = found.filter(found["not_compared"] != "")["not_compared"].value_counts().rows()
    return dict(sorted((str(reason), int(number)) for reason, number in counts))


def _conditions(found: "pl.DataFrame", limits: Mapping[str, float]) -> list[dict[str, object]]:
    known = set(found["metric"].unique().to_list())
    conditions: list[dict[str, object]] = []
    for metric, limit in limits.items():
        if metric not in known:
            listed = ", ".join(sorted(known)) or "none at all"
            raise ConfigurationError(
                f"neither run has a series of the metric {metric!r}, so that its change cannot be limited; "
                f"give one of {listed}"
            )
        own = found.filter(found["metric"] == metric)
        beyond = own.filter(own["change"] > limit).height
        lost = values_lost(own).height
        compared = own["change"].count()
        conditions.append(
            {
                "metric": metric,
                "max_change": float(limit),
                "met": bool(beyond or lost) if compared or lost else None,
                "unavailable_reason": "" if compared or lost else "nothing_compared",
                "series_compared": compared,
                "series_beyond": beyond,
                "series_lost_values": lost,
                "largest_change": own["change"].max(),
            }
        )
    return conditions
