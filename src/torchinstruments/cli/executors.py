"""The arguments that say where the tasks of a merge run."""

import argparse
import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING

from torchinstruments.errors import ConfigurationError

if TYPE_CHECKING:
    from torchinstruments.merge.executors import ExecutorChoice

__all__ = ["add_executor_arguments", "chosen_executor"]


def add_executor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares ``--executor``, ``--scheduler`` and ``--scheduler-file``."""
    parser.add_argument(
        "--executor",
        choices=("threads", "processes", "dask"),
        help="where ranks are read: in threads (default), in processes of this machine, or on a dask cluster",
    )
    parser.add_argument(
        "--scheduler", metavar="ADDRESS", help="dask scheduler, such as tcp://host:8786; implies dask"
    )
    parser.add_argument(
        "--scheduler-file", metavar="FILE", help="file that the dask scheduler wrote; implies dask"
    )


@contextlib.contextmanager
def chosen_executor(arguments: argparse.Namespace) -> Generator["ExecutorChoice"]:
    """Yields what ``merge_run`` takes as executor, connected where a scheduler was named.

    Raises:
        ConfigurationError: The arguments contradict each other, or the scheduler cannot be reached.
    """
    address: str | None = arguments.scheduler
    file: str | None = arguments.scheduler_file
    name: str | None = arguments.executor
    if address is None and file is None:
        yield None if name is None else _named(name)
        return
    if address is not None and file is not None:
        raise ConfigurationError("--scheduler and --scheduler-file were both given; give one of them")
    if name not in {None, "dask"}:
        raise ConfigurationError(
            f"--executor {name} has no scheduler; leave --scheduler and --scheduler-file away, or use dask"
        )
    from torchinstruments.merge.dask_workers import open_client

    with contextlib.closing(open_client(address, file)) as client:
        yield client


def _named(name: str) -> "ExecutorChoice":
    from torchinstruments.merge.executors import EXECUTORS

    return next(one for one in EXECUTORS if one == name)
