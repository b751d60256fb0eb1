"""Sampled forwards that are forced to run eagerly: every layer is seen, and the stance never stays behind."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from torchinstruments.errors import ConfigurationError
from torchinstruments.observe import stance as stance_module
from torchinstruments.observe.capture import SampledForward
from torchinstruments.observe.engine import call_at_end_of_backward
from torchinstruments.observe.sampling import (
    AlwaysSampler,
    EveryNForwardsSampler,
    EveryNStepsSampler,
    TimedSampler,
)
from torchinstruments.observe.stance import is_agreed, refuse_disagreement
from torchinstruments.ranks import pipelining
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.ranks.policy import parse_policy
from torchinstruments.records import SampleState
from unit.observe.compiling import FORMS, INSIDE, Net, compile_as, counting, equal, stance, train
from unit.observe.memory import MemorySession, Recorder, observe

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
X = torch.ones(3, 4)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Every test compiles for itself, and leaves compiled code in use."""
    torch._dynamo.reset()
    yield
    assert stance() == "default"
    torch._dynamo.reset()


def states(session: MemorySession) -> list[str]:
    """The state of each sample's first delivery."""
    found: dict[int, str] = {}
    for sample in session.samples():
        found.setdefault(sample.ordinal, sample.state.value)
    return list(found.values())


def compiled_blocks(*, checkpointed: bool = False) -> Net:
    """A model whose blocks are compiled."""
    model = Net(checkpointed=checkpointed)
    compile_as("blocks", model, counting())
    return model


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("form", FORMS)
def test_every_layer_of_a_sampled_forward_is_seen(
    session: MemorySession, form: str, checkpointed: bool
) -> None:
    """Rows say ``forced_eager``, unsampled forwards use the compiled code, and nothing is compiled anew."""
    bare_backend, backend = counting(), counting()
    torch.manual_seed(7)
    bare = train(compile_as(form, Net(checkpointed=checkpointed), bare_backend))
    torch._dynamo.reset()
    torch.manual_seed(7)
    model = compile_as(form, Net(checkpointed=checkpointed), backend)
    observer = observe(model, session, sampler=EveryNForwardsSampler(2), force_eager=True)
    observed = train(model)
    observer.close()
    assert backend.frame_count == bare_backend.frame_count
    # The backend builds what was written, so that here both ways give the same bits.
    assert equal(bare, observed)
    layers = {*INSIDE, "head"}
    for found in (session.outputs(), session.gradients()):
        assert {(m.layer, m.execution.value, m.reasons[0]) for m in found} == {
            (layer, "forced_eager", "") for layer in layers
        }
    assert {m.layer: (m.expected, m.fired) for m in session.modules} == dict.fromkeys(layers, (True, 3))
    assert (observer.counters.samples, observer.counters.missed) == (3, 0)
    assert session.errors == []


def test_the_stance_lasts_from_the_forward_to_the_end_of_its_backward(session: MemorySession) -> None:
    """It is taken before the model runs and left behind all that the engine does."""
    seen: list[str] = []
    model = nn.Sequential(Recorder(lambda x: (seen.append(stance()), x)[1]), nn.Linear(4, 2))
    observe(model, session, sampler=EveryNForwardsSampler(2), force_eager=True)
    for expected in ("default", "force_eager"):
        seen.clear()
        loss = model(X).sum()
        assert (seen, stance()) == ([expected], expected)
        loss.backward()
        assert stance() == "default"


def test_it_lasts_behind_what_the_framework_does_at_the_end_of_the_backward(session: MemorySession) -> None:
    """DDP and FSDP have a callback queued in the backward, as the hook of the parameter has here."""
    model = compiled_blocks()
    observe(model, session, force_eager=True)
    seen: list[str] = []

    def queue(_: torch.Tensor) -> None:
        call_at_end_of_backward(lambda: seen.append(stance()))

    model.get_parameter("head.weight").register_hook(queue)
    model(X).sum().backward()
    assert (seen, stance()) == (["force_eager"], "default")


def test_a_forward_without_gradients_leaves_it_at_its_end(session: MemorySession) -> None:
    """No backward can come: under no_grad, and where nothing that was returned requires one."""
    model = compiled_blocks()
    observe(model, session, force_eager=True)
    with torch.no_grad():
        model(X)
    assert stance() == "default"
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model(X)
    assert stance() == "default"
    assert states(session) == ["forward_complete"] * 2


@pytest.mark.parametrize("interrupts", [False, True], ids=["exception", "interrupt"])
def test_a_forward_that_raises_leaves_it(session: MemorySession, interrupts: bool) -> None:
    """An exception at once; what runs no hooks, by the next forward."""
    errors: list[BaseException] = []

    def fail(x: torch.Tensor) -> torch.Tensor:
        if errors:
            raise errors.pop()
        return x

    model = nn.Sequential(compiled_blocks(), Recorder(fail))
    observe(model, session, sampler=EveryNForwardsSampler(2), force_eager=True)
    model(X).sum().backward()
    error = KeyboardInterrupt() if interrupts else ValueError("the model's own")
    errors.append(error)
    with pytest.raises(type(error)):
        model(X)
    if interrupts:
        assert stance() == "force_eager"
        model(X).sum().backward()
    assert stance() == "default"


def test_a_backward_that_raises_leaves_it_at_the_next_forward(session: MemorySession) -> None:
    """The engine never says that such a backward is over."""

    class Fails(torch.autograd.Function):
        @staticmethod
        @override
        def forward(*args: Any, **kwargs: Any) -> Any:
            return args[1].clone()

        @staticmethod
        @override
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            raise ValueError("the model's own")

    fails: list[bool] = []
    model = nn.Sequential(
        nn.Linear(4, 4), Recorder(lambda x: Fails.apply(x) if fails else x), nn.Linear(4, 2)
    )
    observe(model, session, sampler=EveryNForwardsSampler(2), force_eager=True)
    model(X).sum().backward()
    fails.append(True)
    with pytest.raises(ValueError, match="the model's own"):
        model(X).sum().backward()
    model(X)
    assert stance() == "default"


def test_a_backward_that_never_comes_leaves_it_at_the_next_forward(session: MemorySession) -> None:
    """The graph went with its last tensor."""
    model = compiled_blocks()
    observe(model, session, sampler=EveryNForwardsSampler(2), force_eager=True)
    model(X).sum().backward()
    model(X)
    assert stance() == "force_eager"
    model(X)
    assert stance() == "default"


def test_a_graph_that_is_kept_is_waited_for_until_the_next_attempt(session: MemorySession) -> None:
    """What is kept for a log holds the stance no longer than its attempt lasts."""
    model = Net()
    compile_as("blocks", model, counting())
    clock = StepClock()
    watch = OptimizerWatch(clock, weakref.ref(model), None, on_error=_never)
    observe(model, session, clock=clock, companions=(watch,), sampler=EveryNStepsSampler(2), force_eager=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for expected in ("default", "force_eager", "default"):
        kept.append(model(X))
        model(X).sum().backward()
        assert stance() == expected
        optimizer.step()
    assert states(session) == ["forward_complete"] * 2


def test_micro_batches_with_one_backward_all_run_eagerly(session: MemorySession) -> None:
    """The second forward begins while the first one waits, so it is waited for too; checkpoints hold."""
    model = compiled_blocks(checkpointed=True)
    observer = observe(model, session, sampler=EveryNForwardsSampler(3), force_eager=True)
    for _ in range(3):
        loss = model(X).sum() + model(2 * X).sum()
        loss.backward()
        assert stance() == "default"
    assert observer.counters.samples + observer.counters.missed == 2
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_sample_is_missed_while_a_compiled_forward_waits_for_its_backward(session: MemorySession) -> None:
    """It runs compiled as well, is counted, and one warning says why."""
    model = compiled_blocks(checkpointed=True)
    observer = observe(model, session, sampler=EveryNForwardsSampler(2), force_eager=True)

    def step() -> None:
        loss = model(X).sum() + model(2 * X).sum()
        assert stance() == "default"
        loss.backward()

    with pytest.warns(RuntimeWarning, match="still waits for its backward"):
        step()
    step()
    assert (observer.counters.samples, observer.counters.missed) == (0, 2)
    assert states(session) == [SampleState.MISSED.value] * 2
    model(X).sum().backward()
    model(X).sum().backward()
    assert observer.counters.samples == 1


@pytest.mark.parametrize("retain_graph", [False, True], ids=["two parts", "one graph twice"])
def test_a_second_backward_through_a_forced_forward_finds_it_forced(
    session: MemorySession, retain_graph: bool
) -> None:
    """What checkpoints compute again is what they computed before."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList([compiled_blocks(checkpointed=True) for _ in range(2)])

        @override
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(net(x) for net in self.nets)

    model = Two()
    observe(model, session, force_eager=True)
    one, other = model(X)
    one.sum().backward(retain_graph=retain_graph)
    assert stance() == ("force_eager" if retain_graph else "default")
    (one if retain_graph else other).sum().backward()
    assert stance() == "default"
    assert {d.backward_index for d in session.samples()} == {None, 0, 1}


def test_removing_the_observer_in_between_leaves_it(session: MemorySession) -> None:
    """The program's code between the two runs compiled again."""
    model = compiled_blocks()
    observer = observe(model, session, force_eager=True)
    loss = model(X).sum()
    assert stance() == "force_eager"
    observer.close()
    assert stance() == "default"
    loss.backward()
    assert stance() == "default"


@pytest.mark.parametrize("by", ["its own thread", "another thread"])
@pytest.mark.parametrize("form", ["whole", "in_place", "blocks"])
def test_an_observer_that_is_removed_in_a_forced_forward_leaves_it_at_its_end(
    session: MemorySession, form: str, by: str
) -> None:
    """All of one forward runs eagerly, and so does what its checkpoints compute again."""
    removals: list[Callable[[], object]] = []

    def remove(x: torch.Tensor) -> torch.Tensor:
        for removal in removals:
            removal()
            assert stance() == "force_eager"
        return x

    net = Net(checkpointed=True)
    net.blocks.insert(1, Recorder(torch.compiler.disable(remove)))
    for block in (net.blocks[0], net.blocks[2]):
        block.compile(backend=counting())
    model = compile_as(form, net, counting()) if form != "blocks" else net
    model(X).sum().backward()
    observer = observe(model, session, force_eager=True)
    removals.append(observer.close)
    if by == "another thread":
        removals[0] = lambda: _in_another_thread(observer.close)
    loss = model(X).sum()
    assert stance() == "default"
    loss.backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (model, *model.modules()))
    removals.clear()
    model(X).sum().backward()
    assert observer.counters.samples == 0
    assert observer.counters.missed == 1


def test_an_interrupt_behind_a_removal_holds_it_until_the_next_forward(session: MemorySession) -> None:
    """A handler of SIGINT removes the observer and raises, after which torch runs no hooks."""
    removals: list[Callable[[], object]] = []

    def interrupt(x: torch.Tensor) -> torch.Tensor:
        for removal in removals:
            removal()
            raise KeyboardInterrupt
        return x

    model = nn.Sequential(compiled_blocks(), Recorder(interrupt))
    observer = observe(model, session, force_eager=True)
    removals.append(observer.close)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    removals.clear()
    model(X).sum().backward()
    assert stance() == "default"
    assert not model._forward_hooks


def test_an_observer_that_is_removed_behind_an_interrupt_leaves_it_at_once(session: MemorySession) -> None:
    """A ``finally`` removes it, and the forward is not on the stack any more."""

    def interrupt(_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    model = nn.Sequential(compiled_blocks(), Recorder(interrupt))
    observer = observe(model, session, force_eager=True)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert stance() == "force_eager"
    observer.close()
    assert stance() == "default"
    assert not model._forward_hooks


def _in_another_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class Spying(torch.autograd.Function):
    """Notes the stance in which its backward runs, and raises there if it is to."""

    @staticmethod
    @override
    def forward(*args: Any, **kwargs: Any) -> Any:
        ctx, x, ctx.seen, ctx.fails = args
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ctx.seen.append(stance())
        if ctx.fails:
            raise ValueError("the program's own")
        return *grad_outputs, None, None


def spying(seen: list[str], *, fails: bool = False) -> nn.Sequential:
    """A model with compiled and checkpointed blocks; the stance is seen behind them in the backward."""
    first = Recorder(lambda x: Spying.apply(x.clone().requires_grad_(), seen, fails))
    return nn.Sequential(first, compiled_blocks(checkpointed=True))


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_backward_that_comes_after_its_observer_was_removed_runs_forced(
    session: MemorySession, retain_graph: bool
) -> None:
    """What checkpoints compute again is what they computed before, and the stance is left at the end."""
    seen: list[str] = []
    model = spying(seen)
    observer = observe(model, session, force_eager=True)
    loss = model(X).sum()
    observer.close()
    del observer
    assert stance() == "default"
    loss.backward(retain_graph=retain_graph)
    assert (seen, stance()) == (["force_eager"], "default")
    if retain_graph:
        loss.backward()
        assert (seen, stance()) == (["force_eager"] * 2, "default")


def test_such_a_backward_that_raises_leaves_it_with_its_graph(session: MemorySession) -> None:
    """No forward of an observer comes any more that would tell."""
    seen: list[str] = []
    model = spying(seen, fails=True)
    observer = observe(model, session, force_eager=True)
    loss = model(X).sum()
    observer.close()
    with pytest.raises(ValueError, match="the program's own"):
        loss.backward()
    assert seen == ["force_eager"]
    del loss
    gc.collect()
    assert stance() == "default"


def test_an_observer_that_is_removed_in_a_backward_leaves_it_at_the_end(session: MemorySession) -> None:
    """A hook of the program's may remove it; what is computed again behind that is still forced."""
    seen: list[str] = []
    model = spying(seen)
    observer = observe(model, session, force_eager=True)
    output = model(X)
    parameter = model.get_parameter("1.head.weight")
    parameter.register_hook(lambda _: (observer.close(), None)[1])
    output.sum().backward()
    assert (seen, stance()) == (["force_eager"], "default")


@pytest.mark.parametrize("around", ["fail_on_recompile", "eager_on_recompile", "default"])
def test_a_stance_around_the_forward_alone_is_taken_again_for_the_backward(
    session: MemorySession, around: str
) -> None:
    """The program's own goes with its ``with``, and ours with it; each sample is whole all the same."""
    seen: list[str] = []
    model = spying(seen)
    model(X).sum().backward()
    seen.clear()
    observer = observe(model, session, force_eager=True)
    for _ in range(3):
        with torch.compiler.set_stance(around):
            output = model(X)
        assert stance() == "default"
        output.sum().backward()
        assert stance() == "default"
    assert seen == ["force_eager"] * 3
    assert (observer.counters.samples, observer.counters.missed) == (3, 0)
    assert {m.execution.value for m in session.outputs() + session.gradients()} == {"forced_eager"}
    assert len(session.outputs()) == len(session.gradients()) == 3 * 6
    assert session.errors == []


def test_a_forward_under_a_stance_that_replaced_ours_is_not_taken_for_a_forced_one(
    session: MemorySession,
) -> None:
    """It ran compiled, so its sample is missed; the one before it still has a forced backward."""
    model = compiled_blocks(checkpointed=True)
    model(X).sum().backward()
    observer = observe(model, session, force_eager=True)
    first = model(X)
    torch.compiler.set_stance("default")
    second = model(X)
    first.sum().backward()
    second.sum().backward()
    assert (observer.counters.samples, observer.counters.missed) == (1, 1)
    assert {m.execution.value for m in session.outputs()} == {"forced_eager"}
    assert [error.message for error in session.errors if "ran compiled" not in error.message] == []
    assert len(session.errors) == 1


def test_a_model_that_is_dropped_leaves_it(session: MemorySession) -> None:
    """Nobody would call remove_observer any more."""
    model = compiled_blocks()
    observe(model, session, force_eager=True)
    output = model(X)
    session.deliveries.clear()
    del model
    gc.collect()
    del output
    gc.collect()
    assert stance() == "default"


def test_a_stance_of_the_programs_is_put_back_and_never_overwritten(session: MemorySession) -> None:
    """The one that it had before, and the one that it took meanwhile."""
    model = compiled_blocks()
    observe(model, session, force_eager=True)
    with torch.compiler.set_stance("eager_on_recompile"):
        model(X).sum().backward()
        assert stance() == "eager_on_recompile"
        loss = model(X).sum()
        torch.compiler.set_stance("fail_on_recompile")
        loss.backward()
        assert stance() == "fail_on_recompile"


def test_two_observers_hold_it_together(session: MemorySession) -> None:
    """A part with an observer of its own is measured inside; the stance is left when neither needs it."""
    model = nn.Sequential(compiled_blocks(), nn.Linear(2, 2))
    inner_session = MemorySession()
    inner = observe(model[0], inner_session, force_eager=True)
    outer = observe(model, session, force_eager=True)
    model(X).sum().backward()
    assert stance() == "default"
    for found in (session, inner_session):
        assert {m.execution.value for m in found.outputs()} == {"forced_eager"}
    loss = model(X).sum()
    inner.close()
    assert stance() == "force_eager"
    loss.backward()
    assert stance() == "default"
    outer.close()


def test_a_forward_of_another_thread_is_waited_for(session: MemorySession) -> None:
    """It began under the stance, which is that of the process, and needs it for its own backward."""
    model = compiled_blocks(checkpointed=True)
    observer = observe(model, session, force_eager=True)
    loss = model(X).sum()
    others: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: others.append(model(X).sum()))
    thread.start()
    thread.join()
    loss.backward()
    assert stance() == "force_eager"
    others.pop().backward()
    assert stance() == "default"
    assert observer.counters.samples == 2


def test_a_pipeline_is_left_alone(session: MemorySession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage's forwards run compiled and are missed."""
    model = compiled_blocks()
    observer = observe(model, session, force_eager=True)
    monkeypatch.setattr(pipelining, "STAGE", __name__)
    with pytest.warns(RuntimeWarning, match="a pipeline's schedule"):
        model(X).sum().backward()
    assert (observer.counters.samples, observer.counters.missed) == (0, 1)


def test_a_model_that_returns_nothing_readable_holds_it_until_the_next_forward(
    session: MemorySession,
) -> None:
    """Nothing in it tells of a backward, so it might come until then."""

    class Box:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    model = nn.Sequential(nn.Linear(4, 2), Recorder(Box))
    observe(model, session, sampler=EveryNForwardsSampler(2), force_eager=True)
    model(X).tensor.sum().backward()
    model(X).tensor.sum().backward()
    assert stance() == "force_eager"
    model(X).tensor.sum().backward()
    assert stance() == "default"


@pytest.mark.parametrize(
    ("policy", "sampler", "world_size", "agreed"),
    [
        ("all", EveryNStepsSampler(2), 2, True),
        ("all", AlwaysSampler(), 2, True),
        ([1, 0], AlwaysSampler(), 2, True),
        ("all", EveryNForwardsSampler(2), 2, False),
        ("all", TimedSampler(), 2, False),
        ("rank0", EveryNStepsSampler(2), 2, False),
        ("node", EveryNStepsSampler(2), 2, False),
        ([1], EveryNStepsSampler(2), 2, False),
        ("rank0", TimedSampler(), 1, True),
    ],
)
def test_several_ranks_have_to_force_the_same_forwards(policy, sampler, world_size, agreed) -> None:
    """Every rank has to observe, by a sampler that counts attempts or takes every forward."""
    parsed = parse_policy(policy)
    assert is_agreed(parsed, sampler, world_size) is agreed
    if agreed:
        refuse_disagreement(parsed, sampler, world_size)
    else:
        with pytest.raises(ConfigurationError, match="compiled='force_eager' with rank_policy="):
            refuse_disagreement(parsed, sampler, world_size)


def test_a_world_that_turns_out_to_be_larger_is_observed_at_the_boundary(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the rank was not known at attach, the first forward falls back, with a warning."""
    monkeypatch.setattr(MemorySession, "world_size", 2)
    model = compiled_blocks()
    observe(model, session, force_eager=True)
    with pytest.warns(RuntimeWarning, match="observed at their boundary instead"):
        model(X).sum().backward()
    assert stance() == "default"
    assert {m.layer for m in session.gradients()} == {"blocks.0", "blocks.1", "head"}
    assert {m.layer: m.expected for m in session.modules}["blocks.0.up"] is False


def test_forwards_that_wait_are_bounded(session: MemorySession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between several ranks nothing but the next attempt ends one whose backward never comes."""
    monkeypatch.setattr("torchinstruments.observe.stance.MAX_WAITING", 4)
    monkeypatch.setattr(MemorySession, "world_size", 2)
    model = nn.Sequential(nn.Linear(4, 2))
    observer = observe(model, session, sampler=EveryNForwardsSampler(100), agreed=True, force_eager=True)
    outputs = [model(X) for _ in range(10)]
    assert len(_waiting()) == 4
    outputs.clear()
    assert len(_waiting()) == 4
    observer.close()
    assert _waiting() == []


def _waiting() -> list[object]:
    """What the process waits for."""
    return [flight for flight in stance_module._PROCESS._alive() if flight in stance_module._PROCESS._kept]


def _never(probe: str, error: BaseException) -> None:
    raise AssertionError(probe) from error


def test_nothing_is_forced_in_a_program_that_never_loaded_the_compiler(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no compiled code, and the compiler is not loaded for it."""
    model = nn.Sequential(nn.Linear(4, 2))
    observe(model, session, force_eager=True)
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    model(X).sum().backward()
    assert {m.execution.value for m in session.outputs()} == {"eager"}


def test_a_sample_that_fails_at_its_end_leaves_the_stance_all_the_same(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails in measuring costs the sample and nothing of the program's compiled code."""

    def fails(*_: object) -> None:
        raise OSError("no more")

    model = compiled_blocks()
    observe(model, session, sampler=EveryNForwardsSampler(2), force_eager=True)
    monkeypatch.setattr(SampledForward, "returned", fails)
    found = []
    for _ in range(4):
        model(X).sum().backward()
        found.append(stance())
    assert found == ["default"] * 4
    assert {(error.probe, error.message) for error in session.errors} == {("forward", "no more")}
