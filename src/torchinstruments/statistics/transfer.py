"""Numbers of one device on their way to the host: one tensor, one copy, and an event to wait for.

Where the device has streams and events the copy goes to pinned memory and the training thread only queues it.
Elsewhere the numbers stay on the device until the writer thread asks for them, and that thread waits.
"""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["DeviceNumbers"]

_ASYNCHRONOUS = frozenset({"cuda", "xpu"})


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
        self._num_added = 0
        # Streams and events of the device's own module: their classes differ from device to device.
        self._module: Any = torch.get_device_module(device) if device.type in _ASYNCHRONOUS else None
        self._streams: list[Any] = []
        self._copied: Any = None
        self._sent: torch.Tensor | None = None
        self._numbers: Sequence[float] | None = None
        self._failure = "they were never sent to the host"

    def add(self, numbers: torch.Tensor) -> slice:
        """Takes a tensor of numbers along and returns where they will stand (training thread, hot path)."""
        self._parts.append(numbers.detach().reshape(-1).to(self._dtype))
        if self._module is not None:
            self._streams.append(self._module.current_stream(self._device))
        start = self._num_added
        self._num_added += numbers.numel()
        return slice(start, self._num_added)

    def send(self) -> None:
        """Starts the copy (training thread, hot path). May raise whatever the device raises."""
        try:
            self._await_streams()
            together = torch.cat(self._parts)
            if self._module is None:
                self._sent = together
                return
            pinned = torch.empty(together.shape, dtype=self._dtype, device="cpu", pin_memory=True)
            pinned.copy_(together, non_blocking=True)
            # A blocking event lets the writer thread sleep; the default one spins on a core.
            blocking = {"blocking": True} if self._device.type == "cuda" else {}
            self._copied = self._module.Event(**blocking)
            self._copied.record(self._module.current_stream(self._device))
            self._sent = pinned
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._parts.clear()
            self._streams.clear()

    def read(self, where: slice) -> Sequence[float]:
        """Waits for the copy and returns numbers (writer thread).

        Raises:
            RuntimeError: They could not be brought, and why.
        """
        if self._numbers is None:
            if self._sent is None:
                raise RuntimeError(self._failure)
            if self._copied is not None:
                self._copied.synchronize()
            self._numbers = self._sent.cpu().tolist()
            self._sent = None
        return self._numbers[where]

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
