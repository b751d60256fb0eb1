"""``with observer.step(...)``: an attempt whose begin and end the program tells, and its numbers for it."""

from numbers import Integral
from types import TracebackType

import torch

from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.probe import RootProbe

__all__ = ["MAX_GLOBAL_STEP", "MAX_MICRO_BATCHES", "StepBlock", "checked_number"]

MAX_GLOBAL_STEP = 2**63 - 1
"""The largest number that the column holds."""

MAX_MICRO_BATCHES = 2**31 - 1
"""The largest number that the column holds."""


class StepBlock:
    """What `Observer.step` returns; it never raises, and lets every exception of its block through.

    Args:
        probe: Counts the attempt; None where nothing is observed.
        global_step: The caller's number.
        micro_batches: The caller's number.
    """

    __slots__ = ("__weakref__", "_entered", "_global_step", "_micro_batches", "_probe")

    def __init__(
        self, probe: RootProbe | None, global_step: int | None = None, micro_batches: int | None = None
    ) -> None:
        self._probe = probe
        self._global_step = global_step
        self._micro_batches = micro_batches
        # One entry an entrance, since one object may be entered inside itself, and by several threads.
        self._entered: list[bool] = []

    def __enter__(self) -> None:
        """Opens the attempt (training thread, hot path)."""
        if self._probe is not None:
            self._entered.append(self._probe.step_entered(self, self._global_step, self._micro_batches))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it (training thread, hot path)."""
        if self._probe is not None and self._entered and self._entered.pop():
            self._probe.step_left(failed=kind is not None)


def checked_number(probe: RootProbe, name: str, value: object, lowest: int, highest: int) -> int | None:
    """Returns a number of the caller's, or None where it cannot be used (training thread, hot path).

    Raises:
        ConfigurationError: It cannot be used, and the observer has ``error_policy="raise"``.
    """
    if value is None or (type(value) is int and lowest <= value <= highest):
        return value
    number = _integer(value)
    if number is not None and lowest <= number <= highest:
        return number
    if isinstance(value, torch.Tensor):
        # Its entries are not read, not even for the message: they may lie on a device.
        shown, way_out = f"of type {type(value).__name__}", "; reading a tensor would wait for its device"
    else:
        shown, way_out = f"{_short(value)}", ""
    sentence = (
        f"step({name}=...) was given {shown}, which is not possible; give an int from {lowest} to {highest}, "
        f"or leave it out{way_out}"
    )
    if probe.faults.raises:
        raise ConfigurationError(sentence)
    probe.notice_of_step(name, f"{sentence}; it is left out, and so are further ones")
    return None


def _integer(value: object) -> int | None:
    """Returns what an integer of any kind is, or None where it is none, whatever its own methods do."""
    try:
        return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    except Exception:  # noqa: BLE001 - a number that cannot be read is one that is refused
        return None


def _short(value: object) -> str:
    """Returns a value as a message shows it, whatever its own text does."""
    try:
        return repr(value)[:80]
    except Exception:  # noqa: BLE001 - an object whose text fails is still one that is refused
        return f"of type {type(value).__name__}"
