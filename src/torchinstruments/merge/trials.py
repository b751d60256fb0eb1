"""Parts of a run that nobody vouches for, each read on trial before the merge reads it.

What a footer claims can be checked; that a page of a few bytes unpacks to gigabytes shows only when it is
unpacked. So a process of its own does that first, with bounds of memory and time and without credentials. A
part over which it dies or goes beyond a bound is set aside by name; a new process goes on with the next one.
"""

import contextlib
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import msgspec

from torchinstruments.errors import ConfigurationError, StorageDeniedError
from torchinstruments.merge.executors import ExecutorChoice
from torchinstruments.merge.plan import MergePlan
from torchinstruments.merge.process_workers import ProcessWorkers
from torchinstruments.merge.tasks import RankTask
from torchinstruments.merge.trial_child import Answer, Errand
from torchinstruments.store.children import child_arguments, child_environment
from torchinstruments.store.documents import UnusableFileError
from torchinstruments.store.inspection import check_size
from torchinstruments.store.inventory import PartFile, SetAside
from torchinstruments.store.storage import Storage

__all__ = ["TRIAL_LIMIT_S", "TRIAL_MEMORY_BYTES", "Child", "bounded_workers", "without_harmful_parts"]

TRIAL_MEMORY_BYTES = 2**30
"""Memory that reading one part may take; ours take less than a fifth of it."""

TRIAL_LIMIT_S = 60
"""Seconds that reading one part may take."""

_WORKER_MEMORY_BYTES = 6 * TRIAL_MEMORY_BYTES
_BEGIN_LIMIT_S = 120
_MAX_READERS = 8
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    # Arrow's other allocators reserve a gigabyte at once, which counts as taken.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
_ALLOWED_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TZ")


@contextlib.contextmanager
def bounded_workers(executor: ExecutorChoice) -> Generator[Executor]:
    """Yields processes of this machine with a bound of memory each (caller's thread).

    Raises:
        ConfigurationError: Another executor was asked for.
    """
    if executor not in {None, "processes"}:
        raise ConfigurationError(
            f"a run that is untrusted cannot be read by executor={executor!r}; leave the executor out, for "
            f"it is read in processes of this machine, whose memory is bounded"
        )
    workers = ProcessWorkers(max(1, os.cpu_count() or 1), _WORKER_MEMORY_BYTES)
    try:
        yield workers
    except BaseException:
        workers.end()
        raise
    workers.shutdown()


def without_harmful_parts(
    plan: MergePlan, *, memory_bytes: int = TRIAL_MEMORY_BYTES, limit_s: int = TRIAL_LIMIT_S
) -> MergePlan:
    """Returns a plan without the parts that cannot be read within the bounds (caller's thread).

    Args:
        plan: What is to be read.
        memory_bytes: What reading one part may take.
        limit_s: Seconds that reading one part may take.

    Raises:
        StorageError: A store did not answer.
        ConfigurationError: No process for trials can be started.
    """
    with _Trials(plan, memory_bytes, limit_s) as trials:
        found = trials.judge([part for task in plan.tasks for parts in task.parts.values() for part in parts])
    harmful = {(one.source, one.path) for one in found}
    tasks = tuple([_without(task, harmful) for task in plan.tasks])
    inventory = replace(plan.inventory, set_aside=(*plan.inventory.set_aside, *found))
    return replace(plan, inventory=inventory, tasks=tasks)


def _without(task: RankTask, harmful: set[tuple[int, str]]) -> RankTask:
    kept = {
        table: tuple([part for part in parts if (part.source, part.path) not in harmful])
        for table, parts in task.parts.items()
    }
    return replace(task, parts=kept)


class _Trials:
    """Several processes for trials, each held by one thread.

    Args:
        plan: What is to be read.
        memory_bytes: What reading one part may take.
        limit_s: Seconds that reading one part may take.
    """

    def __init__(self, plan: MergePlan, memory_bytes: int, limit_s: int) -> None:
        self._plan = plan
        self._generations = {task.rank: task.generations for task in plan.tasks}
        self._window = plan.tasks[0].window if plan.tasks else 1
        self._bounds = memory_bytes, limit_s
        self._local = threading.local()
        self._lock = threading.Lock()
        self._children: list[Child] = []
        self._folder = tempfile.TemporaryDirectory(prefix="torchinstruments-trial-")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.end()
        self._folder.cleanup()

    def judge(self, parts: Sequence[PartFile]) -> list[SetAside]:
        """Returns the parts that are to be left out, in the order given."""
        readers = max(1, min(_MAX_READERS, os.cpu_count() or 1, len(parts)))
        with ThreadPoolExecutor(readers, thread_name_prefix="torchinstruments-trial") as pool:
            reasons = list(pool.map(self._reason, parts))
        return [
            SetAside(part.source, part.path, reason)
            for part, reason in zip(parts, reasons, strict=True)
            if reason
        ]

    def _reason(self, part: PartFile) -> str:
        """Returns why a part is to be left out, ``""`` where the merge may look at it."""
        storage = self._plan.storages[part.source]
        try:
            check_size(part.size_bytes)
            with self._on_this_host(storage, part) as (folder, path):
                return self._tried(folder, replace(part, path=path, source=0))
        except UnusableFileError as error:
            return error.reason
        except (FileNotFoundError, StorageDeniedError):
            return ""  # the merge says so itself

    def _tried(self, folder: str, part: PartFile) -> str:
        errand = Errand(
            folder=folder,
            part=part,
            run_id=self._plan.inventory.run.run_id,
            window=self._window,
            generation=self._generations[part.rank].get(part.process, -1),
            limit_s=2 * self._bounds[1],
        )
        child = self._child()
        reason = child.ask(errand)
        # What earlier parts left behind in the process may have been too much, and not this one.
        if reason and not child.is_first:
            reason = self._child().ask(errand)
        return reason

    def _child(self) -> "Child":
        child: Child | None = getattr(self._local, "child", None)
        if child is None or child.is_over:
            child = self._local.child = Child(*self._bounds)
            with self._lock:
                self._children.append(child)
        return child

    @contextlib.contextmanager
    def _on_this_host(self, storage: Storage, part: PartFile) -> Generator[tuple[str, str]]:
        """Yields folder and path of a file with the bytes of a part."""
        if storage.is_local:
            root = os.path.realpath(storage.url)
            if os.path.commonpath([root, os.path.realpath(os.path.join(root, part.path))]) != root:
                raise UnusableFileError("misplaced", "it is a link that leads out of the run's folder")
            yield storage.url, part.path
            return
        descriptor, name = tempfile.mkstemp(dir=self._folder.name)
        try:
            with os.fdopen(descriptor, "wb") as copy, storage.open_input(part.path, part.size_bytes) as file:
                shutil.copyfileobj(file, copy, 2**20)
            yield self._folder.name, Path(name).name
        finally:
            os.unlink(name)


@dataclass(frozen=True, slots=True)
class _Silence(Exception):  # noqa: N818 - no error but an answer
    """The process ended, or its time was over."""

    reason: str


class Child:
    """One process for trials.

    Args:
        memory_bytes: What reading one part may take.
        limit_s: Seconds that reading one part may take.

    Raises:
        ConfigurationError: It cannot be started.
    """

    def __init__(self, memory_bytes: int, limit_s: int) -> None:
        environment = child_environment()
        self._memory_bytes = memory_bytes
        self._limit_s = limit_s
        self._num_asked = 0
        self._process = subprocess.Popen(
            child_arguments("torchinstruments.merge.trial_child", str(memory_bytes)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Nothing else of it: credentials stay here.
            env={name: environment[name] for name in _ALLOWED_VARIABLES if name in environment} | _SETTINGS,
            start_new_session=True,
        )
        self.is_over = False
        try:
            self._answer(_BEGIN_LIMIT_S)
        except _Silence as silence:
            self.end()
            raise ConfigurationError(
                f"a process that reads parts on trial could not be started ({silence.reason})"
            ) from None

    @property
    def is_first(self) -> bool:
        """Whether it was asked no more than once."""
        return self._num_asked <= 1

    def ask(self, errand: Errand) -> str:
        """Returns why a part is to be left out, ``""`` where it can be read; after a reason, it is over."""
        self._num_asked += 1
        assert self._process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(msgspec.json.encode(errand) + b"\n")
                self._process.stdin.flush()
            reason = self._answer(self._limit_s).reason
        except _Silence as silence:
            reason = silence.reason
        if reason:
            self.end()
        if reason.startswith("over_memory_limit"):
            return f"over_memory_limit: reading it takes more than {self._memory_bytes} bytes"
        return reason

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self.is_over = True
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()

    def _answer(self, limit_s: float) -> Answer:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        due_s = time.monotonic() + limit_s
        line = b""
        nobody: list[int] = []
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], nobody, nobody, max(0.0, due_s - time.monotonic()))
            if not ready:
                raise _Silence(f"over_time_limit: reading it takes more than {limit_s:g} s")
            data = os.read(descriptor, 4096)
            if not data:
                code = self._process.wait()
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise _Silence(f"crashed_reader: {how}")
            line += data
        return msgspec.json.decode(line, type=Answer)
