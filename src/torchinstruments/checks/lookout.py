"""Whether the hook of one parameter tells of every backward. A pure state machine.

The engine numbers what it traverses one after the other, in the whole process. While every backward reaches
all parameters, the same one first, and has the number that follows on the one before, nothing else was
traversed in between, and the hook of that first parameter tells as much as those of all. It goes on telling:
where a number is left out, something was traversed of which no hook told. That may have been another model,
or a backward of this one which did not reach that parameter. How many there were is known and can be said;
from there on all hooks are needed, for good. So they are where steps come behind no backward.
"""

import os
import threading
import weakref
from enum import Enum

__all__ = ["STREAK", "Lookout", "passed"]

STREAK = 32
"""Backwards in a row that have to be alike before the hook of one parameter is enough."""


class _State(Enum):
    LEARNING = "all hooks are there"
    ALONE = "one is"
    UNSURE = "one is, and it missed something"
    LEAVING = "all are there again, and no backward came since"
    OVER = "all are there for good"


# To look a member of an enumeration up takes as long as to call a function.
_LEARNING, _ALONE, _UNSURE, _LEAVING, _OVER = _State


class Lookout:
    """Follows the backwards of one session that are only counted."""

    def __init__(self) -> None:
        self.num_missed = 0
        """Traversals by the engine of which no hook told, and of which some may have been backwards."""
        self.first = 0
        """The parameter that the last backward reached first."""
        self._state = _LEARNING
        self._task = -1
        self._streak = 0
        self._num_backwards = -1
        self._num_steps = 0
        self._most_steps = 1
        with _lock:
            _followers.add(self)

    @property
    def is_over(self) -> bool:
        """Whether it follows no more (autograd or training thread, hot path)."""
        return self._state is _OVER

    @property
    def is_one_enough(self) -> bool:
        """Whether all hooks are there and the one of `first` would do (training thread, hot path)."""
        return self._state is _LEARNING and self._streak >= STREAK

    @property
    def may_have_missed(self) -> bool:
        """Whether something may have been traversed of which it has not heard yet (any thread)."""
        return self._state not in {_LEARNING, _OVER}

    @property
    def needs_all(self) -> bool:
        """Whether all hooks are needed again (training thread, hot path)."""
        return self._state is _UNSURE

    def began(self, task: int, first: int, *, is_whole: bool) -> None:
        """Takes that a backward began (autograd thread, hot path).

        Args:
            task: The engine's number of it.
            first: Id of the parameter that it reached.
            is_whole: Whether the one before reached every parameter that has a hook.
        """
        num_between = task - self._task - 1
        self._task = max(task, self._task)
        if self._state is _LEARNING:
            is_alike = num_between == 0 and is_whole and first == self.first
            self._streak = self._streak + 1 if is_alike else 0
            self.first = first
            return
        if num_between > 0:
            self.num_missed += num_between
        if self._state is _LEAVING:
            self._state = _OVER
        elif num_between != 0:
            self._state = _UNSURE

    def passed(self, task: int, *, is_own: bool) -> None:
        """Takes that the engine has given a number (any thread).

        Args:
            task: The number.
            is_own: Whether it was given for being asked, so that nothing was missed there.
        """
        num_missed = task - self._task - is_own
        self._task = max(task, self._task)
        if num_missed <= 0:
            return
        if self._state is _LEARNING:
            self._streak = 0
        elif self._state is not _OVER:
            self.num_missed += num_missed
            if self._state is _ALONE:
                self._state = _UNSURE

    def stepped(self, num_backwards: int) -> None:
        """Takes a step (training thread, hot path).

        Where more of them come behind one backward than ever before, a backward may have gone unseen.

        Args:
            num_backwards: Backwards so far.
        """
        if num_backwards != self._num_backwards:
            self._num_backwards, self._num_steps = num_backwards, 0
        self._num_steps += 1
        if self._num_steps <= self._most_steps:
            return
        if self._state is _LEARNING:
            self._most_steps = self._num_steps
        elif self._state is _ALONE:
            self._state = _UNSURE

    def left_one(self) -> None:
        """Takes that the hook of `first` is about to be the only one (training thread)."""
        self._state = _ALONE

    def all_back(self) -> None:
        """Takes that all hooks are there again (training thread)."""
        self._state = _LEAVING

    def give_up(self) -> None:
        """Takes that all hooks have to stay (training thread)."""
        self._state = _OVER


_followers: weakref.WeakSet[Lookout] = weakref.WeakSet()
# What handles a signal may come in between, and ask too.
_lock = threading.RLock()


def passed(task: int, *, is_own: bool) -> None:
    """Tells every lookout of the process that the engine has given a number (any thread).

    Args:
        task: The number.
        is_own: Whether the engine gave it for being asked, so that nothing was missed there.
    """
    with _lock:
        followers = list(_followers)
    for follower in followers:
        follower.passed(task, is_own=is_own)


def _free_lock() -> None:
    """Does without a lock that a thread of the parent may hold (forked child)."""
    global _lock  # noqa: PLW0603 - a lock cannot be freed by another thread
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_free_lock)
