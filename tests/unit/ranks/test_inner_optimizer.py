"""The optimizer inside what a program steps."""

from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from torchinstruments.ranks.inner_optimizer import inner_optimizer, is_hooked


class _Unready(Optimizer):
    """An Optimizer that never ran its base class's ``__init__``."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


class _Holder:
    """Refuses to be asked for anything that it does not have."""

    def __init__(self, inner: object) -> None:
        self._optim = inner

    def __getattr__(self, name: str) -> object:
        raise OSError(f"asked for {name}")


def test_an_ordinary_optimizer_is_itself() -> None:
    """Its class's step was wrapped by torch when it was made."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert is_hooked(optimizer)
    assert inner_optimizer(optimizer) is optimizer


def test_an_optimizer_with_hooks_that_holds_another_is_itself() -> None:
    """ZeroRedundancyOptimizer is one: its step is the outer one."""
    outer: Any = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    outer.optim = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert inner_optimizer(outer) is outer


def test_wrappers_are_looked_through_without_running_their_code() -> None:
    """Of both kinds, and of both inside each other."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert not is_hooked(_Unready(optimizer))
    for wrapper in (_Unready(optimizer), _Holder(optimizer), _Unready(_Holder(_Unready(optimizer)))):
        assert inner_optimizer(wrapper) is optimizer


class _Other:
    """Holds things under names of its own."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)

    @property
    def __class__(self) -> Any:
        raise OSError("asked for its class")


def test_the_only_optimizer_under_any_name_is_found() -> None:
    """Also twice, in another wrapper, and beside what has a usual name and is no optimizer."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    for wrapper in (
        _Other(opt=optimizer),
        _Other(first=1, opt=optimizer, same=optimizer, other=_Other()),
        _Other(opt=_Unready(_Other(inner=optimizer))),
        _Other(optimizer="sgd", opt=optimizer),
    ):
        assert inner_optimizer(wrapper) is optimizer


def test_of_several_optimizers_under_unusual_names_none_is_chosen() -> None:
    """One under a usual name is."""
    one, other = (SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(2))
    wrapper = _Other(first=one, second=other)
    assert inner_optimizer(wrapper) is wrapper
    assert inner_optimizer(_Other(first=one, base_optimizer=other)) is other


def test_only_the_first_attributes_are_looked_at() -> None:
    """An object may have any number of them."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    filler = {f"x{index}": index for index in range(256)}
    wrapper = _Other(**filler, opt=optimizer)
    assert inner_optimizer(wrapper) is wrapper
    assert inner_optimizer(_Other(**filler, optim=optimizer)) is optimizer


def test_what_holds_no_optimizer_is_returned_as_it_is() -> None:
    """Also where it holds itself."""
    holder = _Holder(None)
    assert inner_optimizer(holder) is holder
    holder._optim = holder
    assert inner_optimizer(holder) is holder
    assert inner_optimizer(None) is None
