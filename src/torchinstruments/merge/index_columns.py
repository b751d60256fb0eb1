"""What ``merged/index.md`` says of the columns of the tables beside it, from the schemas of those."""

from collections.abc import Mapping

import pyarrow as pa

from torchinstruments.merge.comparison import COMPARISON_FILE
from torchinstruments.merge.comparison_blocks import COMPARISON_SCHEMA
from torchinstruments.merge.entries import SUMMARY_SCHEMA
from torchinstruments.merge.overview import OVERVIEW_FILE
from torchinstruments.merge.overview_rows import OVERVIEW_SCHEMA
from torchinstruments.merge.result import SUMMARY_FILE
from torchinstruments.merge.steps import STEPS_FILE, STEPS_SCHEMA
from torchinstruments.merge.timeline import TIMELINE_FILE, TIMELINE_SCHEMA
from torchinstruments.store.page_text import column_type

__all__ = ["columns_text"]

_TABLES = {
    SUMMARY_FILE: SUMMARY_SCHEMA,
    COMPARISON_FILE: COMPARISON_SCHEMA,
    STEPS_FILE: STEPS_SCHEMA,
    OVERVIEW_FILE: OVERVIEW_SCHEMA,
    TIMELINE_FILE: TIMELINE_SCHEMA,
}

_SERIES: Mapping[str, str] = {
    "generation": "which (re)start of the ranks, from 0",
    "attempt": "which try at an optimizer step; null where no optimizer was seen",
    "forward_in_attempt": "ordinal of the forward in it",
    "forward_index": "ordinal of the forward in the process, where there is no attempt",
    "mode": "`train` or `eval`",
    "layer": "name in the model; empty for the root",
    "call_index": "ordinal of the layer's call in its forward",
    "signal": "`input`, `output`, `output_gradient`, `parameter` or `parameter_gradient`",
    "stage": "of a parameter's gradient: `local_accumulated`, `reduced`, `applied`; else empty",
    "tensor_path": "which tensor of the input or output; of a parameter its own name",
    "backward_index": "which traversal of the graph",
    "metric": "which statistic",
}

_MEANINGS: Mapping[str, Mapping[str, str]] = {
    SUMMARY_FILE: {
        "rank": "whose series",
        "latest_shape": "of its last row, as are the next four",
        "latest_dtype": "as in history",
        "latest_scope": "what the number covers; `local` is a whole tensor of the rank",
        "latest_execution": "how the code ran",
        "latest_scale_provenance": "how the loss scale is known",
        "observations": "rows",
        "unavailable_observations": "those without a value",
        "first_*": "its first row",
        "latest_*": "its last row",
        "minimum_*": "its lowest value",
        "maximum_*": "its highest value",
        "previous_window_*": "the rows just before the last window",
        "recent_window_*": "its last rows; the mean is one over samples of this rank's series",
        "loss_scale_lowest": "beside its rows: gradients are stored as observed, multiplied by it",
        "loss_scale_highest": "likewise",
    },
    COMPARISON_FILE: {
        "scope": "`local`: whole tensors; `local_shard`: a part, compared where ranks hold the same one",
        "replica_key": "of a part: which one",
        "num_ranks": "ranks with a value",
        "num_ranks_without_value": "ranks with a row that has none",
        "lowest_rank": "the lowest rank that has the lowest value",
        "lowest_value": "lowest over ranks",
        "highest_rank": "likewise",
        "highest_value": "highest over ranks",
        "median_of_ranks": "lower median over ranks, so a value that some rank has",
        "mad_of_ranks": "lower median over ranks of the distance from it",
        "furthest_rank": "the rank with the largest distance",
        "furthest_value": "its value",
        "furthest_mads": "its distance in multiples of `mad_of_ranks`",
        "unavailable_reason": "why that is null: `two_ranks`, `all_equal`, `mad_is_zero`, `overflow`",
        "differs_in": "what ranks do not share here, as `shape`: then values may differ by right",
    },
    STEPS_FILE: {
        "optimizer": "which optimizer; null for the attempt as a whole",
        "optimizer_step": "which of its steps in this attempt",
        "column": "in what ranks differ, as `outcome` or `scale_before`",
        "place": "0 for the value of the fewest ranks",
        "value": "what these ranks hold, of a number",
        "outcome": "what these ranks hold, of an outcome",
        "num_ranks": "how many they are",
        "ranks": "which, as a set of ranks",
        "unavailable_reason": "empty beside a value; else `further_values`, `no_value` or `no_row`",
    },
    OVERVIEW_FILE: {
        "scope": "`local`: whole tensors; `local_shard`: the part that each rank has",
        "num_ranks": "ranks with a value",
        "num_ranks_without_value": "ranks with a row that has none",
        "lowest_*": "of all ranks",
        "highest_*": "likewise",
        "median_of_ranks": "as in `comparison.parquet`",
        "mad_of_ranks": "likewise",
        "all_groups": "whether of every group of consecutive ranks the furthest is listed",
        "ranks": "some ranks, ascending",
        "values": "the value of each, rounded to 24 bits",
        "distances": "of each from the median of the ranks that hold the same",
    },
    TIMELINE_FILE: {
        "counted_in": "`attempt`, or `forward_index` where no optimizer was seen",
        "first": "the first of the stretch, counted in that",
        "last": "the last of the stretch",
        "rank": "whose",
        "samples": "forwards that this rank measured in it",
        "samples_of_any_rank": "forwards that any rank measured in it",
        "applied": "its optimizer steps by outcome, as are the next three",
        "skipped": "by the loss scaler",
        "abandoned": "no step followed",
        "unknown": "not known",
        "loss_scale_*": "of the scales before and after its steps; null where none is known",
    },
}


def columns_text() -> str:
    """Returns a section a table: each column with its type and its meaning."""
    return "\n".join(
        f"## Columns of {file}\n\n| column | type | |\n|---|---|---|\n{_rows(schema, _MEANINGS[file])}"
        for file, schema in _TABLES.items()
    )


def _rows(schema: pa.Schema, meanings: Mapping[str, str]) -> str:
    known = {**_SERIES, **meanings}
    # Columns of one point or window stand together, where its name with a star has a meaning.
    groups: dict[str, list[pa.Field]] = {}
    for field in schema:
        starred = next((name for name in meanings if _is_of(name, field.name, meanings)), field.name)
        groups.setdefault(starred, []).append(field)
    return "".join(
        f"| {', '.join(f'`{one.name}`' for one in fields)} "
        f"| {'; '.join(column_type(one) for one in fields)} | {known[name]} |\n"
        for name, fields in groups.items()
    )


def _is_of(name: str, column: str, meanings: Mapping[str, str]) -> bool:
    return name.endswith("*") and column.startswith(name[:-1]) and column not in meanings
