"""Scalars of many tensors, one copy, and reducers that cannot hurt each other."""

import math
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from torchinstruments.records import Absent
from torchinstruments.statistics import batching
from torchinstruments.statistics.batching import MeasuredScalars, ScalarBatch
from torchinstruments.statistics.contract import Reducer, Scalar
from torchinstruments.statistics.histograms import (
    HistogramReducer,
    MeasuredHistogram,
    absent_histogram,
    histogram,
)
from torchinstruments.statistics.isolation import isolated
from torchinstruments.statistics.profile import PROFILE_METRICS, ExactProfile
from torchinstruments.statistics.reducers import default_reducers, max_abs, mean, rms
from unit.statistics.accelerator import Accelerator, put


class Errors(list[tuple[str, BaseException]]):
    """Keeps what a batch reports."""

    def __call__(self, probe: str, error: BaseException) -> None:
        """Takes one error."""
        self.append((probe, error))


class Declared:
    """A reducer that declares two metrics and returns what it was made with."""

    metrics = ("first", "second")

    def __init__(self, results: Any) -> None:
        self.results = results

    def __call__(self, _tensor: torch.Tensor) -> Mapping[str, Scalar]:
        """Returns the results, or raises them."""
        if isinstance(self.results, Exception):
            raise self.results
        return self.results


def returning(results: Any) -> Reducer:
    """Returns a reducer that always returns the same."""

    def reducer(tensor: torch.Tensor) -> Mapping[str, Scalar]:
        return results

    return reducer


def measure(*reducers: Reducer, tensor: torch.Tensor | None = None) -> tuple[MeasuredScalars, Errors]:
    """Returns the scalars of one tensor and the errors that were reported."""
    errors = Errors()
    batch = ScalarBatch(reducers, errors)
    with isolated("cpu"):
        index = batch.add(torch.tensor([1.0, 3.0]) if tensor is None else tensor)
        batch.seal()
    measured = batch.read(index)
    assert batch.num_scalars == len(measured.metrics)
    return measured, errors


def by_name(measured: MeasuredScalars) -> dict[str, Any]:
    """Returns each value, or its reason, by metric."""
    return {
        metric: value if reason == "" else reason
        for metric, value, reason in zip(measured.metrics, measured.values, measured.reasons, strict=True)
    }


def test_tensors_are_read_by_the_index_that_they_got() -> None:
    """Each tensor has its own scalars, whatever order they are read in."""
    batch = ScalarBatch(default_reducers(), Errors())
    first, second = batch.add(torch.tensor([1.0, 3.0])), batch.add(torch.tensor([10.0]))
    batch.seal()
    assert batch.num_scalars == 18
    assert by_name(batch.read(second))["mean"] == 10.0
    assert by_name(batch.read(first))["mean"] == 2.0


def test_a_tensor_is_measured_as_it_was_when_it_was_added() -> None:
    """What an in-place operation does afterwards is not seen."""
    batch = ScalarBatch(default_reducers(), Errors())
    tensor, scale = torch.tensor([1.0, 3.0]), torch.tensor(2.0)
    index, scale_index = batch.add(tensor), batch.add_scalar(scale)
    tensor.zero_()
    scale.zero_()
    batch.seal()
    assert by_name(batch.read(index))["max"] == 3.0
    assert batch.read_scalar(scale_index) == 2.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (7, 7.0),
        (0.5, 0.5),
        (torch.tensor(4), 4.0),
        (torch.tensor([[2.5]], dtype=torch.bfloat16), 2.5),
        (torch.tensor(True), 1.0),
        (np.float32(1.5), 1.5),
        (np.int64(3), 3.0),
        (Decimal("0.25"), 0.25),
        (Absent("no_gradient"), "no_gradient"),
        (math.nan, "nonfinite_result"),
        (torch.tensor(-math.inf), "nonfinite_result"),
        (10**400, "overflow"),
        (
            torch.ones(2, 3),
            "reducer_error: TypeError: x is a float32 tensor of shape (2, 3), not a real scalar",
        ),
        (
            torch.tensor(1j),
            "reducer_error: TypeError: x is a complex64 tensor of shape (), not a real scalar",
        ),
        ("0.5", "reducer_error: TypeError: x is of type str, not a real scalar"),
        (None, "reducer_error: TypeError: x is of type NoneType, not a real scalar"),
        (1j, "reducer_error: TypeError: x is of type complex, not a real scalar"),
    ],
)
def test_a_value_is_a_finite_number_or_says_why_not(value: object, expected: object) -> None:
    """Numbers of every kind are taken; nothing that is not finite gets through."""
    measured, errors = measure(returning({"x": value}))
    found = by_name(measured)["x"]
    assert found == expected or str(found).startswith(f"{expected};")
    assert len(errors) == str(expected).startswith("reducer_error")


def test_a_reducer_that_raises_costs_only_its_own_values() -> None:
    """Its declared metrics say what it raised; the others are there; the error is reported once."""
    measured, errors = measure(
        ExactProfile(), Declared(ZeroDivisionError("division by\nzero")), returning({"x": 1})
    )
    found = by_name(measured)
    assert found["first"] == found["second"] == "reducer_error: ZeroDivisionError: division by zero"
    assert (found["mean"], found["x"]) == (2.0, 1.0)
    assert [(probe, type(error)) for probe, error in errors] == [("reducer", ZeroDivisionError)]


def test_a_reducer_that_raises_and_declares_nothing_is_named() -> None:
    """Its one row stands under the name of the function."""

    def explodes(tensor: torch.Tensor) -> Mapping[str, Scalar]:
        raise RuntimeError("boom")

    measured, _ = measure(explodes)
    assert by_name(measured) == {"explodes": "reducer_error: RuntimeError: boom"}


def test_a_duplicate_metric_does_not_displace_the_first() -> None:
    """The later one says so under a name of its own, for a name stands once for a tensor."""
    measured, errors = measure(ExactProfile(), returning({"mean": 5.0, "x": 1.0}), returning({"mean": 6.0}))
    assert len(set(measured.metrics)) == len(measured.metrics) == 12
    found = by_name(measured)
    assert (found["mean"], found["x"]) == (2.0, 1.0)
    assert found["reducer.mean"] == found["reducer.mean#2"] == "reducer_error: duplicate metric 'mean'"
    assert len(errors) == 2


@pytest.mark.parametrize("results", [None, [("x", 1.0)], 3.0, {"": 1.0}, {3: 1.0}])
def test_what_is_no_mapping_from_names_is_refused(results: Any) -> None:
    """The row under the reducer's name says what came instead."""
    measured, errors = measure(returning(results))
    assert measured.metrics == ("reducer",)
    assert measured.reasons[0].startswith("reducer_error: TypeError: it")
    assert len(errors) == 1


def test_a_declared_metric_that_is_not_returned_says_so() -> None:
    """A name that was announced has a row in every sample."""
    measured, errors = measure(Declared({"first": 1.0}))
    assert by_name(measured) == {
        "first": 1.0,
        "second": "reducer_error: it did not return its metric 'second'",
    }
    assert len(errors) == 1


def test_what_a_reducer_does_to_its_tensor_stays_with_it() -> None:
    """Not even what autograd cannot notice reaches the model's tensor, another reducer or a histogram."""

    class Vandal:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, tensor: torch.Tensor) -> Mapping[str, Scalar]:
            before = tensor.sum()
            tensor.numpy()[...] = 7
            tensor.resize_(0)
            return {self.name: before}

    class OwnHistogram(HistogramReducer):
        @override
        def __call__(self, tensor: torch.Tensor, /) -> MeasuredHistogram:
            tensor.numpy()[...] = 7
            return absent_histogram(self.name, "empty")

    whole = torch.ones(4, 3)
    tensor = whole[1:].t()
    batch = ScalarBatch([Vandal("a"), Vandal("b"), ExactProfile()], Errors(), histograms=[OwnHistogram()])
    batch.add(tensor, histograms=True)
    batch.seal()
    values = by_name(batch.read(0))
    assert (values["a"], values["b"], values["mean"]) == (9.0, 9.0, 1.0)
    assert torch.equal(whole, torch.ones(4, 3))


def test_the_own_reducers_are_given_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default pays for nothing that it does not need."""

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("copied")

    monkeypatch.setattr(batching, "own_copy", refuse)
    _, errors = measure(ExactProfile(), rms(), max_abs())
    assert errors == []


def test_a_reducer_may_draw_random_numbers_and_change_modes() -> None:
    """The program draws the same afterwards, and its modes are as before."""

    def careless(tensor: torch.Tensor) -> Mapping[str, Scalar]:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(True)
        torch.manual_seed(1)
        return {"x": torch.randn(1)}

    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    with torch.no_grad():
        _, errors = measure(careless)
        assert not torch.is_grad_enabled()
    assert errors == []
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.randn(3), expected)


def test_a_reducer_that_returns_nothing_has_a_row_that_says_so() -> None:
    """Under its name, where it declared none."""
    measured, errors = measure(returning({}))
    assert by_name(measured) == {"reducer": "reducer_error: ValueError: it returned no metric"}
    assert len(errors) == 1


def test_names_and_messages_that_are_not_utf8_can_be_stored() -> None:
    """A lone surrogate becomes its escape; a message that cannot be read costs no row."""

    class UnreadableError(Exception):
        @override
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def raises(tensor: torch.Tensor) -> Mapping[str, Scalar]:
        raise ValueError("bad \udc80")

    def unreadable(tensor: torch.Tensor) -> Mapping[str, Scalar]:
        raise UnreadableError

    raises.__name__ = "r\udc81"
    measured, _ = measure(returning({"m\udc80": 1.0}), raises, unreadable)
    assert by_name(measured) == {
        "m\\udc80": 1.0,
        "r\\udc81": "reducer_error: ValueError: bad \\udc80",
        "unreadable": "reducer_error: UnreadableError: (its message could not be read)",
    }
    measured, _ = measure(returning({"m\udc80": 1.0, "m\\udc80": 2.0}))
    assert measured.reasons[0].startswith("reducer_error: ValueError: two of its metric names")
    assert histogram(name="h\udc80").name == "h\\udc80"


def test_inference_tensors_are_taken() -> None:
    """They are measured like any other."""
    with torch.inference_mode():
        measured, errors = measure(ExactProfile(), tensor=torch.ones(3))
    assert by_name(measured)["mean"] == 1.0
    assert errors == []


@pytest.mark.parametrize(("number", "expected"), [(65536.0, 65536.0), (math.inf, None), (math.nan, None)])
def test_a_scalar_that_is_brought_along_is_finite_or_none(number: float, expected: object) -> None:
    """A loss scale that overflowed is not passed off as a number."""
    batch = ScalarBatch(default_reducers(), Errors())
    index = batch.add_scalar(torch.tensor([number]))
    batch.seal()
    assert (batch.read_scalar(index), batch.num_scalars) == (expected, 1)


def test_a_scalar_that_is_none_is_reported_and_does_not_raise() -> None:
    """Nothing leaves a hook, whatever was given to it."""
    errors = Errors()
    batch = ScalarBatch(default_reducers(), errors)
    index = batch.add_scalar(torch.ones(3))
    batch.seal()
    assert batch.read_scalar(index) is None
    assert len(errors) == 1


def device_batch(errors: Errors, *reducers: Reducer, tensors: Sequence[torch.Tensor]) -> ScalarBatch:
    """Returns a sealed batch of tensors on an accelerator that refuses to be waited for."""
    with Accelerator():
        batch = ScalarBatch(reducers, errors)
        for tensor in tensors:
            batch.add(put(tensor))
        batch.add_scalar(put(torch.tensor(8.0)))
        batch.seal()
    return batch


def test_on_a_device_everything_comes_in_one_copy_after_seal() -> None:
    """The profile, separate scalars and the loss scale are there without one read on the training thread."""
    errors = Errors()
    first, second = torch.tensor([1.0, 3.0, math.nan, 0.0]), torch.arange(5).to(torch.float16)

    def spread(tensor: torch.Tensor) -> Mapping[str, Scalar]:
        return {"spread": tensor.nan_to_num().max() - tensor.nan_to_num().min(), "host": 1}

    batch = device_batch(errors, ExactProfile(), spread, tensors=[first, second])
    assert errors == []
    with Accelerator():
        for index, tensor in enumerate((first, second)):
            expected = dict(ExactProfile()(tensor)) | {"spread": 3.0 + index, "host": 1.0}
            assert by_name(batch.read(index)) == pytest.approx(expected)
        assert batch.read_scalar(0) == 8.0


def test_on_a_device_a_scalar_is_taken_as_it_is_now() -> None:
    """A loss scale that is changed in place before the copy keeps the value that it had, float64 too."""
    with Accelerator():
        batch = ScalarBatch(default_reducers(), Errors())
        scale = torch.tensor(8.0, dtype=torch.float64)
        index = batch.add_scalar(put(scale))
        scale.zero_()
        batch.seal()
        assert batch.read_scalar(index) == 8.0


def test_on_a_device_reasons_follow_from_the_counts() -> None:
    """What the training thread could not know is said when the numbers have come."""
    nothing = torch.tensor([math.nan, math.inf])
    batch = device_batch(Errors(), ExactProfile(), tensors=[nothing, torch.empty(0)])
    with Accelerator():
        found, empty = by_name(batch.read(0)), by_name(batch.read(1))
    assert (found["mean"], found["nonfinite_fraction"]) == ("no_finite_entries", 1.0)
    assert empty == dict.fromkeys(PROFILE_METRICS, "empty")


def test_on_a_device_a_reducer_that_reads_is_isolated_like_any_other() -> None:
    """Whatever it raises there, the profile beside it is measured."""

    def reads(tensor: torch.Tensor) -> Mapping[str, Scalar]:
        return {"x": tensor.sum().item()}

    errors = Errors()
    batch = device_batch(errors, reads, ExactProfile(), tensors=[torch.tensor([2.0])])
    with Accelerator():
        found = by_name(batch.read(0))
    assert found["reads"].startswith("reducer_error: AssertionError: _local_scalar_dense makes")
    assert (found["mean"], len(errors)) == (2.0, 1)


def test_a_nonfinite_scalar_of_a_device_has_its_reason() -> None:
    """Seen only after the copy, it is none the less absent with a reason."""

    def infinite(tensor: torch.Tensor) -> Mapping[str, Scalar]:
        return {"x": tensor.sum() * math.inf}

    batch = device_batch(Errors(), infinite, tensors=[torch.ones(2)])
    with Accelerator():
        assert batch.read(0) == MeasuredScalars(("x",), (None,), ("nonfinite_result",))


def test_a_copy_that_fails_is_reported_and_named_in_every_value() -> None:
    """The training thread goes on; each value says what became of it."""
    errors = Errors()
    with Accelerator():
        batch = ScalarBatch(default_reducers(), errors)
        index = batch.add(put(torch.ones(2)))
        next(iter(batch._devices.values()))._parts.append(torch.ones(1))
        batch.seal()
    measured = batch.read(index)
    assert set(measured.values) == {None}
    assert set(measured.reasons) == {measured.reasons[0]}
    assert measured.reasons[0].startswith("reducer_error: RuntimeError: AssertionError: cat mixes")
    assert len(errors) == 1


TENSORS = {
    "small": torch.tensor([1.0, 3.0, math.nan, 0.0]),
    "small_wide": torch.tensor([1, 3, 0, 5], dtype=torch.int64),
    "large": torch.randn(5000, generator=torch.Generator().manual_seed(3)),
    "large_half": torch.randn(70_000, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16),
    "invalid": torch.full((3,), math.nan),
    "empty": torch.empty(0),
}
PAIR = (histogram(bins=5), histogram(name="unit", bins=2, value_range=(0.0, 1.0), every_n_samples=3))


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_histograms_of_a_batch_are_those_of_the_histograms_themselves(tensor: torch.Tensor) -> None:
    """However a tensor is looked at, beside statistics, and in the order that was asked for."""
    errors = Errors()
    batch = ScalarBatch(default_reducers(), errors, PAIR)
    everything, none = batch.add(tensor, histograms=True), batch.add(tensor)
    second, first = batch.add(tensor, histograms=PAIR[1:]), batch.add(tensor, histograms=[PAIR[0]])
    batch.seal()
    expected = tuple(one(tensor) for one in PAIR)
    for found, right in zip(batch.read_histograms(everything), expected, strict=True):
        alike(found, right)
    assert batch.read_histograms(none) == ()
    assert [one.name for one in batch.read_histograms(second)] == ["unit"]
    assert [one.name for one in batch.read_histograms(first)] == ["distribution"]
    assert batch.read(everything) == batch.read(none) == batch.read(second)
    assert (batch.num_scalars, errors) == (36, [])


def alike(found: MeasuredHistogram, expected: MeasuredHistogram) -> None:
    """Compares sums to rounding and everything else exactly."""
    for name in MeasuredHistogram.__slots__:
        value, right = getattr(found, name), getattr(expected, name)
        if name.startswith("total") and right is not None:
            assert value == pytest.approx(right, rel=1e-12)
        else:
            assert value == right, name


def test_histograms_need_no_reducer_that_looks() -> None:
    """Beside plain functions, a batch looks at the tensor for the histogram alone."""
    batch = ScalarBatch((returning({"x": 1.0}),), Errors(), PAIR)
    index = batch.add(torch.tensor([0.0, 4.0]), histograms=True)
    batch.seal()
    assert [one.finite_count for one in batch.read_histograms(index)] == [2, 2]
    assert batch.read(index).metrics == ("x",)


def test_on_a_device_histograms_come_with_the_scalars_in_the_one_copy() -> None:
    """Nothing waits before the batch is sealed, and each device sends once."""
    tensor = TENSORS["large"][:700]
    errors = Errors()
    with Accelerator() as accelerator:
        batch = ScalarBatch(default_reducers(), errors, PAIR)
        index, nothing = (
            batch.add(put(one), histograms=True) for one in (tensor, torch.full((4,), math.nan))
        )
        batch.seal()
        assert accelerator.num_host_copies == 0
        found = batch.read_histograms(index)
        batch.read(index)
        assert [one.unavailable_reason for one in batch.read_histograms(nothing)] == ["no_finite_entries"] * 2
        assert accelerator.num_host_copies == 1
    for one, histogram_reducer in zip(found, PAIR, strict=True):
        alike(one, histogram_reducer(tensor))
    assert errors == []


def test_a_copy_that_fails_is_named_in_every_histogram() -> None:
    """What became of it stands where the counts would be."""
    errors = Errors()
    with Accelerator():
        batch = ScalarBatch(default_reducers(), errors, PAIR)
        index = batch.add(put(torch.ones(2)), histograms=True)
        next(iter(batch._devices.values()))._parts.append(torch.ones(1))
        batch.seal()
    reasons = {one.unavailable_reason for one in batch.read_histograms(index)}
    assert len(reasons) == 1
    assert reasons.pop().startswith("reducer_error: RuntimeError: AssertionError: cat mixes")


class Own(HistogramReducer):
    """A histogram that computes itself, or does not."""

    @override
    def __call__(self, tensor: torch.Tensor, /) -> Any:
        """Raises, or returns what its name says."""
        if self.name == "raises":
            raise ZeroDivisionError("no")
        if self.name == "nothing":
            return None
        assert not tensor.requires_grad
        return MeasuredHistogram(self.name, (0.0, 1.0), (1,), 0, 0, 1, 0, 0.5, 0.5, 0.5, 0.25)


def test_histograms_that_compute_themselves_are_isolated() -> None:
    """One that raises, or returns something else, says so in its place and is reported once."""
    errors = Errors()
    batch = ScalarBatch(default_reducers(), errors, (Own("raises"), histogram(), Own("nothing"), Own("fine")))
    index = batch.add(torch.tensor([0.5]), histograms=True)
    batch.seal()
    raised, built_in, nothing, fine = batch.read_histograms(index)
    assert raised.unavailable_reason == "reducer_error: ZeroDivisionError: no"
    assert nothing.unavailable_reason == (
        "reducer_error: TypeError: it returned NoneType, not a MeasuredHistogram"
    )
    assert (built_in.finite_count, fine.counts) == (1, (1,))
    assert [probe for probe, _ in errors] == ["histogram", "histogram"]


@pytest.mark.parametrize("size", [50, 5000])
def test_statistics_that_share_facts_and_histograms_cost_one_look(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensor is packed once, or measured once, whatever follows from it."""
    looks: list[int] = []
    measure, pack = batching.measure_on_host, batching.SmallTensors.add

    def counted_measure(tensor: torch.Tensor, **wanted: Any) -> Any:
        looks.append(tensor.numel())
        return measure(tensor, **wanted)

    def counted_pack(self: Any, tensor: torch.Tensor, rules: Any) -> Any:
        place = pack(self, tensor, rules)
        looks.extend([tensor.numel()] * (place is not None))
        return place

    monkeypatch.setattr(batching, "measure_on_host", counted_measure)
    monkeypatch.setattr(batching.SmallTensors, "add", counted_pack)
    batch = ScalarBatch((*default_reducers(), rms(), max_abs()), Errors(), PAIR)
    index = batch.add(torch.ones(size), histograms=True)
    batch.seal()
    assert looks == [size]
    assert by_name(batch.read(index))["rms"] == 1.0
    assert len(batch.read_histograms(index)) == 2


def test_a_look_that_fails_costs_what_follows_from_it_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of memory is reported once and stands in each value and histogram; a plain reducer is served."""

    def exhausted(tensor: torch.Tensor, **wanted: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(batching, "measure_on_host", exhausted)
    errors = Errors()
    batch = ScalarBatch((mean(), rms(), returning({"x": 1.0})), errors, (histogram(), Own("fine")))
    index = batch.add(torch.ones(5000), histograms=True)
    batch.seal()
    reason = "reducer_error: MemoryError: no room"
    assert by_name(batch.read(index)) == {"mean": reason, "rms": reason, "x": 1.0}
    assert [one.unavailable_reason for one in batch.read_histograms(index)] == [reason, ""]
    assert len(errors) == 1


def test_small_tensors_that_cannot_be_measured_are_reported_once_and_say_so() -> None:
    """The others of the batch have their values."""
    errors = Errors()
    batch = ScalarBatch(default_reducers(), errors, PAIR)
    index, other = batch.add(torch.ones(20), histograms=True), batch.add(torch.ones(300))
    batch._small._open[torch.float32, 32]._sizes.append(10**6)
    batch.seal()
    assert set(batch.read(index).reasons) == {batch.read(index).reasons[0]}
    assert batch.read(index).reasons[0].startswith("reducer_error: RuntimeError: IndexError")
    assert batch.read_histograms(index)[0].unavailable_reason == batch.read(index).reasons[0]
    assert by_name(batch.read(other))["max"] == 1.0
    assert len(errors) == 1


def test_a_duplicate_of_a_statistic_that_follows_from_facts_has_a_name_of_its_own() -> None:
    """The first one keeps the name, whichever kind of reducer it came from."""
    measured, errors = measure(returning({"mean": 5.0}), mean(), rms())
    found = by_name(measured)
    assert (found["mean"], found["rms"]) == (5.0, 5**0.5)
    assert found["MomentReducer.mean"] == "reducer_error: duplicate metric 'mean'"
    assert len(errors) == 1


def test_what_is_added_between_any_two_lines_has_an_index_of_its_own() -> None:
    """The handler of a signal may run the model in the middle of a hook."""

    def first(tensor: torch.Tensor) -> Mapping[str, float]:
        return {"first": tensor.flatten()[0].item()}

    before = sys.gettrace()
    stop, num_stopped = 0, 0
    while num_stopped == stop:
        stop += 1
        batch, inside, left = ScalarBatch((first,), Errors()), list[int](), stop

        def each_line(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal left
            left -= event == "line"
            if left == 0 and event == "line":
                inside.append(batch.add(torch.full((2,), 7.0)))  # noqa: B023 - it is called in its round
            return each_line

        def trace(frame: FrameType, _event: str, _argument: object) -> Any:
            return each_line if frame.f_code is ScalarBatch.add.__code__ and not inside else None  # noqa: B023

        sys.settrace(trace)
        try:
            outside = batch.add(torch.full((2,), 2.0))
        finally:
            sys.settrace(before)
        num_stopped += len(inside)
        values = [batch.read(index).values for index in (outside, *inside)]
        assert values == [(2.0,), (7.0,)][: len(values)]
    assert num_stopped > 5
