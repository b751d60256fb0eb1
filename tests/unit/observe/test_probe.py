"""The probe counts every call of the model, measures the chosen ones, and lets nothing out."""

import copy
import gc
import os
import sys
import tracemalloc
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from typing_extensions import override

from torchinstruments.config import ErrorPolicy
from torchinstruments.errors import ConfigurationError
from torchinstruments.observe import probe
from torchinstruments.observe.counts import Counts
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.sampling import (
    AlwaysSampler,
    EveryNForwardsSampler,
    EveryNStepsSampler,
)
from torchinstruments.ranks.clock import StepClock
from torchinstruments.records import Outcome, SampleState
from unit.observe.memory import MemorySession, Recorder, num_hooks, observe, value

if TYPE_CHECKING:
    from types import FrameType

    from torchinstruments.observe.observer import Observer


class Block(nn.Module):
    """A residual block whose dropout and in-place activation react to any disturbance."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.1)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output."""
        return x + self.drop(self.act(self.fc(self.norm(x))))


def failing(tensor: torch.Tensor) -> Mapping[str, float]:
    """A reducer that raises."""
    raise ValueError("no number")


def train(model: nn.Module) -> list[torch.Tensor]:
    """Everything that 20 steps leave behind: outputs, gradients, parameters, buffers, random state."""
    torch.manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    left: list[torch.Tensor] = []
    for _ in range(20):
        optimizer.zero_grad()
        output = model(torch.randn(32, 8))
        output.square().mean().backward()
        left.append(output.detach().clone())
        left.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        optimizer.step()
    return [*left, *model.state_dict().values(), torch.get_rng_state()]


def test_training_is_bit_identical_with_an_observer(session: MemorySession) -> None:
    """Outputs, gradients, parameters, buffers and random state after 20 steps, keys and modules too."""
    model = nn.Sequential(nn.Linear(8, 16), Block(16), nn.BatchNorm1d(16), Block(16), nn.Linear(16, 4))
    twin = copy.deepcopy(model)
    bare = train(model)
    observer = observe(twin, session)
    observed = train(twin)
    assert len(bare) == len(observed)
    assert all(torch.equal(a, b) for a, b in zip(bare, observed, strict=True))
    assert list(model.state_dict()) == list(twin.state_dict())
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in twin.named_modules()]
    assert observer.counters.samples == 20
    assert session.errors == []
    assert sum(s.backward_index == 0 for s in session.samples()) == 20


def test_attempts_reach_the_session_and_positions_the_sampler(session: MemorySession) -> None:
    """Steps that the clock is told of divide forwards into attempts, and the last one is told at the end."""
    clock = StepClock()
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session, sampler=EveryNStepsSampler(2), clock=clock)
    for step in range(4):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        clock.step_started(1, float(step))
        clock.step_ended(1, float(step))
    assert [
        (s.position.attempt, s.position.micro_batch) for s in session.samples() if s.backward_index is None
    ] == [
        (1, 0),
        (1, 1),
        (3, 0),
        (3, 1),
    ]
    assert [a.attempt for a in session.attempts] == [0, 1, 2]
    observer.close()
    assert [(a.attempt, a.micro_batches, a.outcome) for a in session.attempts] == [
        (attempt, 2, Outcome.APPLIED) for attempt in range(4)
    ]


def test_a_reducer_that_raises_costs_its_own_values(session: MemorySession) -> None:
    """The other reducer's values are there, the sample counts its errors, and the layer is named."""

    def biggest(tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"biggest": tensor.max()}

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    observe(model, session, reducers=(failing, biggest))
    with pytest.warns(RuntimeWarning, match="reducer failed in 0: ValueError: no number") as caught:
        output = model(torch.ones(1, 2))
    output.sum().backward()
    assert len(caught) == 1
    forward = session.samples()[0]
    assert forward.errors == 2
    (_, relu) = forward.measurements
    assert value(relu, "biggest") == output.max().item()
    assert relu.reasons[relu.metrics.index("failing")].startswith("reducer_error: ValueError: no number")
    assert [(e.probe, e.module) for e in session.errors][:2] == [("reducer", "0"), ("reducer", "1")]


def test_raise_surfaces_at_the_next_root_forward_and_nowhere_else(session: MemorySession) -> None:
    """Forward and backward of the failing sample run to their end; then the error comes once."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(
        model, session, reducers=(failing,), sampler=EveryNForwardsSampler(2), policy=ErrorPolicy.RAISE
    )
    model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert model[0].weight.grad is not None
    with pytest.raises(ValueError, match="no number") as caught:
        model(torch.ones(1, 2))
    assert "reducer failed in 0" in caught.value.__notes__[0]
    for _ in range(2):
        model(torch.ones(1, 2))
    assert observer.counters.forwards == 4
    with pytest.raises(ValueError, match="no number"):
        observer.close()
    assert session.num_closed == 1


def test_raise_surfaces_errors_of_sinks_too(session: MemorySession) -> None:
    """What the writer met is raised at the next root forward."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session, policy=ErrorPolicy.RAISE)
    model(torch.ones(1, 2))
    session.sink_error = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))


def test_warnings_turned_into_errors_do_not_reach_training(session: MemorySession) -> None:
    """A program that runs with -W error trains on."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session, reducers=(failing,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 2)).sum().backward()
    assert len(session.errors) == 2


def test_an_error_of_the_observer_itself_stays_inside(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's call succeeds, and the error is counted under the forward."""

    def broken(model: nn.Module) -> frozenset[int]:
        raise RuntimeError("bug")

    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    monkeypatch.setattr(probe, "compiled_parts", broken)
    with pytest.warns(RuntimeWarning, match="forward failed in the model: RuntimeError: bug"):
        model(torch.ones(1, 2))
    assert observer.counters.errors == {"forward": 1}
    assert num_hooks(model) == 2


def cost_of_unsampled_forwards(num_modules: int, *, direct: bool) -> tuple[Counter[str], int, int]:
    """Calls of the package in one forward, bytes at its peak, and blocks that stay of 300 of them."""
    model = nn.Sequential(*(nn.Identity() for _ in range(num_modules)))
    sampler = EveryNForwardsSampler(1_000_000)
    observer = observe(model, MemorySession(), sampler=sampler, capture_direct_forwards=direct)
    package = str(Path(probe.__file__).parents[1])
    calls: Counter[str] = Counter()

    def note(frame: "FrameType", event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[frame.f_code.co_qualname] += 1

    x = torch.ones(1)
    for _ in range(20):
        # The first one ends the watch for calls of parts that came before it.
        model(x)
    sys.setprofile(note)
    model(x)
    sys.setprofile(None)
    tracemalloc.start()
    model(x)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    model(x)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    gc.collect()
    num_blocks = sys.getallocatedblocks()
    for _ in range(300):
        model(x)
    num_kept = sys.getallocatedblocks() - num_blocks
    assert observer.counters.forwards == 323
    observer.close()
    return calls, peak, num_kept


@pytest.mark.parametrize("direct", [False, True])
def test_an_unsampled_forward_costs_the_same_however_many_modules_there_are(direct: bool) -> None:
    """The package is called as often, needs no entry for each module at any time, and keeps nothing."""
    few_calls, few_bytes, few_kept = cost_of_unsampled_forwards(2, direct=direct)
    many_calls, many_bytes, many_kept = cost_of_unsampled_forwards(200, direct=direct)
    assert many_calls == few_calls
    assert many_calls["RootProbe.root_started"] == 1
    assert abs(many_bytes - few_bytes) < 8 * (200 - 2)
    assert max(few_kept, many_kept) < 300


def test_detaching_before_the_backward_drops_its_gradients(session: MemorySession) -> None:
    """Nothing arrives after the end, and no hook is left."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    loss = model(torch.ones(1, 2)).sum()
    observer.close()
    loss.backward()
    assert len(session.deliveries) == 1
    assert num_hooks(model) == 0


def test_detaching_inside_a_forward_leaves_no_hook(session: MemorySession) -> None:
    """The forward that was being measured ends as usual, counts as missed, and the user is told."""
    observers: list[Observer] = []

    def close(x: torch.Tensor) -> torch.Tensor:
        observers[0].close()
        return x

    model = nn.Sequential(nn.Linear(2, 2), Recorder(close), nn.Linear(2, 2))
    observers.append(observe(model, session))
    with pytest.warns(RuntimeWarning, match="removed while a sampled forward ran"):
        model(torch.ones(1, 2)).sum().backward()
    assert num_hooks(model) == 0
    assert [(sample.state, sample.measurements) for sample in session.samples()] == [(SampleState.MISSED, ())]
    assert (observers[0].counters.samples, observers[0].counters.missed) == (0, 1)


def test_a_rank_that_turns_out_not_to_observe_detaches_at_its_first_forward() -> None:
    """The session says so, once."""
    session = MemorySession(begins=False)
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    for _ in range(2):
        model(torch.ones(1, 2))
    assert (session.num_begun, session.deliveries, num_hooks(model), observer.observing) == (1, [], 0, False)


def test_recomputation_of_a_whole_model_is_no_forward(session: MemorySession) -> None:
    """A checkpointed root counts once."""
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    observer = observe(model, session)
    output = checkpoint(model, torch.ones(1, 2, requires_grad=True), use_reentrant=False)
    output.sum().backward()
    assert observer.counters.forwards == 1
    assert [s.state for s in session.samples()] == [
        SampleState.FORWARD_COMPLETE,
        SampleState.BACKWARD_OBSERVED,
    ]


def test_a_forward_during_graph_capture_is_missed(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is delivered as such, and nothing is measured into the graph."""

    def capturing() -> bool:
        return True

    monkeypatch.setattr(probe, "is_capturing_graph", capturing)
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    model(torch.ones(1, 2)).sum().backward()
    (sample,) = session.samples()
    assert (sample.state, sample.settled, sample.measurements) == (SampleState.MISSED, True, ())
    assert (observer.counters.missed, observer.counters.samples) == (1, 0)


def test_a_scripted_model_is_refused(session: MemorySession) -> None:
    """The sentence says what to attach to instead."""
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigurationError, match="attach to the module that it was scripted from"):
        observe(model, session)


def test_a_scripted_layer_is_reported_and_the_rest_measured(session: MemorySession) -> None:
    """The catalog does not expect it to fire, and its row says why; a frozen script has no mode."""
    scripted = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.ReLU()).eval()))
    model = nn.Sequential(nn.Linear(2, 2), scripted)
    with pytest.warns(RuntimeWarning, match="^torchinstruments: the layer '1' is a scripted module"):
        observe(model, session)
    assert [(error.probe, error.module) for error in session.errors] == [("scripted_module", "1")]
    model(torch.ones(1, 2))
    assert [(m.layer, m.mode, m.reasons[0]) for m in session.outputs()] == [
        ("1", "eval", "scripted_module"),
        ("0", "train", ""),
    ]
    assert [(m.expected, m.fired) for m in session.modules] == [(True, 1), (False, 0)]


def test_a_companion_that_cannot_attach_leaves_no_hook(session: MemorySession) -> None:
    """The error reaches the caller, and companions before it are detached again."""
    log: list[str] = []

    class Companion:
        def __init__(self, name: str) -> None:
            self.name = name

        def attach(self) -> None:
            log.append(f"+{self.name}")
            if self.name == "b":
                raise RuntimeError("cannot")

        def detach(self) -> None:
            log.append(f"-{self.name}")

    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="cannot"):
        observe(model, session, companions=(Companion("a"), Companion("b")))
    assert log == ["+a", "+b", "-a", "-b"]
    assert num_hooks(model) == 0


def test_a_model_that_is_dropped_takes_its_observer_and_companions_along(session: MemorySession) -> None:
    """Nothing of the observer keeps the model alive, and hooks into the process go with it."""
    log: list[str] = []

    class Companion:
        def attach(self) -> None:
            log.append("attached")

        def detach(self) -> None:
            log.append("detached")

    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session, companions=(Companion(),))
    model(torch.ones(1, 2)).sum().backward()
    gone = weakref.ref(model)
    session.deliveries.clear()
    del model
    gc.collect()
    assert gone() is None
    assert log == ["attached", "detached"]


def test_a_forked_child_observes_nothing(session: MemorySession) -> None:
    """Its forwards leave no sample and no hook runs; the parent's observer goes on."""
    model = nn.Sequential(nn.Linear(2, 2))
    observer = observe(model, session)
    model(torch.ones(1, 2))
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            model(torch.ones(1, 2))
            with observer.paused():
                pass
            assert len(session.deliveries) == 1
            assert not observer.observing
            assert observer.close()
            assert observer.flush()
            assert session.num_closed == 0
            again = MemorySession()
            observe(model, again, sampler=AlwaysSampler())
            model(torch.ones(1, 2))
            assert (len(again.deliveries), len(session.deliveries)) == (1, 1)
            is_right = True
        finally:
            os._exit(0 if is_right else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    model(torch.ones(1, 2))
    assert len(session.deliveries) == 2


def test_collection_is_timed_and_rows_are_counted(session: MemorySession) -> None:
    """Seconds of the deliveries add up to the counter; scalars include those that are missing."""
    model = nn.Sequential(nn.Linear(2, 2), Recorder(dict.fromkeys))
    observer = observe(model, session)
    model(torch.ones(1, 2))
    counters = observer.counters
    assert counters.collection_s == pytest.approx(sum(s.collection_s for s in session.samples()))
    assert counters.collection_s > 0
    assert counters.rows == sum(len(m.metrics) for m in session.outputs()) == 18


def test_giving_up_a_forward_lets_no_exception_out(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next forward runs, and is measured."""

    def interrupt(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise KeyboardInterrupt
        return x

    def fails(sampled: object) -> None:
        raise ValueError("cannot be given up")

    model = nn.Sequential(Recorder(interrupt))
    observer = observe(model, session, policy=ErrorPolicy.IGNORE)
    assert observer._probe is not None
    monkeypatch.setattr(observer._probe._calls, "_end_failed", fails)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1))
    model(torch.zeros(1))
    assert [error.message for error in session.errors] == ["cannot be given up"]
    assert [sample.state for sample in session.samples()] == [SampleState.FORWARD_COMPLETE]


def test_a_signal_handler_may_count_and_report_where_its_thread_does() -> None:
    """No lock of an observer stops the thread that holds it."""
    faults = Faults(ErrorPolicy.IGNORE, lambda _record: None)
    counts = Counts(faults, StepClock())
    with faults._lock, counts._lock:
        faults.report("forward", "", ValueError("x"))
        counts.add(samples=1)
    assert (counts.read().samples, counts.read().errors) == (1, {"forward": 1})
    model = nn.Sequential(nn.Linear(2, 2))
    attached = observe(model, MemorySession())._probe
    assert attached is not None
    with attached._lock, attached._bypass._lock:
        model(torch.ones(1, 2))
    assert attached.counters().samples == 1
