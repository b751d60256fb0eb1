"""Reads the telemetry of a run with Polars and with DuckDB, and gets the same three tables from both.

Polars reads through `open_run`, which takes folders and URLs, knows every table's columns and leaves
damaged files out. DuckDB reads the Parquet files themselves (``pip install duckdb``). The tables: the
spread of each series in the first and the last sample, the values that are missing with their reasons, and
how long steps took on each rank. Without a folder `basic_training.py` is run first.

    python examples/read_with_polars_and_duckdb.py
    python examples/read_with_polars_and_duckdb.py runs/language-model
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import duckdb
import polars as pl

from torchinstruments import Run, open_run

SPREAD = """
    SELECT rank, layer, call_index, signal, stage, tensor_path,
        arg_min(value, sample_id) AS first, arg_max(value, sample_id) AS last
    FROM history WHERE metric = 'std' AND backward_index = 0 GROUP BY ALL ORDER BY ALL
"""
MISSING = """
    SELECT rank, layer, signal, unavailable_reason, count(*) AS rows
    FROM history WHERE value IS NULL GROUP BY ALL ORDER BY ALL
"""
STEPS = """
    SELECT rank, count(*) AS steps, count_if(outcome = 'applied') AS applied,
        max(gap_s + forward_s + backward_s + optimizer_s) AS longest_s
    FROM steps GROUP BY ALL ORDER BY ALL
"""


def by_polars(run: Run) -> list[pl.DataFrame]:
    """Returns the three tables by Polars."""
    history, steps = run.history(), run.steps()
    value = pl.col("value").sort_by("sample_id")
    spread = (
        history.filter(pl.col("value").is_not_null(), metric="std", backward_index=0)
        .group_by("rank", "layer", "call_index", "signal", "stage", "tensor_path")
        .agg(value.first().alias("first"), value.last().alias("last"))
    )
    missing = (
        history.filter(pl.col("value").is_null())
        .group_by("rank", "layer", "signal", "unavailable_reason")
        .agg(pl.len().alias("rows"))
    )
    step_s = pl.sum_horizontal("gap_s", "forward_s", "backward_s", "optimizer_s")
    timed = steps.group_by("rank").agg(
        pl.len().alias("steps"),
        (pl.col("outcome") == "applied").sum().alias("applied"),
        step_s.max().alias("longest_s"),
    )
    return [table.sort(pl.all()).collect() for table in (spread, missing, timed)]


def by_duckdb(folder: str) -> list[pl.DataFrame]:
    """Returns the three tables by DuckDB; of several ranks each has a folder, of one it is the run's."""
    connection = duckdb.connect()
    ranks = "/rank-*" if any(Path(folder).glob("rank-*")) else ""
    for table in ("history", "steps"):
        connection.read_parquet(f"{folder}{ranks}/{table}.parts/*.parquet").create_view(table)
    return [connection.sql(query).pl() for query in (SPREAD, MISSING, STEPS)]


def run_basic_training(folder: str) -> str:
    """Runs the smallest example and returns where its telemetry lies."""
    script = Path(__file__).with_name("basic_training.py")
    command = [sys.executable, str(script), "--output-dir", folder]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return said.rpartition("telemetry: ")[2].strip()


def main() -> None:
    """Prints the tables, and whether both readers got the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", help="of a run (default: one of basic_training.py, made now)")
    parser.add_argument("--output-dir", default=os.environ.get("OUTPUT_DIR", "runs/to-read"))
    options = parser.parse_args()
    folder = options.folder or run_basic_training(options.output_dir)

    titles = (
        "spread of layers (std), first and last sample",
        "values that are missing",
        "steps of each rank",
    )
    for title, polars, duck in zip(titles, by_polars(open_run(folder)), by_duckdb(folder), strict=True):
        print(f"\n{title}")
        print(polars)
        print(f"DuckDB has the same: {polars.equals(duck.cast(polars.schema))}")


if __name__ == "__main__":
    main()
