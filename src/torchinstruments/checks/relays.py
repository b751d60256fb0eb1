"""Callables that hand on what they are told, and keep nobody alive for it."""

import weakref

from torch.optim import Optimizer

from torchinstruments.checks.visitor import SiteVisitor

__all__ = ["SkipRelay", "weakly"]


class SkipRelay:
    """Tells a visitor of skipped steps; what begins and ends is seen by hooks of its own, which may raise."""

    def __init__(self, visitor: SiteVisitor) -> None:
        self._visitor = weakref.ref(visitor)

    def step_began(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Takes nothing."""

    def step_ended(self, optimizer: Optimizer) -> None:
        """Takes nothing."""

    def step_skipped(self, optimizer: Optimizer) -> None:  # noqa: ARG002 - whose it was is in the ledger
        """Has what the backwards of a skipped attempt left judged (training thread, hot path)."""
        visitor = self._visitor()
        if visitor is not None:
            visitor.step_skipped()


class weakly:  # noqa: N801 - reads as the adverb it is
    """Calls a method of an object that it does not keep alive.

    Args:
        owner: The object.
        name: Of its method.
    """

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: object, name: str) -> None:
        self._owner = weakref.ref(owner)
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Calls it, where the object lives."""
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._name)(*args, **kwargs)
