"""Reads event files with TensorBoard's own reader."""

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PluginEventAccumulator,
)

__all__ = ["dashboard_tags", "num_records", "read_histograms"]


def read_histograms(folder: Path) -> dict[str, list[Any]]:
    """Returns tag to its histogram events, in the order of reading."""
    accumulator = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    accumulator.Reload()
    tags: Any = accumulator.Tags()["histograms"]
    return {tag: accumulator.Histograms(tag) for tag in tags}


def dashboard_tags(folder: Path) -> list[str]:
    """Returns the tags that the histogram dashboard shows."""
    accumulator = PluginEventAccumulator(str(folder))
    accumulator.Reload()
    return sorted(accumulator.PluginTagToContent("histograms"))


def num_records(path: Path) -> int:
    """Returns how many whole records lie in an event file."""
    return len(list(RawEventFileLoader(str(path)).Load()))
