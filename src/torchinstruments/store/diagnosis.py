"""Trying a store out: what a run needs of it, one probe at a time, with a file of the probe's own.

Nothing of a run is read or touched, and nothing stays behind. A probe that fails says why, and those that
need what it did are left out.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchinstruments.errors import TorchInstrumentsError
from torchinstruments.store.filesystem import LocalStorage, Storage, open_storage
from torchinstruments.store.urls import local_path, scrub, secrets_of

__all__ = ["MAX_CLOCK_SKEW_S", "Probe", "probe_store"]

MAX_CLOCK_SKEW_S = 60.0
"""Beyond so much between the host's clock and the store's, ages and interruptions may be judged wrongly."""

_PROBE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe of a store.

    Attributes:
        name: ``open``, ``create``, ``create_again``, ``write``, ``read``, ``list``, ``delete`` or ``clock``.
        outcome: ``ok``, ``warning``, ``failed`` or ``skipped``.
        duration_s: Seconds that it took; None where it was skipped.
        detail: What was found, and for a failure the way out; without secrets.
        clock_skew_s: Of ``clock``, how far the store's clock is ahead of this host's, else None.
    """

    name: str
    outcome: str
    duration_s: float | None
    detail: str
    clock_skew_s: float | None = None


def probe_store(
    url: str, storage_options: Mapping[str, object] | None, *, timeout_s: float
) -> tuple[Probe, ...]:
    """Tries out what a run does with its store (offline).

    Args:
        url: The folder of a run, or where one is to be; it need not exist.
        storage_options: Settings in fsspec's dialect.
        timeout_s: Bound of one request in seconds.

    Returns:
        The probes in the order in which they were made.

    Raises:
        ConfigurationError: The address or the options cannot work at all.
    """
    storage = open_storage(url, storage_options, timeout_s=timeout_s)
    probing = _Probing(storage, secrets_of(url, storage_options))
    missing = _missing_folders(url) if storage.is_local else []
    try:
        probing.run()
    finally:
        for folder in missing:  # innermost first; one that somebody has used meanwhile stays
            try:
                folder.rmdir()
            except OSError:
                break
    return tuple(probing.probes)


class _Found(NamedTuple):
    outcome: str
    detail: str
    clock_skew_s: float | None = None


class _Probing:
    """The probes of one store, one after the other."""

    def __init__(self, storage: Storage, secrets: tuple[str, ...]) -> None:
        self.probes: list[Probe] = []
        self._storage = storage
        self._secrets = secrets
        self._name = f"torchinstruments-doctor-{uuid.uuid4().hex}"
        self._data = uuid.uuid4().bytes * (_PROBE_BYTES // 16)
        self._written_between_s = (0.0, 0.0)

    def run(self) -> None:
        """Makes all probes; the file is deleted whatever happens after its creation."""
        if not self._try("create", self._create):
            self._try("delete", self._delete_quietly)
            for name in ("create_again", "write", "read", "list", "clock"):
                self._skip(name)
            return
        try:
            self._try("create_again", self._create_again)
            wrote = self._try("write", self._write)
            for name, function in (("read", self._read), ("list", self._list), ("clock", self._clock)):
                if wrote:
                    self._try(name, function)
                else:
                    self._skip(name)
        finally:
            self._try("delete", self._delete)

    def _try(self, name: str, function: Callable[[], _Found]) -> bool:
        began_s = time.monotonic()
        try:
            found = function()
        except (TorchInstrumentsError, OSError, NotImplementedError) as error:
            found = _Found("failed", scrub(f"{type(error).__name__}: {error}", self._secrets))
        self.probes.append(
            Probe(name, found.outcome, time.monotonic() - began_s, found.detail, found.clock_skew_s)
        )
        return found.outcome != "failed"

    def _skip(self, name: str) -> None:
        self.probes.append(Probe(name, "skipped", None, "needs what failed before it"))

    def _create(self) -> _Found:
        if not self._storage.create(self._name, b"first " + self._data):
            return _Found(
                "failed", "a file of a random name was there already, so creations cannot be trusted"
            )
        return _Found("ok", f"a file of {_PROBE_BYTES // 1024} KiB")

    def _create_again(self) -> _Found:
        if self._storage.create(self._name, b"second " + self._data):
            return _Found(
                "warning",
                "the store overwrote a file that was there: it ignores conditional creation, so two "
                "runs that start at once may take one folder; give each run a folder of its own",
            )
        return _Found("ok", "refused, since the file is there: one run alone can claim a folder")

    def _write(self) -> _Found:
        began_s = time.time()
        self._storage.replace(self._name, self._data)
        self._written_between_s = (began_s, time.time())
        return _Found("ok", f"{_PROBE_BYTES // 1024} KiB in one request")

    def _read(self) -> _Found:
        if self._storage.read(self._name) != self._data:
            return _Found(
                "failed",
                "other bytes came back than were written: a cache or a proxy lies between; leave it out",
            )
        return _Found("ok", "the bytes that were written")

    def _list(self) -> _Found:
        entries = self._storage.list()
        if self._name not in {entry.path for entry in entries}:
            return _Found(
                "failed",
                "the file is not in the listing, so a merge would miss parts; use a store or a mount that "
                "lists what was written",
            )
        return _Found("ok", f"{len(entries):,} entries, the new one among them")

    def _clock(self) -> _Found:
        found = next(entry for entry in self._storage.list() if entry.path == self._name)
        if found.modified_at is None:
            return _Found(
                "warning",
                "the store tells no time of a change; a run's manifests are judged by the writers' clocks",
            )
        began_s, ended_s = self._written_between_s
        # Stores tell whole seconds, so that a time may seem up to one second early.
        early_s = min(0.0, found.modified_at + 1.0 - began_s)
        skew_s = early_s or max(0.0, found.modified_at - ended_s)
        if abs(skew_s) > MAX_CLOCK_SKEW_S:
            return _Found(
                "warning",
                f"this host's clock and the store's differ by {abs(skew_s):.0f} s; set this host's with "
                f"NTP, since requests are refused at 15 minutes and ages are judged wrongly before that",
                skew_s,
            )
        return _Found("ok", f"the store's clock is {skew_s:+.1f} s from this host's, to the second", skew_s)

    def _delete(self) -> _Found:
        self._remove()
        try:
            self._storage.read(self._name)
        except FileNotFoundError:
            return _Found("ok", "nothing of the probe is left")
        return _Found("failed", f"{self._storage.url}/{self._name} is still there; delete it")

    def _delete_quietly(self) -> _Found:
        """After a creation whose outcome is not known."""
        try:
            self._remove()
        except (TorchInstrumentsError, OSError):
            return _Found("skipped", "needs what failed before it")
        return _Found("ok", "nothing of the probe is left")

    def _remove(self) -> None:
        if isinstance(self._storage, LocalStorage):
            (Path(self._storage.url) / self._name).unlink(missing_ok=True)
            return
        from torchinstruments.store.remote import FsspecStorage

        assert isinstance(self._storage, FsspecStorage)
        self._storage.remove(self._name)


def _missing_folders(url: str) -> list[Path]:
    """Returns the folders that a write would make, innermost first."""
    folder = Path(local_path(url))
    return [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
