"""What a fault proxy does to which request: an ordered list of rules, the first that matches decides."""

import re
import threading
from dataclasses import dataclass
from typing import TypedDict, Unpack

__all__ = ["Fault", "FaultRules", "Which"]


class Which(TypedDict, total=False):
    """The requests that a rule applies to; all of them where nothing is given.

    Attributes:
        method: Methods, ``PUT`` or ``PUT|POST``; None for all.
        path: Regular expression that is searched in path and query; None for all.
        times: How many of them; None for all.
        skip: How many of them pass before it applies.
    """

    method: str | None
    path: str | None
    times: int | None
    skip: int


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a request.

    Attributes:
        action: ``status``, ``reset``, ``reset_body``, ``stall``, ``delay``, ``drop_response``, ``truncate``.
        code: HTTP status of ``status``.
        error: ``Code`` in the document of ``status``.
        delay_s: Of ``delay``.
        after_bytes: Of ``reset_body`` and ``truncate``.
    """

    action: str
    code: int = 0
    error: str = ""
    delay_s: float = 0.0
    after_bytes: int = 0


class FaultRules:
    """Rules in the order in which they were added (any thread)."""

    def __init__(self) -> None:
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault, **which: Unpack[Which]) -> None:
        """Adds a rule behind the others.

        Args:
            fault: What is done.
            **which: To which requests.
        """
        path = which.get("path")
        rule = _Rule(
            fault,
            which.get("method"),
            None if path is None else re.compile(path),
            which.get("times"),
            which.get("skip", 0),
        )
        with self._lock:
            self._rules.append(rule)

    def clear(self) -> None:
        """Forgets all rules."""
        with self._lock:
            self._rules.clear()

    def match(self, method: str, target: str) -> Fault | None:
        """Returns what is done to a request, which counts as one that its rule has met.

        Args:
            method: ``GET``, ``PUT``, ...
            target: Path and query, as sent.
        """
        with self._lock:
            for rule in self._rules:
                if not rule.covers(method, target):
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                    continue
                if rule.times is not None:
                    rule.times -= 1
                return rule.fault
        return None


@dataclass(slots=True)
class _Rule:
    fault: Fault
    method: str | None
    path: re.Pattern[str] | None
    times: int | None
    skip: int

    def covers(self, method: str, target: str) -> bool:
        """Returns whether a request is one of its own, and not all of them were met."""
        if self.method is not None and method not in self.method.split("|"):
            return False
        if self.path is not None and not self.path.search(target):
            return False
        return self.times != 0
