"""Work for an executor, taken back in the order in which it was given."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from typing import Protocol, TypeVar

from torchinstruments.errors import TorchInstrumentsError, WorkerLostError
from torchinstruments.merge.rank_sets import ranks_text

__all__ = ["MAX_WAITING", "MAX_WAITING_BLOCKS", "OfRanks", "in_order"]

MAX_WAITING = 64
"""Tasks that run, or wait with their results, ahead of the one that is taken next."""

MAX_WAITING_BLOCKS = 8
"""The same for tasks that compare all ranks, whose answers may be as large as what they read."""

MAX_WAITING_WEIGHT = 262_144
"""Series of the results that wait, some 250 bytes each; `MAX_WAITING_BLOCKS` results may wait always."""


class OfRanks(Protocol):
    """A task that says which ranks' files it reads, so that what fails can be told by rank."""

    @property
    def read_ranks(self) -> tuple[int, ...]:
        """The ranks."""
        ...


_Task = TypeVar("_Task", bound=OfRanks)
_Found = TypeVar("_Found")


def in_order(
    executor: Executor,
    function: Callable[[_Task], _Found],
    tasks: Iterable[_Task],
    *,
    max_waiting: int | None = None,
    weight: Callable[[_Found], int] | None = None,
) -> Generator[_Found]:
    """Yields what a function finds for each task, in the order of the tasks (offline, the caller's thread).

    Only so many are under way, so that what is found takes bounded memory.

    Args:
        executor: Where the function runs.
        function: Importable by name, for another process or machine.
        tasks: What it is called with, one after the other.
        max_waiting: Tasks under way at most; None for `MAX_WAITING`.
        weight: How many series a result has, where that is what it takes memory for: the more, the fewer
            tasks are under way. None where results are small.

    Raises:
        WorkerLostError: A worker died over a task, as often as it was tried.
        TorchInstrumentsError: What the function raised. Of either ``failures`` says which ranks, and why.
    """
    waiting: deque[tuple[_Task, Future[_Found]]] = deque()
    most = MAX_WAITING if max_waiting is None else max_waiting
    least = min(most, MAX_WAITING_BLOCKS)
    bound = most if weight is None else least
    try:
        for task in tasks:
            waiting.append((task, executor.submit(function, task)))
            while len(waiting) >= bound:
                found = _next(waiting)
                if weight is not None:
                    bound = max(least, min(most, MAX_WAITING_WEIGHT // max(1, weight(found))))
                yield found
        while waiting:
            yield _next(waiting)
    except BrokenExecutor as error:
        # The executor takes no more tasks; which of those under way broke it, it does not say.
        raise _lost((), error) from error
    finally:
        for _, future in waiting:
            future.cancel()


def _next(waiting: "deque[tuple[_Task, Future[_Found]]]") -> _Found:
    task, future = waiting.popleft()
    try:
        return future.result()
    except TorchInstrumentsError as error:
        error.failures = _failures(task, error, waiting)
        if isinstance(error, WorkerLostError):
            named = WorkerLostError(f"{_names(task.read_ranks)} could not be read: {error}")
            named.failures = error.failures
            raise named from error
        raise
    except (BrokenExecutor, CancelledError) as error:
        raise _lost(task.read_ranks, error) from error
    except Exception as error:
        error.add_note(f"torchinstruments: while {_names(task.read_ranks)} was read")
        raise


def _lost(ranks: tuple[int, ...], error: Exception) -> WorkerLostError:
    reason = str(error) or type(error).__name__
    lost = WorkerLostError(
        f"the executor lost a worker while {_names(ranks)} was read ({reason}); merge again with a new one"
    )
    lost.failures = dict.fromkeys(ranks, reason)
    return lost


def _failures(
    task: OfRanks, error: TorchInstrumentsError, waiting: "deque[tuple[_Task, Future[_Found]]]"
) -> dict[int, str]:
    """Returns rank to reason, of this task and of those that had failed when it did."""
    found = _of_ranks(task, error)
    for other, future in waiting:
        if future.done() and not future.cancelled():
            raised = future.exception()
            if isinstance(raised, TorchInstrumentsError):
                found = _of_ranks(other, raised) | found
    return dict(sorted(found.items()))


def _of_ranks(task: OfRanks, error: TorchInstrumentsError) -> dict[int, str]:
    """Returns rank to reason: the ranks that the error names, else all that its task reads."""
    return dict(error.failures) or dict.fromkeys(task.read_ranks, str(error))


def _names(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "a rank"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text(ranks)}"
