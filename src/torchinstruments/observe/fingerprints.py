"""Fingerprints of a model's parameters and buffers, once an attempt.

They are taken at the first sampled forward of an attempt, before anything of it has run, and only while the
parameters still are those with which the attempt began. Of a parameter that is gathered at the moment, as
that of a root is after an evaluation, it is the part that this rank keeps, as ever. Ranks may sample
different forwards of an attempt, so that a rank which looked after a step beside one which looked before it
would seem to have lost its way.

Nothing is compared here and no rank is asked: digests go into the table, and whoever reads the tables of all
ranks compares those with equal keys.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchinstruments.observe.faults import Faults
from torchinstruments.observe.sharding import parts_at_rest
from torchinstruments.observe.tensors import PARAMETER, TensorNames
from torchinstruments.ranks.replicas import ReplicaKeys
from torchinstruments.records import Absent, FingerprintRecord, Position
from torchinstruments.statistics.admission import COMPLEX, admit, is_readable
from torchinstruments.statistics.digests import Digester, unsigned
from torchinstruments.statistics.isolation import functions_off, isolated
from torchinstruments.statistics.transfer import DeviceNumbers

__all__ = ["Fingerprinter", "Fingerprints"]

_PROBE = "fingerprint"
_HOST = torch.device("cpu")
_ON_HOST = frozenset({"cpu"})


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A digest that is still on its way.

    Attributes:
        numbers: Bring it.
        where: Its place among them.
    """

    numbers: DeviceNumbers
    where: int


_Row = tuple[str, str, str, torch.Size, torch.dtype]
"""A row of ``fingerprints`` without its attempt and its digest; see `FingerprintRecord`."""


class _Found:
    """What has a fingerprint: rows in the order of the model, and those of each device with their tensors."""

    __slots__ = ("_on_host", "digests", "of_devices", "rows")

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.digests: list[int | _OnDevice | None] = []
        self.of_devices: defaultdict[torch.device, tuple[list[int], list[torch.Tensor]]]
        self.of_devices = defaultdict(lambda: ([], []))
        # To ask for the device itself costs more.
        self._on_host = self.of_devices[_HOST]

    def add(self, row: _Row, tensor: torch.Tensor) -> None:
        """Adds a row and its tensor."""
        places, tensors = self._on_host if tensor.is_cpu else self.of_devices[tensor.device]
        rows = self.rows
        places.append(len(rows))
        tensors.append(tensor)
        rows.append(row)

    def finished(self) -> tuple[Sequence[_Row], Sequence[int | _OnDevice]]:
        """Returns the rows that have a digest, and the digests."""
        digests = [digest for digest in self.digests if digest is not None]
        if len(digests) == len(self.rows):
            return self.rows, digests
        return [
            row for row, digest in zip(self.rows, self.digests, strict=True) if digest is not None
        ], digests


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """The fingerprints of one attempt: `records.DeferredFingerprints`. Holds no tensor of the model.

    Attributes:
        attempt: Which.
        rows: In the order of the model.
        digests: Of each row.
    """

    attempt: int
    rows: Sequence[_Row]
    digests: Sequence[int | _OnDevice]

    @property
    def num_rows(self) -> int:
        """Rows that it holds (training thread, hot path)."""
        return len(self.rows)

    def resolve(self) -> tuple[FingerprintRecord, ...]:
        """Waits for the copies and returns the rows (writer thread).

        Raises:
            RuntimeError: A device did not bring its digests, and why.
        """
        return tuple(
            [
                FingerprintRecord(
                    self.attempt, tensor, kind, key, tuple(shape), _name_of(dtype), _read(digest)
                )
                for (tensor, kind, key, shape, dtype), digest in zip(self.rows, self.digests, strict=True)
            ]
        )


class Fingerprinter:
    """Takes the fingerprints of one model.

    Args:
        faults: Takes errors, and what cannot be fingerprinted.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._digester = Digester()
        self._names = TensorNames()
        self._last_attempt = -1
        self._left_out: set[tuple[str, str]] = set()
        self._lock = threading.RLock()

    def disarm(self) -> None:
        """Makes it usable in a forked child, where the lock may be held for ever."""
        self._lock = threading.RLock()

    def is_due(self, position: Position, *, is_before_every_step: bool) -> bool:
        """Returns whether a sampled forward is to be fingerprinted (training thread, hot path).

        Args:
            position: Where the forward stands.
            is_before_every_step: What `StepClock` says. The forward with which an attempt opens needs no such
                word: every rank finds the parameters there as the attempt before left them.
        """
        if position.attempt is None or not position.grad_enabled:
            return False
        if position.forward_in_attempt > 0 and not is_before_every_step:
            return False
        with self._lock:
            is_new = position.attempt > self._last_attempt
            self._last_attempt = max(position.attempt, self._last_attempt)
        return is_new

    def take(self, model: nn.Module, attempt: int) -> Fingerprints:
        """Starts the digests of all parameters and buffers; it never raises (training thread, hot path).

        Args:
            model: The attached model, as it is now.
            attempt: Which attempt it is that begins.
        """
        found = _Found()
        with functions_off(), isolated("cpu"):
            try:
                self._find(model, found)
            except Exception as error:  # noqa: BLE001 - nothing may leave a hook
                self._faults.report(_PROBE, "", error)
            found.digests = [None] * len(found.rows)
            for device, (places, tensors) in found.of_devices.items():
                if not places:
                    continue
                try:
                    self._digest(device, places, tensors, found)
                except Exception as error:  # noqa: BLE001 - whatever a device did; the rows say so when read
                    self._faults.report(_PROBE, "", error)
        return Fingerprints(attempt, *found.finished())

    def _find(self, model: nn.Module, found: _Found) -> None:
        """Adds the rows of a model, and what is to be digested for them."""
        named, tensors, modules = self._names.of(model)
        keys = ReplicaKeys(modules)
        at_rest = parts_at_rest(model)
        for name, kind, place in named:
            part = tensors[place]
            if part is None:
                continue
            if at_rest:
                part = at_rest.get(id(part), part)
            try:
                local = part if is_readable(part) else self._admitted(name, part)
                if local is not None:
                    key = keys.of(part) if kind == PARAMETER else ""
                    found.add((name, kind, key, local.shape, local.dtype), local)
            except Exception as error:  # noqa: BLE001 - one tensor's failure is its own
                self._faults.report(_PROBE, name, error)

    def _admitted(self, name: str, part: torch.Tensor) -> torch.Tensor | None:
        """Returns what is to be digested of a tensor; None, and tells why, where there is nothing."""
        if is_lazy(part):
            self._leave_out(name, "its shape is not known yet")
            return None
        admitted = admit(part, COMPLEX)
        if isinstance(admitted, Absent):
            self._leave_out(name, admitted.reason)
            return None
        return admitted[0]

    def _digest(
        self, device: torch.device, places: Sequence[int], tensors: Sequence[torch.Tensor], found: _Found
    ) -> None:
        """Gives rows of one device the digests of their tensors, or where these will be."""
        if device.type in _ON_HOST:
            digests, failures = self._digester.several_on_host(tensors)
            for one, error in failures:
                self._faults.report(_PROBE, found.rows[places[one]][0], error)
            if len(digests) == len(found.rows):
                found.digests[:] = digests
            else:
                for place, digest in zip(places, digests, strict=True):
                    found.digests[place] = digest
            return
        numbers = DeviceNumbers(device, torch.int64)
        try:
            for which, on_it in self._digester.several_on_device(tensors):
                if isinstance(on_it, Exception):
                    self._faults.report(_PROBE, found.rows[places[which[0]]][0], on_it)
                else:
                    for where, one in enumerate(which, numbers.add(on_it).start):
                        found.digests[places[one]] = _OnDevice(numbers, where)
        finally:
            numbers.send()

    def _leave_out(self, name: str, reason: str) -> None:
        """Tells once that a tensor has no fingerprint."""
        if (name, reason) not in self._left_out:
            self._left_out.add((name, reason))
            self._faults.notice(_PROBE, name, f"{name} has no fingerprint: {reason}")


def _read(digest: int | _OnDevice) -> int:
    """Returns a digest, waiting for it where it is on a device (writer thread)."""
    if isinstance(digest, int):
        return digest
    return unsigned(int(digest.numbers.read(slice(digest.where, digest.where + 1))[0]))


@cache
def _name_of(dtype: torch.dtype) -> str:
    """Returns a dtype's name as it is stored."""
    return str(dtype).removeprefix("torch.")
