"""Objects that are made without a call of their class, for what is made in each step of training.

To call a class that is written in Python takes a step that is not sampled two to eight microseconds, most of
them to get into ``__init__`` or ``__new__`` and to fetch it; these two take less than one. Whoever makes an
object this way sets what it needs by itself: of a dataclass without slots the class has the default values of
all other fields. See ``docs/design/0014-a-step-that-is-not-sampled.md``.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["new_object", "new_tuple"]

new_object = object.__new__
"""Makes an object of a class that is not initialised."""

new_tuple: Callable[[type[tuple[Any, ...]], tuple[object, ...]], Any] = tuple.__new__
"""Makes a named tuple of a tuple."""
