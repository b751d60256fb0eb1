"""Times of an attempt as the accelerator sees them: events on its streams, read by the writer thread.

The host's clock tells when work was queued, the device's when it ran. Where the model lies on an accelerator,
each moment that the step clock is fed with records a timing event on the device's current stream; the moment
is the host's number all the same and carries the event along. When an attempt is over, the writer thread
waits for its events and measures its phases anew.

Nothing here waits on the training thread, and nothing is recorded while a graph is captured. An attempt of
which any moment has no event keeps the host's times, and its row says so: during a capture, beyond the bound
of events, after a failure, or where the device does not come to the events in time.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from torchinstruments.ranks.window import MAX_SPANS, Span, Spans
from torchinstruments.records import Amendment, AttemptRecord

__all__ = ["DEVICE_TYPES", "MAX_EVENTS", "WAIT_S", "DeviceTimes", "Moment", "TimingEvent", "device_times"]

DEVICE_TYPES = frozenset({"cuda", "xpu"})
"""Devices whose events are used."""

MAX_EVENTS = 65_536
"""Events that are made at most; while all of them wait to be read, attempts have the host's times."""

WAIT_S = 10.0
"""For which the writer thread waits for the events of an attempt."""

_LONGEST_SLEEP_S = 0.05


class TimingEvent(Protocol):
    """An event of a device, as `torch.cuda.Event` is."""

    def query(self) -> bool:
        """Returns whether the device has come to it (writer thread)."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Returns the milliseconds from this event to another one (writer thread)."""
        ...


class _Lease:
    """An event that is in use; the last one who lets go of it gives it back."""

    __slots__ = ("_free", "event")

    def __init__(self, event: TimingEvent, free: "deque[TimingEvent]") -> None:
        self.event = event
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.event)


class Moment(float):
    """Seconds of the host's clock, with the event that was recorded at that time."""

    __slots__ = ("lease",)
    lease: _Lease


class DeviceTimes:
    """Makes the moments of one model's step clock, and measures between them; a `ranks.window.DeviceClock`.

    Args:
        make: Makes a timing event.
        record: Records one on the device's current stream.
        is_capturing: Whether a graph is being captured, of which nothing else may become part.
        on_error: Called with the probe ``clock`` and the exception for everything that fails.
        host_now: Monotonic seconds.
        max_events: As `MAX_EVENTS`.
        wait_s: As `WAIT_S`.
    """

    def __init__(
        self,
        make: Callable[[], TimingEvent],
        record: Callable[[Any], None],
        *,
        is_capturing: Callable[[], bool],
        on_error: Callable[[str, BaseException], None],
        host_now: Callable[[], float] = time.perf_counter,
        max_events: int = MAX_EVENTS,
        wait_s: float = WAIT_S,
    ) -> None:
        self._make = make
        self._record = record
        self._is_capturing = is_capturing
        self._on_error = on_error
        self._host_now = host_now
        self._max_events = max_events
        self._wait_s = wait_s
        self._free: deque[TimingEvent] = deque()
        self._making = threading.Lock()
        self._has_failed = False
        self._is_late = False
        self.num_made = 0
        """Events that were made so far."""

    @property
    def num_free(self) -> int:
        """Events that nobody uses now."""
        return len(self._free)

    def now(self) -> float:
        """Returns this moment: the host's seconds, with an event where one can be had (hot path)."""
        now_s = self._host_now()
        if self._has_failed:
            return now_s
        try:
            if self._is_capturing():
                return now_s
            lease = self._lease()
            if lease is None:
                return now_s
            self._record(lease.event)
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            # An event that cannot be recorded once cannot be recorded the next time either.
            self._has_failed = True
            self._on_error("clock", error)
            return now_s
        moment = Moment(now_s)
        moment.lease = lease
        return moment

    def amendments(self, attempts: Sequence[Spans]) -> Sequence[Amendment]:
        """Returns for each record of a window what brings its times (training thread, hot path)."""
        shared = _Shared()
        return [_Amendment(self, spans, shared) for spans in attempts]

    def measure(self, record: AttemptRecord, spans: Spans, shared: "_Shared") -> AttemptRecord:
        """Returns a record with the device's times, or as it was where they cannot be had (writer thread)."""
        if not _has_all_events(spans):
            return record
        try:
            if shared.times is None:
                shared.times = (
                    0.0 if spans.gap is None else self._seconds([spans.gap]),
                    self._seconds(spans.forward),
                    self._seconds(spans.backward),
                )
            step_s = 0.0
            if spans.step is not None:
                step_s = max(0.0, self._seconds([spans.step]) - self._seconds(spans.inside_step))
        except Exception as error:  # noqa: BLE001 - whatever the device did, the host's times are there
            self._on_error("clock", error)
            return record
        gap_s, forward_s, backward_s = shared.times
        return replace(
            record,
            gap_s=None if record.gap_s is None else gap_s,
            forward_s=forward_s,
            backward_s=backward_s,
            optimizer_s=step_s,
            clock="device",
        )

    def _lease(self) -> _Lease | None:
        try:
            return _Lease(self._free.popleft(), self._free)
        except IndexError:
            pass
        with self._making:
            if self.num_made >= self._max_events:
                return None
            self.num_made += 1
        return _Lease(self._make(), self._free)

    def _seconds(self, spans: Sequence[Span]) -> float:
        total_ms = 0.0
        for begin, end in spans:
            assert isinstance(begin, Moment), "looked at before"
            assert isinstance(end, Moment), "looked at before"
            self._wait(begin.lease.event)
            self._wait(end.lease.event)
            total_ms += max(0.0, begin.lease.event.elapsed_time(end.lease.event))
        return total_ms / 1000.0

    def _wait(self, event: TimingEvent) -> None:
        """Waits until the device has come to an event, asleep, and not for ever: a collective may hang."""
        if event.query():
            self._is_late = False
            return
        # Once it came too late, nothing waits again until it has come.
        end_s = time.monotonic() + (0.0 if self._is_late else self._wait_s)
        sleep_s = 0.001
        while time.monotonic() < end_s:
            time.sleep(sleep_s)
            if event.query():
                return
            sleep_s = min(2.0 * sleep_s, _LONGEST_SLEEP_S)
        self._is_late = True
        raise TimeoutError(
            f"the device did not come to the end of an attempt within {self._wait_s:g} s; its row has the "
            f"host's times"
        )


@dataclass(slots=True)
class _Shared:
    """Gap, forward and backward seconds, which the records of one window have in common, once measured."""

    times: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class _Amendment:
    """Brings one record's times."""

    device: DeviceTimes
    spans: Spans
    shared: _Shared

    def is_complete(self) -> bool:
        """Returns True: the window is over (writer thread)."""
        return True

    def amend(self, record: AttemptRecord) -> AttemptRecord:
        """Returns the record with the device's times where they can be had (writer thread)."""
        return self.device.measure(record, self.spans, self.shared)


def device_times(
    device: torch.device | None, on_error: Callable[[str, BaseException], None]
) -> DeviceTimes | None:
    """Returns what measures times on a device, or None where its events are not used (at attach).

    Args:
        device: Where the model lies; None where that is not known.
        on_error: Called with the probe ``clock`` and the exception for everything that fails.
    """
    if device is None or device.type not in DEVICE_TYPES:
        return None
    # Streams and events of the device's own module: their classes differ from device to device.
    module: Any = torch.get_device_module(device)

    def make() -> TimingEvent:
        return module.Event(enable_timing=True)

    def record(event: Any) -> None:
        event.record(module.current_stream(device))

    return DeviceTimes(
        make,
        record,
        is_capturing=getattr(module, "is_current_stream_capturing", _never),
        on_error=on_error,
    )


def _never() -> bool:
    return False


def _has_all_events(spans: Spans) -> bool:
    """Whether every moment is there, and carries an event."""
    if max(len(spans.forward), len(spans.backward), len(spans.inside_step)) > MAX_SPANS:
        return False
    every = [*spans.forward, *spans.backward, *spans.inside_step]
    every.extend(span for span in (spans.gap, spans.step) if span is not None)
    return all(isinstance(moment, Moment) for span in every for moment in span)
