"""Objects that are made without a call of their class, for what is made in each step of training.

To call a class that is written in Python takes a step that is not sampled two to eight microseconds, most of
them to get into ``__init__`` or ``__new__`` and to fetch it; these two take less than one. Whoever makes an
object this way sets what it needs by itself: of a dataclass without slots the class has the default values of
all other fields. See ``docs/design/0014-a-step-that-is-not-sampled.md``.
"""

from collections.abc import Callable
from dataclasses import fields, make_dataclass
from typing import Any

__all__ = ["filled_for", "new_object", "new_tuple"]

new_object = object.__new__
"""Makes an object of a class that is not initialised."""

new_tuple: Callable[[type[tuple[Any, ...]], tuple[object, ...]], Any] = tuple.__new__
"""Makes a named tuple of a tuple."""


def filled_for(frozen: type) -> Any:
    """Returns a class with the fields of a frozen slotted dataclass, whose objects turn into that one's.

    Their fields are set first and their ``__class__`` then, in a third of the time that frozen ones take.
    """
    return make_dataclass(
        f"_Filled{frozen.__name__}", [(one.name, one.type) for one in fields(frozen)], slots=True
    )
