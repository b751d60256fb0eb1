"""``torchinstruments upload``: carries what a job left in a spool to its store."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from torchinstruments.cli.command import Command, add_reading_arguments, seconds, storage_options
from torchinstruments.cli.console import ProgressLine, count_text, shown_text
from torchinstruments.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchinstruments.store.clearing import SpoolUpload

__all__ = ["COMMAND"]

_GIVE_UP_AFTER_S = 300.0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "spool",
        nargs="?",
        type=Path,
        metavar="SPOOL",
        help="what a manifest gives as its spool, a run's spool, or the folder in which spools lie; "
        "else $TORCHINSTRUMENTS_SPOOL_DIR or ~/.cache/torchinstruments/spool",
    )
    parser.add_argument(
        "--give-up-after-s",
        type=seconds,
        default=_GIVE_UP_AFTER_S,
        metavar="SECONDS",
        help="how long to go on while the store does not answer (default: %(default)g)",
    )
    add_reading_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    from torchinstruments.environment import spool_root
    from torchinstruments.store.clearing import upload_spool
    from torchinstruments.store.private_folders import own_spool_root
    from torchinstruments.store.spools import find_spools

    patience_s: float = arguments.give_up_after_s
    if not patience_s >= 0:
        raise ConfigurationError(
            f"--give-up-after-s is {patience_s}, but has to be 0 or more seconds, such as 300"
        )
    options = storage_options(arguments)
    given: Path | None = arguments.spool
    if given is None:
        given = own_spool_root(spool_root().expanduser())
        spools = find_spools(given) if given.exists() else []  # nothing was ever spooled here
    else:
        spools = find_spools(given)
    done: list[SpoolUpload] = []
    for spool in spools:
        with ProgressLine("rows", done="uploaded", doing="uploading") as progress:
            done.append(upload_spool(spool, options, give_up_after_s=patience_s, on_progress=progress))
    if arguments.as_json:
        from torchinstruments.store.manifest import encode_document

        sys.stdout.write(encode_document({"spools": done}).decode())
    _print(given, done, sys.stderr if arguments.as_json else sys.stdout)
    return _exit_code(done)


COMMAND = Command(
    name="upload",
    summary="upload what a job left in a local spool",
    description="Uploads what the processes of a job left in the spool of this host, with the settings given "
    "here or in the environment, not those of the job. What is up is removed from the spool. An uploader "
    "that is at work is left to it, unless it fails or --storage-options are given: then it hands over "
    "first. Ends once everything is up, at once where the store refuses, and after --give-up-after-s where "
    "it does not answer; whatever is left stays in the spool.",
    example="torchinstruments upload --give-up-after-s 60",
    exit_codes="0 everything is up, 1 something is left or was set aside, 2 nothing could be done",
    add_arguments=_add_arguments,
    run=_run,
)


def _exit_code(done: "Sequence[SpoolUpload]") -> int:
    """0 where everything is up, 2 where nothing could be done, else 1."""
    failed = [one for one in done if one.error]
    if failed and len(failed) == len(done) and not any(one.rows_uploaded for one in done):
        return 2
    incomplete = any(one.rows_set_aside or one.num_unknown for one in done)
    left = any(one.num_files_left and not one.num_writers for one in done)
    return 1 if failed or incomplete or left else 0


def _print(place: Path, done: "Sequence[SpoolUpload]", file: TextIO) -> None:
    if not done:
        print(f"nothing to upload in {shown_text(str(place))}", file=file)
    for one in done:
        run_id, url = shown_text(one.run_id), shown_text(one.url)
        print(
            f"run {run_id or '?'}: {count_text(one.rows_uploaded, 'row')} uploaded to {url or '?'}", file=file
        )
        if one.error:
            print(f"  failed       {shown_text(one.error)}", file=file)
        if one.num_files_left:
            left = f"{count_text(one.rows_left, 'row')} in {count_text(one.num_files_left, 'file')}"
            print(f"  left         {left} in {shown_text(one.spool)}", file=file)
        if one.num_writers:
            writers = count_text(one.num_writers, "process", "processes")
            print(f"  still writes {writers}; what comes later is carried by the job's uploader", file=file)
        if one.rows_set_aside:
            aside = count_text(one.rows_set_aside, "row")
            print(f"  set aside    {aside} in {shown_text(one.spool)}/unreadable", file=file)
        if one.num_unknown:
            unknown = count_text(one.num_unknown, "folder")
            print(f"  not known    {unknown} of another release in {shown_text(one.spool)}", file=file)
