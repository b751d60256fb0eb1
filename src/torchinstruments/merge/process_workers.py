"""Worker processes of this machine, each of which may die without taking the merge with it.

A pool of several processes breaks as a whole when one of them dies, and does not say which task it was that
killed it. So each worker is a pool of one: the task that it was running is known, is tried again in a new
process, and after a few deaths ends the merge with an error that names it.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

from typing_extensions import override

from torchinstruments.errors import ConfigurationError, WorkerLostError
from torchinstruments.merge.limits import limit_memory

__all__ = ["MAX_TRIES", "ProcessWorkers"]

MAX_TRIES = 3
"""Times that a task is begun; a task that ends a process so often is given up."""

_Parameters = ParamSpec("_Parameters")
_Found = TypeVar("_Found")


class ProcessWorkers(ThreadPoolExecutor):
    """Runs tasks in spawned processes, one at a time in each (offline).

    Args:
        num_workers: Processes at most.
        memory_bytes: What each may take beside what it has when it begins; None for no bound.
    """

    def __init__(self, num_workers: int, memory_bytes: int | None = None) -> None:
        super().__init__(num_workers, thread_name_prefix="torchinstruments-merge")
        self._memory_bytes = memory_bytes
        self._local = threading.local()
        self._slots_lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._is_ended = False

    @override
    def submit(
        self, fn: Callable[_Parameters, _Found], /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> Future[_Found]:
        """Queues a task."""
        return super().submit(self._run, fn, *args, **kwargs)  # type: ignore[arg-type] - bound, with its task

    def end(self) -> None:
        """Ends all workers at once, whatever they do; what was queued is cancelled (caller's thread)."""
        with self._slots_lock:
            self._is_ended = True
            slots = list(self._slots)
        for slot in slots:
            slot.kill()
        self.shutdown(wait=True, cancel_futures=True)

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the workers once they have done what they do."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        with self._slots_lock:
            slots = list(self._slots)
            self._slots.clear()
        for slot in slots:
            slot.close()

    def _run(
        self, function: Callable[_Parameters, _Found], *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> _Found:
        lost: BrokenProcessPool | None = None
        for _ in range(MAX_TRIES):
            try:
                return self._slot().submit(function, *args, **kwargs).result()
            except BrokenProcessPool as error:
                self._drop_slot()
                lost = error
        raise WorkerLostError(
            f"a worker process died {MAX_TRIES} times over one task; where memory ran out, use threads, or a "
            f"machine with more"
        ) from lost

    def _slot(self) -> "_Slot":
        slot: _Slot | None = getattr(self._local, "slot", None)
        if slot is None:
            slot = self._local.slot = _Slot(self._memory_bytes)
            with self._slots_lock:
                self._slots.append(slot)
            if not self._is_ended:
                slot.start()
        # Looked at after a start: what has no process yet when the workers are ended is not killed with them.
        if self._is_ended:
            slot.kill()
            raise WorkerLostError("the merge was cancelled")
        return slot

    def _drop_slot(self) -> None:
        slot: _Slot = self._local.slot
        self._local.slot = None
        with self._slots_lock, contextlib.suppress(ValueError):
            self._slots.remove(slot)
        slot.close()


class _Slot:
    """One worker process."""

    def __init__(self, memory_bytes: int | None) -> None:
        # Spawned: a fork of a process with threads, as this one is, may hang.
        self._pool = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
            initargs=(memory_bytes,),
        )
        self._pid: int | None = None

    def start(self) -> None:
        """Begins the process.

        Raises:
            ConfigurationError: It cannot be begun.
        """
        # Ctrl-C is for the process that merges; a new one inherits what the thread that begins it blocks.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._pid = self._pool.submit(os.getpid).result()
        except BrokenProcessPool as error:
            raise ConfigurationError(
                "a worker process could not be started: in a script, merge_run(executor='processes') has to "
                "stand below if __name__ == '__main__':, for each worker imports the script; or use threads"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    def submit(
        self, function: Callable[_Parameters, _Found], *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> Future[_Found]:
        """Hands the process its only task."""
        return self._pool.submit(function, *args, **kwargs)

    def kill(self) -> None:
        """Ends the process, whatever it does."""
        for child in multiprocessing.active_children():
            if child.pid == self._pid:
                child.kill()

    def close(self) -> None:
        """Waits until the process is gone."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker(memory_bytes: int | None) -> None:
    """Ends with the process that merges, however that ends (worker)."""
    if memory_bytes is not None:
        limit_memory(memory_bytes)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.join,), daemon=True).start()


def _end_with(wait: Callable[[], None]) -> None:
    wait()
    os._exit(1)
