"""Numbers on their way to the host: one tensor for each device, one copy, and an event to wait for.

What belongs together, all of a sampled step, is left with one `Transfer`, which sends it in one copy. What
the writer thread wants to read before, it copies by itself: nothing waits for a backward that never comes.

Where the device has streams and events the copy goes to pinned memory and the training thread only queues it.
Elsewhere the numbers stay on the device until the writer thread asks for them, and that thread waits.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["DeviceNumbers", "Transfer"]

_ASYNCHRONOUS = frozenset({"cuda", "xpu"})

_QUEUEING_S = 10.0
"""How long a reader waits for a training thread that is just queueing the copy."""


class _Arrival:
    """What one copy brings, of one or more `DeviceNumbers`."""

    def __init__(self, sent: torch.Tensor, copied: Any = None) -> None:
        self._sent = sent
        self._copied = copied
        self._numbers: list[float] | None = None

    def numbers(self) -> list[float]:
        """Waits for the copy and returns all of its numbers (writer thread)."""
        if self._numbers is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._numbers = self._sent.cpu().tolist()
            del self._sent
        return self._numbers


class _Gathered:
    """Numbers side by side on their device, and the point of the stream from which on they are there."""

    def __init__(self, numbers: torch.Tensor, module: Any) -> None:
        self.numbers = numbers
        self._module = module
        self._side: Any = None
        self._stream: Any = None
        self._made: Any = None
        if module is not None:
            # What a reader would need is made here: while a graph is captured no thread may allocate.
            self._side = module.Stream(numbers.device)
            self._stream = module.current_stream(numbers.device)
            self._made = module.Event()
            self._made.record(self._stream)

    def follow(self) -> torch.Tensor:
        """Makes the current stream wait, on the device, and returns the numbers (training thread)."""
        if self._module is not None:
            current = self._module.current_stream(self.numbers.device)
            if current != self._stream:
                current.wait_event(self._made)
                # Its memory belongs to the other stream, which could otherwise reuse it before the copy.
                self.numbers.record_stream(current)
        return self.numbers

    def fetch(self) -> torch.Tensor:
        """Returns the numbers on the host, or what can be asked for them (writer thread)."""
        if self._module is None:
            return self.numbers
        with self._module.stream(self._side):
            self._side.wait_event(self._made)
            return self.numbers.cpu()


class DeviceNumbers:
    """Collects numbers of one device; one copy brings all of them.

    Args:
        device: Where they are.
        dtype: In which they travel: float64, float32 where the device has no other, or int64 for whole
            numbers that have to arrive bit for bit.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._parts: list[torch.Tensor] = []
        self.num_added = 0
        """Numbers so far."""
        # Streams and events of the device's own module: their classes differ from device to device.
        self._module: Any = torch.get_device_module(device) if device.type in _ASYNCHRONOUS else None
        self._streams: list[Any] = []
        self.gathered: _Gathered | None = None
        """Between the last of them and the copy."""
        self._claims = itertools.count()
        self._arrival: _Arrival | None = None
        self._start = 0
        self._is_settled = threading.Event()
        self._failure = "they were never sent to the host"

    @property
    def way(self) -> tuple[torch.device, torch.dtype]:
        """What travels the same way can share a copy."""
        return self._device, self._dtype

    def add(self, numbers: torch.Tensor) -> slice:
        """Takes a tensor of numbers along and returns where they will stand (training thread, hot path)."""
        self._parts.append(numbers.detach().reshape(-1).to(self._dtype))
        if self._module is not None:
            self._streams.append(self._module.current_stream(self._device))
        start = self.num_added
        self.num_added += numbers.numel()
        return slice(start, self.num_added)

    def send(self) -> None:
        """Starts the copy (training thread, hot path). May raise whatever the device raises."""
        self._gather()
        if self.claim():
            self.send_together((self,))

    def leave(self, transfer: "Transfer") -> None:
        """Leaves the copy to a transfer, or to who reads before (training thread, hot path).

        Nothing is added afterwards. May raise whatever the device raises.
        """
        self._gather()
        transfer.take(self)

    def claim(self) -> bool:
        """Returns whether the caller is the first, and so has to bring them to the host (any thread)."""
        return next(self._claims) == 0

    @staticmethod
    def send_together(several: "Sequence[DeviceNumbers]") -> None:
        """Starts one copy for what the caller has claimed (training thread, hot path).

        Args:
            several: Of one device and dtype, and gathered. May raise whatever the device raises.
        """
        failure = ""
        arrival: _Arrival | None = None
        try:
            parts = [one.gathered.follow() for one in several if one.gathered is not None]
            arrival = several[0].started(parts[0] if len(parts) == 1 else torch.cat(parts))
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            start = 0
            for one in several:
                one.settle(arrival, start, failure)
                start += one.num_added

    def read(self, where: slice) -> Sequence[float]:
        """Waits for the copy, or makes it, and returns numbers (writer thread).

        Raises:
            RuntimeError: They could not be brought, and why.
        """
        gathered = self.gathered
        if self._arrival is None and gathered is not None:
            if self.claim():
                try:
                    self.settle(_Arrival(gathered.fetch()), 0, "")
                except Exception as error:
                    self.settle(None, 0, f"{type(error).__name__}: {error}")
                    raise
            else:
                self._is_settled.wait(_QUEUEING_S)
        if self._arrival is None:
            raise RuntimeError(self._failure)
        return self._arrival.numbers()[self._start + where.start : self._start + where.stop]

    def started(self, together: torch.Tensor) -> _Arrival:
        """Starts a copy, and returns what it will bring (training thread, hot path)."""
        if self._module is None:
            return _Arrival(together)
        pinned = torch.empty(together.shape, dtype=self._dtype, device="cpu", pin_memory=True)
        pinned.copy_(together, non_blocking=True)
        # A blocking event lets the writer thread sleep; the default one spins on a core.
        blocking = {"blocking": True} if self._device.type == "cuda" else {}
        copied = self._module.Event(**blocking)
        copied.record(self._module.current_stream(self._device))
        return _Arrival(pinned, copied)

    def settle(self, arrival: _Arrival | None, start: int, failure: str) -> None:
        """Takes what became of the copy (any thread)."""
        self._start = start
        self._failure = failure or self._failure
        self._arrival = arrival
        self.gathered = None
        self._is_settled.set()

    def _gather(self) -> None:
        """Puts the numbers side by side."""
        try:
            self._await_streams()
            self.gathered = _Gathered(torch.cat(self._parts), self._module)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._parts.clear()
            self._streams.clear()

    def _await_streams(self) -> None:
        """Makes the current stream wait, on the device, for those that the numbers come from."""
        if self._module is None:
            return
        current = self._module.current_stream(self._device)
        for part, stream in zip(self._parts, self._streams, strict=True):
            if stream != current:
                current.wait_stream(stream)
                # Its memory belongs to the other stream, which could otherwise reuse it before the copy.
                part.record_stream(current)


class Transfer:
    """What was measured of one sampled step and is still on its devices, to be sent in one copy for each."""

    def __init__(self) -> None:
        self._waiting: deque[DeviceNumbers] = deque()

    def take(self, numbers: DeviceNumbers) -> None:
        """Takes numbers that are gathered (training or autograd thread, hot path)."""
        self._waiting.append(numbers)

    def send(self, on_error: Callable[[str, BaseException], None]) -> None:
        """Starts the copies of what has not been read yet; it never raises (training thread, hot path).

        Call it inside `isolated`, and not while a graph is captured.

        Args:
            on_error: Called with ``"reducer"`` and the exception for each copy that fails; must not raise.
        """
        due: dict[tuple[torch.device, torch.dtype], list[DeviceNumbers]] = {}
        for _ in range(len(self._waiting)):
            try:
                numbers = self._waiting.popleft()
            except IndexError:  # another thread sends too
                break
            if numbers.claim():
                due.setdefault(numbers.way, []).append(numbers)
        for several in due.values():
            try:
                DeviceNumbers.send_together(several)
            except Exception as error:  # noqa: BLE001 - a device that failed before
                on_error("reducer", error)
