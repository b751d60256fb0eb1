"""Callables that hand on what they are told, and keep nobody alive for it."""

import weakref
from collections.abc import Callable

__all__ = ["weakly"]


def weakly(owner: object, name: str) -> Callable[..., None]:
    """Returns what calls a method of an object, as long as the object lives, which it does not see to.

    Args:
        owner: The object.
        name: Of its method.
    """
    held, method = weakref.ref(owner), getattr(type(owner), name)

    def call(*args: object) -> None:
        own = held()
        if own is not None:
            method(own, *args)

    return call
