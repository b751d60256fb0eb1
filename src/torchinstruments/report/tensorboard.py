"""Scalars for TensorBoard from ``comparison.parquet``: lowest, median and highest over ranks, and no mean."""

import importlib
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import quote

from torchinstruments.errors import ConfigurationError, RunFormatError
from torchinstruments.merge.comparison import COMPARISON_FILE
from torchinstruments.merge.reopened import merged_table, shaped_like_a_merge

if TYPE_CHECKING:
    from torchinstruments.merge.result import MergeResult

__all__ = ["WrittenScalars", "write_tensorboard"]

_KINDS = {"lowest": "lowest_value", "median_of_ranks": "median_of_ranks", "highest": "highest_value"}
_TENSOR = (
    "layer",
    "signal",
    "stage",
    "call_index",
    "tensor_path",
    "backward_index",
    "mode",
    "replica_key",
    "metric",
)
_COLUMNS = ("attempt", "forward_index", *_TENSOR, *_KINDS.values())
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class WrittenScalars:
    """What was written for TensorBoard.

    Attributes:
        folder: Where its files lie.
        num_series: Series, each with three scalars.
        num_values: Rows of ``comparison.parquet``.
    """

    folder: Path
    num_series: int
    num_values: int


def write_tensorboard(merged: "MergeResult", folder: str | Path) -> WrittenScalars:
    """Writes every series that two ranks have as three scalars, and a layout that draws them as a band.

    ``tensorboard --logdir FOLDER`` shows the bands under "Custom Scalars". The step is the attempt, without
    attempts the forward of the process.

    Args:
        merged: From `merge_run`.
        folder: A local folder, made where it is missing; it must hold no file yet.

    Raises:
        ConfigurationError: Something lies in the folder, or it cannot be written to.
        RunFormatError: The table of the merge cannot be read, or is not what a merge writes.
        StorageError: A store did not answer.
    """
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    table = merged_table(merged, COMPARISON_FILE)
    if table is None:
        raise RunFormatError(
            f"the result in {merged.url.rstrip('/')} has no {COMPARISON_FILE}; merge the run again"
        )
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        is_taken = any(target.iterdir())
    except OSError as error:
        raise ConfigurationError(
            f"{target} cannot hold files for TensorBoard ({error.strerror}); give a local folder of its own"
        ) from error
    if is_taken:
        raise ConfigurationError(
            f"{target} is not empty, and TensorBoard would read what lies there together with this; "
            f"give a new folder"
        )
    tags: dict[str, str] = {}
    num_values = 0
    with shaped_like_a_merge(merged), closing(EventFileWriter(str(target))) as writer:
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=list(_COLUMNS)):
            for row in batch.to_pylist():
                tag = _tag(row)
                tags.setdefault(tag, f"{row['layer'] or '(root)'}")
                writer.add_event(_event(tag, row))
                num_values += 1
        if tags:
            writer.add_event(_layout_event(tags))
    return WrittenScalars(target, len(tags), num_values)


def _tag(row: Mapping[str, object]) -> str:
    """Returns the tag of a series, percent-quoted, so that no name makes a folder of its own."""
    parts = ["torchinstruments", "ranks", _quoted(str(row["layer"])) or "@root", _quoted(str(row["signal"]))]
    parts += [_quoted(str(row[name])) for name in ("stage",) if row[name]]
    parts += [f"call_{row['call_index']}", _quoted(str(row["tensor_path"]))]
    parts += [f"traversal_{row['backward_index']}"] if row["backward_index"] else []
    parts += [_quoted(str(row["mode"]))] if row["mode"] != "train" else []
    parts += [_quoted(str(row["replica_key"]))] if row["replica_key"] else []
    return "/".join([*parts, _quoted(str(row["metric"]))])


def _quoted(segment: str) -> str:
    return quote(segment, safe="", errors="backslashreplace")


def _event(tag: str, row: Mapping[str, object]) -> object:
    step = row["forward_index"] if row["attempt"] is None else row["attempt"]
    summary = _messages("compat.proto.summary_pb2").Summary
    values = [summary.Value(tag=f"{tag}/{kind}", simple_value=row[name]) for kind, name in _KINDS.items()]
    return _new_event(summary(value=values), step)


def _layout_event(tags: Mapping[str, str]) -> object:
    """Returns the layout of the custom scalars: a category a layer, and in it a band a series."""
    # TensorBoard's own function for this needs TensorFlow.
    metadata = _messages("plugins.custom_scalar.metadata")
    layout = _messages("plugins.custom_scalar.layout_pb2").Layout(category=list(_categories(tags)))
    summary = _messages("compat.proto.summary_pb2").Summary
    value = summary.Value(
        tag=metadata.CONFIG_SUMMARY_TAG,
        metadata=metadata.create_summary_metadata(),
        tensor=_messages("compat.proto.tensor_pb2").TensorProto(
            dtype="DT_STRING", string_val=[layout.SerializeToString()]
        ),
    )
    return _new_event(summary(value=[value]), 0)


def _new_event(summary: object, step: object) -> object:
    return _messages("compat.proto.event_pb2").Event(wall_time=time.time(), step=step, summary=summary)


def _messages(name: str) -> ModuleType:
    """Returns a module of TensorBoard's messages, which protobuf makes while it is imported."""
    return importlib.import_module(f"tensorboard.{name}")


def _categories(tags: Mapping[str, str]) -> Iterator[object]:
    messages = _messages("plugins.custom_scalar.layout_pb2")
    band = messages.MarginChartContent
    of_layers: dict[str, list[str]] = {}
    for tag, layer in tags.items():
        of_layers.setdefault(layer, []).append(tag)
    for layer, own in of_layers.items():
        charts = [
            messages.Chart(
                title="/".join(tag.split("/")[3:]),
                margin=band(
                    series=[
                        band.Series(
                            value=f"{tag}/median_of_ranks", lower=f"{tag}/lowest", upper=f"{tag}/highest"
                        )
                    ]
                ),
            )
            for tag in own
        ]
        yield messages.Category(title=layer, chart=charts, closed=len(of_layers) > 1)
