"""Which root forwards are measured."""

import warnings

import torch
from torch import nn

from torchinstruments.observe.sampling import AlwaysSampler, SamplingEvent
from unit.observe.memory import MemorySession, observe


class Failing:
    """A sampler that raises."""

    def should_sample(self, event: SamplingEvent) -> bool:
        """Raises."""
        raise ValueError(f"at {event.forward_index}")


def test_a_sampler_that_raises_chooses_nothing_and_is_reported_once(session: MemorySession) -> None:
    """Training goes on; every error is counted."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session, sampler=Failing())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(1, 2))
    assert len(caught) == 1
    assert "sampler failed in the model: ValueError: at 0" in str(caught[0].message)
    assert session.deliveries == []
    assert observer.counters.errors == {"sampler": 3}


def test_what_replaces_the_method_of_a_sampler_is_asked_by_an_event(session: MemorySession) -> None:
    """A sampler of this package is asked by less as long as it is what it was made as."""

    def should_sample(event: SamplingEvent) -> bool:
        return event.monotonic_s > 0

    sampler = AlwaysSampler()
    vars(sampler)["should_sample"] = should_sample
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session, sampler=sampler)
    model(torch.ones(1, 2))
    assert observer.counters.errors == {}
    assert len(session.samples()) == 1


def test_paused_forwards_are_counted_and_not_measured(session: MemorySession) -> None:
    """Pauses may be nested."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    with observer.paused():
        with observer.paused():
            model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    (sample,) = session.samples()
    assert (sample.ordinal, sample.position.forward_index) == (0, 2)
    assert observer.counters.forwards == 3


def test_a_sampler_of_ones_own_may_draw_random_numbers_and_change_modes(session: MemorySession) -> None:
    """The program goes on as without it."""

    class Careless:
        def should_sample(self, event: SamplingEvent) -> bool:
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
            return bool(torch.rand(1) < 2) and event.forward_index == 0

    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    torch.manual_seed(5)
    expected = model(torch.ones(4, 2))
    observe(model, session, sampler=Careless())
    torch.manual_seed(5)
    output = model(torch.ones(4, 2))
    assert torch.equal(output, expected)
    assert output.requires_grad
    assert torch.get_default_dtype() is torch.float32
    assert len(session.deliveries) == 1
