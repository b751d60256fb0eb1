"""What a watched forward is: the forward that it would be, seen from its begin to its end."""

import ast
import copy
import inspect
import pickle
import textwrap
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from checks.training import mlp
from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer
from torchinstruments.checks import (
    LivenessProbe,
    RangeProbe,
    SinkProbe,
    func,
    grad_audit,
    grad_health,
    module,
    tensor_scan,
)
from torchinstruments.checks.layer_watch import LayerWatch
from torchinstruments.checks.probes import attention, function_mode, liveness, ranges, sinks, watching
from unit.observe.compiling import FORMS, Net, compile_as, counting, equal, train

X = torch.linspace(-2, 2, 12).reshape(3, 4)


class Block(nn.Module):
    """Dropout, batch statistics, an activation in place, and a checkpoint."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.norm, self.fc, self.act, self.drop = (
            nn.BatchNorm1d(4),
            nn.Linear(4, 4),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
        )
        self.use_reentrant = use_reentrant

    def inner(self, x):
        """(batch, 4) -> the same."""
        return self.drop(self.act(self.fc(x)))

    def forward(self, x):
        """(batch, 4) -> the same."""
        return x + checkpoint(self.inner, self.norm(x), use_reentrant=self.use_reentrant)


def probes():
    """Returns one probe of each kind that sees much."""
    return [
        RangeProbe({func("relu"): (0, 1), module("*"): (-1, 1)}),
        LivenessProbe([func("linear"), func("relu"), func("dropout"), module("0.*")], unit_dim=-1),
        SinkProbe(attention=[func("relu")], residual=[func("linear")]),
    ]


def leftovers(model):
    """Returns everything that a watch may leave behind."""
    found = list(_get_current_function_mode_stack())
    for part in model.modules():
        found += [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        found += [vars(part).get("_compiled_call_impl")] if vars(part).get("_compiled_call_impl") else []
    return found


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_training_with_all_probes_watching_is_the_same_bit_for_bit(use_reentrant):
    """Outputs, gradients, parameters, buffers and random numbers; a recomputation is no second call."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(4, 4), *[Block(use_reentrant=use_reentrant) for _ in range(2)], nn.Linear(4, 2)
    )
    twin = copy.deepcopy(model)
    bare = train(model)
    found = probes()
    with ExitStack() as stack:
        for probe in found:
            stack.enter_context(probe.watch(twin))
        watched = train(twin)
    assert equal(bare, watched)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    assert leftovers(twin) == []
    assert [probe.num_forwards for probe in found] == [6, 6, 6]
    sites = {one.site: one.num_seen for one in found[1].facts()}
    assert sites["1.act:relu"] == sites["2.fc:linear"] == 6


def test_an_unwatched_forward_pays_for_nothing():
    """No hook, no mode and no slot is there outside of the block, and none between two forwards but hooks."""
    model = mlp()
    probe = RangeProbe({func("linear"): (-9, 9), module("0"): (-9, 9)})
    assert leftovers(model) == []
    with probe.watch(model):
        assert _get_current_function_mode_stack() == []
        model(X)
        assert _get_current_function_mode_stack() == []
        nn.functional.linear(X, model[0].weight)
        model[0](X)
    assert leftovers(model) == []
    model(X)
    assert [one.num_seen for one in probe.facts()] == [1, 1, 1]


class Operations(TorchDispatchMode):
    """Notes every operation that a device would run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs it."""
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operations_of(model):
    """Returns the operations of a forward and its backward."""
    model.zero_grad()
    with Operations() as mode:
        model(X).sum().backward()
    return mode.names


def test_a_forward_that_is_not_watched_has_no_operation_more():
    """Before, behind and inside a block that watches another model; in a block these probes see one."""
    model, other = nn.Sequential(mlp(), nn.ReLU()), mlp()
    bare = operations_of(model)
    found = probes()
    with ExitStack() as stack:
        for probe in found:
            stack.enter_context(probe.watch(other))
        assert operations_of(model) == bare
        assert operations_of(other)
        assert operations_of(model) == bare
    with ExitStack() as stack:
        for probe in found:
            stack.enter_context(probe.watch(model))
        model(X)
    assert operations_of(model) == bare
    assert [probe.num_forwards for probe in found] == [2, 2, 2]


def test_a_watch_goes_on_after_an_exception_that_the_program_catches():
    """Between the calls nothing is seen, and the next call is a forward again."""

    class Sometimes(nn.Module):
        is_bad = True

        def forward(self, x):
            """Raises now and then."""
            x = x.relu()
            if self.is_bad:
                raise KeyError("mine")
            return x.relu()

    model, probe = Sometimes(), LivenessProbe([func("relu")])
    with probe.watch(model):
        with pytest.raises(KeyError):
            model(X)
        assert _get_current_function_mode_stack() == []
        torch.relu(X)
        model.is_bad = False
        model(X)
    assert [(one.site, one.num_seen) for one in probe.facts()] == [("(model):relu", 2), ("(model):relu#1", 1)]
    assert leftovers(model) == []


def test_blocks_may_be_nested_and_end_in_any_order():
    """A part of the model inside the whole, a watch inside a forward, and a model that calls itself."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    whole, part = LivenessProbe([func("linear")]), LivenessProbe([func("linear")])
    first, second = whole.watch(model), part.watch(model[1])
    first.__enter__()
    second.__enter__()
    model(X)
    first.__exit__(None, None, None)
    model(X)
    second.__exit__(None, None, None)
    assert {one.site: one.num_seen for one in whole.facts()} == {"0:linear": 1, "1.1:linear": 1}
    assert {one.site: one.num_seen for one in part.facts()} == {"1:linear": 2}
    assert leftovers(model) == []

    class Recursive(nn.Module):
        def forward(self, x, depth=2):
            """Calls itself."""
            return x if depth == 0 else self(x.relu(), depth - 1)

    probe = LivenessProbe([func("relu"), module("")])
    with probe.watch(recursive := Recursive()):
        recursive(X)
    assert probe.num_forwards == 1
    assert [one.site for one in probe.facts()] == [
        "(model):relu",
        "(model):relu#1",
        "(model)",
        "(model)#1",
        "(model)#2",
    ]


def test_an_exception_of_the_model_leaves_nothing_behind():
    """Nor does one that no hook sees."""

    class Fails(nn.Module):
        def __init__(self, error):
            super().__init__()
            self.fc, self.error = nn.Linear(4, 4), error

        def forward(self, x):
            """Raises."""
            raise self.error(str(self.fc(x).shape))

    for error in (ValueError, KeyboardInterrupt):
        model, probe = Fails(error), LivenessProbe([func("linear"), module("fc")])
        with pytest.raises(error), probe.watch(model):
            model(X)
        assert leftovers(model) == []
        assert len(probe.facts()) == 2


def test_an_error_of_a_probe_does_not_reach_the_program(monkeypatch):
    """It is counted, with what it was and where."""

    def fails(*_args):
        raise ValueError("mine")

    monkeypatch.setattr(ranges, "scan", fails)
    model, probe = mlp(), RangeProbe({func("linear"): (0, 1), module("0"): (0, 1)})
    with probe.watch(model):
        model(X)
    (entry,) = probe.unavailable
    assert (entry.reason, entry.num_times) == ("probe_error: ValueError: mine", 3)


def test_modes_of_the_program_stay_as_they_are():
    """One that was there before sees its calls, one that the forward leaves on is there after it."""

    class Counts(TorchFunctionMode):
        num_calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.num_calls += 1
            return func(*args, **(kwargs or {}))

    class Leaves(nn.Module):
        def __init__(self, mode):
            super().__init__()
            self.mode = mode

        def forward(self, x):
            """Turns a mode on."""
            self.mode.__enter__()
            return x.relu()

    counts = []
    for watched in (False, True):
        outer, inner, probe = Counts(), Counts(), LivenessProbe([func("relu")])
        model = Leaves(inner)
        with ExitStack() as stack:
            stack.enter_context(outer)
            if watched:
                stack.enter_context(probe.watch(model))
                before = outer.num_calls
            else:
                before = 0
            model(X)
            assert _get_current_function_mode_stack() == [outer, inner]
            inner.__exit__(None, None, None)
            counts.append((outer.num_calls - before, inner.num_calls))
        if watched:
            assert probe.facts()[0].num_seen == 1
    assert counts[0] == counts[1]


def test_other_threads_are_not_watched_and_said():
    """Their forwards are their own."""
    model, probe = mlp(), LivenessProbe([func("linear")])
    with probe.watch(model):
        thread = threading.Thread(target=model, args=(X,))
        thread.start()
        thread.join()
    assert (probe.num_forwards, probe.facts()) == (0, ())
    reasons = {entry.reason.partition(":")[0] for entry in probe.unavailable}
    assert reasons == {"other_thread", "no_forward", "selector_matched_nothing"}


def test_a_forward_that_makes_a_program_is_left_alone_and_said():
    """The program is the one without a probe."""
    model = mlp(depth=1)
    expected: Any = torch.jit.trace(model, (X,))
    probe = LivenessProbe([func("linear"), module("0")])
    with probe.watch(model), grad_health(model):
        traced: Any = torch.jit.trace(model, (X,), check_trace=False)
        exported = torch.export.export(model, (X,))
    kinds = [[node.kind() for node in program.inlined_graph.nodes()] for program in (expected, traced)]
    assert kinds[0] == kinds[1]
    assert "aten::linear" in kinds[0]
    assert [node.name for node in exported.graph.nodes if node.op == "call_function"] == ["linear"]
    assert (probe.num_forwards, probe.facts()) == (0, ())
    assert any(entry.reason.startswith("traced: by torch.jit.trace") for entry in probe.unavailable)


def test_what_transforms_compute_has_no_values():
    """Inside ``torch.func`` a tensor stands for many."""
    model, probe = mlp(depth=1), LivenessProbe([func("linear")])
    with probe.watch(model):
        torch.func.vmap(model)(X)
    (entry,) = probe.unavailable
    assert entry.reason == "unsupported_layout: inside a torch.func transform"


def test_copies_of_a_watched_model_are_not_watched():
    """They have hooks that do nothing, and the model can be saved."""
    model, probe = mlp(), LivenessProbe([func("linear"), module("0")])
    with probe.watch(model):
        copied = copy.deepcopy(model)
        pickle.loads(pickle.dumps(model))(X)
        copied(X)
        model(X)
    assert probe.num_forwards == 1


def test_sites_are_bounded(monkeypatch):
    """Further ones are counted."""
    monkeypatch.setattr(watching, "MAX_SITES", 3)
    model, probe = mlp(depth=5), LivenessProbe([func("linear")])
    with probe.watch(model):
        model(X)
    assert len(probe.facts()) == 3
    (entry,) = probe.unavailable
    assert (entry.reason.partition(":")[0], entry.num_times) == ("too_many_sites", 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("form", FORMS)
def test_compiled_code_stays_as_it_is_and_is_said_to_be_unseen(form):
    """Nothing is compiled for a watch, training is the same, and the boundary of compiled code is seen."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    bare = train(compile_as(form, Net(), counting()))
    torch._dynamo.reset()
    torch.manual_seed(7)
    backend = counting()
    model = compile_as(form, Net(), backend)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model)
    model.load_state_dict(state)
    num_graphs = backend.frame_count
    probe = LivenessProbe(
        [func("tanh"), func("linear"), module("blocks.0.up"), module("blocks.0"), module("")]
    )
    with pytest.warns(match="matched nothing"), probe.watch(model):
        watched = train(model)
    assert backend.frame_count == num_graphs
    assert equal(bare, watched)
    assert probe.num_forwards == 6
    assert {"func('tanh')", "module('blocks.0.up')"} <= set(probe.unmatched)
    reasons = {entry.reason: entry.names for entry in probe.unavailable}
    assert "blocks.0.up" in reasons["inside_compiled"]
    sites = {one.site for one in probe.facts()}
    whole = form in {"whole", "in_place"}
    assert sites == ({"(model)"} if whole else {"(model)", "blocks.0", "head:linear"})
    torch._dynamo.reset()


def test_what_torch_runs_fused_is_fused_all_the_same():
    """An encoder in evaluation gives the same bits, and the parts that did not run are said to be inside."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    x = torch.randn(3, 5, 8)
    probe = LivenessProbe([func("relu"), func("linear"), module("layers.0.linear1"), module("layers.1")])
    for training in (False, True):
        model.train(training)
        torch.manual_seed(1)
        with torch.no_grad():
            expected = model(x)
        torch.manual_seed(1)
        if training:
            with torch.no_grad(), probe.watch(model):
                assert torch.equal(model(x), expected)
            assert {"layers.0:relu", "layers.0.linear1", "layers.1"} <= {one.site for one in probe.facts()}
        else:
            with torch.no_grad(), pytest.warns(match="matched nothing"), probe.watch(model):
                assert torch.equal(model(x), expected)
            reasons = {entry.reason: entry.names for entry in probe.unavailable}
            assert "layers.0.linear1" in reasons["inside_fused"]
            assert [one.site for one in probe.facts()] == ["layers.1"]
    assert leftovers(model) == []


@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_a_model_that_is_itself_fused_stays_so(kind):
    """With its own hooks aside, no mode is on while it runs."""
    torch.manual_seed(0)
    model = (
        nn.MultiheadAttention(8, 2, batch_first=True)
        if kind == "attention"
        else nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    ).eval()
    x = torch.randn(3, 5, 8)
    inputs = (x, x, x) if kind == "attention" else (x,)
    probe = LivenessProbe([func("linear")])
    with torch.no_grad(), torch.profiler.profile() as bare:
        model(*inputs)
    with torch.no_grad(), pytest.warns(match="matched nothing"), probe.watch(model):
        with torch.profiler.profile() as watched:
            model(*inputs)
    names = [{event.key for event in profile.key_averages()} for profile in (bare, watched)]
    assert any("transformer" in name or "native_multi_head" in name for name in names[0])
    assert names[0] == names[1]
    assert probe.unavailable[0].reason == "inside_fused"


def test_an_observer_and_a_probe_do_not_see_each_other(tmp_path):
    """The rows are those without a probe, and a probe sees no operation of the observer's."""
    found = {}
    for name in ("alone", "beside"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        probe = LivenessProbe([func("linear"), func("relu"), func("sum"), func("isfinite")])
        inject_observer(model, output_dir=tmp_path / name, sampler=AlwaysSampler())
        with ExitStack() as stack:
            if name == "beside":
                stack.enter_context(pytest.warns(match="matched nothing"))
                stack.enter_context(probe.watch(model))
            model(X).sum().backward()
        remove_observer(model)
        rows = open_run(str(tmp_path / name)).history().collect()
        found[name] = rows.select("layer", "signal", "metric", "value", "unavailable_reason")
    assert found["alone"].equals(found["beside"])
    assert [one.site for one in probe.facts()] == ["0:linear", "1:relu"]


def test_nothing_reads_a_device_while_a_forward_is_watched():
    """What a probe computes stays where it is until somebody asks for it."""
    hot = [
        tensor_scan.scan,
        tensor_scan._scan_piece,
        tensor_scan._scan_integers,
        tensor_scan._by_bits,
        tensor_scan._outside,
        attention.attention_sums,
        attention.AttentionSums.plus,
        ranges._RangeSite.take,
        ranges._Kind.add,
        ranges._first_of,
        liveness._LivenessSite.take,
        liveness._LivenessSite._take_units,
        liveness._nonzero_units,
        liveness._is_nonzero,
        liveness._max_abs,
        sinks._SinkSite._take_attention,
        sinks._SinkSite._take_residual,
        watching.Probe.take,
        watching._Watch._take,
        function_mode.FunctionWatch.__torch_function__,
        LayerWatch.place,
        grad_audit.GradHealth.observe,
        grad_audit.GradHealth.arrived,
        grad_audit.GradHealth._watch,
        grad_audit.GradHealth._measure,
    ]
    for function in hot:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        called = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        }
        assert called.isdisjoint({"item", "tolist", "cpu", "numpy", "nonzero", "bool", "read"}), function
