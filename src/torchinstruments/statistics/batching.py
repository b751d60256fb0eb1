"""All scalars of one delivery of a sample, from hooks on the training thread to numbers on the writer's.

Each tensor is reduced when it is added, for later operations may change it in place. Values that are on the
host at once are kept as Python floats. What is on a device stays there; `ScalarBatch.seal` sends everything
of one device in one asynchronous copy, and reading waits for it, on the writer thread.

Reducers are isolated from each other: one that raises, or returns what is no scalar, costs its own values and
says so in their place.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat, TypeAlias

import torch

from torchinstruments.records import Absent, Reason
from torchinstruments.statistics.contract import Reducer, as_packed, known_metrics, reducer_name
from torchinstruments.statistics.device import accumulation_dtype
from torchinstruments.statistics.transfer import DeviceNumbers

__all__ = ["MeasuredScalars", "ScalarBatch"]

_PROBE = "reducer"


@dataclass(frozen=True, slots=True)
class MeasuredScalars:
    """The scalars of one tensor.

    Attributes:
        metrics: Names, each once, in the order of the reducers.
        values: Finite numbers; None where there is a reason.
        reasons: ``""`` beside a value, else a `Reason` with or without detail.
    """

    metrics: tuple[str, ...]
    values: tuple[float | None, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Numbers on their way from a device; the metrics of one packed result share one of these."""

    numbers: DeviceNumbers
    where: slice
    finish: Callable[[Sequence[float]], Mapping[str, float | Absent]] | None = None


_Held: TypeAlias = float | Absent | _Waiting


class ScalarBatch:
    """Scalars of many tensors.

    Args:
        reducers: What is computed of each tensor.
        on_error: Called with ``"reducer"`` and the exception once for each failure. It must not raise.
    """

    def __init__(self, reducers: Sequence[Reducer], on_error: Callable[[str, BaseException], None]) -> None:
        self._reducers = tuple(reducers)
        self._on_error = on_error
        self._tensors: list[dict[str, _Held]] = []
        self._scalars: list[_Held] = []
        self._devices: dict[torch.device, DeviceNumbers] = {}
        self._num_scalars = 0

    @property
    def num_scalars(self) -> int:
        """Scalars that it holds, absent ones included (training thread, hot path)."""
        return self._num_scalars

    def add(self, tensor: torch.Tensor) -> int:
        """Reduces a tensor and returns the index to read it by (training thread, hot path).

        Call it inside `isolated`. It never raises and keeps no reference to the tensor.

        Args:
            tensor: Detached, plain and measurable, as `admit` returns it.
        """
        held: dict[str, _Held] = {}
        for reducer in self._reducers:
            try:
                results = self._reduce(reducer, tensor)
            except Exception as error:  # noqa: BLE001 - a user's reducer may raise anything
                for metric in known_metrics(reducer) or (reducer_name(reducer),):
                    held[_free_name(reducer, metric, held)] = _reducer_error(error)
                self._on_error(_PROBE, error)
            else:
                self._keep(reducer, results, held)
        self._tensors.append(held)
        self._num_scalars += len(held)
        return len(self._tensors) - 1

    def add_scalar(self, tensor: torch.Tensor) -> int:
        """Takes one number along as it is now; returns the index to read it by (training thread, hot path).

        Call it inside `isolated`. It never raises.

        Args:
            tensor: One element, on any device. It may change afterwards.
        """
        held: _Held
        try:
            held = self._hold("a scalar", tensor.detach().clone())
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            held = _reducer_error(error)
            self._on_error(_PROBE, error)
        self._scalars.append(held)
        self._num_scalars += 1
        return len(self._scalars) - 1

    def seal(self) -> None:
        """Starts one copy to the host for each device (training thread, hot path).

        Nothing is added afterwards. Call it inside `isolated`. It never raises.
        """
        for numbers in self._devices.values():
            try:
                numbers.send()
            except Exception as error:  # noqa: BLE001 - out of memory, or a device that failed before
                self._on_error(_PROBE, error)

    def read(self, index: int) -> MeasuredScalars:
        """Waits for the copy and returns the scalars of one tensor (writer thread, after `seal`)."""
        held = self._tensors[index]
        finished: dict[int, Mapping[str, float | Absent]] = {}
        values = [_resolved(metric, value, finished) for metric, value in held.items()]
        return MeasuredScalars(
            metrics=tuple(held),
            values=tuple(None if isinstance(value, Absent) else value for value in values),
            reasons=tuple(value.reason if isinstance(value, Absent) else "" for value in values),
        )

    def read_scalar(self, index: int) -> float | None:
        """Waits for the copy and returns one number (writer thread, after `seal`).

        Returns:
            The number, or None where it is not finite or could not be had.
        """
        value = _resolved("", self._scalars[index], {})
        return None if isinstance(value, Absent) else value

    def _reduce(self, reducer: Reducer, tensor: torch.Tensor) -> Mapping[str, object]:
        """Calls one reducer.

        Raises:
            Exception: Whatever the reducer raises, or what is wrong with what it returned or did.
        """
        version = None if tensor.is_inference() else tensor._version  # noqa: SLF001 - its only public name
        results: Mapping[str, object]
        if tensor.device.type != "cpu" and as_packed(reducer):
            packed = reducer.pack(tensor)
            numbers = self._numbers_of(packed.scalars.device)
            waiting = _Waiting(numbers, numbers.add(packed.scalars), packed.finish)
            results = dict.fromkeys(reducer.metrics, waiting)
        else:
            results = reducer(tensor)
        if version is not None and tensor._version != version:  # noqa: SLF001
            raise RuntimeError("it changed the tensor that it was given to measure")
        if not isinstance(results, Mapping):
            raise TypeError(f"it returned {type(results).__name__}, not a mapping from names to scalars")
        for metric in results:
            if not isinstance(metric, str) or not metric:
                raise TypeError(f"its metric name {metric!r} is not a text of at least one character")
        return results

    def _keep(self, reducer: Reducer, results: Mapping[str, object], held: dict[str, _Held]) -> None:
        """Adds what a reducer returned, and what it declared and did not return."""
        for metric, result in results.items():
            if metric in held:
                self._refuse(reducer, metric, f"duplicate metric {metric!r}", held)
                continue
            try:
                held[metric] = self._hold(metric, result)
            except Exception as error:  # noqa: BLE001 - one value may not cost the others
                held[metric] = _reducer_error(error)
                self._on_error(_PROBE, error)
        for metric in known_metrics(reducer):
            if metric not in results:
                self._refuse(reducer, metric, f"it did not return its metric {metric!r}", held)

    def _refuse(self, reducer: Reducer, metric: str, problem: str, held: dict[str, _Held]) -> None:
        """Puts a problem with a reducer's result in the place of a value."""
        held[_free_name(reducer, metric, held)] = Absent(Reason.REDUCER_ERROR.with_detail(problem))
        self._on_error(_PROBE, ValueError(f"{reducer_name(reducer)}: {problem}"))

    def _hold(self, metric: str, result: object) -> _Held:
        """Returns a value as a float, as what is on its way, or as absent.

        Raises:
            TypeError: It is not a real scalar.
        """
        if isinstance(result, (Absent, _Waiting)):
            return result
        if not isinstance(result, torch.Tensor):
            return _number(metric, result)
        if result.numel() != 1 or result.is_complex():
            kind = f"a {str(result.dtype).removeprefix('torch.')} tensor of shape {tuple(result.shape)}"
            raise TypeError(f"{metric} is {kind}, not a real scalar; return one number for each name")
        if result.device.type == "cpu":
            return _number(metric, result.item())
        numbers = self._numbers_of(result.device)
        return _Waiting(numbers, numbers.add(result))

    def _numbers_of(self, device: torch.device) -> DeviceNumbers:
        """Returns what collects the numbers of a device."""
        numbers = self._devices.get(device)
        if numbers is None:
            numbers = self._devices[device] = DeviceNumbers(device, accumulation_dtype(device))
        return numbers


def _number(metric: str, result: object) -> float | Absent:
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


def _resolved(metric: str, held: _Held, finished: dict[int, Mapping[str, float | Absent]]) -> float | Absent:
    """Returns a value once its numbers have come; a packed result is finished once for all its metrics."""
    if not isinstance(held, _Waiting):
        return held
    try:
        numbers = held.numbers.read(held.where)
        if held.finish is None:
            return _number(metric, numbers[0])
        if id(held) not in finished:
            finished[id(held)] = held.finish(numbers)
        return finished[id(held)][metric]
    except Exception as error:  # noqa: BLE001 - the device failed: the reason goes where the value would be
        return _reducer_error(error)


def _reducer_error(error: Exception) -> Absent:
    """Returns the reason that an exception is."""
    return Absent(Reason.REDUCER_ERROR.with_detail(f"{type(error).__name__}: {error}"))


def _free_name(reducer: Reducer, metric: str, held: Mapping[str, _Held]) -> str:
    """Returns the metric's name, or one made of it where that is taken: a name stands once for a tensor."""
    candidate, number = metric, 1
    while candidate in held:
        candidate = f"{reducer_name(reducer)}.{metric}" + (f"#{number}" if number > 1 else "")
        number += 1
    return candidate
