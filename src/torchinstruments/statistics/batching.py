"""All scalars and histograms of one delivery of a sample, from hooks on the training thread to the writer's.

Each tensor is reduced, or copied, when it is added, for later operations may change it in place. One look at
it serves every reducer that follows from facts, and its histograms. Small CPU tensors are copied and looked
at together (`SmallTensors`), at the latest by `ScalarBatch.seal`. What is on a device stays there; `seal`
has everything of one device sent in one asynchronous copy, with other batches of the sampled step where there
are such, and reading waits for it, on the writer thread.

Reducers are isolated from each other: one that raises, or returns what is no scalar, costs its own values and
says so in their place. One that is not this package's own gets a copy of the tensor to itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch

from torchinstruments.records import Absent, Reason, storable
from torchinstruments.statistics.bins import BinRule
from torchinstruments.statistics.contract import Reducer, as_packed, known_metrics, reducer_name
from torchinstruments.statistics.device import accumulation_dtype, pack_facts
from torchinstruments.statistics.foreign import foreign_code, own_copy
from torchinstruments.statistics.held import (
    Derived,
    Held,
    Look,
    Seen,
    SeenOnDevice,
    Waiting,
    finished,
    lone_number,
    number_of,
    reducer_error,
)
from torchinstruments.statistics.histograms import (
    HistogramReducer,
    MeasuredHistogram,
    absent_histogram,
    measured_histogram,
)
from torchinstruments.statistics.host import measure_on_host
from torchinstruments.statistics.measured import Measured
from torchinstruments.statistics.measuring import MAX_SCRATCH_BYTES, FactsReducer
from torchinstruments.statistics.number_rows import NumberRows
from torchinstruments.statistics.packing import SmallTensors
from torchinstruments.statistics.reading import (
    MeasuredScalars,
    ScalarTable,
    read_one_by_one,
    read_table,
)
from torchinstruments.statistics.transfer import DeviceNumbers, Transfer

__all__ = ["MeasuredScalars", "ScalarBatch"]

_PROBE = "reducer"
_SCALAR = "a scalar"
_LOST = Absent(Reason.REDUCER_ERROR.with_detail("its packed result does not hold it"))


@dataclass(slots=True)
class _Tensor:
    """What a batch holds of one tensor.

    Attributes:
        held: Values, or what they will come from, by metric; empty where all follow from the look.
        histograms: Those that are there, and the place of each of the others in the look, in one order.
        look: The look at the tensor, where one was taken.
    """

    held: dict[str, Held]
    histograms: list[MeasuredHistogram | tuple[str, int]] = field(default_factory=list)
    look: Look | None = None


class ScalarBatch:
    """Scalars and histograms of many tensors.

    Args:
        reducers: What is computed of each tensor.
        on_error: Called with ``"reducer"`` or ``"histogram"`` and the exception once for each failure. It
            must not raise.
        histograms: What `add` takes where it is told to.
    """

    def __init__(
        self,
        reducers: Sequence[Reducer],
        on_error: Callable[[str, BaseException], None],
        histograms: Sequence[HistogramReducer] = (),
    ) -> None:
        self._reducers = tuple(reducers)
        self._on_error = on_error
        self._histograms = tuple(histograms)
        self._tensors: dict[int, _Tensor] = {}
        # Not its length: a signal's handler may call a layer before a tensor is in its place.
        self._indices = count()
        self._scalars: list[Held] = []
        self._devices: dict[torch.device, DeviceNumbers] = {}
        self._small = SmallTensors()
        self._num_scalars = 0
        looking = [reducer for reducer in self._reducers if isinstance(reducer, FactsReducer)]
        self._looks = bool(looking)
        only = looking[0] if len(looking) == len(self._reducers) == 1 else None
        self._rows = NumberRows(only) if only is not None and only.metrics else None
        self._is_ordered = any(reducer.is_ordered for reducer in looking)
        self._max_scratch_bytes = min(
            (reducer.max_scratch_bytes for reducer in looking), default=MAX_SCRATCH_BYTES
        )

    @property
    def num_scalars(self) -> int:
        """Scalars that it holds, absent ones included (training thread, hot path)."""
        return self._num_scalars

    def add(self, tensor: torch.Tensor, *, histograms: bool | Sequence[HistogramReducer] = False) -> int:
        """Reduces a tensor and returns the index to read it by (training thread, hot path).

        Call it inside `isolated`. It never raises and keeps no reference to the tensor.

        Args:
            tensor: Detached, plain and measurable, as `admit` returns it.
            histograms: Which histograms to take: all of the batch, none, or these.
        """
        wanted = (self._histograms if histograms is True else histograms) or ()
        if self._rows is not None:
            return self._add_row(self._rows, tensor, wanted)
        taken = _Tensor({})
        failure = self._take_look(tensor, taken, wanted) if self._looks or wanted else None
        for reducer in self._reducers:
            if isinstance(reducer, FactsReducer):
                self._derive(reducer, taken, failure)
                continue
            try:
                results = self._reduce(reducer, tensor)
            except Exception as error:  # noqa: BLE001 - a user's reducer may raise anything
                self._fail(reducer, error, taken.held)
                self._on_error(_PROBE, error)
            else:
                self._keep(reducer, results, taken.held)
        index = next(self._indices)
        self._tensors[index] = taken
        self._num_scalars += len(taken.held)
        return index

    def add_scalar(self, tensor: torch.Tensor) -> int:
        """Takes one number along as it is now; returns the index to read it by (training thread, hot path).

        Call it inside `isolated`. It never raises.

        Args:
            tensor: One element, on any device. It may change afterwards.
        """
        held: Held
        try:
            held = self._hold(_SCALAR, tensor.detach().clone())
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            held = reducer_error(error)
            self._on_error(_PROBE, error)
        self._scalars.append(held)
        self._num_scalars += 1
        return len(self._scalars) - 1

    def seal(self, transfer: Transfer | None = None) -> None:
        """Measures small tensors and starts one copy to the host for each device (training thread, hot path).

        Nothing is added afterwards. Call it inside `isolated`. It never raises.

        Args:
            transfer: Starts the copies in its place, with those of other batches.
        """
        devices = self._devices.values()
        sends = [one.send if transfer is None else partial(one.leave, transfer) for one in devices]
        for finish in (self._small.measure, *sends):
            try:
                finish()
            except Exception as error:  # noqa: BLE001 - out of memory, or a device that failed before
                self._on_error(_PROBE, error)

    def read_all(self, indices: Sequence[int], absent: Callable[[int], MeasuredScalars]) -> ScalarTable:
        """Waits for the copy and returns the scalars of several tensors (writer thread, after `seal`).

        Args:
            indices: Of the tensors, in the order that is wanted; negative for what was not measured.
            absent: Returns what stands for that, by its place in `indices`.
        """

        def read_alone(place: int) -> MeasuredScalars:
            return absent(place) if indices[place] < 0 else self.read(indices[place])

        if self._rows is None:
            return read_one_by_one([read_alone(place) for place in range(len(indices))])
        return read_table(self._rows, indices, read_alone)

    def read(self, index: int) -> MeasuredScalars:
        """Waits for the copy and returns the scalars of one tensor (writer thread, after `seal`)."""
        held: Mapping[str, Held] = self._tensors[index].held if index in self._tensors else {}
        if self._rows is not None and not held:
            numbers = self._rows.numbers(index)
            if numbers is not None:
                return MeasuredScalars(self._rows.metrics, numbers, ("",) * len(numbers))
            look = self._rows.look(index)
            held = dict.fromkeys(
                self._rows.metrics, _LOST if look is None else Derived(self._rows.reducer, look)
            )
        values: list[float | None] = []
        reasons: list[str] = []
        source: Held = 0.0
        found: Mapping[str, float | Absent] | Absent = {}
        for metric, one in held.items():
            if isinstance(one, (Waiting, Derived)):
                # Metrics that share what they come from lie side by side: it is finished once for all.
                if one is not source:
                    source, found = one, finished(one)
                value = found if isinstance(found, Absent) else found.get(metric, _LOST)
            else:
                value = one
            if isinstance(value, Absent):
                values.append(None)
                reasons.append(value.reason)
            else:
                values.append(value)
                reasons.append("")
        return MeasuredScalars(tuple(held), tuple(values), tuple(reasons))

    def read_histograms(self, index: int) -> tuple[MeasuredHistogram, ...]:
        """Waits for the copy and returns the histograms that were taken of one tensor.

        It is called on the writer thread, after `seal`. They are in the order in which they were asked for;
        one that could not be had says why.
        """
        tensor = self._tensors.get(index)
        if tensor is None or not tensor.histograms:
            return ()
        measured, failure = None, Absent("")
        try:
            measured = None if tensor.look is None else tensor.look.measured()
        except Exception as error:  # noqa: BLE001 - the device failed: the reason goes where the counts would be
            failure = reducer_error(error)
        histograms = []
        for one in tensor.histograms:
            if isinstance(one, MeasuredHistogram):
                histograms.append(one)
            elif measured is None:
                histograms.append(absent_histogram(one[0], failure.reason))
            else:
                name, place = one
                binned = measured.binned[place] if measured.binned else None
                histograms.append(measured_histogram(name, measured.facts, binned))
        return tuple(histograms)

    def read_scalar(self, index: int) -> float | None:
        """Waits for the copy and returns one number (writer thread, after `seal`).

        Returns:
            The number, or None where it is not finite or could not be had.
        """
        value = self._scalars[index]
        if isinstance(value, (Waiting, Derived)):
            found = finished(value)
            value = found if isinstance(found, Absent) else found.get(_SCALAR, _LOST)
        return None if isinstance(value, Absent) else value

    def _add_row(self, rows: NumberRows, tensor: torch.Tensor, wanted: Sequence[HistogramReducer]) -> int:
        """Adds a tensor whose values all follow from one look; returns its index, which is its row."""
        self._num_scalars += len(rows.metrics)
        failure: Exception | None = None
        if not wanted:
            try:
                return rows.add(self._look(tensor, ()))
            except Exception as error:  # noqa: BLE001 - out of memory, most likely
                self._on_error(_PROBE, error)
                failure = error
        # One that has histograms, or could not be looked at.
        taken = _Tensor({})
        if wanted:
            failure = self._take_look(tensor, taken, wanted)
        if taken.look is None:
            self._derive(rows.reducer, taken, failure)
        index = rows.add(taken.look.result if isinstance(taken.look, Seen) else taken.look)
        self._tensors[index] = taken
        return index

    def _take_look(
        self, tensor: torch.Tensor, taken: _Tensor, wanted: Sequence[HistogramReducer]
    ) -> Exception | None:
        """Looks at a tensor once for all that follows from facts; returns what prevented it."""
        rules: list[BinRule] = []
        for one in wanted:
            if type(one).__call__ is not HistogramReducer.__call__:
                taken.histograms.append(self._own_histogram(one, tensor))
            else:
                taken.histograms.append((one.name, len(rules)))
                rules.append(one.rule)
        if not self._looks and not rules:
            return None
        try:
            found = self._look(tensor, rules)
        except Exception as error:  # noqa: BLE001 - out of memory, most likely
            reason = reducer_error(error).reason
            taken.histograms = [
                one if isinstance(one, MeasuredHistogram) else absent_histogram(one[0], reason)
                for one in taken.histograms
            ]
            self._on_error(_PROBE, error)
            return error
        taken.look = Seen(found) if isinstance(found, Measured) else found
        return None

    def _look(self, tensor: torch.Tensor, rules: Sequence[BinRule]) -> Measured | Look:
        """Takes the cheapest look that a tensor allows."""
        if tensor.device.type == "cpu":
            place = self._small.add(tensor, rules)
            if place is not None:
                return place
            return measure_on_host(
                tensor,
                is_ordered=self._is_ordered,
                rules=rules,
                max_scratch_bytes=self._max_scratch_bytes,
            )
        packed = pack_facts(
            tensor, is_ordered=self._is_ordered, rules=rules, max_scratch_bytes=self._max_scratch_bytes
        )
        numbers = self._numbers_of(packed.scalars.device)
        return SeenOnDevice(numbers, numbers.add(packed.scalars), packed.finish)

    def _own_histogram(self, one: HistogramReducer, tensor: torch.Tensor) -> MeasuredHistogram:
        """Calls a histogram that computes itself."""
        try:
            with foreign_code(tensor.device):
                measured: object = one(own_copy(tensor))
        except Exception as raised:  # noqa: BLE001 - a user's code may raise anything
            error = raised
        else:
            if isinstance(measured, MeasuredHistogram):
                return measured
            error = TypeError(f"it returned {type(measured).__name__}, not a MeasuredHistogram")
        self._on_error("histogram", error)
        return absent_histogram(one.name, reducer_error(error).reason)

    def _derive(self, reducer: FactsReducer, taken: _Tensor, failure: Exception | None) -> None:
        """Adds the metrics of a reducer whose values follow from the look."""
        if failure is not None or taken.look is None:
            self._fail(reducer, failure or RuntimeError("the tensor was not looked at"), taken.held)
            return
        source = Derived(reducer, taken.look)
        derived = dict.fromkeys(reducer.metrics, source)
        if taken.held.keys().isdisjoint(derived):
            taken.held.update(derived)
        else:
            self._keep(reducer, derived, taken.held)

    def _fail(self, reducer: Reducer, error: Exception, held: dict[str, Held]) -> None:
        """Puts an exception in the place of all values of a reducer."""
        for metric in known_metrics(reducer) or (reducer_name(reducer),):
            held[_free_name(reducer, metric, held)] = reducer_error(error)

    def _reduce(self, reducer: Reducer, tensor: torch.Tensor) -> Mapping[str, object]:
        """Calls one reducer.

        Raises:
            Exception: Whatever the reducer raises, or what is wrong with what it returned.
        """
        with foreign_code(tensor.device):
            results = self._call(reducer, own_copy(tensor))
            if not isinstance(results, Mapping):
                raise TypeError(f"it returned {type(results).__name__}, not a mapping from names to scalars")
            named: dict[str, object] = {}
            for metric, result in results.items():
                if not isinstance(metric, str) or not metric:
                    raise TypeError(f"its metric name {metric!r} is not a text of at least one character")
                named[storable(metric)] = result
            if len(named) < len(results):
                raise ValueError("two of its metric names are the same once they can be stored")
        if not named and not known_metrics(reducer):
            raise ValueError("it returned no metric")
        return named

    def _call(self, reducer: Reducer, tensor: torch.Tensor) -> object:
        """Returns what one reducer returns for a tensor."""
        if tensor.device.type != "cpu" and as_packed(reducer):
            packed = reducer.pack(tensor)
            numbers = self._numbers_of(packed.scalars.device)
            waiting = Waiting(numbers, numbers.add(packed.scalars), packed.finish)
            return dict.fromkeys(reducer.metrics, waiting)
        return reducer(tensor)

    def _keep(self, reducer: Reducer, results: Mapping[str, object], held: dict[str, Held]) -> None:
        """Adds what a reducer returned, and what it declared and did not return."""
        for metric, result in results.items():
            if metric in held:
                self._refuse(reducer, metric, f"duplicate metric {metric!r}", held)
                continue
            try:
                held[metric] = self._hold(metric, result)
            except Exception as error:  # noqa: BLE001 - one value may not cost the others
                held[metric] = reducer_error(error)
                self._on_error(_PROBE, error)
        for metric in known_metrics(reducer):
            if metric not in results:
                self._refuse(reducer, metric, f"it did not return its metric {metric!r}", held)

    def _refuse(self, reducer: Reducer, metric: str, problem: str, held: dict[str, Held]) -> None:
        """Puts a problem with a reducer's result in the place of a value."""
        held[_free_name(reducer, metric, held)] = Absent(Reason.REDUCER_ERROR.with_detail(problem))
        self._on_error(_PROBE, ValueError(f"{reducer_name(reducer)}: {problem}"))

    def _hold(self, metric: str, result: object) -> Held:
        """Returns a value as a float, as what is on its way, or as absent.

        Raises:
            TypeError: It is not a real scalar.
        """
        if isinstance(result, (Absent, Waiting, Derived)):
            return result
        if not isinstance(result, torch.Tensor):
            return number_of(metric, result)
        if result.numel() != 1 or result.is_complex():
            kind = f"a {str(result.dtype).removeprefix('torch.')} tensor of shape {tuple(result.shape)}"
            raise TypeError(f"{metric} is {kind}, not a real scalar; return one number for each name")
        if result.device.type == "cpu":
            return number_of(metric, result.item())
        numbers = self._numbers_of(result.device)
        return Waiting(numbers, numbers.add(result), lone_number(metric))

    def _numbers_of(self, device: torch.device) -> DeviceNumbers:
        """Returns what collects the numbers of a device."""
        numbers = self._devices.get(device)
        if numbers is None:
            numbers = self._devices[device] = DeviceNumbers(device, accumulation_dtype(device))
        return numbers


def _free_name(reducer: Reducer, metric: str, held: Mapping[str, Held]) -> str:
    """Returns the metric's name, or one made of it where that is taken: a name stands once for a tensor."""
    candidate, number = metric, 1
    while candidate in held:
        candidate = f"{reducer_name(reducer)}.{metric}" + (f"#{number}" if number > 1 else "")
        number += 1
    return candidate
