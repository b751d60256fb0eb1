"""The ``torchinstruments`` command: one module a subcommand, loaded when it is called.

Exit codes: 0 complete, 1 done but something is missing or set aside, 2 could not, 3 a limit of
``compare`` did not hold, 130 interrupted by the user, 143 ended by SIGTERM. With ``--json`` standard output
carries one JSON document and nothing else. A mistake of the user gets one sentence.
"""

import argparse
import sys
from collections.abc import Sequence

from torchinstruments._version import __version__
from torchinstruments.cli import compare, doctor, merge, report, status, upload
from torchinstruments.cli.console import shown_text
from torchinstruments.cli.pipes import closed_pipes_are_quiet
from torchinstruments.cli.termination import TERMINATED, Terminated, raised_when_terminated
from torchinstruments.errors import TorchInstrumentsError

__all__ = ["COULD_NOT", "INTERRUPTED", "main"]

COULD_NOT = 2
"""Exit code: nothing was done."""

INTERRUPTED = 130
"""Exit code: the user pressed Ctrl-C."""

_COMMANDS = (merge.COMMAND, report.COMMAND, status.COMMAND, compare.COMMAND, upload.COMMAND, doctor.COMMAND)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: Arguments without the program's name, else those of this process.
    """
    with closed_pipes_are_quiet():
        return _exit_code(argv)


def _exit_code(argv: Sequence[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # how argparse ends after --help, --version and its own complaints
        return stop.code if isinstance(stop.code, int) else COULD_NOT
    try:
        with raised_when_terminated():
            code = arguments.run(arguments)
    except Terminated:
        return TERMINATED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (TorchInstrumentsError, OSError) as error:
        print(f"torchinstruments: {_sentence(error)}", file=sys.stderr)
        return COULD_NOT
    return code if isinstance(code, int) else COULD_NOT


def _sentence(error: Exception) -> str:
    return shown_text(" ".join(str(error).split()), 4000) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchinstruments",
        description="Reads what the ranks of a training job left, in a local folder or an object store.",
        epilog="exit codes: 0 complete, 1 done but something is missing or set aside, 2 could not, "
        "3 a limit of compare (--max-change) did not hold",
    )
    parser.add_argument("--version", action="version", version=f"torchinstruments {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        sub = commands.add_parser(
            command.name, help=command.summary, description=command.description, allow_abbrev=False
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser
