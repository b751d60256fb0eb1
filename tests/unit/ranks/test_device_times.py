"""Times from events, on a pretended device: a clock of its own, far from the host's, behind it in time.

Nothing here ran on an accelerator: the events are stand-ins with the few methods that are used.
"""

import gc
import threading

import pytest
import torch

from torchinstruments.ranks import device_times as module
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.device_times import DeviceTimes, Moment, device_times
from torchinstruments.ranks.window import MAX_SPANS
from torchinstruments.records import GradSync


class _PretendedEvent:
    """Stands for a device's event. The device comes to it when it is told to."""

    def __init__(self, device):
        self.device = device
        self.at_ms: float | None = None
        self.ordinal = -1

    def query(self):
        self.device.num_queries += 1
        assert threading.current_thread() is self.device.reader, "the training thread asks for no event"
        return self.ordinal < self.device.num_done

    def elapsed_time(self, end_event, /):
        assert self.query()
        assert end_event.query()
        if self.device.fails:
            raise RuntimeError("device-side assert")
        return end_event.at_ms - self.at_ms


class _PretendedDevice:
    """Stands for an accelerator whose clock runs twice as fast as the host's."""

    def __init__(self, **options):
        self.host_s = 0.0
        self.num_recorded = 0
        self.num_done = 10**9
        self.num_queries = 0
        self.fails = False
        self.capturing = False
        self.broken = False
        self.reader: threading.Thread | None = None
        self.errors = []
        self.times = DeviceTimes(
            lambda: _PretendedEvent(self),
            self.record,
            is_capturing=lambda: self.capturing,
            on_error=lambda probe, error: self.errors.append((probe, error)),
            host_now=self.tick,
            **options,
        )
        self.clock = StepClock(declared_optimizer=True, device=self.times)
        self.closed = []

    def tick(self):
        self.host_s += 1.0
        return self.host_s

    def record(self, event):
        assert not self.capturing
        if self.broken:
            raise RuntimeError("no stream")
        event.at_ms = 2000.0 * self.host_s
        event.ordinal = self.num_recorded
        self.num_recorded += 1

    def forward(self, *, grad=True):
        started = self.clock.forward_started(grad_enabled=grad, now_s=self.times.now(), now_us=0)
        self.closed += started.closed
        self.clock.forward_ended(self.times.now(), GradSync.SYNCED)

    def step(self, key=0, closure=None):
        self.clock.step_started(key, self.times.now())
        if closure is not None:
            closure()
        self.clock.step_ended(key, self.times.now())

    def backward(self):
        self.clock.backward_ended(self.times.now())

    def close(self):
        self.closed += self.clock.close(self.times.now())

    def read(self):
        """Reads all records as the writer thread would."""
        self.reader = threading.current_thread()
        return [attempt.resolve() for attempt in self.closed]


def _train(device, steps=2):
    for _ in range(steps):
        device.forward()
        device.backward()
        device.tick()
        device.step()


def test_phases_are_measured_between_the_devices_events():
    """Every second of the host is two of the device; what runs between two phases is in none."""
    device = _PretendedDevice()
    _train(device)
    device.close()
    host = [attempt.record for attempt in device.closed]
    records = device.read()
    assert [(r.gap_s, r.forward_s, r.backward_s, r.optimizer_s, r.clock) for r in host] == [
        (0.0, 1.0, 1.0, 1.0, "host"),
        (1.0, 1.0, 1.0, 1.0, "host"),
    ]
    assert [(r.gap_s, r.forward_s, r.backward_s, r.optimizer_s, r.clock) for r in records] == [
        (0.0, 2.0, 2.0, 2.0, "device"),
        (2.0, 2.0, 2.0, 2.0, "device"),
    ]
    assert device.errors == []


def test_what_a_closure_runs_is_no_time_of_the_step():
    """Neither its forward nor its backward."""
    device = _PretendedDevice()

    def closure():
        device.forward()
        device.backward()

    device.step(0, closure)
    device.close()
    (record,) = device.read()
    assert (record.forward_s, record.backward_s, record.optimizer_s) == (2.0, 2.0, 4.0)


def test_several_optimizers_share_their_windows_times_which_are_measured_once():
    """Each has its own optimizer time."""
    device = _PretendedDevice()
    device.forward()
    device.step(0)
    device.step(1)
    device.close()
    device.reader = threading.current_thread()
    first, second = device.closed
    assert first.resolve().forward_s == 2.0
    num_queries = device.num_queries
    record = second.resolve()
    assert (record.optimizer, record.forward_s, record.optimizer_s) == (1, 2.0, 2.0)
    assert device.num_queries - num_queries == 4


def test_no_event_is_asked_for_while_training_and_every_one_is_given_back():
    """The pool grows to what is in flight and no further, whatever becomes of the records."""
    device = _PretendedDevice()
    for _ in range(50):
        _train(device, 1)
        device.forward(grad=False)
        device.read()
        device.closed.clear()
        device.reader = None
    assert device.times.num_made < 30
    device.close()
    device.closed.clear()
    made = device.times.num_made
    device.clock = StepClock()
    gc.collect()
    assert device.times.num_free == made


def test_an_event_that_fails_leaves_the_hosts_times():
    """It is reported, and the row says whose clock it is."""
    device = _PretendedDevice()
    _train(device, 1)
    device.close()
    device.fails = True
    (record,) = device.read()
    assert (record.clock, record.forward_s, record.gap_s) == ("host", 1.0, 0.0)
    assert [(probe, str(error)) for probe, error in device.errors] == [("clock", "device-side assert")]


def test_a_device_that_cannot_record_is_not_asked_again():
    """Training goes on with the host's clock."""
    device = _PretendedDevice()
    device.broken = True
    _train(device)
    device.broken = False
    _train(device)
    device.close()
    assert [record.clock for record in device.read()] == ["host"] * 4
    assert len(device.errors) == 1


def test_nothing_is_recorded_while_a_graph_is_captured():
    """An attempt with any such moment has the host's times; the next ones are the device's again."""
    device = _PretendedDevice()
    _train(device, 1)
    device.capturing = True
    _train(device, 1)
    device.capturing = False
    _train(device, 2)
    device.close()
    assert [record.clock for record in device.read()] == ["device", "host", "host", "device"]
    assert device.errors == []


def test_events_are_bounded():
    """While all of them wait to be read, attempts have the host's times."""
    device = _PretendedDevice(max_events=12)
    _train(device, 5)
    device.close()
    assert device.times.num_made == 12
    assert [record.clock for record in device.read()] == ["device", "device", "host", "host", "host"]
    device.closed.clear()
    device.reader = None
    _train(device, 2)
    device.close()
    assert [record.clock for record in device.read()] == ["host", "device"]


def test_an_attempt_with_more_spans_than_are_kept_has_the_hosts_times():
    """Its memory is bounded; its sums are right all the same."""
    device = _PretendedDevice()
    for _ in range(MAX_SPANS + 5):
        device.forward()
    device.step()
    device.close()
    (record,) = device.read()
    assert (record.clock, record.forward_s) == ("host", float(MAX_SPANS + 5))
    assert device.times.num_made < 4 * MAX_SPANS


def test_a_device_that_hangs_is_waited_for_once(monkeypatch):
    """A collective may never end; the rows behind it come with the host's times, and without waiting."""
    slept = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    device = _PretendedDevice(wait_s=0.01)
    _train(device, 3)
    device.close()
    device.num_done = 3
    first = device.closed[0]
    device.reader = threading.current_thread()
    assert first.resolve().clock == "host"
    assert slept
    slept.clear()
    assert [attempt.resolve().clock for attempt in device.closed[1:]] == ["host", "host"]
    assert slept == []
    assert {type(error) for _, error in device.errors} == {TimeoutError}
    device.num_done = 10**9
    assert [attempt.resolve().clock for attempt in device.closed] == ["device"] * 3


def test_a_moment_is_the_hosts_number():
    """Whatever reckons with it gets plain floats."""
    device = _PretendedDevice()
    one, other = device.times.now(), device.times.now()
    assert isinstance(one, Moment)
    assert type(other - one) is float
    assert other - one == 1.0


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("meta"), torch.device("mps")])
def test_a_model_on_a_device_without_such_events_has_the_hosts_clock(device):
    """There is nothing that could be recorded."""
    assert device_times(device, lambda *_: None) is None
