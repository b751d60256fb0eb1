"""An interrupt, or a removal of the observer, at any moment leaves no hook and no changed state behind."""

import functools
import gc
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

import torchinstruments
from torchinstruments.observe.observer import Observer
from torchinstruments.observe.sampling import SamplingEvent
from torchinstruments.ranks.clock import StepClock
from torchinstruments.records import GradSync, Position, SampleState, Signal
from unit.observe.memory import MemorySession, Recorder, num_hooks, observe, traces, value

OWN = str(Path(torchinstruments.__file__).parent)
LIFECYCLE = (
    "/observe/probe.py",
    "/observe/choice.py",
    "/observe/handover.py",
    "/observe/capture.py",
    "/observe/placement.py",
    "/observe/layer_calls.py",
    "/observe/hooks.py",
    "/observe/bypass.py",
    "/observe/slots.py",
    "/observe/calls.py",
    "/observe/gradients.py",
    "/observe/parameters.py",
    "/observe/direct.py",
    "/observe/applied.py",
    "/observe/attempts.py",
    "/observe/observer.py",
    "/observe/registry.py",
    "/statistics/isolation.py",
)
"""What places hooks and changes states, and takes them back."""


class InterruptsAt:
    """Raises a KeyboardInterrupt at one line of the observer's own code, as Ctrl-C may.

    Args:
        line: A file of the package with its folder, and a line number; None only notes what runs.
        visit: At which visit of it.
    """

    def __init__(self, line: tuple[str, int] | None, visit: int = 1) -> None:
        self.line = line
        self.left = visit
        self.lines: Counter[tuple[str, int]] = Counter()
        self.was_raised = False

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Any:
        """Looks only into files of the lifecycle."""
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(OWN) or not name.endswith(LIFECYCLE):
            return None
        return self._look

    def _look(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line" and not self.was_raised:
            line = (frame.f_code.co_filename, frame.f_lineno)
            self.lines[line] += 1
            if line == self.line:
                self.left -= 1
                if self.left == 0:
                    self.was_raised = True
                    raise KeyboardInterrupt
        return self._look


def make_model() -> nn.Sequential:
    """A model with a layer that may run fused, a parameter as an output, and small layers."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(1, 1, 8))
    return nn.Sequential(
        nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 8, 0.0), Recorder(lambda x: (x, weight)), First()
    )


class First(nn.Module):
    """Takes two outputs for one."""

    @override
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Returns their product."""
        return pair[0] * pair[1]


def attached(session: MemorySession) -> tuple[nn.Sequential, Observer]:
    """An observed model with all that is ever placed in one."""
    model = make_model()
    return model, observe(model, session, signals=(*Signal,), capture_direct_forwards=True)


def train(model: nn.Module) -> list[torch.Tensor]:
    """One forward and backward; returns the gradients."""
    model.zero_grad()
    model(torch.ones(1, 2, 8)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def hooks_of_tensors(model: nn.Module) -> int:
    """Hooks on parameters."""
    return sum(
        len(getattr(parameter, kind) or {})
        for parameter in model.parameters()
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )


def left_behind(model: nn.Module) -> list[object]:
    """What is in a model that was never observed, all of it empty."""
    return [num_hooks(model), hooks_of_tensors(model), traces(model), "forward" in vars(model)]


def lines_of(action: Callable[[], object]) -> list[tuple[tuple[str, int], int]]:
    """The lines that an action runs, each with one of its visits: the first, or every other time the last.

    A ``with`` always has its first: it is visited again before it calls ``__exit__``, which is in C++
    wherever that matters, and there the interpreter looks for no signals.
    """
    gc.collect()  # observers that earlier tests left would be looked through here and be gone later
    found = InterruptsAt(None)
    sys.settrace(found)
    try:
        action()
    finally:
        sys.settrace(None)
    return [
        (line, 1 if place % 2 or linecache.getline(*line).strip().startswith("with ") else count)
        for place, (line, count) in enumerate(found.lines.items())
    ]


def interrupt(action: Callable[[], object], line: tuple[str, int], visit: int) -> bool:
    """Runs an action with an interrupt; returns whether it came."""
    tracer = InterruptsAt(line, visit)
    sys.settrace(tracer)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return tracer.was_raised


@pytest.mark.filterwarnings("ignore:torchinstruments")
@pytest.mark.parametrize("share", range(2))
def test_an_interrupt_at_any_line_of_a_sampled_step_is_cleaned_up(share: int) -> None:
    """Gradients are on at once; the next steps are as without it, and removing leaves nothing."""
    expected = train(make_model())
    model, observer = attached(MemorySession())
    train(model)
    lines = lines_of(lambda: train(model))
    observer.close()
    num_raised = 0
    for line, visit in lines[share::2]:
        session = MemorySession()
        model, observer = attached(session)
        train(model)
        num_raised += interrupt(functools.partial(train, model), line, visit)
        where = (line, visit)
        assert torch.is_grad_enabled(), where
        assert not torch._C._is_torch_function_all_disabled(), where
        session.deliveries.clear()
        assert all(map(torch.equal, train(model), expected)), where
        states = [sample.state for sample in session.samples()][-2:]
        assert states == [SampleState.FORWARD_COMPLETE, SampleState.BACKWARD_OBSERVED], where
        observer.close()
        assert left_behind(model) == [0, 0, {}, False], where
    assert num_raised > 50


@pytest.mark.filterwarnings("ignore:torchinstruments")
def test_an_interrupt_at_any_line_of_a_removal_is_made_good_by_another_one() -> None:
    """Whatever it left, the observer can be removed again, and the model is as before."""

    def remove() -> None:
        observer.close()

    model, observer = attached(MemorySession())
    train(model)
    lines = lines_of(remove)
    for line, visit in lines:
        model, observer = attached(MemorySession())
        train(model)
        assert interrupt(remove, line, visit), line
        observer.close()
        assert left_behind(model) == [0, 0, {}, False], line
        assert torch.is_grad_enabled(), line
    assert len(lines) > 50


class Removes:
    """A sampler that removes the observer and chooses all the same."""

    def __init__(self) -> None:
        self.observer: Observer | None = None

    def should_sample(self, event: SamplingEvent) -> bool:
        """Removes it in the third forward."""
        if event.forward_index == 2 and self.observer is not None:
            self.observer.close()
        return True


def test_a_sampler_that_removes_the_observer_leaves_no_hook(session: MemorySession) -> None:
    """The forward that it chose nevertheless is a missed sample."""
    model = make_model()
    sampler = Removes()
    sampler.observer = observe(
        model, session, sampler=sampler, signals=(*Signal,), capture_direct_forwards=True
    )
    for _ in range(4):
        train(model)
    assert left_behind(model) == [0, 0, {}, False]
    states = [sample.state for sample in session.samples() if sample.backward_index is None]
    assert states == [SampleState.FORWARD_COMPLETE] * 2 + [SampleState.MISSED]
    assert session.errors == []


@pytest.mark.filterwarnings("ignore:torchinstruments. the observer was removed")
def test_a_removal_by_another_thread_at_any_line_of_a_forward_leaves_no_hook() -> None:
    """Wherever the forward is then, its sample is complete or missed and nothing stays."""
    model, observer = attached(MemorySession())
    train(model)
    lines = lines_of(lambda: train(model))
    observer.close()
    seen = set()
    for line, visit in lines[::3]:
        session = MemorySession()
        model, observer = attached(session)
        train(model)
        session.deliveries.clear()
        remover = threading.Thread(target=observer.close)

        def remove_at(
            frame: FrameType, event: str, _argument: object, line: Any = line, remover: Any = remover
        ) -> Any:
            nonlocal left
            if event == "line" and (frame.f_code.co_filename, frame.f_lineno) == line:
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    remover.start()
                    # What the forward holds a lock in, the removal may wait for.
                    remover.join(0.05)
            return remove_at if frame.f_code.co_filename.startswith(OWN) else None

        left = visit
        sys.settrace(remove_at)
        try:
            train(model)
        finally:
            sys.settrace(None)
        remover.join()
        assert left_behind(model) == [0, 0, {}, False], (line, visit)
        forwards = [sample.state for sample in session.samples() if sample.backward_index is None]
        assert len(forwards) <= 1, (line, visit)
        seen.update(forwards)
        assert session.errors == [] or SampleState.MISSED in forwards
    assert seen == {SampleState.FORWARD_COMPLETE, SampleState.MISSED}


class Unbound:
    """An object of the user's that cannot even be asked for its class."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    @override
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("it is not bound")


@pytest.mark.filterwarnings("ignore:torchinstruments")
def test_an_output_that_raises_at_any_question_costs_its_own_rows(session: MemorySession) -> None:
    """The sample ends, its hooks go, the other layers are measured, and its row has the reason."""
    model = nn.Sequential(nn.Linear(2, 2), Recorder(Unbound))
    observer = observe(model, session, signals=(*Signal,))
    for _ in range(2):
        output = model(torch.ones(1, 2))
        assert num_hooks(model) == 2
        output.tensor.sum().backward()
    forwards = [sample.state for sample in session.samples() if sample.backward_index is None]
    assert forwards == [SampleState.FORWARD_COMPLETE] * 2
    assert [(m.layer, m.reasons[0]) for m in session.outputs()] == [
        ("0", ""),
        ("1", "unreadable_output: RuntimeError: it is not bound"),
    ] * 2
    assert [value(m) for m in session.gradients()] == [1.0, 1.0]
    observer.close()
    assert left_behind(model) == [0, 0, {}, False]


@pytest.mark.filterwarnings("ignore:torchinstruments")
def test_a_sample_whose_end_raises_is_missed(session: MemorySession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raises at the end of a forward, its hooks go and it is told."""

    class Clock(StepClock):
        @override
        def forward_ended(self, now_s: float, grad_sync: GradSync, position: Position | None = None) -> None:
            raise MemoryError("no room")

    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session, clock=Clock())
    model(torch.ones(1, 2))
    assert [sample.state for sample in session.samples()] == [SampleState.FORWARD_COMPLETE]
    assert num_hooks(model) == 2

    def fail(*_args: object, **_kwargs: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("torchinstruments.observe.capture.Delivery", fail)
    model(torch.ones(1, 2))
    assert [sample.state for sample in session.samples()][1:] == [SampleState.MISSED]
    assert num_hooks(model) == 2
    assert observer.counters.missed == 1
    assert {e.type for e in session.errors} == {"MemoryError"}
