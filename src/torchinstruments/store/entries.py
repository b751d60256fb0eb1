"""One series of one rank as a statistics entry, the shape in a process's ``result.json`` and in the merge's.

Strict JSON: a missing number is null with a reason beside it, never NaN.
"""

import math

import numpy as np

from torchinstruments.store.summaries import (
    NO_OBSERVATIONS,
    NO_VALID_OBSERVATIONS,
    Points,
    SeriesSummaries,
)
from torchinstruments.store.windows import Windows

__all__ = ["entry", "number", "timestamp_text", "window_reason", "window_reasons"]


def number(value: float) -> float | None:
    """Returns a float as strict JSON has it: None in place of NaN and the infinities."""
    return value if math.isfinite(value) else None


def timestamp_text(microseconds: int) -> str:
    """Returns microseconds since the epoch as ISO 8601 in UTC, always with six digits after the point."""
    return f"{np.datetime64(microseconds, 'us')}+00:00"


def entry(summaries: SeriesSummaries, place: int) -> dict[str, object]:
    """Returns one series of one rank as a statistics entry, without its metric's name."""
    return {
        "observations": int(summaries.observations[place]),
        "unavailable_observations": int(summaries.unavailable_observations[place]),
        "first": _point_entry(summaries.first, place),
        "latest": _point_entry(summaries.latest, place),
        "minimum": _point_entry(summaries.minimum, place),
        "maximum": _point_entry(summaries.maximum, place),
        "previous_window": _window_entry(summaries.previous_window, place),
        "recent_window": _window_entry(summaries.recent_window, place),
    }


def _point_entry(points: Points, place: int) -> dict[str, object]:
    sample_id = int(points.sample_id[place])
    there = sample_id >= 0
    return {
        "sample_id": sample_id if there else None,
        "timestamp": timestamp_text(int(points.timestamp_us[place])) if there else None,
        "value": number(float(points.value[place])),
        "unavailable_reason": points.reason[place],
    }


def _window_entry(windows: Windows, place: int) -> dict[str, object]:
    observations, valid = int(windows.observations[place]), int(windows.valid_observations[place])
    return {
        "observations": observations,
        "valid_observations": valid,
        "mean": number(float(windows.mean[place])),
        "unavailable_reason": window_reason(observations, valid),
    }


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
