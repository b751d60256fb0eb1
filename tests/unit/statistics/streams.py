"""Streams and events for the pretended accelerator, which write down what is asked of them.

They have the shape of ``torch.cuda``. Nothing is really asynchronous: they show who waits for whom and which
thread asks, not what a GPU does.
"""

from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from unit.statistics.accelerator import DEVICE, AcceleratorTensor


class PretendedStream:
    """A stream with a name."""

    def __init__(self, streams: "Streams", name: str) -> None:
        self.streams, self.name = streams, name

    def wait_event(self, event: "PretendedEvent") -> None:
        """Lets the stream wait on the device."""
        self.streams.log.append(f"{self.name} waits for {event.recorded_on}")


class PretendedEvent:
    """An event, recorded on streams."""

    def __init__(self, streams: "Streams") -> None:
        self.streams, self.recorded_on = streams, ""

    def record(self, stream: PretendedStream) -> None:
        """Marks a point of a stream."""
        self.recorded_on = stream.name
        self.streams.log.append(f"record on {stream.name}")

    def synchronize(self) -> None:
        """Lets the calling thread wait."""
        self.streams.log.append(f"wait for {self.recorded_on}")


class Streams:
    """A device's module.

    Attributes:
        log: What was asked, in order.
        current: The current stream, of all threads.
        Event: Makes an event.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = PretendedStream(self, "training")
        streams = self

        class OwnEvent(PretendedEvent):
            def __init__(self) -> None:
                super().__init__(streams)

        self.Event = OwnEvent

    def Stream(self, _: torch.device) -> PretendedStream:
        """Makes a stream that is none of the program's."""
        return PretendedStream(self, "side")

    def current_stream(self, _: torch.device) -> PretendedStream:
        """Returns the current one."""
        return self.current

    @contextmanager
    def stream(self, stream: PretendedStream) -> Generator[None]:
        """Makes a stream the current one."""
        before, self.current = self.current, stream
        yield
        self.current = before


def pretend_streams(
    monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, device_type: str = DEVICE.type
) -> Streams:
    """Makes these modules take a device for one with streams; pinned memory becomes ordinary memory."""
    streams, empty = Streams(), torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        streams.log.extend(["pin"] * pin_memory)
        return empty(*args, **kwargs)

    def outlives(_: torch.Tensor, stream: PretendedStream) -> None:
        streams.log.append(f"memory outlives {stream.name}")

    def module_of(_: torch.device) -> Streams:
        return streams

    for module in modules:
        monkeypatch.setattr(module, "_ASYNCHRONOUS", frozenset({device_type}))
    monkeypatch.setattr(torch, "get_device_module", module_of)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(AcceleratorTensor, "record_stream", outlives, raising=False)
    return streams
