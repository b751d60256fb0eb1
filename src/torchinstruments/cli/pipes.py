"""Output into a program that stops reading, such as ``head``: the rest goes nowhere, and the command goes on.

What a command does and its exit code do not depend on who reads what it prints.
"""

import os
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO, cast

__all__ = ["closed_pipes_are_quiet"]


class _UntilClosed:
    """A stream whose text goes nowhere from the moment on at which nobody reads it any more.

    Args:
        stream: Where the text goes until then.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._give_up()

    def _give_up(self) -> None:
        # The interpreter flushes the stream once more at exit, so that its descriptor has to lead somewhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._stream.flush()


@contextmanager
def closed_pipes_are_quiet() -> Generator[None]:
    """Lets standard output and standard error be pipes that are closed at any moment."""
    with ExitStack() as stack:
        out, err = (cast("TextIO", _UntilClosed(stream)) for stream in (sys.stdout, sys.stderr))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            yield
        finally:
            out.flush()
            err.flush()
