"""Wrapped scaler classes: what listeners are told, and what is left behind."""

import copy
import functools
import os
import pickle
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD
from typing_extensions import override

from torchinstruments.ranks.scaler_methods import listen, stop_listening


class _Listener:
    """Writes down what it is told, and of which scaler and optimizer; raises where it is to."""

    def __init__(self, fails: str = "") -> None:
        self.told: list[Any] = []
        self.of: list[tuple[object, ...]] = []
        self.errors: list[str] = []
        self._fails = fails

    def _tell(self, what: Any, *of: object) -> None:
        self.told.append(what)
        self.of.append(of)
        if what == self._fails:
            raise OSError(self._fails)

    def scaled(self, scaler: GradScaler) -> None:
        self._tell("scaled", scaler)

    def unscaled(self, scaler: GradScaler, optimizer: object) -> None:
        self._tell("unscaled", scaler, optimizer)

    def step_begins(self, scaler: GradScaler, optimizer: object) -> object:
        self._tell("step begins", scaler, optimizer)
        return "token"

    def step_returned(self, scaler: GradScaler, optimizer: object, begun: Any) -> None:
        self._tell(("step returned", begun), scaler, optimizer)

    def update_begins(self, scaler: GradScaler) -> None:
        self._tell("update begins", scaler)

    def updated(self, scaler: GradScaler, *, is_scale_set: bool) -> None:
        self._tell(("updated", is_scale_set), scaler)

    def report(self, error: BaseException) -> None:
        self.errors.append(str(error))

    def __enter__(self) -> Self:
        listen(self)
        return self

    def __exit__(self, *_: object) -> None:
        stop_listening(self)


def _wrapped() -> list[tuple[str, str]]:
    return [
        (owner.__name__, name)
        for owner in (GradScaler, ShardedGradScaler)
        for name in ("scale", "unscale_", "step", "update")
        if hasattr(vars(owner).get(name), "__wrapped__")
    ]


def test_nobody_of_the_parent_is_told_in_a_forked_child() -> None:
    """What the parent watches is the parent's; the child's own listeners are told."""
    with _Listener() as listener:
        child = os.fork()
        if child == 0:
            _run(GradScaler("cpu"))
            with _Listener() as own:
                _run(GradScaler("cpu"))
            os._exit(0 if own.told and not listener.told else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        _run(GradScaler("cpu"))
    assert listener.told[0] == "scaled"


def _run(scaler: GradScaler, *, unscale: bool = False, new_scale: Any = None) -> SGD:
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer=optimizer)
    scaler.update(new_scale=new_scale)
    return optimizer


ALL = ["scaled", "step begins", ("step returned", "token"), "update begins", ("updated", False)]


class _Super(GradScaler):
    """Overrides all of it and calls its parent's."""

    @override
    def scale(self, outputs):
        return super().scale(outputs)

    @override
    def unscale_(self, optimizer):
        super().unscale_(optimizer)

    @override
    def step(self, optimizer, *args, **kwargs):
        return super().step(optimizer, *args, **kwargs)

    @override
    def update(self, new_scale=None):
        super().update(new_scale)


class _Twice(_Super):
    """Overrides all of it once more."""

    @override
    def step(self, optimizer, *args, **kwargs):
        return super().step(optimizer, *args, **kwargs)

    @override
    def update(self, new_scale=None):
        super().update(new_scale)


@pytest.mark.parametrize("kind", [GradScaler, _Super, _Twice])
def test_each_call_is_told_once_however_many_classes_override_it(kind: type[GradScaler]) -> None:
    """The unscale_ inside a step is part of the step, and the program's own is not."""
    with _Listener() as listener:
        _run(kind("cpu", init_scale=2.0))
        _run(kind("cpu", init_scale=2.0), unscale=True, new_scale=4.0)
    assert listener.told == [*ALL, "scaled", "unscaled", *ALL[1:-1], ("updated", True)]
    assert listener.errors == []


def test_each_call_is_told_of_its_scaler_and_its_optimizer() -> None:
    """Also where the optimizer is given by name."""
    scaler = GradScaler("cpu", init_scale=2.0)
    with _Listener() as listener:
        optimizer = _run(scaler, unscale=True)
    assert listener.of == [(scaler,), *[(scaler, optimizer)] * 3, (scaler,), (scaler,)]


def test_a_disabled_scaler_is_not_told_of() -> None:
    """Its methods do nothing."""
    with _Listener() as listener:
        _run(GradScaler("cpu", enabled=False))
    assert listener.told == []


def test_each_of_several_listeners_is_told() -> None:
    """Two observed models of one program."""
    with _Listener() as one, _Listener() as other:
        _run(GradScaler("cpu", init_scale=2.0))
    assert one.told == other.told == ALL


@pytest.mark.parametrize("fails", ["scaled", "step begins", "update begins"])
def test_a_listener_that_fails_hears_of_it_and_nobody_else(fails: str) -> None:
    """The scaler works, and the other listener is told everything."""
    scaler = GradScaler("cpu", init_scale=2.0)
    with _Listener(fails) as failing, _Listener() as other:
        _run(scaler)
    assert failing.errors == [fails]
    assert other.told == ALL
    assert scaler.get_scale() == 2.0


def test_an_exception_of_the_scaler_reaches_the_caller_unchanged() -> None:
    """And the next call is told as ever."""
    with _Listener() as listener:
        scaler = GradScaler("cpu")
        with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
            scaler.step(SGD(nn.Linear(1, 1).parameters(), lr=0.1))
        with pytest.raises(AssertionError, match="Attempted update but _scale is None"):
            scaler.update()
        assert listener.told == ["step begins", "update begins"]
        listener.told.clear()
        _run(scaler)
        assert listener.told == ALL


def test_the_classes_are_restored_exactly_by_the_last_of_several_listeners() -> None:
    """The first to leave must not take the wrapping from the other."""
    originals = [dict(vars(owner)) for owner in (GradScaler, ShardedGradScaler)]
    with _Listener():
        with _Listener():
            assert _wrapped() == [
                ("GradScaler", "scale"),
                ("GradScaler", "unscale_"),
                ("GradScaler", "step"),
                ("GradScaler", "update"),
                ("ShardedGradScaler", "scale"),
                ("ShardedGradScaler", "unscale_"),
                ("ShardedGradScaler", "update"),
            ]
        assert len(_wrapped()) == 7
    assert _wrapped() == []
    assert [dict(vars(owner)) for owner in (GradScaler, ShardedGradScaler)] == originals


def test_a_wrapper_that_somebody_else_put_on_top_is_left_in_place() -> None:
    """And ours below it becomes a passage."""
    calls = []

    class _Own(GradScaler):
        @override
        def scale(self, outputs):
            return super().scale(outputs)

    listener = _Listener()
    with listener:
        ours = vars(_Own)["scale"]

        def theirs(self, outputs):
            calls.append(outputs)
            return ours(self, outputs)

        type.__setattr__(_Own, "scale", theirs)
    assert hasattr(ours, "__wrapped__")
    assert vars(_Own)["scale"] is theirs
    assert _Own("cpu", init_scale=8.0).scale(torch.ones(())).item() == 8.0
    assert len(calls) == 1
    assert listener.told == []


def test_a_subclass_that_is_made_later_is_wrapped_when_it_is_first_met() -> None:
    """Its own step does not call the one that is wrapped already; its scale does."""
    with _Listener() as listener:

        class _Late(GradScaler):
            @override
            def step(self, optimizer, *args, **kwargs):
                return optimizer.step(*args, **kwargs)

        scaler = _Late("cpu", init_scale=2.0)
        model = nn.Linear(1, 1)
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        scaler.step(SGD(model.parameters(), lr=0.1))
        assert listener.told == ["scaled", "step begins", ("step returned", "token")]
    assert not hasattr(_Late.step, "__wrapped__")


def test_a_scaler_can_be_pickled_and_copied_meanwhile() -> None:
    """Checkpoints hold scalers."""
    with _Listener():
        scaler = GradScaler("cpu", init_scale=8.0)
        _run(scaler)
        assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()
        assert copy.deepcopy(scaler).state_dict() == scaler.state_dict()


def test_a_compiled_program_is_left_alone() -> None:
    """What is traced must not become part of the program."""
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    with _Listener() as listener:
        compiled = torch.compile(scaler.scale, backend="eager")
        assert compiled(torch.ones(())).item() == 2.0
    assert listener.told == []
    assert listener.errors == []


class _Static(GradScaler):
    """Its methods have no scaler as their first argument, or belong to the class."""

    @staticmethod
    @override
    def scale(outputs: Any) -> Any:  # pyrefly: ignore
        return outputs * 2.0

    @classmethod
    @override
    def unscale_(cls, optimizer: Any) -> Any:  # pyrefly: ignore
        return optimizer

    @staticmethod
    @override
    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # pyrefly: ignore
        return optimizer.step(*args, **kwargs)

    @classmethod
    @override
    def update(cls, new_scale: Any = None) -> Any:  # pyrefly: ignore
        return new_scale


class _Callable:
    """An object in the place of a method."""

    def __call__(self, outputs: Any) -> Any:
        return outputs * 3.0


class _Odd(GradScaler):
    scale: Any = _Callable()


def test_methods_that_are_no_functions_stay_as_they_are() -> None:
    """Called on a scaler and on the class they do what they do without a listener, and nobody is told."""
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    attributes = dict(vars(_Static)), dict(vars(_Odd))
    with _Listener() as listener:
        assert (dict(vars(_Static)), dict(vars(_Odd))) == attributes
        for owner in (_Static, _Static("cpu", init_scale=8.0)):
            loss: Any = owner.scale(model(torch.ones(1, 1)).sum())
            loss.backward()
            assert owner.unscale_(optimizer) is optimizer
            assert owner.step(optimizer) is None
            assert owner.update(3.0) == 3.0
        assert _Odd("cpu").scale(torch.ones(())).item() == 3.0
    assert listener.told == []
    assert listener.errors == []


class _Decorated(GradScaler):
    """A static method that calls its parent's."""

    @staticmethod
    @override
    def update(scaler: Any, new_scale: Any = None) -> None:  # pyrefly: ignore
        GradScaler.update(scaler, new_scale)


def test_a_static_method_that_calls_its_parents_is_told_by_that() -> None:
    """The parent's method is a function."""
    scaler = _Decorated("cpu", init_scale=2.0)
    with _Listener() as listener:
        scaler.scale(torch.ones(()))
        scaler._per_optimizer_states[0]["found_inf_per_device"] = {"cpu": torch.zeros(())}
        _Decorated.update(scaler, 4.0)
    assert listener.told == ["scaled", "update begins", ("updated", True)]
    assert scaler.get_scale() == 4.0


class _Fixed(GradScaler):
    """Sets its scale at each update, to a number that is bound in the class."""

    update: Any = functools.partialmethod(GradScaler.update, 64.0)


class _Named(GradScaler):
    """The same by name."""

    update: Any = functools.partialmethod(GradScaler.update, new_scale=64.0)


@pytest.mark.parametrize("kind", [_Fixed, _Named])
def test_a_partial_method_is_told_with_the_argument_that_is_bound_in_it(kind: type[GradScaler]) -> None:
    """It is called through the scaler and through its class, and is there again afterwards."""
    original = vars(kind)["update"]
    scaler, model = kind("cpu", init_scale=2.0), nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with _Listener() as listener:
        for update in (scaler.update, lambda: kind.update(scaler)):
            scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            scaler.step(optimizer)
            update()
            assert scaler.get_scale() == 64.0
    assert listener.told == [*ALL[:-1], ("updated", True)] * 2
    assert vars(kind)["update"] is original


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch looks at it as it compiles
def test_a_listener_hears_nothing_of_a_step_that_is_compiled() -> None:
    """Torch would compile what it does, and again at each change of it."""
    model, scaler = nn.Linear(1, 1), GradScaler("cpu", init_scale=2.0)
    optimizer = SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def step(entries: torch.Tensor) -> None:
        scaler.scale(model(entries).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    with _Listener() as listener:
        step(torch.ones(1, 1))
    assert (listener.told, listener.errors) == ([], [])
