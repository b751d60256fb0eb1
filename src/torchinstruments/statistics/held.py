"""What a batch holds of a value until the writer thread asks for it: the number, or what it comes from."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, SupportsFloat, TypeAlias

from torchinstruments.records import Absent, Reason
from torchinstruments.statistics.measured import Measured
from torchinstruments.statistics.measuring import FactsReducer
from torchinstruments.statistics.transfer import DeviceNumbers

__all__ = [
    "Derived",
    "Held",
    "Look",
    "Seen",
    "SeenOnDevice",
    "Waiting",
    "finished",
    "lone_number",
    "number_of",
    "reducer_error",
]


class Look(Protocol):
    """One look at a tensor, whose result may still be on its way."""

    def measured(self) -> Measured:
        """Returns what was measured; may raise what prevented it (writer thread)."""
        ...

    def values(self, reducer: FactsReducer) -> Mapping[str, float | Absent]:
        """Returns what a reducer makes of it; may raise what prevented it (writer thread)."""
        ...


@dataclass(frozen=True, slots=True)
class Seen:
    """A look that was taken when the tensor was added."""

    result: Measured

    def measured(self) -> Measured:
        """Returns what was measured."""
        return self.result

    def values(self, reducer: FactsReducer) -> Mapping[str, float | Absent]:
        """Returns what a reducer makes of it."""
        return reducer.values(self.result.facts)


@dataclass(frozen=True, slots=True)
class SeenOnDevice:
    """A look whose numbers are on their way from a device."""

    numbers: DeviceNumbers
    where: slice
    finish: Callable[[Sequence[float]], Measured]

    def measured(self) -> Measured:
        """Waits for the copy and returns what was measured."""
        return self.finish(self.numbers.read(self.where))

    def values(self, reducer: FactsReducer) -> Mapping[str, float | Absent]:
        """Waits for the copy and returns what a reducer makes of it."""
        return reducer.values(self.measured().facts)


@dataclass(frozen=True, slots=True)
class Derived:
    """Values of a reducer that follow from the look at its tensor; its metrics share one of these."""

    reducer: FactsReducer
    look: Look

    def values(self) -> Mapping[str, float | Absent]:
        """Returns the values by metric."""
        return self.look.values(self.reducer)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Numbers on their way from a device; the metrics of one packed result share one of these."""

    numbers: DeviceNumbers
    where: slice
    finish: Callable[[Sequence[float]], Mapping[str, float | Absent]]

    def values(self) -> Mapping[str, float | Absent]:
        """Waits for the copy and returns the values by metric."""
        return self.finish(self.numbers.read(self.where))


Held: TypeAlias = float | Absent | Waiting | Derived


def number_of(metric: str, result: object) -> float | Absent:
    """Returns a host number as a finite float, or why it is none.

    Raises:
        TypeError: It is not a real number.
    """
    # A runtime check against SupportsFloat costs more than all the rest: it comes last.
    if not isinstance(result, (float, int)) and (
        isinstance(result, (str, bytes, complex)) or not isinstance(result, SupportsFloat)
    ):
        raise TypeError(f"{metric} is of type {type(result).__name__}, not a real scalar")
    try:
        number = float(result)
    except OverflowError:
        return Absent(Reason.OVERFLOW.value)
    return number if math.isfinite(number) else Absent(Reason.NONFINITE_RESULT.value)


def finished(held: Waiting | Derived) -> Mapping[str, float | Absent] | Absent:
    """Returns the values that waited, by metric, or why there are none (writer thread)."""
    try:
        return held.values()
    except Exception as error:  # noqa: BLE001 - the device failed: the reason goes where the value would be
        return reducer_error(error)


def reducer_error(error: Exception) -> Absent:
    """Returns the reason that an exception is."""
    return Absent(Reason.REDUCER_ERROR.with_error(error))


def lone_number(metric: str) -> Callable[[Sequence[float]], Mapping[str, float | Absent]]:
    """Returns what makes the only value of its metric from one number."""
    return partial(_named, metric)


def _named(metric: str, numbers: Sequence[float]) -> Mapping[str, float | Absent]:
    """Returns one number by its name."""
    return {metric: number_of(metric, numbers[0])}
