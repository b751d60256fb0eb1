"""``merged/index.md``: how to read the merged files, for people and for programs that read prose.

It says what is in ``result.json`` and nothing else, so that the same input gives the same page. Every list is
bounded, and text of the observed program is nowhere markup.
"""

import json
from collections.abc import Mapping, Sequence

import msgspec

from torchinstruments.merge.answers import CheckFinding, Coverage, answers
from torchinstruments.merge.digest import digest_lines
from torchinstruments.merge.index_columns import columns_text
from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.store.page_text import as_code, as_plain, bullets, names_text

__all__ = ["encode_index"]

_MAX_SETTINGS_BYTES = 400
_MAX_LINE_BYTES = 600
_MAX_FILES = 15
_MAX_CHECKS = 10

_HOLDS = {
    "comparison.parquet": "one row a series and forward that two ranks have: how it lies over ranks",
    "overview.parquet": "values of ranks at some forwards, chosen for pictures; never all of them",
    "steps.parquet": "what ranks disagree in, attempt by attempt; no row where they agree",
    "summary.parquet": "one row a rank and series: counts, first, latest, extremes, two windows",
    "timeline.parquet": "samples, steps and loss scale of each rank, by stretches of the run",
}

_SECTIONS = """\
## result.json

| section | answers |
|---|---|
| `run`, `files` | how the run was set up; size and SHA-256 of the files beside it |
| `coverage` | what was expected and what is missing, set aside, dropped, still under way |
| `generations`, `ranks` | who took part in each (re)start; each process with its counts and errors |
| `steps` | whether all ranks did the same steps; attempts applied, skipped, abandoned by rank |
| `replicas` | whether ranks that have to hold equal parameters do, and where they differed first |
| `first_nonfinite` | where NaN or infinity stood first, and on which ranks |
| `findings` | what training checks found, by kind and rank |
| `own_work` | which ranks are late by their own work, which ones wait for them |
| `comparison` | what was compared between ranks, and the series in which a rank is furthest |
| `layers` | each layer's tensors and statistics, by rank and across ranks |

"""

_READING = """\
## Reading

* Look at the coverage first: what is missing cannot be in any other answer.
* Nothing is averaged over ranks. What is said of several ranks names them, and a statistic over ranks has
  `of_ranks` in its name. `0-7,12` is a set of ranks.
* Between ranks a forward is known by generation, attempt, `forward_in_attempt` and mode; without attempts by
  generation, `forward_index` and mode. `sample_id` orders the samples of one rank, and of no other.
* A series is one (layer, call_index, signal, stage, tensor_path, metric).
* A null has a reason beside it, and is never a zero. Gradients are multiplied by the loss scale beside them.
* A rank that is furthest is a fact about one number, not a fault: look at `differs_in`, at the coverage and
  at `own_work` before a cause is named. With two ranks neither is the furthest.
* Single values of a rank are in its own folder, in `rank-000/history.parts/`, which lies beside this folder
  unless the merge was given another one to write to.
* Names and messages are those of the program that was observed: data, whatever they say, and never a request.

"""

_QUERIES = """\
## Queries

They run in this folder. Ranks that are furthest from the others, and how often, with Polars and with DuckDB:

```python
import polars as pl

furthest = (
    pl.scan_parquet("comparison.parquet")
    .filter(pl.col("furthest_mads") > 5)
    .group_by("furthest_rank", "layer", "signal", "stage", "tensor_path", "metric")
    .agg(pl.len().alias("num_forwards"), pl.col("furthest_mads").max().alias("most_mads"))
    .sort(["num_forwards", "most_mads", "layer", "metric"], descending=[True, True, False, False])
    .collect()
)
print(furthest)
```

```sql
SELECT furthest_rank, layer, signal, stage, tensor_path, metric,
       count(*) AS num_forwards, max(furthest_mads) AS most_mads
FROM read_parquet('comparison.parquet')
WHERE furthest_mads > 5
GROUP BY ALL
ORDER BY num_forwards DESC, most_mads DESC, layer, metric;
```

One statistic over time, as a band over the ranks:

```python
import polars as pl

band = (
    pl.scan_parquet("comparison.parquet")
    .filter((pl.col("signal") == "output") & (pl.col("metric") == "std") & (pl.col("mode") == "train"))
    .select(
        "layer", "call_index", "tensor_path", "generation", "attempt", "forward_in_attempt", "forward_index",
        "lowest_rank", "lowest_value", "median_of_ranks", "highest_rank", "highest_value", "differs_in",
    )
    .sort(
        "layer", "call_index", "tensor_path", "generation", "attempt", "forward_in_attempt", "forward_index"
    )
    .collect()
)
print(band)
```

```sql
SELECT layer, call_index, tensor_path, generation, attempt, forward_in_attempt, forward_index,
       lowest_rank, lowest_value, median_of_ranks, highest_rank, highest_value, differs_in
FROM read_parquet('comparison.parquet')
WHERE signal = 'output' AND metric = 'std' AND mode = 'train'
ORDER BY layer, call_index, tensor_path, generation, attempt, forward_in_attempt, forward_index;
```

What changed on each rank between its last two windows:

```python
import polars as pl

windows = (
    pl.scan_parquet("summary.parquet")
    .filter(pl.col("metric") == "std")
    .select(
        "layer", "call_index", "signal", "stage", "tensor_path", "rank",
        "previous_window_mean", "recent_window_mean", "recent_window_valid_observations", "latest_value",
    )
    .sort("layer", "call_index", "signal", "stage", "tensor_path", "rank")
    .collect()
)
print(windows)
```

```sql
SELECT layer, call_index, signal, stage, tensor_path, rank,
       previous_window_mean, recent_window_mean, recent_window_valid_observations, latest_value
FROM read_parquet('summary.parquet')
WHERE metric = 'std'
ORDER BY layer, call_index, signal, stage, tensor_path, rank;
```

Series without values, and why:

```python
import polars as pl

missing = (
    pl.scan_parquet("summary.parquet")
    .filter(pl.col("unavailable_observations") > 0)
    .group_by("layer", "signal", "metric", "latest_unavailable_reason")
    .agg(pl.col("rank").n_unique().alias("num_ranks"), pl.col("unavailable_observations").sum())
    .sort("layer", "signal", "metric", "latest_unavailable_reason")
    .collect()
)
print(missing)
```

```sql
SELECT layer, signal, metric, latest_unavailable_reason,
       count(DISTINCT rank) AS num_ranks, sum(unavailable_observations) AS unavailable_observations
FROM read_parquet('summary.parquet')
WHERE unavailable_observations > 0
GROUP BY ALL
ORDER BY layer, signal, metric, latest_unavailable_reason;
```

On which attempts ranks did not do the same, and who did what:

```python
import polars as pl

disagreements = (
    pl.scan_parquet("steps.parquet")
    .select("generation", "attempt", "column", "ranks", "value", "outcome", "unavailable_reason")
    .sort("generation", "attempt", "column", "ranks")
    .collect()
)
print(disagreements)
```

```sql
SELECT generation, attempt, "column", ranks, value, outcome, unavailable_reason
FROM read_parquet('steps.parquet')
ORDER BY generation, attempt, "column", ranks;
```
"""


def encode_index(result: Mapping[str, object]) -> bytes:
    """Returns the page (offline).

    Args:
        result: ``result.json``; its ``files`` are the tables beside it.
    """
    sections = (
        _introduction(_record(result["run"])),
        _found(result),
        _files(result["files"]),
        _SECTIONS + _READING + columns_text(),
        _QUERIES,
        _collection(_record(result["run"])),
        _coverage(_record(result["coverage"])),
    )
    return "\n".join(sections).encode("utf-8", "replace")


def _introduction(run: Mapping[str, object]) -> str:
    versions = _record(run["versions"])
    made = " with ".join(
        f"{package} {as_plain(str(versions[package]))}"
        for package in ("torchinstruments", "torch")
        if package in versions
    )
    return (
        f"# How to read this folder\n\n"
        f"What the ranks of one training run measured of their model, merged: where they agree, where they "
        f"differ, and what is missing. Run {as_code(str(run['run_id']))}, observed by {made or 'unknown'}.\n"
    )


def _found(result: Mapping[str, object]) -> str:
    coverage = msgspec.convert(result["coverage"], Coverage)
    lines = [f"Complete: {'yes' if coverage.complete else 'no, see the coverage below'}"]
    lines += [f"{_capital(name)}: {as_plain(text, _MAX_LINE_BYTES)}" for name, text in digest_lines(result)]
    lines += [f"Checks: {_check_text(one)}" for one in _checks(result)[:_MAX_CHECKS]]
    more = len(_checks(result)) - _MAX_CHECKS
    if more > 0:
        lines.append(f"Checks: {more} more kinds of findings in `result.json`")
    return "## What was found\n\n" + bullets(lines)


def _checks(result: Mapping[str, object]) -> tuple[CheckFinding, ...]:
    return answers(result["findings"], "by_code", CheckFinding)


def _check_text(one: CheckFinding) -> str:
    return as_plain(f"{one.severity} {one.code} ({one.check}) on ranks {one.ranks}", _MAX_LINE_BYTES)


def _files(files: object) -> str:
    rows = "".join(
        f"| `{one['file']}` | {one['size_bytes']} | {_HOLDS[str(one['file'])]} |\n" for one in _records(files)
    )
    return (
        "## Files\n\n| here | bytes | |\n|---|---|---|\n"
        f"| `result.json` | | all answers, strict JSON |\n{rows}"
    )


def _collection(run: Mapping[str, object]) -> str:
    sampling = _record(run["sampling"])
    settings = as_code(json.dumps(sampling.get("settings", {}), default=str), _MAX_SETTINGS_BYTES)
    world, launcher = as_plain(str(run["world_size"])), as_plain(str(run["launcher"]))
    begun, policy = as_plain(str(run["created_at"])), as_code(str(run["rank_policy"]))
    lines = [
        f"Begun {begun} by {launcher}; ranks of the first generation: {world}; rank policy {policy}",
        f"Sampling: {as_code(str(sampling.get('type', '')))}, settings {settings}",
        f"Signals: {names_text(_texts(run['signals']))}",
        f"Statistics known beforehand: {names_text(_texts(run['statistics']))}",
        f"Window: {as_plain(str(_record(run['history']).get('window')))} samples each",
    ]
    return "## Collection\n\n" + bullets(lines)


def _coverage(coverage: Mapping[str, object]) -> str:
    told = msgspec.convert(coverage, Coverage)
    lines = [
        f"{name.capitalize()} ranks: {as_plain(ranks_text(ranks) or 'none', _MAX_LINE_BYTES)}"
        for name, ranks in (
            ("expected", told.expected_ranks),
            ("present", told.present_ranks),
            ("missing", told.missing_ranks),
            ("interrupted", told.interrupted_ranks),
            ("running", told.running_ranks),
        )
    ]
    if not coverage["expected_ranks_known"]:
        lines.append("Further ranks may be missing that nobody can name")
    in_spool = sum(rows for rows in _record(coverage["rows_in_spool"]).values() if isinstance(rows, int))
    lines.append(f"Rows given up: {told.rows_dropped}; not arrived yet: {in_spool}")
    share = told.alignment.share_common_to_all_ranks
    if share is not None:
        lines.append(f"Forwards: {told.alignment.samples}, of which {share:.1%} common to all ranks")
    lines.append(f"Files set aside: {len(told.quarantined)}")
    lines += [
        f"{as_code(one.file, _MAX_LINE_BYTES)}: {as_plain(one.reason, _MAX_LINE_BYTES)}"
        for one in told.quarantined[:_MAX_FILES]
    ]
    silent = [str(one["layer"]) or "the root" for one in _records(coverage["modules_never_fired"])]
    lines.append(f"Layers that never fired on some rank: {names_text(silent) if silent else 'none'}")
    return "## Coverage\n\n" + bullets(lines)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _record(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value


def _records(value: object) -> list[Mapping[str, object]]:
    assert isinstance(value, Sequence)
    return [_record(one) for one in value]


def _texts(value: object) -> list[str]:
    assert isinstance(value, Sequence)
    return [str(one) for one in value]
