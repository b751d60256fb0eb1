"""The uploader: one process a host and run that owns the remote store.

``python -m torchinstruments.store.uploader SPOOL`` reads the address and its options from standard input,
takes over or takes ``uploader.lock``, and works until no process of the run is alive on this host and its
spool is empty. A store that fails is tried again with growing pauses; one that fails for a day after the last
process has ended is given up, and the spool stays for the next uploader. One that is asked for its place ends
after the request that it is at. It never imports torch or Polars.

The same loop runs in a thread where only the training process can reach the address.
"""

import argparse
import contextlib
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from torchinstruments.errors import (
    ConfigurationError,
    StorageDeniedError,
    StorageNotFoundError,
    StorageUnreachableError,
)
from torchinstruments.store.filesystem import Storage, open_storage
from torchinstruments.store.locks import FileLock
from torchinstruments.store.shipment import Shipment
from torchinstruments.store.spool_folder import (
    ABOUT,
    LOG,
    UNREADABLE,
    UPLOADER_LOCK,
    UPLOADER_NICENESS,
    process_folders,
)
from torchinstruments.store.uploader_state import (
    UploaderState,
    clear_handover,
    clear_uploader_state,
    is_handover_wanted,
    write_uploader_state,
)
from torchinstruments.store.urls import scrub, secrets_of

__all__ = ["GIVE_UP_AFTER_S", "Backoff", "Uploader", "main"]

GIVE_UP_AFTER_S = 24 * 3600.0
"""So long an uploader goes on trying after the last process of its run has ended."""

_ROUND_S = 1.0
_LOOK_S = 0.2
_HURRY_S = 25.0
_WAIT_FOR_LOCK_S = 3.0
_MAX_LOG_BYTES = 256 * 1024
_REQUEST_TIMEOUT_S = 30.0
_EXIT_GAVE_UP = 3
_NOT_NOW = (StorageDeniedError, StorageNotFoundError, StorageUnreachableError, ConfigurationError)


class Backoff:
    """When to try again: pauses that double, with jitter, so that hosts do not come back all at once.

    Args:
        clock: Monotonic seconds.
        jitter: Returns a number from 0 to 1.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._failures = 0
        self._tried_s = 0.0
        self._pause_s = 0.0
        self.failing_since_s: float | None = None

    def succeeded(self) -> None:
        """Starts over."""
        self._failures = 0
        self._pause_s = 0.0
        self.failing_since_s = None

    def failed(self, *, slowly: bool) -> None:
        """Lengthens the pause: up to a minute; to five where it hardly passes by itself."""
        first_s, longest_s = (60.0, 300.0) if slowly else (1.0, 60.0)
        self._failures += 1
        self._tried_s = self._clock()
        if self.failing_since_s is None:
            self.failing_since_s = self._tried_s
        pause_s = min(longest_s, first_s * 2.0 ** min(self._failures - 1, 10))
        self._pause_s = pause_s * (0.5 + 0.5 * self._jitter())

    def is_due(self, *, somebody_waits: bool) -> bool:
        """Returns whether to try now; while somebody waits, no pause is longer than five seconds."""
        pause_s = min(self._pause_s, 5.0) if somebody_waits else self._pause_s
        return self._clock() - self._tried_s >= pause_s


class Uploader:
    """Uploads one spool until nothing is left to upload.

    Args:
        spool: The spool of the run.
        url: The address that the user asked for, with its secrets.
        storage_options: Settings in fsspec's dialect.
        lock: ``uploader.lock``, held.
        give_up_after_s: Seconds of failing after the last process has ended.
        once: Whether to end as soon as everything that lies there is up, although processes still write; it
            then gives up after `give_up_after_s` whoever lives, and at once where the store refuses.
        open_remote: Opens the address.
        after_put: See `Shipment`.
        after_round: Called after each try of a process's folder.

    Attributes:
        last_error: Why uploading fails at present, without secrets; ``""`` while it does not.
    """

    def __init__(
        self,
        spool: Path,
        url: str,
        storage_options: Mapping[str, object] | None,
        lock: FileLock,
        *,
        give_up_after_s: float = GIVE_UP_AFTER_S,
        once: bool = False,
        open_remote: Callable[..., Storage] = open_storage,
        after_put: Callable[[str], None] | None = None,
        after_round: Callable[[], None] | None = None,
    ) -> None:
        self._spool = spool
        self._url = url
        self._storage_options = storage_options
        self._secrets = secrets_of(url, storage_options)
        self._lock = lock
        self._give_up_after_s = give_up_after_s
        self._open_remote = open_remote
        self._once = once
        self._after_put = after_put
        self._after_round = after_round
        self._started_at_s = time.monotonic()
        self._refused = False
        self.last_error = ""
        self._is_noted = False
        self._base: Storage | None = None
        self._shipments: dict[str, Shipment] = {}
        self._unknown: set[str] = set()
        self._backoff = Backoff()
        self._last_said = ""
        self._hurry_until_s: float | None = None
        self._wake = threading.Event()

    def hurry(self) -> None:
        """Uploads everything at once from now on, and ends after 25 s in any case (signal handler)."""
        if self._hurry_until_s is None:
            self._hurry_until_s = time.monotonic() + _HURRY_S
        self._wake.set()

    def run(self) -> int:
        """Works until nothing is left or another one asks; returns the exit code, 0 or 3 where it gave up."""
        self._say(f"uploader {os.getpid()} begins")
        with contextlib.suppress(OSError):
            clear_handover(self._spool)
        self._note("")
        try:
            while True:
                if not self._lock.is_at(self._spool / UPLOADER_LOCK):
                    return 0  # the spool was removed; who makes it again has an uploader of its own
                more = self._round()
                if not self._shipments and self._leave():
                    return 0
                if is_handover_wanted(self._spool):
                    self._say("hands over to another uploader, as it was asked to")
                    with contextlib.suppress(OSError):
                        clear_handover(self._spool)
                    return 0
                if self._once and not more and self._backoff.failing_since_s is None:
                    self._say("ends, for what lay here is up; processes still write")
                    return 0
                if self._hurry_until_s is not None and time.monotonic() >= self._hurry_until_s:
                    self._say("ends as it was asked to; what is left stays in the spool")
                    return 0
                if self._has_given_up():
                    self._say("gives up; what is left stays in the spool for the next uploader")
                    return _EXIT_GAVE_UP
                if not more:
                    self._rest()
        finally:
            self._lock.release()

    def _round(self) -> bool:
        """Goes once over all processes; returns whether there is more to do at once."""
        self._look_for_processes()
        if not self._backoff.is_due(somebody_waits=self._somebody_waits()):
            return False
        more = False
        urgent = self._once or self._hurry_until_s is not None
        failures = 0
        for shipment in list(self._shipments.values()):
            if is_handover_wanted(self._spool):
                return True
            try:
                is_left = shipment.ship(self._opened(), urgent=urgent)
                more = more or is_left
                if not is_left and shipment.remove_if_done():
                    del self._shipments[shipment.folder.name]
            except Exception as error:  # noqa: BLE001 - nothing may end the uploader while rows are left
                failures += 1
                if self._failed(shipment, error):
                    return False
            finally:
                if self._after_round is not None:
                    self._after_round()
        if not failures:
            self._backoff.succeeded()
            self._note("")
        return more

    def _failed(self, shipment: Shipment, error: Exception) -> bool:
        """Notes a failure; returns whether the others need not be tried now."""
        text = scrub(f"{type(error).__name__}: {error}", self._secrets)
        if text != self._last_said:
            self._say(text)
            self._last_said = text
        self._note(text)
        slowly = isinstance(error, (StorageDeniedError, StorageNotFoundError, ConfigurationError))
        self._backoff.failed(slowly=slowly)
        self._refused = slowly
        if slowly:
            self._base = None  # a client of its own next time, which looks for credentials anew
        concerns_all = isinstance(error, _NOT_NOW)
        for one in self._shipments.values() if concerns_all else (shipment,):
            one.forget_home(is_gone=isinstance(error, StorageNotFoundError))
            with contextlib.suppress(OSError):
                one.note_error(text)
        return concerns_all

    def _note(self, text: str) -> None:
        """Tells whoever looks into the spool who is at work, and what fails."""
        if text == self.last_error and self._is_noted:
            return
        self.last_error = text
        with contextlib.suppress(OSError):
            write_uploader_state(self._spool, UploaderState(os.getpid(), self._started_at_s, text))
            self._is_noted = True

    def _opened(self) -> Storage:
        if self._base is None:
            self._base = self._open_remote(self._url, self._storage_options, timeout_s=_REQUEST_TIMEOUT_S)
        return self._base

    def _look_for_processes(self) -> None:
        folders = {folder.name: folder for folder in process_folders(self._spool)}
        for name, shipment in list(self._shipments.items()):
            if name not in folders or shipment.was_made_again():
                del self._shipments[name]
        for name, folder in folders.items():
            if name in self._shipments or name in self._unknown:
                continue
            try:
                self._shipments[name] = Shipment(folder, self._say, after_put=self._after_put)
            except FileNotFoundError:
                continue
            except msgspec.DecodeError as error:
                self._unknown.add(name)
                self._say(f"{folder} was not written by this release and is left alone: {error}")

    def _somebody_waits(self) -> bool:
        return (
            self._once
            or self._hurry_until_s is not None
            or any(one.has_request() for one in self._shipments.values())
        )

    def _rest(self) -> None:
        end_s = time.monotonic() + _ROUND_S
        while (left_s := end_s - time.monotonic()) > 0:
            if self._wake.wait(min(_LOOK_S, left_s)):
                self._wake.clear()
                return
            if is_handover_wanted(self._spool):
                return
            if self._backoff.failing_since_s is None and self._somebody_waits():
                return

    def _has_given_up(self) -> bool:
        since_s = self._backoff.failing_since_s
        if since_s is not None and self._once and self._refused:
            return True
        if since_s is None or time.monotonic() - since_s < self._give_up_after_s:
            return False
        return self._once or all(shipment.is_over() for shipment in self._shipments.values())

    def _leave(self) -> bool:
        """Clears the empty spool and frees the lock; returns False where a process came in between."""
        self._say("ends, for nothing is left to upload")
        with contextlib.suppress(OSError):
            (self._spool / UNREADABLE).rmdir()
        if not (self._spool / UNREADABLE).exists() and not self._unknown:
            (self._spool / LOG).unlink(missing_ok=True)
        clear_uploader_state(self._spool)
        (self._spool / UPLOADER_LOCK).unlink(missing_ok=True)
        self._lock.release()
        with contextlib.suppress(OSError):
            self._spool.rmdir()
        if not any(
            folder.name not in self._unknown and (folder / ABOUT).exists()
            for folder in process_folders(self._spool)
        ):
            return True
        with contextlib.suppress(FileNotFoundError):
            lock = FileLock.acquire(self._spool / UPLOADER_LOCK)
            if lock is not None:
                self._lock = lock
                self._is_noted = False
                self._note(self.last_error)
                return False
        return True

    def _say(self, text: str) -> None:
        """Writes a line to the bounded log."""
        path = self._spool / LOG
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {scrub(text, self._secrets)}\n"
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(descriptor).st_size > _MAX_LOG_BYTES:
                    os.ftruncate(descriptor, 0)
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)


def main(arguments: list[str] | None = None) -> int:
    """Runs the uploader of one spool; 3 where it gave up, else 0."""
    parser = argparse.ArgumentParser(prog="python -m torchinstruments.store.uploader", description=__doc__)
    parser.add_argument("spool", type=Path, help="folder of the run's spool")
    parser.add_argument(
        "--lock-descriptor", type=int, default=None, help="descriptor of the lock, held by the parent"
    )
    given = parser.parse_args(arguments)
    url, storage_options = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    lock_path = given.spool / UPLOADER_LOCK
    lock = FileLock.adopt(given.lock_descriptor, lock_path) if given.lock_descriptor is not None else None
    if lock is None:
        try:
            lock = FileLock.acquire(lock_path, timeout_s=_WAIT_FOR_LOCK_S)
        except FileNotFoundError:
            return 0  # the spool is gone: nothing to do
    if lock is None:
        return 0
    with contextlib.suppress(OSError):
        # Training goes first; whoever started this process has usually seen to it.
        os.setpriority(os.PRIO_PROCESS, 0, max(UPLOADER_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    uploader = Uploader(given.spool, url, storage_options, lock)

    def on_signal(_number: int, _frame: object) -> None:
        uploader.hurry()

    signal.signal(signal.SIGTERM, on_signal)
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    return uploader.run()


if __name__ == "__main__":
    sys.exit(main())
