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
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchinstruments.observe.faults import Faults
from torchinstruments.observe.sharding import ManagedParameters
from torchinstruments.observe.tensors import PARAMETER, NamedTensor, named_tensors
from torchinstruments.ranks.replicas import ReplicaKeys
from torchinstruments.records import Absent, FingerprintRecord, Position
from torchinstruments.statistics.admission import COMPLEX, admit
from torchinstruments.statistics.digests import Digester, unsigned
from torchinstruments.statistics.isolation import functions_off, isolated
from torchinstruments.statistics.transfer import DeviceNumbers

__all__ = ["Fingerprinter", "Fingerprints"]

_PROBE = "fingerprint"
_HOST = frozenset({"cpu"})


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A digest that is still on its way.

    Attributes:
        numbers: Bring it.
        where: Its place among them.
    """

    numbers: DeviceNumbers
    where: slice


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of ``fingerprints`` without its attempt; see `FingerprintRecord`."""

    tensor: str
    kind: str
    replica_key: str
    shape: tuple[int, ...]
    dtype: str
    digest: int | _OnDevice


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """The fingerprints of one attempt: `records.DeferredFingerprints`. Holds no tensor of the model.

    Attributes:
        attempt: Which.
        rows: In the order of the model.
    """

    attempt: int
    rows: tuple[_Row, ...]

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
                    self.attempt,
                    row.tensor,
                    row.kind,
                    row.replica_key,
                    row.shape,
                    row.dtype,
                    _read(row.digest),
                )
                for row in self.rows
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
        rows: list[_Row] = []
        numbers: dict[torch.device, DeviceNumbers] = {}
        with functions_off(), isolated("cpu"):
            try:
                keys = ReplicaKeys(model)
                at_rest = ManagedParameters.of(model).at_rest or {}
                for named in named_tensors(model):
                    part = at_rest.get(id(named.tensor))
                    row = self._row(named if part is None else replace(named, tensor=part), keys, numbers)
                    if row is not None:
                        rows.append(row)
            except Exception as error:  # noqa: BLE001 - nothing may leave a hook
                self._faults.report(_PROBE, "", error)
            for of_device in numbers.values():
                try:
                    of_device.send()
                except Exception as error:  # noqa: BLE001 - whatever a device did; the rows say so when read
                    self._faults.report(_PROBE, "", error)
        return Fingerprints(attempt, tuple(rows))

    def _row(
        self, named: NamedTensor, keys: ReplicaKeys, numbers: dict[torch.device, DeviceNumbers]
    ) -> _Row | None:
        """Returns the row of one tensor; None where there is none, which was told."""
        try:
            if is_lazy(named.tensor):
                self._leave_out(named.name, "its shape is not known yet")
                return None
            admitted = admit(named.tensor, COMPLEX)
            if isinstance(admitted, Absent):
                self._leave_out(named.name, admitted.reason)
                return None
            local, _ = admitted
            return _Row(
                tensor=named.name,
                kind=named.kind,
                replica_key=keys.of(named.tensor) if named.kind == PARAMETER else "",
                shape=tuple(local.shape),
                dtype=str(local.dtype).removeprefix("torch."),
                digest=self._digest(local, numbers),
            )
        except Exception as error:  # noqa: BLE001 - one tensor's failure is its own
            self._faults.report(_PROBE, named.name, error)
            return None

    def _digest(self, local: torch.Tensor, numbers: dict[torch.device, DeviceNumbers]) -> int | _OnDevice:
        """Returns a digest, or where it will be."""
        device = local.device
        if device.type in _HOST:
            return self._digester.on_host(local)
        digest = self._digester.on_device(local)
        if device not in numbers:
            numbers[device] = DeviceNumbers(device, torch.int64)
        return _OnDevice(numbers[device], numbers[device].add(digest))

    def _leave_out(self, name: str, reason: str) -> None:
        """Tells once that a tensor has no fingerprint."""
        if (name, reason) not in self._left_out:
            self._left_out.add((name, reason))
            self._faults.notice(_PROBE, name, f"{name} has no fingerprint: {reason}")


def _read(digest: int | _OnDevice) -> int:
    """Returns a digest, waiting for it where it is on a device (writer thread)."""
    if isinstance(digest, int):
        return digest
    return unsigned(int(digest.numbers.read(digest.where)[0]))
