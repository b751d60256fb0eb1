"""Numbers of one element on their way from a device to the writer thread, without a wait and bounded.

A loss scale changes in place and a scaler's findings are gone after its ``update``, so both are copied when
they are right: into the next slot of a ring that lies on the same device. The training thread queues that
copy and records an event; it reads nothing, and allocates nothing after the first time. Readers (the writer
thread, a report of checks) wait for the events on a stream of the ring's own, fetch the whole ring in one
copy and serve tickets from that.

A ticket that is asked for after the ring went round has no value. It can have no wrong one: the training
thread counts a slot before it queues the copy into it, and the writer looks at that count after its own copy.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch._C import (
    DisableTorchFunction,
    DispatchKey,
    _dispatch_tls_is_dispatch_key_included,
    _is_torch_function_mode_enabled,
    _len_torch_dispatch_stack,
)
from torch.utils._python_dispatch import _disable_current_modes

from torchinstruments.ranks.bare_objects import new_object

__all__ = ["NUM_SLOTS", "Ring", "Rings", "Ticket"]

NUM_SLOTS = 16_384
"""Numbers that a ring holds: thousands of attempts, of which the writer thread sees some in every second."""

# To look a slot up takes torch longer than to fill it.
_NUM_VIEWS = 64

_PRE_DISPATCH = DispatchKey.PreDispatch
_ASYNCHRONOUS = frozenset({"cuda", "xpu"})


@runtime_checkable
class _Distributed(Protocol):
    """A DTensor."""

    def to_local(self) -> torch.Tensor: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """One number of a ring.

    Attributes:
        ring: Where it lies.
        ordinal: Which of all numbers that the ring ever took.
        value: The number, once it was read.
    """

    ring: "Ring"
    ordinal: int
    value: float | None = None

    def read(self) -> float | None:
        """Waits for the number and returns it; None where the ring went round first (any thread).

        Raises:
            Exception: Whatever the device raises.
        """
        if self.value is None:
            self.value = self.ring.read(self.ordinal)
        return self.value


class Ring:
    """Slots on one device.

    Args:
        like: Lies on that device.
        num_slots: How many numbers it holds.
    """

    def __init__(self, like: torch.Tensor, num_slots: int = NUM_SLOTS) -> None:
        device = like.device
        self._num_slots = num_slots
        # A tensor that is made in inference mode could not be written outside of it.
        with torch.inference_mode(mode=False):
            self._buffer = like.new_zeros(num_slots, dtype=_dtype(device))
        # Training threads keep one after the other; the writer never takes it.
        self._keeping = threading.RLock()
        self._reading = threading.RLock()
        self._num_begun = 0
        self._num_kept = 0
        self._views: tuple[int, tuple[torch.Tensor, ...]] = (-1, ())
        self._fetched: torch.Tensor = self._buffer
        self._fetched_ordinals = range(0)
        # Streams and events of the device's own module: their classes differ from device to device.
        self._module: Any = torch.get_device_module(device) if device.type in _ASYNCHRONOUS else None
        self._events: dict[Any, Any] = {}
        self._made_on: Any = None
        self._side: Any = None
        self._arrived: Any = None
        if self._module is not None:
            # What the writer needs is made here: while a graph is captured no thread may allocate.
            self._made_on = self._module.current_stream(device)
            self._side = self._module.Stream(device)
            self._arrived = self._event(blocking=True)
            self._fetched = torch.empty(num_slots, dtype=self._buffer.dtype, device="cpu", pin_memory=True)

    def keep(self, tensor: torch.Tensor) -> Ticket:
        """Takes the number that a tensor holds at this point of its stream (training thread, hot path).

        Args:
            tensor: One element, plain, on the ring's device. It may change afterwards.

        Raises:
            Exception: Whatever the device raises.
        """
        with self._keeping:
            ordinal = self._num_begun
            # Counted first: from here on what the slot held may be gone.
            self._num_begun = ordinal + 1
            slot = ordinal % self._num_slots
            first = slot - slot % _NUM_VIEWS
            if self._views[0] != first:
                self._views = (first, self._views_from(first))
            self._views[1][slot - first].fill_(tensor if tensor.ndim == 0 else tensor.reshape(()))
            if self._module is not None:
                self._record()
            self._num_kept = ordinal + 1
        ticket = new_object(Ticket)
        ticket.ring, ticket.ordinal, ticket.value = self, ordinal, None
        return ticket

    def read(self, ordinal: int) -> float | None:
        """Waits for a number and returns it; None where the ring went round first (any thread).

        Whoever keeps numbers waits for no reader. Readers of a device wait for each other, since what one
        fetches takes the place of what another is about to look at.

        Raises:
            Exception: Whatever the device raises.
        """
        if self._module is None:
            slot = ordinal % self._num_slots
            value = float(self._buffer.select(0, slot).cpu().item())
            return value if ordinal >= self._num_begun - self._num_slots else None
        with self._reading:
            if ordinal >= self._fetched_ordinals.stop:
                self._fetch()
            if ordinal not in self._fetched_ordinals:
                return None
            return float(self._fetched[ordinal % self._num_slots].item())

    def _views_from(self, first: int) -> tuple[torch.Tensor, ...]:
        """Returns some slots, each as a tensor without dimensions."""
        length = min(_NUM_VIEWS, self._num_slots - first)
        return self._buffer.narrow(0, first, length).unbind()

    def _record(self) -> None:
        """Marks the point of the current stream that a reader has to wait for."""
        stream = self._module.current_stream(self._buffer.device)
        event = self._events.get(stream)
        if event is None:
            if stream != self._made_on:
                # The memory must outlive what this stream does to it.
                self._buffer.record_stream(stream)
            event = self._event(blocking=False)
            event.record(stream)
            # Replaced, never changed: the writer may be going through it.
            self._events = {**self._events, stream: event}
            return
        event.record(stream)

    def _fetch(self) -> None:
        """Copies the ring to the host; the training thread's next copies need not wait for it."""
        num_kept = self._num_kept
        with self._module.stream(self._side):
            for event in self._events.values():
                self._side.wait_event(event)
            self._fetched.copy_(self._buffer, non_blocking=True)
            self._arrived.record(self._side)
        self._arrived.synchronize()
        self._fetched_ordinals = range(max(0, self._num_begun - self._num_slots), num_kept)

    def _event(self, *, blocking: bool) -> Any:
        # A blocking event lets the writer thread sleep; the default one spins on a core.
        is_cuda = self._buffer.device.type == "cuda"
        return self._module.Event(blocking=blocking) if is_cuda else self._module.Event()


class Rings:
    """One ring for each device that numbers come from, made at the first of them.

    Args:
        num_slots: Of each ring.
    """

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self._num_slots = num_slots
        self._rings: dict[torch.device, Ring] = {}

    def keep(self, tensor: torch.Tensor) -> Ticket | None:
        """As `keep_all`, of a single tensor (training thread, hot path)."""
        return self.keep_all((tensor,))[0]

    def keep_all(self, tensors: Iterable[torch.Tensor]) -> list[Ticket | None]:
        """Takes the numbers that tensors hold now (training thread, hot path).

        Args:
            tensors: Each of one element, on any device. They may change afterwards.

        Returns:
            None for each while a graph is being captured, which a copy would become part of.

        Raises:
            Exception: Whatever the device raises.
        """
        # Torch includes the key as long as there are modes of before the dispatch: to count those takes
        # longer. A function that asks for all three would be a call more.
        if not (
            _len_torch_dispatch_stack() > 0
            or _is_torch_function_mode_enabled()
            or _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
        ):
            return self._keep(tensors)
        # They may count, cache or rewrite every operation of the program, which this is none of.
        with DisableTorchFunction(), _disable_current_modes():
            return self._keep(tensors)

    def _keep(self, tensors: Iterable[torch.Tensor]) -> list[Ticket | None]:
        tickets: list[Ticket | None] = []
        for tensor in tensors:
            # Nothing here requires a gradient, so that nothing is recorded for autograd.
            local = tensor.detach() if tensor.requires_grad else tensor
            if type(local) is not torch.Tensor and isinstance(local, _Distributed):
                local = local.to_local()
            if local.is_cuda and torch.cuda.is_current_stream_capturing():
                tickets.append(None)
                continue
            ring = self._rings.get(local.device)
            if ring is None:
                ring = self._rings.setdefault(local.device, Ring(local, self._num_slots))
            tickets.append(ring.keep(local))
        return tickets


def _dtype(device: torch.device) -> torch.dtype:
    """Returns float64 where the device has it; a scaler's own numbers are float32."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not getattr(torch.xpu.get_device_properties(device), "has_fp64", True):
        return torch.float32
    return torch.float64
