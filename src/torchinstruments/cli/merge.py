"""``torchinstruments merge``: one answer from the folders of many ranks."""

import argparse
import sys
from typing import TYPE_CHECKING, TextIO

from torchinstruments.cli.command import Command, add_place_arguments, storage_options
from torchinstruments.cli.console import ProgressLine, count_text, shown_text
from torchinstruments.cli.executors import add_executor_arguments, chosen_executor
from torchinstruments.cli.folders import open_folders, print_runs_beside
from torchinstruments.cli.widest_table import print_widest
from torchinstruments.errors import ConfigurationError
from torchinstruments.report.coverage_lines import coverage_lines, headline, num_samples
from torchinstruments.report.document import as_integer, as_record, as_records
from torchinstruments.report.findings import finding_lines

if TYPE_CHECKING:
    from torchinstruments.merge.result import MergeResult

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    parser.add_argument(
        "--output", metavar="URL", help="folder for result.json and its tables (default: URL/merged)"
    )
    parser.add_argument("--ranks", metavar="RANKS", help="merge these ranks only, such as 0-7,12")
    add_executor_arguments(parser)
    parser.add_argument(
        "--untrusted",
        action="store_true",
        help="read each part on trial in a process with bounds of memory and time, and leave it out where it "
        "goes beyond them: for runs that nobody vouches for",
    )


def _run(arguments: argparse.Namespace) -> int:
    from torchinstruments.merge.engine import merge_run
    from torchinstruments.merge.rank_sets import parse_ranks

    if arguments.output is not None and not arguments.output.strip():
        raise ConfigurationError(
            "--output is empty; leave it out for merged/ in the run's folder, or give a folder"
        )
    ranks = None if arguments.ranks is None else parse_ranks(arguments.ranks)
    options = storage_options(arguments)
    # Looked into first, so that nothing that goes wrong here can come after a result that was written.
    folders = open_folders(arguments.urls, options)
    with chosen_executor(arguments) as executor, ProgressLine("ranks") as progress:
        merged = merge_run(
            *arguments.urls,
            output=arguments.output,
            storage_options=options,
            ranks=ranks,
            progress=progress,
            executor=executor,
            untrusted=arguments.untrusted,
        )
    if arguments.as_json:
        from torchinstruments.store.manifest import encode_document

        sys.stdout.write(encode_document(dict(merged.result)).decode())
    file = sys.stderr if arguments.as_json else sys.stdout
    samples = _print_summary(merged, file)
    print_runs_beside(folders, file)
    return 0 if merged.complete and samples else 1


COMMAND = Command(
    name="merge",
    summary="merge what the ranks of a run left into one result",
    description="Reads the folders of all ranks and writes merged/result.json, with summary.parquet, "
    "steps.parquet, comparison.parquet, two small tables for pictures and index.md, a guide to them, beside "
    "it. Says whether all that was expected was there, whether all ranks did the same steps, whether "
    "replicas are equal, which rank saw the first nonfinite value, what training checks found, which rank is "
    "late by its own work, which is furthest from the others. Works while the job runs, too.",
    example="torchinstruments merge runs/first --executor processes",
    exit_codes="0 complete, 1 done, but something is missing or was set aside, or there is no sample, "
    "2 could not",
    add_arguments=_add_arguments,
    run=_run,
)


def _print_summary(merged: "MergeResult", file: TextIO) -> int:
    """Prints what came of a merge; returns how many samples there are."""
    coverage = as_record(merged.result["coverage"])
    run = as_record(merged.result["run"])
    processes = as_records(merged.result["ranks"])
    rows = sum(as_integer(process["rows"]) for process in processes)
    samples = num_samples(merged.result)
    print(
        f"run {shown_text(str(run['run_id']))}: {headline(samples, is_complete=merged.complete)}", file=file
    )
    for name, text in (*finding_lines(merged.result), *coverage_lines(coverage)):
        print(f"  {name:<12} {shown_text(text)}", file=file)
    print(f"  {'read':<12} {count_text(rows, 'row')} of {count_text(samples, 'sample')}", file=file)
    print(f"  {'result':<12} {shown_text(merged.url.rstrip('/'))}/result.json", file=file)
    print_widest(merged.result, file)
    return samples
