"""Calls of parts outside a call of the model are counted, told once, and cost ordinary training nothing."""

import copy
import gc
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from torchinstruments.config import ErrorPolicy
from torchinstruments.observe import bypass
from torchinstruments.observe.sampling import EveryNForwardsSampler
from torchinstruments.observe.wrappers import is_compiled_in_place
from torchinstruments.ranks.clock import StepClock
from unit.observe.memory import MemorySession, Recorder, num_hooks, observe, traces

SLOT = "_compiled_call_impl"


class Model(nn.Module):
    """An encoder of three modules, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
        self.head = nn.Linear(2, 2)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of the head."""
        return self.head(self.encoder(x))


X = torch.ones(1, 2)


def told(session: MemorySession) -> list[str]:
    """What was said about calls outside the model."""
    return [error.message for error in session.errors if error.probe == "bypassed"]


def test_parts_called_before_any_call_of_the_model_are_counted_once(session: MemorySession) -> None:
    """One warning at the end, with one count for each outermost call and the names of the parts."""
    model = Model()
    observer = observe(model, session)
    for _ in range(3):
        model.head(model.encoder(X))
    with pytest.warns(RuntimeWarning, match="calls of parts of the model") as caught:
        observer.close()
    assert len(caught) == 1
    (sentence,) = told(session)
    assert sentence.startswith(
        "at least 6 calls of parts of the model ('encoder', 'head') ran outside a call of the model; "
    )
    assert sentence.endswith("call the attached model itself, as model(...)")
    assert observer.counters.errors == {"bypassed": 1}
    assert session.deliveries == []


def test_parts_called_after_a_sampled_forward_are_counted_until_the_next_forward(
    session: MemorySession,
) -> None:
    """Those inside a call of the model are not."""
    model = Model()
    observer = observe(model, session)
    for _ in range(2):
        model(X).sum().backward()
        model.encoder(X)
    model(X)
    with pytest.warns(RuntimeWarning, match=r"2 calls of parts of the model \('encoder'\)"):
        observer.close()
    assert len(session.samples()) == 5


def test_a_model_whose_forward_is_called_directly_is_told_what_to_do(session: MemorySession) -> None:
    """Its parts are seen, and above them its own forward, whatever that calls its instance."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(this, x: torch.Tensor) -> torch.Tensor:
            return this.head(x)

    model = Named()
    observer = observe(model, session)
    model.forward(X)
    with pytest.warns(RuntimeWarning, match="or give capture_direct_forwards=True, since"):
        observer.close()


def test_captured_direct_forwards_are_no_bypass(session: MemorySession) -> None:
    """Parts called alone still are, without the advice to capture."""
    model = Model()
    observer = observe(model, session, capture_direct_forwards=True)
    model.forward(X)
    model.forward(X)
    model.head(X)
    with pytest.warns(RuntimeWarning, match=r"1 call of parts of the model \('head'\)"):
        observer.close()
    assert "capture_direct_forwards" not in told(session)[0]


def test_direct_forwards_of_parts_are_counted_where_they_are_captured(session: MemorySession) -> None:
    """Once each, as calls are: not those inside a forward of the model or of a part, nor a call's own."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Direct.Encoder()
            self.head = nn.Linear(2, 2)

        class Encoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(2, 2)
                self.second = nn.Linear(2, 2)

            @override
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.second(self.first.forward(x))

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head.forward(self.encoder.forward(x))

    model = Direct()
    observer = observe(model, session, capture_direct_forwards=True, sampler=EveryNForwardsSampler(2))
    expected = [model.encoder(X), model.encoder.forward(X), model.head.forward(X), model(X), model.forward(X)]
    for _ in range(3):
        model.head.forward(X)
        model.encoder.forward(X)
    assert torch.equal(expected[0], expected[1])
    assert torch.equal(expected[3], expected[4])
    model(X)
    model.head.forward(X)
    with pytest.warns(RuntimeWarning, match="calls of parts of the model") as caught:
        observer.close()
    assert len(caught) == 1
    (sentence,) = told(session)
    assert sentence.startswith("at least 9 calls of parts of the model ('encoder', 'head') ran outside")
    assert traces(model) == {}
    assert len(session.samples()) == 1


def test_direct_forwards_of_parts_that_are_no_bypass_are_not_counted(session: MemorySession) -> None:
    """Recomputation in a backward, pauses, traces, copies and other models."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(2, 2)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block.forward, x, use_reentrant=False)

    class Around(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block.forward(x)

    model = Checkpointed()
    observer = observe(model, session, capture_direct_forwards=True)
    twin = copy.deepcopy(model)
    assert traces(twin) == {}
    assert "forward" not in vars(pickle.loads(pickle.dumps(model.block)))
    for _ in range(3):
        twin.block.forward(X)
        with observer.paused():
            model.block.forward(X)
        torch.jit.trace(Around(model.block), X, check_trace=False)
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    observer.close()
    assert session.errors == []


def test_parts_that_are_copied_for_several_devices_are_watched_without_an_override(
    session: MemorySession,
) -> None:
    """An override would run the original in place of a replica; calls are counted all the same."""
    parallel: Any = nn.DataParallel(Model())
    parallel.device_ids = [0, 1]
    with pytest.warns(RuntimeWarning, match="use DistributedDataParallel"):
        observer = observe(parallel, session, capture_direct_forwards=True)
    assert "forward" not in vars(parallel.module.head)
    parallel.module.head(X)
    with pytest.warns(RuntimeWarning, match=r"1 call of parts of the model \('module.head'\)"):
        observer.close()


def test_what_a_wrapper_wraps_is_a_part_too(session: MemorySession) -> None:
    """An evaluation that unwraps the model passes the wrapper by."""
    model = nn.DataParallel(Model())
    observer = observe(model, session)
    model.module(X)
    with pytest.warns(RuntimeWarning, match=r"1 call of parts of the model \('module'\)"):
        observer.close()


def test_ordinary_training_is_not_warned_of(session: MemorySession) -> None:
    """Recomputation in the backward, copies, other models and other threads' forwards are no bypass."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    model = Checkpointed()
    observer = observe(model, session)
    twin = copy.deepcopy(model)
    for _ in range(3):
        twin.block(X)
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        thread = threading.Thread(target=model, args=(X,))
        thread.start()
        thread.join()
    observer.close()
    assert session.errors == []


def test_parts_called_in_a_pause_are_not_counted(session: MemorySession) -> None:
    """Whoever pauses knows that nothing is measured."""
    model = Model()
    observer = observe(model, session)
    with observer.paused():
        model.encoder(X)
    observer.close()
    assert session.errors == []


@pytest.mark.parametrize("direct", [False, True])
def test_unsampled_forwards_find_nothing_on_any_module(session: MemorySession, direct: bool) -> None:
    """No hook and no entry below the model, from its begin to the next sample."""
    seen: list[dict[str, list[str]]] = []
    model = nn.Sequential(nn.Linear(2, 2), Recorder(lambda x: (seen.append(traces(model)), x)[1]))
    observe(model, session, sampler=EveryNForwardsSampler(3), capture_direct_forwards=direct)
    for _ in range(5):
        model(X).sum().backward()
        seen.append(traces(model))
    inside, after = seen[::2], seen[1::2]
    in_sample = [*(["forward"] if direct else []), "_forward_hooks"]
    in_watch = [*(["forward", "__getstate__"] if direct else []), SLOT]
    hooked = {"0": in_sample, "1": in_sample}
    watched = {"0": in_watch, "1": in_watch}
    assert inside == [{}, {}, hooked, {}, {}]
    assert after == [{}, {}, watched, {}, {}]
    assert num_hooks(model) == 2


def test_watching_is_no_hook_and_ends_with_the_observer(session: MemorySession) -> None:
    """What modules do with hooks, their fast paths above all, stays as it is."""
    model = Model()
    observer = observe(model, session)
    assert num_hooks(model) == 2
    assert traces(model) == {
        part: [SLOT] for part in ("encoder", "encoder.0", "encoder.1", "encoder.1.0", "head")
    }
    observer.close()
    assert traces(model) == {}


def test_copies_of_a_watched_model_are_clean(session: MemorySession) -> None:
    """Deep and shallow copies and pickles, of the model and of a part, work and are not watched."""
    model = Model()
    observer = observe(model, session)
    expected = Model.forward(copy.deepcopy(model), X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert traces(twin) == {}
        assert torch.equal(twin(X), expected)
    assert SLOT not in vars(copy.copy(model.head))
    observer.close()
    assert session.errors == []


def test_a_copy_of_all_entries_runs_the_copy(session: MemorySession) -> None:
    """A replica that torch.nn.DataParallel makes has the entries of the module, and its own parameters."""
    model = Model()
    observe(model, session)
    replica: Any = model.head._replicate_for_data_parallel()
    replica.weight = torch.zeros(2, 2)
    replica.bias = torch.zeros(2)
    assert torch.equal(replica(X), torch.zeros(1, 2))
    entries = copy.deepcopy(vars(model.head), {})
    assert entries[SLOT] is None


def test_a_part_that_is_compiled_while_it_is_watched_stays_compiled(session: MemorySession) -> None:
    """The watched part is not taken for a compiled one, and what compiling put there is left."""
    model = Model()
    observer = observe(model, session)
    assert not is_compiled_in_place(model.head)
    model.head.compile(backend="eager")
    assert is_compiled_in_place(model.head)
    model(X)
    observer.close()
    assert is_compiled_in_place(model.head)
    assert "_compiled_call_impl" not in vars(model.encoder)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_code_is_not_compiled_anew_for_it(session: MemorySession) -> None:
    """A part compiled before attach is not watched inside; one that is watched compiles without a break."""
    compilations: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compilations.append(1)
        return graph.forward

    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    assert isinstance(compiled, nn.Module)
    model = nn.Sequential(compiled, nn.Linear(2, 2))
    observer = observe(model, session)
    for _ in range(3):
        assert SLOT not in vars(block[0])
        model(X).sum().backward()
        assert SLOT not in vars(block[0])
        model[0](X)
    assert len(compilations) == 1
    with pytest.warns(RuntimeWarning, match=r"3 calls of parts of the model \('0'\)"):
        observer.close()
    whole = Model()
    expected = whole(X)
    observe(whole, MemorySession())
    assert torch.equal(torch.compile(whole, backend="eager", fullgraph=True)(X), expected)


@pytest.mark.parametrize("direct", [False, True])
def test_code_that_calls_a_part_is_not_compiled_for_each_sample(session: MemorySession, direct: bool) -> None:
    """Once while the part is watched and once while it is not, however often that changes."""
    compilations: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compilations.append(1)
        return graph.forward

    model = Model()

    @torch.compile(backend=backend, fullgraph=True)
    def score(x: torch.Tensor) -> torch.Tensor:
        return model.head.forward(x) if direct else model.head(x)

    observe(model, session, capture_direct_forwards=True, sampler=EveryNForwardsSampler(2))
    for _ in range(6):
        score(X)
        model(X)
    assert len(compilations) == 2
    assert len(session.samples()) == 3


def test_a_forward_that_a_tool_wrapped_while_it_was_watched_runs_as_the_tool_wants(
    session: MemorySession,
) -> None:
    """What the tool holds is the watch of then, which is not put over what the tool made of it."""
    model = Model()
    head: Any = model.head
    observer = observe(model, session, capture_direct_forwards=True)
    below = head.forward
    head.forward = lambda x: -below(x)
    expected = -nn.Linear.forward(head, X)
    for _ in range(3):
        assert torch.equal(head.forward(X), expected)
        assert torch.equal(model(X), model.forward(X))
    with pytest.warns(RuntimeWarning, match=r"3 calls of parts of the model \('head'\)"):
        observer.close()
    assert torch.equal(head.forward(X), expected)
    del head.forward
    assert torch.equal(head.forward(X), -expected)


def test_a_watched_part_can_be_scripted(session: MemorySession) -> None:
    """The script is that of the part's own forward, whose source is found below the watch."""
    model = Model()
    observe(model, session, capture_direct_forwards=True)
    bare = torch.jit.script(Model().encoder)
    scripted = torch.jit.script(model.encoder)
    assert scripted.code == bare.code
    assert torch.equal(scripted(X), model.encoder(X))


def test_steps_without_a_call_of_the_model_are_evidence(session: MemorySession) -> None:
    """A step after each call is ordinary; each further one of the same optimizer is counted."""
    clock = StepClock()
    model = Model()
    observer = observe(model, session, clock=clock, sampler=EveryNForwardsSampler(100))
    for num_steps in (1, 3, 1, 2):
        model(X).sum().backward()
        for _ in range(num_steps):
            clock.step_started(1, 0.0)
            clock.step_ended(1, 0.0)
        clock.step_started(2, 0.0)
        clock.step_ended(2, 0.0)
    with pytest.warns(RuntimeWarning, match="3 steps of its optimizers came without a call of it"):
        observer.close()


def test_the_number_of_counted_calls_is_bounded(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it the sentence says at least, and nothing is watched again."""
    monkeypatch.setattr(bypass, "MAX_COUNTED", 4)
    model = Model()
    observer = observe(model, session)
    for _ in range(9):
        model.head(X)
    model(X)
    assert traces(model) == {}
    with pytest.warns(RuntimeWarning, match="at least 4 calls of parts"):
        observer.close()


def test_it_is_never_raised(session: MemorySession) -> None:
    """Not even where errors are: it is none."""
    model = Model()
    observer = observe(model, session, policy=ErrorPolicy.RAISE)
    model.head(X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        observer.close()
    assert len(caught) == 1
    assert len(told(session)) == 1


def test_a_model_that_goes_while_it_is_watched_leaves_its_parts_clean(session: MemorySession) -> None:
    """A part that lives on runs as before."""
    model = Model()
    observe(model, session)
    head = model.head
    del model
    head(X)
    gc.collect()
    assert SLOT not in vars(head)
