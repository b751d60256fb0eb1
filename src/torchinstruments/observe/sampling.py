"""Which root forwards are measured.

A sampler is asked once before every root forward and says yes or no. It sees where the forward stands and
nothing else: no tensor, no clock of its own, so that the same events give the same answers and a test needs
no waiting. A sampler keeps its own state and therefore belongs to one observer.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Position, storable

__all__ = [
    "AlwaysSampler",
    "EveryNForwardsSampler",
    "EveryNStepsSampler",
    "SamplingEvent",
    "SamplingPolicy",
    "TimedSampler",
    "describe",
    "is_own",
    "validate_sampler",
    "without_event",
]

_MAX_SETTING_CHARACTERS = 200


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingEvent:
    """One root forward that is about to run.

    Attributes:
        attempt: Window of the optimizer step that it belongs to, from 0; None before the first grad-enabled
            forward.
        forward_in_attempt: Ordinal among all root forwards of the attempt.
        micro_batch: Ordinal among the grad-enabled ones; None for an evaluation forward.
        forward_index: Ordinal among all root forwards of the process.
        grad_enabled: Whether gradients are enabled.
        monotonic_s: Seconds of ``time.monotonic``.
    """

    attempt: int | None
    forward_in_attempt: int
    micro_batch: int | None
    forward_index: int
    grad_enabled: bool
    monotonic_s: float


class SamplingPolicy(Protocol):
    """Chooses root forwards. An exception counts as no, and is reported."""

    def should_sample(self, event: SamplingEvent) -> bool:
        """Returns whether this forward is measured (training thread, hot path: asked before every one)."""
        ...


class AlwaysSampler:
    """Measures every root forward."""

    def should_sample(self, event: SamplingEvent | Position) -> bool:  # noqa: ARG002 - every event gets the same answer
        """Returns True."""
        return True


class EveryNForwardsSampler:
    """Measures the root forwards number n, 2n, 3n, ..., training and evaluation alike.

    Ranks agree on it only where all of them run the same forwards.

    Args:
        n: Root forwards per sample, at least 1.

    Raises:
        ConfigurationError: ``n`` is not a whole number of at least 1.
    """

    def __init__(self, n: int) -> None:
        self.n = _whole_number("EveryNForwardsSampler", n)

    def should_sample(self, event: SamplingEvent | Position) -> bool:
        """Returns whether this is the n-th forward since the last one chosen."""
        return (event.forward_index + 1) % self.n == 0


class EveryNStepsSampler:
    """Measures the attempts at an optimizer step number n, 2n, 3n, ...: each of their micro-batches.

    Evaluation forwards are left out. All ranks try their steps together, so their samples line up. Attempts
    are counted from optimizer steps: where none is seen, everything is one attempt.

    Example:
        >>> from torchinstruments import EveryNStepsSampler, SamplingEvent
        >>> sampler = EveryNStepsSampler(10)
        >>> forwards = [
        ...     SamplingEvent(attempt, 0, 0, attempt, grad_enabled=True, monotonic_s=0.0)
        ...     for attempt in range(30)
        ... ]
        >>> [event.attempt for event in forwards if sampler.should_sample(event)]
        [9, 19, 29]

    Args:
        n: Attempts per sampled attempt, at least 1.

    Raises:
        ConfigurationError: ``n`` is not a whole number of at least 1.
    """

    def __init__(self, n: int) -> None:
        self.n = _whole_number("EveryNStepsSampler", n)

    def should_sample(self, event: SamplingEvent | Position) -> bool:
        """Returns whether this is a training forward of an attempt that was chosen."""
        return event.grad_enabled and event.attempt is not None and (event.attempt + 1) % self.n == 0


class TimedSampler:
    """Measures the first root forward after each interval.

    Where several ranks train, they agree on the forwards that they measure, about one an interval: see
    `torchinstruments.observe.aligned`. What is said here of deadlines is then true of the leading rank's
    clock, and of each rank's own where there is nobody to agree with.

    Deadlines lie on a grid that starts at the first root forward, so that slow forwards do not shift it. A
    deadline that passed while nothing ran is made up for once, not once for each that was missed.

    Args:
        interval: Time between samples, more than zero.
        immediate: Whether the very first root forward is measured too.

    Raises:
        ConfigurationError: ``interval`` is not a positive `timedelta`, or ``immediate`` not a bool.
    """

    def __init__(self, interval: timedelta = timedelta(minutes=1), *, immediate: bool = False) -> None:
        if not isinstance(interval, timedelta) or interval <= timedelta(0):
            raise ConfigurationError(
                f"TimedSampler(interval={interval!r}) is not possible; "
                f"give a timedelta of more than zero, such as timedelta(seconds=30)"
            )
        if not isinstance(immediate, bool):
            raise ConfigurationError(
                f"TimedSampler(immediate={immediate!r}) is not possible; give True or False"
            )
        self.interval = interval
        self.immediate = immediate
        self._interval_s = interval.total_seconds()
        self._started_s: float | None = None
        self._intervals_used = 0

    def should_sample(self, event: SamplingEvent) -> bool:
        """Returns whether an interval has ended since the last forward that was measured."""
        if self._started_s is None:
            self._started_s = event.monotonic_s
            return self.immediate
        # The deadline is computed from the start, not summed up, so that it never drifts by rounding.
        if event.monotonic_s < self._started_s + (self._intervals_used + 1) * self._interval_s:
            return False
        passed = math.floor((event.monotonic_s - self._started_s) / self._interval_s)
        self._intervals_used = max(self._intervals_used + 1, passed)
        return True


def validate_sampler(sampler: SamplingPolicy) -> SamplingPolicy:
    """Returns the sampler if it can be asked.

    Raises:
        ConfigurationError: It has no callable ``should_sample``, or is a class instead of an instance.
    """
    if isinstance(sampler, type):
        raise ConfigurationError(
            f"sampler={sampler.__name__} is a class; give an instance, such as AlwaysSampler()"
        )
    if not callable(getattr(sampler, "should_sample", None)):
        raise ConfigurationError(
            f"sampler={sampler!r} has no method should_sample(event); give a sampler, such as AlwaysSampler()"
        )
    return sampler


def is_own(sampler: SamplingPolicy) -> bool:
    """Returns whether a sampler is one of these, and no subclass of the program's."""
    return type(sampler) in (AlwaysSampler, EveryNForwardsSampler, EveryNStepsSampler, TimedSampler)


def without_event(sampler: SamplingPolicy) -> Callable[[Position], bool] | None:
    """Returns what asks a sampler of this package by a forward's position alone; None where it takes more."""
    if not isinstance(sampler, AlwaysSampler | EveryNForwardsSampler | EveryNStepsSampler):
        return None
    is_replaced = "should_sample" in vars(sampler)
    return sampler.should_sample if is_own(sampler) and not is_replaced else None


def describe(sampler: SamplingPolicy) -> Mapping[str, object]:
    """Returns what ``run.json`` says of a sampler: its type and its settings, fit for strict JSON.

    A sampler of the caller's own goes by its class name; its settings are known where it is a dataclass.
    """
    match sampler:
        case AlwaysSampler():
            return {"type": "always", "settings": {}}
        case EveryNForwardsSampler():
            return {"type": "every_n_forwards", "settings": {"n": sampler.n}}
        case EveryNStepsSampler():
            return {"type": "every_n_steps", "settings": {"n": sampler.n}}
        case TimedSampler():
            settings = {"interval_s": sampler.interval.total_seconds(), "immediate": sampler.immediate}
            return {"type": "timed", "settings": settings}
        case _:
            return {"type": type(sampler).__name__, "settings": _dataclass_settings(sampler)}


def _dataclass_settings(sampler: object) -> dict[str, object]:
    """Returns the fields of a dataclass instance as JSON values; empty for anything else."""
    if not dataclasses.is_dataclass(sampler):
        return {}
    return {
        field.name: _json_value(getattr(sampler, field.name, None)) for field in dataclasses.fields(sampler)
    }


def _json_value(value: object) -> object:
    """Returns a plain value as it is and anything else as its text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    try:
        return storable(value if isinstance(value, str) else repr(value)[:_MAX_SETTING_CHARACTERS])
    except Exception:  # noqa: BLE001 - the user's code
        return type(value).__name__


def _whole_number(name: str, n: object) -> int:
    """Returns n if it is a whole number of at least 1."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigurationError(f"{name}({n!r}) is not possible; give a whole number of at least 1")
    return n
