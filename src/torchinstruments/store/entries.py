"""One series of one rank as a statistics entry, the shape in a process's ``result.json`` and in the merge's.

Strict JSON: a missing number is null with a reason beside it, never NaN.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from torchinstruments.store.summaries import (
    NO_OBSERVATIONS,
    NO_VALID_OBSERVATIONS,
    Points,
    SeriesSummaries,
)
from torchinstruments.store.windows import Windows

__all__ = ["entries", "entry", "number", "timestamp_text", "window_reason", "window_reasons"]


def number(value: float) -> float | None:
    """Returns a float as strict JSON has it: None in place of NaN and the infinities."""
    return value if math.isfinite(value) else None


def timestamp_text(microseconds: int) -> str:
    """Returns microseconds since the epoch as ISO 8601 in UTC, always with six digits after the point."""
    return f"{np.datetime64(microseconds, 'us')}+00:00"


def entry(summaries: SeriesSummaries, place: int) -> dict[str, object]:
    """Returns one series of one rank as a statistics entry, without its metric's name."""
    return entries(summaries, [place])[0]


def entries(summaries: SeriesSummaries, places: Sequence[int]) -> list[dict[str, object]]:
    """Returns `entry` of some series, in a fraction of the time."""
    at = np.array(places, np.int64)
    return _records(
        {
            "observations": summaries.observations[at].tolist(),
            "unavailable_observations": summaries.unavailable_observations[at].tolist(),
            "first": _point_entries(summaries.first, at),
            "latest": _point_entries(summaries.latest, at),
            "minimum": _point_entries(summaries.minimum, at),
            "maximum": _point_entries(summaries.maximum, at),
            "previous_window": _window_entries(summaries.previous_window, at),
            "recent_window": _window_entries(summaries.recent_window, at),
        }
    )


def _records(columns: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _point_entries(points: Points, at: npt.NDArray[np.int64]) -> list[dict[str, object]]:
    ids, texts = points.sample_id[at], np.datetime_as_string(points.timestamp_us[at].view("datetime64[us]"))
    times: list[object] = [f"{text}+00:00" for text in texts.tolist()]
    sample_ids: list[object] = ids.tolist()
    for place in np.flatnonzero(ids < 0).tolist():
        times[place] = sample_ids[place] = None
    return _records(
        {
            "sample_id": sample_ids,
            "timestamp": times,
            "value": [number(value) for value in points.value[at].tolist()],
            "unavailable_reason": [points.reason[place] for place in at.tolist()],
        }
    )


def _window_entries(windows: Windows, at: npt.NDArray[np.int64]) -> list[dict[str, object]]:
    observations, valid = windows.observations[at].tolist(), windows.valid_observations[at].tolist()
    return _records(
        {
            "observations": observations,
            "valid_observations": valid,
            "mean": [number(value) for value in windows.mean[at].tolist()],
            "unavailable_reason": [window_reason(*pair) for pair in zip(observations, valid, strict=True)],
        }
    )


def window_reason(observations: int, valid: int) -> str:
    """Returns why a window has no mean, ``""`` where it has one."""
    if valid:
        return ""
    return NO_VALID_OBSERVATIONS if observations else NO_OBSERVATIONS


def window_reasons(windows: Windows) -> tuple[str, ...]:
    """Returns `window_reason` of each series."""
    if bool((windows.valid_observations > 0).all()):
        return ("",) * len(windows.valid_observations)
    counts = zip(windows.observations.tolist(), windows.valid_observations.tolist(), strict=True)
    return tuple(window_reason(*pair) for pair in counts)
