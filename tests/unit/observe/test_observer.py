"""The handle that a training script holds."""

import copy
import pickle

import pytest
import torch
from torch import nn

from torchinstruments.errors import ObserverAlreadyAttachedError
from torchinstruments.observe.observer import InertObserver, Observer, observer_of
from torchinstruments.records import Counters
from unit.observe.memory import MemorySession, observe


def test_a_model_has_one_observer_in_whatever_wrapper(session: MemorySession) -> None:
    """A second one is refused on the model, on its wrapper and on what it wraps."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    assert observer_of(model) is observer
    assert observer_of(nn.DataParallel(model)) is observer
    for again in (model, nn.DataParallel(model)):
        with pytest.raises(ObserverAlreadyAttachedError, match=r"call remove_observer\(model\) first"):
            observe(again, MemorySession())
    observer.close()
    assert observer_of(model) is None
    wrapped = observe(nn.DataParallel(model), MemorySession())
    with pytest.raises(ObserverAlreadyAttachedError):
        observe(model, MemorySession())
    wrapped.close()


def test_a_part_of_an_observed_model_may_have_an_observer_of_its_own(session: MemorySession) -> None:
    """Both see the part's calls."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    observe(model, session)
    other = MemorySession()
    observe(model[0], other)
    model(torch.ones(1, 2)).sum().backward()
    assert [len(session.deliveries), len(other.deliveries)] == [2, 2]
    assert session.outputs()[0].values == other.outputs()[0].values


def test_the_model_keeps_its_observer(session: MemorySession) -> None:
    """A script that drops the handle is observed all the same."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session)
    model(torch.ones(1, 2))
    assert len(session.deliveries) == 1
    found = observer_of(model)
    assert found is not None
    assert found.observing


def test_flush_and_close_answer_for_the_session(session: MemorySession) -> None:
    """The catalog is told first; closing twice ends the run once."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    for _ in range(2):
        model(torch.ones(1, 2))
    assert session.modules[0].fired == 1
    assert observer.flush()
    assert session.modules[0].fired == 2
    assert not observer.flush(timeout_s=0.0)
    assert observer.close()
    assert observer.close()
    assert session.num_closed == 1
    assert not observer.observing
    assert observer.url == "memory://run"


def test_an_inert_observer_has_the_same_surface_and_does_nothing() -> None:
    """It only marks its model as taken, for as long as the model lives or until it is closed."""
    model = nn.Sequential(nn.Linear(2, 2))
    InertObserver("file:///run").attach(model)
    observer = observer_of(model)
    assert observer is not None
    with pytest.raises(ObserverAlreadyAttachedError):
        observe(model, MemorySession())
    with observer.paused():
        model(torch.ones(1, 2))
    assert (observer.url, observer.observing, observer.counters) == ("file:///run", False, Counters())
    assert observer.flush()
    assert observer.close()
    assert observer_of(model) is None


def test_copies_and_pickles_of_an_observer_are_inert(session: MemorySession) -> None:
    """Whatever holds one can be copied."""
    model = nn.Sequential(nn.Linear(2, 2))
    trainer = {"model": model, "observer": observe(model, session)}
    for twin in (
        copy.deepcopy(trainer)["observer"],
        copy.copy(trainer["observer"]),
        pickle.loads(pickle.dumps(trainer))["observer"],
    ):
        assert isinstance(twin, Observer)
        assert not twin.observing
        assert twin.url == "memory://run"
        assert twin.close()
    assert session.num_closed == 0
