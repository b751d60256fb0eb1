"""Numbers on their way through a ring: never a wrong one, no wait, no host read, no memory."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from torchinstruments.ranks import ring as ring_module
from torchinstruments.ranks.ring import NUM_SLOTS, Ring, Rings
from unit.statistics.accelerator import Accelerator, AcceleratorTensor, operation_name, put
from unit.statistics.streams import PretendedEvent, PretendedStream, Streams, pretend_streams


def test_a_number_is_the_one_that_was_there_when_it_was_kept() -> None:
    """The tensor changes in place afterwards."""
    rings, scale = Rings(), torch.tensor(1024.0)
    before = rings.keep(scale)
    scale.mul_(0.5)
    after = rings.keep(scale)
    scale.zero_()
    assert before is not None
    assert after is not None
    assert (after.read(), before.read(), before.read()) == (512.0, 1024.0, 1024.0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
def test_one_element_of_any_shape_and_kind(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A sharded scaler's findings have a dimension."""
    ticket = Rings().keep(torch.full(shape, 3, dtype=dtype))
    assert ticket is not None
    assert ticket.read() == 3.0


@pytest.mark.parametrize("number", [float("inf"), 2.0**127, 2.0**-126, 0.1])
def test_a_float32_number_travels_exactly(number: float) -> None:
    """Also a scale that grew beyond all bounds."""
    tensor = torch.tensor(number, dtype=torch.float32)
    ticket = Rings().keep(tensor)
    assert ticket is not None
    assert ticket.read() == tensor.item()


def test_a_ring_that_went_round_has_no_number_rather_than_a_wrong_one() -> None:
    """What is read in time keeps its value; the tickets of the last round have theirs."""
    ring = Ring(torch.zeros(()), num_slots=4)
    tickets = [ring.keep(torch.tensor(float(index))) for index in range(4)]
    assert tickets[0].read() == 0.0
    tickets += [ring.keep(torch.tensor(float(index))) for index in range(4, 10)]
    assert [ticket.read() for ticket in tickets] == [0.0] + [None] * 5 + [6.0, 7.0, 8.0, 9.0]


@pytest.mark.parametrize("num_slots", [63, 64, 65, 200])
def test_every_slot_of_a_ring_holds_its_own_number(num_slots: int) -> None:
    """Also where the ring is no multiple of the slots that are looked up together."""
    ring = Ring(torch.zeros(()), num_slots=num_slots)
    tickets = [ring.keep(torch.tensor(float(index))) for index in range(2 * num_slots + 7)]
    last = tickets[-num_slots:]
    assert [ticket.read() for ticket in last] == [float(ticket.ordinal) for ticket in last]
    assert [ticket.read() for ticket in tickets[:-num_slots]] == [None] * (num_slots + 7)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_ring_can_be_kept_in_and_read_out_in_any_mode(
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    """A ring that was made, and slots that were looked up, in one mode are written in another."""
    with mode():
        ring = Ring(torch.zeros(()), num_slots=70)
        inside = ring.keep(torch.tensor(1.0))
    outside = ring.keep(torch.tensor(2.0))
    with mode():
        again = ring.keep(torch.tensor(3.0))
    assert [inside.read(), outside.read(), again.read()] == [1.0, 2.0, 3.0]


def test_a_copy_that_failed_takes_its_slot_and_no_other() -> None:
    """The slot's old number may be gone, so that its old ticket has none."""
    ring = Ring(torch.zeros(()), num_slots=2)
    first = ring.keep(torch.tensor(1.0))
    second = ring.keep(torch.tensor(2.0))
    with pytest.raises(RuntimeError):
        ring.keep(torch.zeros(2))
    assert (first.read(), second.read()) == (None, 2.0)


def test_threads_that_keep_and_one_that_reads_never_see_a_wrong_number() -> None:
    """Each number names its thread and its turn; the small ring goes round all the time."""
    ring = Ring(torch.zeros(()), num_slots=64)
    kept: list[list[Any]] = [[], []]
    wrong, num_read = [], 0

    def keep(thread: int) -> None:
        for turn in range(3_000):
            number = float(thread * 10_000 + turn)
            kept[thread].append((number, ring.keep(torch.tensor(number))))

    threads = [threading.Thread(target=keep, args=(thread,)) for thread in (0, 1)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for mine in kept:
            for number, ticket in mine[-40:]:
                value = ticket.read()
                num_read += value is not None
                if value not in {None, number}:
                    wrong.append((number, value))
    for thread in threads:
        thread.join()
    assert wrong == []
    assert num_read > 0
    assert sum(ticket.read() is not None for mine in kept for _, ticket in mine) >= 64


def test_nothing_is_recorded_for_autograd_and_no_mode_sees_it() -> None:
    """A mode of the program may count or cache every operation."""

    class _Seen(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        @override
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(operation_name(func))
            return func(*args, **(kwargs or {}))

    rings, scale = Rings(), torch.ones((), requires_grad=True)
    with _Seen() as seen:
        tickets = [rings.keep(scale), rings.keep(scale)]
        scale.detach()
    assert seen.names == ["detach"]
    assert [ticket and ticket.read() for ticket in tickets] == [1.0, 1.0]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("inside_first", [True, False])
def test_inference_mode_on_either_side(inside_first: bool) -> None:
    """A ring that was made in one can be written in the other."""
    rings, values = Rings(), []
    for inside in (inside_first, not inside_first):
        with torch.inference_mode(mode=inside):
            ticket = rings.keep(torch.ones(()) * 5)
        values.append(ticket and ticket.read())
    assert values == [5.0, 5.0]


def test_memory_is_taken_once() -> None:
    """A keep allocates no tensor memory after the first."""
    rings, scale = Rings(), torch.ones(())
    taken = []
    for num_kept in (1, 10):
        with torch.profiler.profile(profile_memory=True) as profile:
            for _ in range(num_kept):
                rings.keep(scale)
        # A view has no memory of its own.
        taken.append(sum(event.self_cpu_memory_usage for event in profile.events() or ()))
    assert taken == [8 * NUM_SLOTS, 0]


def test_each_device_has_its_ring_and_nothing_waits_on_the_training_thread() -> None:
    """On a pretended device a wait or a mix with the host raises, also where modes are off."""
    rings = Rings(num_slots=8)
    with Accelerator():
        tickets = [rings.keep(put(torch.tensor(float(index)))) for index in range(3)]
        on_host = rings.keep(torch.tensor(9.0))
        assert Accelerator.num_host_copies == 0
        assert [ticket and ticket.read() for ticket in tickets] == [0.0, 1.0, 2.0]
        assert Accelerator.num_host_copies == 3
        assert on_host is not None
        assert on_host.read() == 9.0


def test_on_a_fake_cuda_device_the_copy_stays_there() -> None:
    """Shapes and devices of the real kernels; what a stream or an event does cannot be seen without one."""
    with FakeTensorMode():
        scale = torch.ones((), device="cuda")
        buffer = scale.new_zeros(NUM_SLOTS, dtype=ring_module._dtype(scale.device))
        kept = buffer.select(0, 3).fill_(scale.reshape(()))
    assert (kept.device.type, kept.dtype, buffer.nbytes) == ("cuda", torch.float64, 131_072)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Gives the pretended device streams and events."""
    return pretend_streams(monkeypatch, ring_module)


def test_the_training_thread_records_and_the_reader_waits_on_a_stream_of_its_own(streams: Streams) -> None:
    """One copy serves all tickets that were there before it; this shows the order of calls, not a GPU's."""
    with Accelerator():
        ring = Ring(put(torch.zeros(())), num_slots=4)
        tickets = [ring.keep(put(torch.tensor(float(index)))) for index in range(3)]
        assert streams.log == ["pin", *["record on training"] * 3]
        assert Accelerator.num_host_copies == 0
        streams.log.clear()
        assert [ticket.read() for ticket in tickets] == [0.0, 1.0, 2.0]
        assert streams.log == ["side waits for training", "record on side", "wait for side"]
        assert Accelerator.num_host_copies == 1
        later = ring.keep(put(torch.tensor(3.0)))
        assert later.read() == 3.0
        assert Accelerator.num_host_copies == 2


def test_a_second_stream_has_its_own_event_and_keeps_the_memory_alive(streams: Streams) -> None:
    """A reader waits for both."""
    with Accelerator():
        ring = Ring(put(torch.zeros(())), num_slots=4)
        ring.keep(put(torch.tensor(1.0)))
        streams.current = PretendedStream(streams, "other")
        ticket = ring.keep(put(torch.tensor(2.0)))
        ring.keep(put(torch.tensor(3.0)))
        assert streams.log == [
            "pin",
            "record on training",
            "memory outlives other",
            "record on other",
            "record on other",
        ]
        streams.log.clear()
        assert ticket.read() == 2.0
        assert streams.log[:2] == ["side waits for training", "side waits for other"]


def test_a_device_ring_that_went_round_while_it_was_copied_has_no_number(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread counts a slot before it writes it, and the reader looks at the count afterwards."""
    with Accelerator():
        ring = Ring(put(torch.zeros(())), num_slots=4)
        tickets = [ring.keep(put(torch.tensor(float(index)))) for index in range(4)]

        def two_more(_: object) -> None:
            ring.keep(put(torch.tensor(4.0)))
            ring.keep(put(torch.tensor(5.0)))

        monkeypatch.setattr(PretendedEvent, "synchronize", two_more)
        assert [ticket.read() for ticket in tickets] == [None, None, 2.0, 3.0]


def test_two_readers_of_a_device_ring_do_not_take_each_others_numbers(streams: Streams) -> None:
    """A report of checks reads while the writer thread does; between a look and a read nothing is fetched."""
    with Accelerator():
        ring = Ring(put(torch.zeros(())), num_slots=4)
        tickets = [ring.keep(put(torch.tensor(float(index)))) for index in range(4)]
        assert tickets[3].read() == 3.0
        latest = ring.keep(put(torch.tensor(4.0)))
        found: list[float | None] = []

        class Looked:
            """Says that a number is there, and has another thread read a later one in its place."""

            def __init__(self, ordinals: range) -> None:
                self.ordinals, self.stop = ordinals, ordinals.stop

            def __contains__(self, ordinal: int) -> bool:
                other.start()
                other.join(0.5)
                return ordinal in self.ordinals

        def read() -> None:
            with Accelerator():
                found.append(latest.read())

        other = threading.Thread(target=read)
        ring._fetched_ordinals = Looked(ring._fetched_ordinals)  # type: ignore[assignment]
        assert tickets[0].read() == 0.0
        other.join()
        assert found == [4.0]


def test_two_threads_that_read_all_the_time_see_no_wrong_number(streams: Streams) -> None:
    """One keeps, two read; the small ring goes round all the time."""
    del streams
    kept: list[Any] = []
    wrong: list[tuple[float, float | None]] = []
    is_over = threading.Event()
    with Accelerator():
        ring = Ring(put(torch.zeros(())), num_slots=8)

        def read() -> None:
            while not is_over.is_set():
                for number, ticket in kept[-6:]:
                    value = ring.read(ticket.ordinal)
                    if value not in {None, number}:
                        wrong.append((number, value))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        numbers = [float(turn) for turn in range(1_500)]
        # One by one, for the readers look at the last ones meanwhile.
        kept.extend((number, ring.keep(put(torch.tensor(number)))) for number in numbers)
        is_over.set()
        for reader in readers:
            reader.join()
    assert wrong == []


def test_nothing_is_kept_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy would become part of the graph."""

    class _OnCuda(AcceleratorTensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    rings = Rings()
    with Accelerator():
        tensor = _OnCuda(torch.ones(()))
        monkeypatch.setattr(_OnCuda, "detach", lambda self: self)
        assert rings.keep(tensor) is None
    assert rings._rings == {}
