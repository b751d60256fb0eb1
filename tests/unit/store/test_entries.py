"""One series as strict JSON has it."""

import math

from torchinstruments.store.columns import Origin
from torchinstruments.store.entries import entry, number, timestamp_text
from torchinstruments.store.history_columns import history_columns
from torchinstruments.store.running_summary import RunningSummary
from unit.store.material import START_US, forward, measurement


def test_a_point_tells_its_sample_its_time_and_its_value() -> None:
    """Each point of an entry stands for one row."""
    summary = RunningSummary(2)
    one = measurement(metrics=("mean",), values=(1.5,))
    summary.add(history_columns([(7, forward(7, one))], Origin(0, 0, "1a2b3c4d")).table)
    found = entry(summary.finish(), 0)
    point = {
        "sample_id": 7,
        "timestamp": "2023-11-14T22:13:20.000000+00:00",
        "value": 1.5,
        "unavailable_reason": "",
    }
    assert [found[name] for name in ("first", "latest", "minimum", "maximum")] == [point] * 4
    assert found["previous_window"] == {
        "observations": 0,
        "valid_observations": 0,
        "mean": None,
        "unavailable_reason": "no_observations",
    }


def test_every_null_has_a_reason() -> None:
    """A series without a single value says why at each point and window."""
    summary = RunningSummary(1)
    one = measurement(metrics=("mean",), values=(None,), reasons=("empty",))
    summary.add(history_columns([(i, forward(i, one)) for i in range(2)], Origin(0, 0, "1a2b3c4d")).table)
    found = entry(summary.finish(), 0)
    reasons = {name: part["unavailable_reason"] for name, part in found.items() if isinstance(part, dict)}
    assert reasons == {
        "first": "empty",
        "latest": "empty",
        "minimum": "no_valid_observations",
        "maximum": "no_valid_observations",
        "previous_window": "no_valid_observations",
        "recent_window": "no_valid_observations",
    }


def test_numbers_that_json_does_not_know_become_null() -> None:
    """NaN and the infinities never reach a document."""
    assert [number(value) for value in (math.nan, math.inf, -math.inf, 0.5)] == [None, None, None, 0.5]


def test_times_are_iso_with_their_zone() -> None:
    """Microseconds are kept."""
    assert timestamp_text(START_US + 1) == "2023-11-14T22:13:20.000001+00:00"
