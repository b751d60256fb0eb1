"""Work for an executor, taken back in the order in which it was given."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

__all__ = ["MAX_WAITING", "in_order"]

MAX_WAITING = 64
"""Tasks that run, or wait with their results, ahead of the one that is taken next."""

_Task = TypeVar("_Task")
_Found = TypeVar("_Found")


def in_order(
    executor: Executor, function: Callable[[_Task], _Found], tasks: Iterable[_Task]
) -> Iterator[_Found]:
    """Yields what a function finds for each task, in the order of the tasks (offline, the caller's thread).

    At most `MAX_WAITING` are under way, so that what is found takes bounded memory.
    """
    waiting: deque[Future[_Found]] = deque()
    try:
        for task in tasks:
            waiting.append(executor.submit(function, task))
            if len(waiting) >= MAX_WAITING:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
