"""Whoever comes and goes while an optimizer steps, the step of the program goes on."""

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer

from torchinstruments import AlwaysSampler, inject_observer
from torchinstruments.ranks.step_hooks import StepHooks


class Seen:
    """Counts the steps that it sees."""

    def __init__(self) -> None:
        self.num_began = self.num_ended = 0
        self.hooks = StepHooks(self.began, self.ended)

    def began(self, *_: object) -> None:
        """Counts a begin."""
        self.num_began += 1

    def ended(self, *_: object) -> None:
        """Counts an end."""
        self.num_ended += 1


def stepping(parameter: nn.Parameter | None = None) -> SGD:
    """Returns an optimizer that can step."""
    own = nn.Parameter(torch.ones(2)) if parameter is None else parameter
    own.grad = torch.ones(2)
    return SGD([own], lr=1.0)


def num_pairs() -> tuple[int, int]:
    """Returns the hooks in torch's dictionaries."""
    return len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)


def test_many_watch_through_one_pair_and_none_is_left() -> None:
    """Each sees every step while it is attached; attaching twice is once."""
    optimizer, first, second = stepping(), Seen(), Seen()
    before = num_pairs()
    first.hooks.attach()
    first.hooks.attach()
    second.hooks.attach()
    optimizer.step()
    assert num_pairs() == (before[0] + 1, before[1] + 1)
    first.hooks.detach()
    first.hooks.detach()
    optimizer.step()
    second.hooks.detach()
    optimizer.step()
    assert (first.num_began, first.num_ended, second.num_began, second.num_ended) == (1, 1, 2, 2)
    assert num_pairs() == before


def test_one_may_go_and_another_come_in_the_middle_of_a_step() -> None:
    """The last one too; the pair then stays until somebody goes while no step runs."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer, late = stepping(parameter), Seen()
    before = num_pairs()

    def leaves(*_: object) -> None:
        leaving.detach()

    def replaces(*_: object) -> None:
        late.hooks.attach()
        late.hooks.detach()
        coming.detach()

    leaving = StepHooks(leaves, lambda *_: None)
    coming = StepHooks(None, replaces)
    leaving.attach()
    coming.attach()
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.zeros(2))
    assert num_pairs() == (before[0] + 1, before[1] + 1)
    late.hooks.attach()
    optimizer.step()
    late.hooks.detach()
    assert (late.num_began, late.num_ended) == (1, 1)
    assert num_pairs() == before


def test_arguments_go_from_one_to_the_next() -> None:
    """As between torch's own hooks: the step gets what the last one returned."""
    given: list[Any] = []

    def wraps(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given.append(kwargs["closure"]())
        return args, {**kwargs, "closure": lambda: kwargs["closure"]() + 1}

    both = [StepHooks(wraps, lambda *_: None) for _ in range(2)]
    for one in both:
        one.attach()
    try:
        assert stepping().step(closure=lambda: 5) == 7
    finally:
        for one in both:
            one.detach()
    assert given == [5, 6]


class Cyclic(nn.Linear):
    """A model that only a garbage collection frees."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.itself = lambda: self


def test_a_model_that_is_collected_while_another_one_steps(tmp_path: Path) -> None:
    """Its observer goes with it, between two hooks of the program's own, and the step goes on."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = stepping(parameter)
    gc.collect()
    before = num_pairs()
    model = Cyclic()
    inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler(), histograms=())
    reference = weakref.ref(model)
    del model

    def collect(*_: object) -> None:
        gc.collect()

    own = [torch_optimizer.register_optimizer_step_pre_hook(hook) for hook in (collect, lambda *_: None)]
    try:
        assert reference() is not None
        optimizer.step()
    finally:
        for handle in own:
            handle.remove()
    assert reference() is None
    assert torch.equal(parameter.detach(), torch.zeros(2))
    passing = Seen()
    passing.hooks.attach()
    passing.hooks.detach()
    assert num_pairs() == before


def test_threads_come_and_go_while_another_one_steps() -> None:
    """No step raises, and no watcher is left."""
    before = num_pairs()
    ends = time.monotonic() + 1.0

    def come_and_go() -> None:
        while time.monotonic() < ends:
            one = Seen()
            one.hooks.attach()
            one.hooks.detach()

    stays = Seen()
    stays.hooks.attach()
    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    optimizer, num_steps = stepping(), 0
    while time.monotonic() < ends:
        optimizer.step()
        num_steps += 1
    for thread in threads:
        thread.join()
    stays.hooks.detach()
    assert (stays.num_began, stays.num_ended) == (num_steps, num_steps)
    assert num_pairs() == before
