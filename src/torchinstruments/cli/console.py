"""What people see: tables and progress, with rich on a terminal and as plain lines elsewhere.

Names of layers and hosts are anybody's text: never read as markup, without control characters, and shortened
where they would fill the screen.
"""

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from torchinstruments.report.texts import count_text, shown_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["ProgressLine", "age_text", "count_text", "print_table", "shown_text"]

_PLAIN_WIDTH = 200
_MAX_CELL_CHARACTERS = 200


class ProgressLine:
    """Progress on standard error: a bar on a terminal, else a plain line each 10 percent.

    Args:
        what: What is counted, ``ranks``.
        done: What was done to them, ``read``.
        doing: What is being done to them, ``reading``.
    """

    def __init__(self, what: str, *, done: str = "read", doing: str = "reading") -> None:
        self._what = what
        self._done = done
        self._doing = doing
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_tenth = 0

    def __enter__(self) -> Self:
        """Shows nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the bar off the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Shows how much is done."""
        if sys.stderr.isatty():
            self._show_bar(done, total)
            return
        tenth = 10 * done // total if total else 10
        if tenth > self._last_tenth:
            self._last_tenth = tenth
            print(
                f"{self._done} {done} of {total} {self._what} ({100 * done // max(total, 1)}%)",
                file=sys.stderr,
                flush=True,
            )

    def _show_bar(self, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(file=sys.stderr), transient=True)
            self._task = self._bar.add_task(f"{self._doing} {self._what}", total=total)
            self._bar.start()
        if self._task is not None:
            self._bar.update(self._task, completed=done)


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, file: TextIO, num_text_columns: int = 1
) -> None:
    """Prints a table; columns after the first `num_text_columns` are aligned to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file, highlight=False, width=None if file.isatty() else _PLAIN_WIDTH)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(
            Text(heading), justify="left" if place < num_text_columns else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(shown_text(cell, _MAX_CELL_CHARACTERS)) for cell in row))
    console.print(table)


def age_text(seconds: float) -> str:
    """Returns an age in the largest unit that keeps two digits: ``45 s``, ``12 min``, ``3 h``, ``9 d``."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
