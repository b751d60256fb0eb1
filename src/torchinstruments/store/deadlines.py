"""A bound for a call that may hang: it runs in a thread, which is left behind when time is up."""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["call_in_time"]

_T = TypeVar("_T")


def call_in_time(function: Callable[[], _T], timeout_s: float, *, what: str) -> _T:
    """Returns what `function` returns, or raises what it raises.

    Args:
        function: Called once, in a daemon thread; it goes on in the background where time runs out.
        timeout_s: Bound in seconds.
        what: What is being done, for the message.

    Raises:
        TimeoutError: There was no answer in time.
    """
    answers: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((function(), None))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
            answers.put((None, error))

    threading.Thread(target=run, daemon=True, name="torchinstruments-call").start()
    try:
        value, error = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"{what} gave no answer within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
