"""Tasks that end, or hold up, the worker that runs them; importable by spawned processes and dask workers."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from torchinstruments.errors import StorageUnreachableError


@dataclass(frozen=True)
class Order:
    """What a worker has to do.

    Attributes:
        rank: The rank that the task is of.
        folder: Where each try leaves a file.
        deaths: Tries that end the worker; after these the task succeeds.
    """

    rank: int
    folder: Path
    deaths: int = 0

    @property
    def read_ranks(self) -> tuple[int, ...]:
        """The rank."""
        return (self.rank,)

    def tries(self) -> int:
        """How often it was begun."""
        return len(list(self.folder.glob(f"{self.rank}-*")))


def obey(order: Order) -> int:
    """Leaves a file, and kills the process as often as it was told to."""
    tries = order.tries()
    (order.folder / f"{order.rank}-{tries}").touch()
    if tries < order.deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return order.rank * 10


def refuse(order: Order) -> int:
    """Leaves a file and finds no store."""
    (order.folder / f"{order.rank}-{order.tries()}").touch()
    raise StorageUnreachableError(f"no answer for rank {order.rank}")


def linger(order: Order) -> int:
    """Leaves a file with the number of its process, and works on for a long time."""
    (order.folder / f"{order.rank}-{os.getpid()}").touch()
    time.sleep(300)
    return order.rank


def divided(task: object) -> float:
    """A task that fails with its argument at hand."""
    return 1 / (0 if task else 1)
