"""Real ranks for tests: processes with an initialised gloo group, started once and reused.

::

    def whole_world(scale):
        import torch
        import torch.distributed as dist
        value = torch.tensor([scale * dist.get_rank()])
        dist.all_reduce(value)
        return value.item()

    assert run_ranks(whole_world, 2, 10) == [10, 10]

Each rank is a spawned process with torchrun's variables, one torch thread, and a group over a store that the
calling process hosts on the loopback address, so that the store outlives a rank as torchrun's does. A
function is found in the ranks by its module, or by its file where the module cannot be imported there.
"""

import contextlib
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

__all__ = ["RankFailure", "RankPool", "run_ranks"]

Result = TypeVar("Result")

_START_TIMEOUT_S = 90.0
_GROUP_TIMEOUT_S = 60.0
_AFTER_FAILURE_S = 5.0
_EXIT_TIMEOUT_S = 5.0


class RankFailure(RuntimeError):  # noqa: N818
    """A function failed on at least one rank.

    Attributes:
        tracebacks: Rank to traceback, or to a sentence for a rank that died or did not answer in time.
    """

    def __init__(self, tracebacks: Mapping[int, str]) -> None:
        """Makes a failure.

        Args:
            tracebacks: By rank.
        """
        self.tracebacks = dict(tracebacks)
        ranks = ", ".join(map(str, self.tracebacks))
        texts = "\n".join(f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in self.tracebacks.items())
        super().__init__(f"failed on rank {ranks}\n{texts}")


def run_ranks(
    fn: Callable[..., Result], world_size: int = 2, *args: Any, timeout_s: float = 120.0, **kwargs: Any
) -> list[Result]:
    """Runs a function on every rank of a new world and returns what each rank returned, by rank.

    Args:
        fn: A function at the top of a module; it runs with the process group initialised.
        world_size: Ranks, from 1.
        *args: For the function, the same on all ranks; they are pickled.
        timeout_s: Seconds for the function, without the start of the processes.
        **kwargs: For the function, too.

    Raises:
        RankFailure: The function raised, a rank died, or the time was over.
    """
    with RankPool(world_size) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s, **kwargs)


@dataclass(frozen=True, slots=True)
class _Task:
    """A function by name, and its arguments."""

    module: str
    path: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self) -> object:
        found: Any = _load(self.module, self.path)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found(*self.args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a rank sends back."""

    value: object = None
    failure: str = ""


class RankPool:
    """Ranks that are started once, at the first `run`, and take one function after the other.

    A pool survives an exception in a function. Where a rank died or still hangs, as in a collective that
    another rank left, all its processes are ended, and the next `run` starts new ones.
    """

    def __init__(self, world_size: int = 2, *, environ: Mapping[str, str] | None = None) -> None:
        """Makes a pool that has no processes yet.

        Args:
            world_size: Ranks, from 1.
            environ: Further variables for the ranks.
        """
        if world_size < 1:
            raise ValueError(f"world_size={world_size} is not possible; a world has at least 1 rank")
        self.world_size = world_size
        self._environ = dict(environ or {})
        self._store: dist.TCPStore | None = None
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, by rank; empty while there are none."""
        return tuple(process.pid or 0 for process in self._processes)

    def run(
        self, fn: Callable[..., Result], *args: Any, timeout_s: float = 120.0, **kwargs: Any
    ) -> list[Result]:
        """Runs a function on every rank and returns what each returned, by rank.

        Args:
            fn: A function at the top of a module.
            *args: For the function, the same on all ranks; they are pickled.
            timeout_s: Seconds for the function.
            **kwargs: For the function, too.

        Raises:
            RankFailure: The function raised, a rank died, or the time was over.
        """
        if not self._processes:
            self._start()
        task = _as_task(fn, args, kwargs)
        for connection in self._connections:
            # A rank that died says so when its answer is asked for.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send(task)
        answers, missing = self._collect(timeout_s)
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure} | missing
        if missing:
            self._end(0.0)
        if failures:
            raise RankFailure(dict(sorted(failures.items())))
        results: list[Any] = [answers[rank].value for rank in range(self.world_size)]
        return results

    def close(self) -> None:
        """Ends the ranks and waits for each, so that no zombie is left. Twice is once."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        self._end(_EXIT_TIMEOUT_S)

    def _end(self, timeout_s: float) -> None:
        """Waits for the ranks to end by themselves, and ends those that do not."""
        deadline_s = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._processes.clear()
        self._store = None

    def _start(self) -> None:
        # Port 0 lets the system choose a free one, which nobody can take before the ranks come.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            environ = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                **self._environ,
            }
            process = context.Process(
                target=_serve_rank, args=(theirs, environ), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        answers, missing = self._collect(_START_TIMEOUT_S)
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure} | missing
        if failures:
            self._end(0.0)
            raise RankFailure(dict(sorted(failures.items())))

    def _collect(self, timeout_s: float) -> tuple[dict[int, _Answer], dict[int, str]]:
        """Returns the answers by rank, and a sentence for each rank that gave none."""
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: dict[int, _Answer] = {}
        missing: dict[int, str] = {}
        deadline_s = time.monotonic() + timeout_s
        while waiting:
            left_s = deadline_s - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, left_s))
            for connection in ready:
                if not isinstance(connection, Connection):
                    continue
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    self._processes[rank].join(_EXIT_TIMEOUT_S)
                    missing[rank] = f"the process died with exit code {self._processes[rank].exitcode}"
                if rank in missing or answers[rank].failure:
                    # The others may hang in a collective that this rank left.
                    deadline_s = min(deadline_s, time.monotonic() + _AFTER_FAILURE_S)
            if not ready and left_s <= 0:
                missing.update(dict.fromkeys(waiting.values(), "no answer in time; the process was ended"))
                break
        return answers, missing


def _as_task(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Task:
    name = getattr(fn, "__qualname__", "")
    module = sys.modules.get(getattr(fn, "__module__", ""))
    if module is None or not name or "<" in name:
        raise ValueError(f"{fn!r} cannot be sent to ranks; give a function at the top of a module")
    spec_name = module.__spec__.name if module.__spec__ is not None else module.__name__
    path = getattr(module, "__file__", None) or ""
    return _Task(spec_name, os.path.abspath(path) if path else "", name, args, kwargs)


def _load(name: str, path: str) -> object:
    """Imports a module by name, or from its file where the name leads nowhere, or to another file."""
    with contextlib.suppress(ImportError):
        module = importlib.import_module(name)
        if not path or os.path.abspath(getattr(module, "__file__", None) or "") == path:
            return module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"the module {name} of {path!r} cannot be imported in a rank")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _serve_rank(connection: Connection, environ: Mapping[str, str]) -> None:
    """The life of one rank: joins the group, then runs what comes until None comes."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    try:
        store = dist.TCPStore(
            environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
        )
        connection.send(_Answer())
    except Exception:  # noqa: BLE001
        connection.send(_Answer(failure=traceback.format_exc()))
        return
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            break
        except Exception:  # noqa: BLE001
            connection.send(_Answer(failure=traceback.format_exc()))
            continue
        if task is None:
            break
        try:
            connection.send(_Answer(task.call()))
        except Exception:  # noqa: BLE001
            connection.send(_Answer(failure=traceback.format_exc()))
    dist.destroy_process_group()
