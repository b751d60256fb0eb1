"""``torchinstruments report``: what a merge found as one HTML file, or as scalars for TensorBoard."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchinstruments.cli.command import Command, add_place_arguments, storage_options
from torchinstruments.cli.console import ProgressLine, count_text, shown_text
from torchinstruments.errors import ConfigurationError

if TYPE_CHECKING:
    from torchinstruments.merge.result import MergeResult

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the HTML file, a path or an fsspec URL (default: URL/merged/report.html)",
    )
    parser.add_argument(
        "--tensorboard",
        metavar="FOLDER",
        help="write no page, but lowest, median and highest over ranks of every series as scalars for "
        "TensorBoard into this new local folder",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="merge first, though a result is there; without one that is done anyway",
    )


def _run(arguments: argparse.Namespace) -> int:
    if arguments.tensorboard is not None and arguments.output is not None:
        raise ConfigurationError("--tensorboard and --output were both given; give one of them")
    if arguments.tensorboard is None:
        from torchinstruments.report.extra import require_report_extra

        # Before a merge, which may take long.
        require_report_extra()
    options = storage_options(arguments)
    merged = _merged(arguments, options)
    if arguments.tensorboard is not None:
        return _write_scalars(merged, arguments)
    from torchinstruments.report.coverage_lines import num_samples
    from torchinstruments.report.page import write_report

    written = write_report(merged, arguments.output, storage_options=options)
    state = "" if merged.complete else "; the merge was NOT COMPLETE, see the facts in it"
    _say(
        arguments,
        [f"  missing      {shown_text(sentence)}" for sentence in written.missing]
        + [f"  report       {shown_text(written.url)} ({written.size_bytes / 1e6:.1f} MB{state})"],
        {
            "report": written.url,
            "size_bytes": written.size_bytes,
            "complete": written.complete,
            "missing": list(written.missing),
        },
    )
    return 0 if written.complete and num_samples(merged.result) else 1


COMMAND = Command(
    name="report",
    summary="write what a merge found as one HTML page",
    description="Writes merged/report.html: a page that needs no network, with the facts of the merge first, "
    "then pictures in which to choose layer, signal, metric and rank. Reads what the last merge wrote, and "
    "merges first where there is none. Needs pip install plotly jinja2.",
    example="torchinstruments report runs/first",
    exit_codes="0 complete, 1 done, but something is missing in the merge or in the pictures, or there "
    "is no sample, 2 could not",
    add_arguments=_add_arguments,
    run=_run,
)


def _merged(arguments: argparse.Namespace, options: Mapping[str, object] | None) -> "MergeResult":
    from torchinstruments.merge.reopened import reopen_result

    # Several folders are those of one run; the result lies in the first one.
    merged = None if arguments.merge else reopen_result(arguments.urls[0], options)
    if merged is not None:
        return merged
    from torchinstruments.merge.engine import merge_run

    if not arguments.merge:
        print("the run was not merged yet; merging it first", file=sys.stderr)
    with ProgressLine("ranks") as progress:
        return merge_run(*arguments.urls, storage_options=options, progress=progress)


def _write_scalars(merged: "MergeResult", arguments: argparse.Namespace) -> int:
    from torchinstruments.report.tensorboard import write_tensorboard

    written = write_tensorboard(merged, arguments.tensorboard)
    if written.num_series == 0:
        line = "  scalars      none, for no series was measured on two ranks"
    else:
        series = count_text(written.num_series, "series", "series")
        line = (
            f"  scalars      {series} in {shown_text(str(written.folder))}; tensorboard --logdir shows them"
        )
    _say(
        arguments,
        [line],
        {
            "tensorboard": str(written.folder),
            "series": written.num_series,
            "values": written.num_values,
            "complete": merged.complete,
        },
    )
    return 0 if merged.complete and written.num_series else 1


def _say(arguments: argparse.Namespace, lines: Sequence[str], document: Mapping[str, object]) -> None:
    """Prints lines for people, and the document where it was asked for."""
    from torchinstruments.store.manifest import encode_document

    for line in lines:
        print(line, file=sys.stderr if arguments.as_json else sys.stdout)
    if arguments.as_json:
        sys.stdout.write(encode_document(dict(document)).decode())
