"""The ``torchinstruments`` command: one module a subcommand, loaded when it is called.

Exit codes: 0 complete, 1 done but something is missing or set aside, 2 could not, 3 a limit of
``compare`` did not hold, 130 interrupted by the user, 143 ended by SIGTERM. With ``--json`` standard output
carries one JSON document and nothing else. A mistake of the user gets one sentence.
"""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from typing_extensions import override

from torchinstruments._version import __version__
from torchinstruments.cli import compare, doctor, merge, report, status, upload
from torchinstruments.cli.console import shown_text
from torchinstruments.cli.pipes import closed_pipes_are_quiet
from torchinstruments.cli.termination import TERMINATED, Terminated, raised_when_terminated
from torchinstruments.errors import TorchInstrumentsError

__all__ = ["COMMANDS", "COULD_NOT", "INTERRUPTED", "main"]

COULD_NOT = 2
"""Exit code: nothing was done."""

INTERRUPTED = 130
"""Exit code: the user pressed Ctrl-C."""

COMMANDS = (merge.COMMAND, report.COMMAND, status.COMMAND, compare.COMMAND, upload.COMMAND, doctor.COMMAND)
"""The subcommands, in the order of the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: Arguments without the program's name, else those of this process.
    """
    with closed_pipes_are_quiet():
        return _exit_code(argv)


def _exit_code(argv: Sequence[str] | None) -> int:
    try:
        parser = _parser()
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            _refuse(
                f"{arguments.name} does not take {' '.join(unknown)} there", f"{parser.prog} {arguments.name}"
            )
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


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, and where the rest is explained."""

    @override
    def error(self, message: str) -> NoReturn:
        _refuse(message, self.prog)


def _refuse(message: str, prog: str) -> NoReturn:
    sentence = shown_text(" ".join(message.split()), 4000)
    print(f"torchinstruments: {sentence}; see: {prog} --help", file=sys.stderr)
    sys.exit(COULD_NOT)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchinstruments",
        description="Reads what the ranks of a training job left, in a local folder or an object store.",
        epilog="Each command explains itself with --help. Exit codes: 0 complete, 1 done but something is "
        "missing or set aside, 2 could not, 3 a limit of compare (--max-change) did not hold",
    )
    parser.add_argument("--version", action="version", version=f"torchinstruments {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name,
            help=command.summary,
            description=_filled(command.description),
            epilog=f"example:\n  {command.example}\n\n{_filled('exit codes: ' + command.exit_codes)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, name=command.name)
    return parser


def _filled(text: str) -> str:
    return textwrap.fill(text, max(40, shutil.get_terminal_size().columns - 2))
