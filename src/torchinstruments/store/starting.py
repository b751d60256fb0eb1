"""Seeing to it that one uploader a host and run is alive.

Whoever can take ``uploader.lock`` finds that there is none, starts one, and hands it the lock that it holds:
the kernel keeps it held without a gap, so no two are ever started. Address and options go through a pipe,
never through arguments, variables or files.

An uploader that fails and is older than this process may have been started with what no longer works, such as
credentials that have expired. It is asked for its place, once: whichever follows it is younger.
"""

import contextlib
import os
import pickle
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from torchinstruments.store.children import child_arguments, child_environment
from torchinstruments.store.locks import FileLock
from torchinstruments.store.spool_folder import LOG, UPLOADER_LOCK, UPLOADER_NICENESS
from torchinstruments.store.uploader_state import read_uploader_state, take_over

__all__ = ["UploaderStarter"]

_SETTLE_S = 5.0
_HANDOVER_S = 2.0


class _Detached(subprocess.Popen[bytes]):
    """A process that is meant to outlive this one."""

    # pyrefly: ignore[missing-override-decorator]
    def __del__(self) -> None:
        """Leaves it alone: the warning of the base class is about a process that was forgotten."""


_started: set[_Detached] = set()
"""Uploaders that this process started, kept so that they can be reaped."""


class UploaderStarter:
    """Starts the uploader of one spool where none is alive (writer thread, closing thread).

    Args:
        spool: The spool of the run.
        url: The address that the user asked for, with its secrets.
        storage_options: Settings in fsspec's dialect.
        in_process: Whether only this process can reach the address; the uploader is a thread then.
    """

    def __init__(
        self, spool: Path, url: str, storage_options: Mapping[str, object] | None, *, in_process: bool
    ) -> None:
        self._spool = spool
        self._url = url
        self._storage_options = dict(storage_options or {})
        self._in_process = in_process
        self._made_at_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._process: _Detached | None = None
        self.last_error = ""

    def ensure(self) -> None:
        """Starts an uploader where none is alive; a failure to do so is kept in `last_error`."""
        self._reap()
        try:
            lock = FileLock.acquire(self._spool / UPLOADER_LOCK)
            if lock is None and self._should_replace():
                lock = take_over(self._spool, _HANDOVER_S)
            if lock is None:
                self.last_error = ""
                return
            try:
                if self._in_process:
                    self._start_thread(lock)
                else:
                    self._start_process(lock)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            self.last_error = f"no uploader could be started: {type(error).__name__}: {error}"

    def settle(self) -> None:
        """Gives an uploader in this process the time to clear the spool, once nothing is left to upload."""
        if self._thread is not None:
            self._thread.join(_SETTLE_S)
        self._reap()

    def _should_replace(self) -> bool:
        state = read_uploader_state(self._spool)
        return state is not None and state.last_error != "" and state.started_at_s < self._made_at_s

    def _start_thread(self, lock: FileLock) -> None:
        from torchinstruments.store.uploader import Uploader

        uploader = Uploader(self._spool, self._url, self._storage_options, lock)
        self._thread = threading.Thread(target=uploader.run, daemon=True, name="torchinstruments-uploader")
        self._thread.start()

    def _start_process(self, lock: FileLock) -> None:
        errand = pickle.dumps((self._url, self._storage_options))
        log = os.open(self._spool / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = _Detached(
                child_arguments(
                    "torchinstruments.store.uploader",
                    str(self._spool),
                    "--lock-descriptor",
                    str(lock.descriptor),
                ),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(lock.descriptor,),
                start_new_session=True,
                env=child_environment(),
            )
        finally:
            os.close(log)
        with contextlib.suppress(OSError):
            # Training goes first from the beginning: loading the uploader's modules is work already.
            os.setpriority(os.PRIO_PROCESS, process.pid, UPLOADER_NICENESS)
        lock.close()
        _started.add(process)
        self._process = process
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(errand)

    def _reap(self) -> None:
        for process in list(_started):
            code = process.poll()
            if code is None:
                continue
            _started.discard(process)
            if process is self._process and code:
                self.last_error = f"the uploader ended with exit code {code}; its log is {self._spool / LOG}"
