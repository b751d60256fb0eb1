"""Where the tasks of a merge run: threads, processes, a dask cluster, or whatever the caller has.

All give the same bytes: tasks are pure, and their results are folded in the order of the tasks.
"""

import contextlib
import os
from collections.abc import Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, TypeAlias, Union

from torchinstruments.errors import ConfigurationError
from torchinstruments.merge.dask_workers import DaskWorkers, is_client, open_client
from torchinstruments.merge.process_workers import ProcessWorkers

if TYPE_CHECKING:
    import distributed

__all__ = ["EXECUTORS", "ExecutorChoice", "workers_for"]

EXECUTORS: tuple[Literal["threads", "processes", "dask"], ...] = ("threads", "processes", "dask")
"""Names of executors."""

ExecutorChoice: TypeAlias = Union[
    Literal["threads", "processes", "dask"], Executor, "distributed.Client", None
]
"""What `merge_run` takes as executor."""

_MAX_THREADS = 16


@contextlib.contextmanager
def workers_for(choice: ExecutorChoice) -> Generator[Executor]:
    """Yields where tasks run, and leaves none of its own running however the block ends (caller's thread).

    Args:
        choice: None is ``"threads"``. What the caller made stays open.

    Raises:
        ConfigurationError: There is no such executor, or it cannot be reached.
    """
    if choice is None or choice == "threads":
        pool = ThreadPoolExecutor(_num_threads(), thread_name_prefix="torchinstruments-merge")
        try:
            yield pool
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    elif choice == "processes":
        processes = ProcessWorkers(max(1, os.cpu_count() or 1))
        try:
            yield processes
        except BaseException:
            processes.end()
            raise
        processes.shutdown()
    elif choice == "dask":
        with contextlib.closing(open_client()) as client, _on_cluster(client) as executor:
            yield executor
    elif isinstance(choice, Executor):
        yield choice
    elif is_client(choice):
        with _on_cluster(choice) as executor:
            yield executor
    else:
        raise ConfigurationError(
            f"executor={choice!r} is not possible; give 'threads', 'processes', 'dask', an Executor of "
            f"concurrent.futures, or a distributed.Client"
        )


@contextlib.contextmanager
def _on_cluster(client: "distributed.Client") -> Generator[Executor]:
    if client.asynchronous:
        raise ConfigurationError("the distributed.Client is asynchronous; give one with asynchronous=False")
    executor = DaskWorkers(client)
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _num_threads() -> int:
    return max(2, min(_MAX_THREADS, 2 * (os.cpu_count() or 1)))
