"""While one thread makes a program of one model, what other threads do with another is seen as ever."""

import ast
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.fx import _symbolic_trace
from typing_extensions import override

import torchinstruments
from torchinstruments.observe.observer import Observer
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.loss_scale import ScalerWatch
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.ranks.tracing import runs_for_a_compiler
from torchinstruments.records import Outcome, ScaleProvenance
from unit.observe.memory import MemorySession, observe

WAIT_S = 60.0


class Halfway:
    """Holds a thread where it is called, until it is let go."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self.may_go = threading.Event()
        self.answers: list[bool] = []

    def wait(self) -> None:
        """Is called by the thread in the midst of its work."""
        self.answers.append(runs_for_a_compiler())
        self.is_there.set()
        assert self.may_go.wait(WAIT_S)


class Waiting(nn.Module):
    """A model that waits in its forward."""

    def __init__(self, halfway: Halfway) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.halfway = halfway

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.halfway.wait()
        return self.layer(x)


def compile_other(halfway: Halfway) -> None:
    """Compiles with a backend that takes its time."""

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., object]:
        halfway.wait()
        return graph.forward

    torch.compile(nn.Linear(3, 3), backend=backend)(torch.ones(1, 3))


def export_other(halfway: Halfway) -> None:
    """Exports a model that takes its time."""
    torch.export.export(Waiting(halfway), (torch.ones(1, 3),), strict=False)


@pytest.fixture(params=[compile_other, export_other], ids=["torch.compile", "torch.export"])
def halfway(request: pytest.FixtureRequest) -> Iterator[Halfway]:
    """Another thread that is in the midst of making a program."""
    found = Halfway()
    thread = threading.Thread(target=request.param, args=(found,))
    thread.start()
    assert found.is_there.wait(WAIT_S)
    yield found
    found.may_go.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def attach(model: nn.Module, session: MemorySession, *, direct: bool) -> Observer:
    """Attaches an observer that sees optimizers and scalers."""
    clock = StepClock()
    optimizers = OptimizerWatch(clock, weakref.ref(model))
    scalers = ScalerWatch(clock, optimizers)
    return observe(
        model,
        session,
        clock=clock,
        scale=scalers,
        companions=(optimizers, scalers),
        capture_direct_forwards=direct,
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "hooks": lambda: nn.Sequential(nn.Linear(4, 4)),
    "direct forwards": lambda: nn.Sequential(nn.Linear(4, 4)),
    "slot": lambda: nn.TransformerEncoderLayer(4, 1, 4, 0.0, batch_first=True),
}


@pytest.mark.parametrize("seen_by", MODELS)
def test_what_is_trained_is_seen_while_another_thread_compiles(
    session: MemorySession, halfway: Halfway, seen_by: str
) -> None:
    """Each forward has its values, gradients and scale, and each step its attempt."""
    model = MODELS[seen_by]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    direct = seen_by == "direct forwards"
    observer = attach(model, session, direct=direct)
    for _ in range(3):
        forward = model.forward if direct else model
        scaler.scale(forward(torch.randn(2, 3, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert halfway.answers == [True]
    assert torch.compiler.is_compiling()
    assert not runs_for_a_compiler()
    observer.close()
    assert (observer.counters.forwards, observer.counters.samples) == (3, 3)
    by_layer = Counter(m.layer for m in session.outputs())
    assert set(by_layer.values()) == {3}
    assert Counter(m.layer for m in session.gradients()) == by_layer
    assert {m.reasons[0] for m in session.outputs() + session.gradients()} == {""}
    assert session.samples()[-1].scale_provenance is ScaleProvenance.GRADSCALER
    assert [attempt.outcome for attempt in session.attempts] == [Outcome.APPLIED] * 3
    assert session.errors == []


@pytest.mark.parametrize("halfway", [compile_other], indirect=True, ids=["torch.compile"])
def test_what_another_thread_compiles_is_compiled_unseen(session: MemorySession, halfway: Halfway) -> None:
    """A thread that makes a program of its own of the observed model is told from one that trains it."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    model(torch.ones(1, 2))
    program = torch.export.export(model, (torch.ones(1, 2),), strict=False)
    assert len(program.state_dict) == 2
    observer.close()
    assert (observer.counters.forwards, observer.counters.samples) == (1, 1)
    assert [error.message for error in session.errors] == ["1 forward under torch.export was not observed"]


def test_forwards_are_seen_while_the_flag_of_fx_is_up(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the process's own: a compiler raises it, and two tracing threads may leave it up for ever."""
    monkeypatch.setattr(_symbolic_trace, "_is_fx_tracing_flag", True)
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    model(torch.ones(1, 2))
    observer.close()
    assert (observer.counters.samples, session.errors) == (1, [])


SOURCES = sorted(Path(torchinstruments.__file__).parent.glob("**/*.py"))
TRACING = Path("ranks", "tracing.py")


def test_one_module_alone_asks_whether_any_thread_compiles() -> None:
    """What asks for itself would take another thread's compiler for its own."""
    asking = {
        path
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in {"is_compiling", "_is_compiling_flag"}
    }
    assert [path.parts[-2:] for path in asking] == [TRACING.parts]
