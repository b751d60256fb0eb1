"""Which models carry an observer.

A model and its wrapped forms (DDP, compiled, ...) are the same model here: two observers on them would
measure everything twice. A part of an observed model is another model and may have an observer of its own.

Nothing is kept alive by being listed: neither a model nor an observer that watches it (the model's hooks hold
that one).
"""

import functools
import os
import weakref
from collections.abc import Callable, Collection
from typing import Protocol

from torch import nn

from torchinstruments.observe.wrappers import core_of

__all__ = ["Listed", "enlist", "find", "listed", "strike"]


class Listed(Protocol):
    """An observer, as far as this list is concerned."""

    def disarm(self) -> None:
        """Makes it do nothing for ever (in a forked child, before anything else runs there)."""
        ...


_entries: dict[int, tuple["weakref.ref[nn.Module]", Callable[[], Listed | None]]] = {}

listed: Collection[int] = _entries
"""The ids of the models that carry an observer; none where it is empty."""


def enlist(model: nn.Module, observer: Listed, *, keep: bool) -> None:
    """Lists an observer under its model.

    Args:
        model: The attached model.
        observer: Its observer.
        keep: Whether the list keeps the observer alive as long as the model lives; only for one that does not
            hold the model.
    """
    core = core_of(model)
    key = id(core)
    held: Callable[[], Listed | None] = _Holder(observer) if keep else weakref.ref(observer)
    # An id is used again once its module is gone, so the entry goes with the module.
    _entries[key] = (weakref.ref(core, functools.partial(_drop, key)), held)


def find(model: nn.Module) -> Listed | None:
    """Returns the observer of the model or of any of its wrapped forms, or None."""
    if not _entries:
        return None
    core = core_of(model)
    entry = _entries.get(id(core))
    if entry is None or entry[0]() is not core:
        return None
    return entry[1]()


def strike(observer: Listed) -> None:
    """Takes an observer off the list; one that is not on it is fine."""
    for key, (_, held) in list(_entries.items()):
        if held() is observer:
            _entries.pop(key, None)


class _Holder:
    """Keeps an observer alive, called like a weak reference."""

    __slots__ = ("_observer",)

    def __init__(self, observer: Listed) -> None:
        self._observer = observer

    def __call__(self) -> Listed | None:
        return self._observer


def _drop(key: int, gone: "weakref.ref[nn.Module]") -> None:
    """Removes the entry of a module that is gone, unless its id is in use again."""
    entry = _entries.get(key)
    if entry is not None and entry[0] is gone:
        _entries.pop(key, None)


def _disarm_all() -> None:
    """Makes every observer inert in a forked child: threads, files and ids belong to the parent."""
    for _, held in list(_entries.values()):
        observer = held()
        if observer is not None:
            observer.disarm()
    # The child may attach an observer of its own to the same model.
    _entries.clear()


os.register_at_fork(after_in_child=_disarm_all)
