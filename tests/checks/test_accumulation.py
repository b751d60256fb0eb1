"""Which backward a gradient belongs to, where one hook serves all parameters."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from checks.training import batch, mlp, train
from torchinstruments.checks import ChecksSession
from torchinstruments.checks.accumulation import AccumulationSite
from torchinstruments.checks.inventory import Inventory


class _Listener:
    """Writes down what each backward reached."""

    def __init__(self) -> None:
        self.ended: list[list[int]] = []

    def backward_began(self, *, is_counted: bool) -> None:
        if is_counted:
            self.ended.append([])

    def backward_ended(self, fired: Sequence[int]) -> None:
        self.ended.append(sorted(fired))

    def accumulated(self, index: int) -> None:
        raise AssertionError(index)


def _fail(probe: str, error: BaseException) -> None:
    raise AssertionError(probe) from error


Watched = tuple[Any, AccumulationSite, _Listener]


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Two layers in a row, their site, and who listens to it."""
    model, listener = mlp(), _Listener()
    site = AccumulationSite(listener, int, _fail)
    assert site.attach(Inventory(model).parameters) == []
    yield model, site, listener
    site.detach()
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())


def test_a_backward_inside_another_one_has_its_own_parameters(watched: Watched) -> None:
    """The outer one goes on where it was."""
    model, site, listener = watched
    first, last = model.children()

    def run_other(_parameter: torch.Tensor) -> None:
        with torch.enable_grad():
            first(batch()).sum().backward()

    hook = last.weight.register_post_accumulate_grad_hook(run_other)
    model(batch()).sum().backward()
    hook.remove()
    assert listener.ended == [[0, 1], [0, 1, 2, 3]]
    assert (site.num_backwards, site.num_fires) == (2, 6)


def test_backwards_of_two_threads_are_two(watched: Watched) -> None:
    """Each goes on after the other has reached a parameter."""
    model, site, listener = watched
    first, last = model.children()
    other = threading.Thread(target=lambda: first(batch()).sum().backward())
    has_reached, may_go_on = threading.Event(), threading.Event()

    def wait(_parameter: torch.Tensor) -> None:
        if threading.current_thread() is other:
            has_reached.set()
            assert may_go_on.wait(60)

    def run_other(_parameter: torch.Tensor) -> None:
        other.start()
        assert has_reached.wait(60)

    def let_go(_parameter: torch.Tensor) -> None:
        if threading.current_thread() is not other:
            may_go_on.set()

    waits = [one.register_post_accumulate_grad_hook(wait) for one in first.parameters()]
    starts = last.bias.register_post_accumulate_grad_hook(run_other)
    goes_on = last.weight.register_post_accumulate_grad_hook(let_go)
    model(batch()).sum().backward()
    other.join()
    for handle in (*waits, starts, goes_on):
        handle.remove()
    assert sorted(listener.ended) == [[0, 1], [0, 1, 2, 3]]
    assert site.num_fires == 6


class _Crossed(dict[int, Any]):
    """What runs, where another thread of the same backward comes first between a look and what follows."""

    def __init__(self, other: Callable[[], None]) -> None:
        super().__init__()
        self._others = [other]

    def get(self, task: int, default: Any = None) -> Any:
        found = super().get(task, default)
        if self._others:
            self._others.pop()()
        return found


@pytest.mark.parametrize("counts_only", [False, True])
def test_a_backward_that_begins_in_two_threads_is_one(watched: Watched, counts_only: bool) -> None:
    """Each of the two gradients is told of, and the end once."""
    model, site, listener = watched
    site.counts_only = counts_only
    site.running = _Crossed(lambda: site.accumulated(model[0].weight))
    model[1](torch.ones(2, model[1].in_features)).sum().backward()
    assert listener.ended == [[] if counts_only else [0, 2, 3]]
    assert (site.num_backwards, site.num_fires) == (1, 3)
    assert len(site.running) == counts_only


def test_a_backward_that_raised_leaves_nothing_to_the_next_one(watched: Watched) -> None:
    """What it had reached is dropped, and one of another order is told as it is."""
    model, site, listener = watched
    first, last = model.children()

    def fail(_parameter: torch.Tensor) -> None:
        raise OSError("mine")

    hook = last.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(OSError, match="mine"):
        model(batch()).sum().backward()
    hook.remove()
    assert site.running
    site.forget_unfinished()
    assert not site.running
    for module in (model, first, last, model):
        module(batch()).sum().backward()
    assert listener.ended == [[0, 1, 2, 3], [0, 1], [2, 3], [0, 1, 2, 3]]


def test_a_site_that_is_detached_keeps_no_parameter() -> None:
    """Nor does the hook that every parameter had."""
    model, listener = mlp(), _Listener()
    site = AccumulationSite(listener, int, _fail)
    site.attach(Inventory(model).parameters)
    model(batch()).sum().backward()
    site.detach()
    parameters = [weakref.ref(one) for one in model.parameters()]
    del model
    gc.collect()
    assert [one() for one in parameters] == [None] * 4


def test_backwards_are_told_apart_where_gradients_are_only_counted(watched: Watched) -> None:
    """One inside another one is one of its own, one that raised is one too, and each gradient is counted."""
    model, site, listener = watched
    first, last = model.children()
    model(batch()).sum().backward()
    site.count_from_here({0, 1, 2, 3}, None)

    def run_other(_parameter: torch.Tensor) -> None:
        with torch.enable_grad():
            first(batch()).sum().backward()

    hook = last.weight.register_post_accumulate_grad_hook(run_other)
    model(batch()).sum().backward()
    hook.remove()

    def fail(_parameter: torch.Tensor) -> None:
        raise OSError("mine")

    hook = last.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(OSError, match="mine"):
        model(batch()).sum().backward()
    hook.remove()
    last(batch()).sum().backward()
    assert listener.ended == [[0, 1, 2, 3], [], [], [], []]
    assert (site.num_backwards, site.num_fires) == (5, 4 + 4 + 2 + 2 + 2)
    site.forget_unfinished()
    assert (site.running, site.num_fires) == ({}, 14)


def test_gradients_that_are_only_counted_are_counted_while_the_backward_runs(watched: Watched) -> None:
    """No end of it is awaited, so that its count stands at any moment."""
    model, site, _ = watched
    site.count_from_here({0, 1, 2, 3}, None)
    seen: list[int] = []
    hooks = [
        one.register_post_accumulate_grad_hook(lambda _: seen.append(site.num_fires))
        for one in model.parameters()
    ]
    model(batch()).sum().backward()
    for hook in hooks:
        hook.remove()
    assert seen == [1, 2, 3, 4]


def test_a_gradient_that_is_looked_at_when_it_comes_keeps_every_hook() -> None:
    """Where ranks reduce it in place it is another one when the backward ends; without one, hooks may go."""
    model = mlp()
    for early in (frozenset[int](), frozenset({0})):
        site = AccumulationSite(_Listener(), int, _fail)
        site.attach(Inventory(model).parameters, early)
        assert site.lookout.is_over == bool(early)
        site.detach()


def test_many_backwards_are_counted_in_bounded_memory_beside_one_that_goes_on(watched: Watched) -> None:
    """A hundred of one layer inside a backward of both, which is one all the same."""
    model, site, listener = watched
    first, last = model.children()
    site.count_from_here({0, 1, 2, 3}, None)

    def run_others(_parameter: torch.Tensor) -> None:
        for _ in range(100):
            with torch.enable_grad():
                first(batch()).sum().backward()

    hook = last.bias.register_post_accumulate_grad_hook(run_others)
    model(batch()).sum().backward()
    hook.remove()
    assert len(site.running) <= 64
    assert site.num_fires == 204
    assert site.num_backwards == len(listener.ended) == 101


def test_backwards_that_raise_are_kept_in_mind_in_bounded_memory(watched: Watched) -> None:
    """No end of them ever comes, nor a step after which they are forgotten."""
    model, site, listener = watched
    site.count_from_here({0, 1, 2, 3}, None)

    def fail(_parameter: torch.Tensor) -> None:
        raise OSError("mine")

    hook = next(model.parameters()).register_post_accumulate_grad_hook(fail)
    for _ in range(300):
        with pytest.raises(OSError, match="mine"):
            model(batch()).sum().backward()
    hook.remove()
    assert len(site.running) <= 128
    assert site.num_backwards == len(listener.ended) == 300
    num_fires = site.num_fires
    site.forget_unfinished()
    assert (site.running, site.num_fires) == ({}, num_fires)


@pytest.mark.parametrize("checks", [False, True])
def test_a_step_forgets_backwards_that_were_only_counted(checks: bool) -> None:
    """However many there are, what goes on around others keeps its place among the next ones."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = ChecksSession(model, optimizer, scaler=None)
    if checks:
        session.register_frozen_check(["0.weight"], action="collect")
    with session:
        assert session._last is not None
        site = session._last.site
        for _ in range(3):
            for number in range(40):
                # No two in a row are alike, so that every hook is needed.
                (model if number % 2 else model[0])(batch()).sum().backward()
            optimizer.step()
        assert site.counts_only
        assert not site.running
        assert session.overhead()["num_accumulation_hooks"] == 3 * 20 * (4 + 2)


@pytest.mark.parametrize(
    ("named", "awaited", "counts"),
    [
        ({0, 1, 2, 3}, None, True),
        ({0, 1, 2, 3, 7}, {0, 1, 2, 3}, True),
        ({0, 1, 2}, None, False),
        ({0, 1, 2, 7}, None, False),
        ({0, 1, 2, 3}, {0, 1}, False),
    ],
)
def test_gradients_are_named_until_names_tell_nothing_more(
    watched: Watched, named: set[int], awaited: set[int] | None, counts: bool
) -> None:
    """Each parameter with a hook has to be known to be reached, and has to be one that is awaited."""
    model, site, listener = watched
    site.count_from_here(named, awaited)
    model(batch()).sum().backward()
    assert listener.ended == [[] if counts else [0, 1, 2, 3]]
    assert site.num_fires == 4


@pytest.mark.parametrize("checks", [False, True])
def test_who_was_never_reached_is_known_with_and_without_checks(checks: bool) -> None:
    """The first backwards go through one layer, later ones through both: each parameter is found."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = ChecksSession(model, optimizer, scaler=None)
    if checks:
        session.register_nonfinite_grad_check()
    fired: list[object] = []
    with session:
        for part in (model[0], model[0], model, model, model[0]):
            part(batch()).sum().backward()
            optimizer.step()
            fired.append(session.report().coverage["parameters_that_fired"])
        report = session.report()
        assert session.overhead()["num_accumulation_hooks"] == 3 * 2 + 2 * 4
    assert fired == [2, 2, 4, 4, 4]
    assert report.counters["backwards"] == 5


class _Trainer:
    """Holds a model and its session, and is held by a hook of a parameter."""

    def __init__(self) -> None:
        self.model = mlp()
        self.session = ChecksSession(self.model).attach()
        self.model[0].weight.register_hook(self._look)
        self.model(batch()).sum().backward()

    def _look(self, _gradient: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("raises", [False, True])
def test_a_session_that_is_dropped_with_its_parameters_is_collected(*, raises: bool) -> None:
    """Also where a parameter leads to it, and where the last backward raised."""
    trainer = _Trainer()
    if raises:

        def fail(_gradient: torch.Tensor) -> None:
            raise OSError("mine")

        handle = trainer.model[0].weight.register_hook(fail)
        with pytest.raises(OSError, match="mine"):
            trainer.model(batch()).sum().backward()
        handle.remove()
    session = weakref.ref(trainer.session)
    del trainer
    gc.collect()
    assert session() is None


def test_parameters_can_be_swapped_after_a_detach() -> None:
    """Torch refuses to swap a tensor to which there is a weak reference."""
    model = mlp()
    with ChecksSession(model) as session:
        train(model)
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.zeros(4, 4)))
    assert session.final_report is not None
