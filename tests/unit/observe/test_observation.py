"""A delivery holds no tensor and resolves to a sample."""

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchinstruments.observe.observation import absence_metrics
from torchinstruments.records import Execution, Measurement, Scope, Signal
from torchinstruments.statistics.batching import ScalarBatch
from torchinstruments.statistics.histograms import HistogramReducer, histogram
from torchinstruments.statistics.profile import PROFILE_METRICS, ExactProfile
from unit.observe.memory import MemorySession, Recorder, observe, value

NOT_REACHED = "no_gradient: none came, or a view was changed in place, which loses its hook"


def without_names(tensor: torch.Tensor) -> Mapping[str, float]:
    """A reducer that declares no metrics."""
    return {"a": 1.0}


def test_metrics_of_a_missing_tensor_are_those_known_or_the_reducers_names() -> None:
    """No reducer is without a row."""
    assert absence_metrics((ExactProfile(), without_names)) == (*PROFILE_METRICS, "without_names")


def test_a_delivery_keeps_no_output_alive(session: MemorySession) -> None:
    """Outputs that the queue has not resolved yet are gone already."""
    outputs: list[weakref.ref[torch.Tensor]] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        outputs.append(weakref.ref(y))
        return y

    model = nn.Sequential(Recorder(note), nn.ReLU())
    observe(model, session)
    model(torch.ones(4))
    gc.collect()
    assert outputs[0]() is None
    assert value(session.outputs()[0]) == 2.0


def test_a_measurement_has_each_field_in_its_place_and_stays_as_it_is(session: MemorySession) -> None:
    """It equals one that is made by name, and is frozen, however its fields were set."""
    model = nn.Sequential(nn.Identity())
    observe(model, session)
    model(torch.ones(4))
    found = session.outputs()[0]
    assert found == Measurement(
        layer="0",
        layer_index=0,
        call_index=0,
        signal=Signal.OUTPUT,
        stage="",
        tensor_path="output",
        backward_index=0,
        timestamp_us=found.timestamp_us,
        mode="train",
        grad_enabled=True,
        scope=Scope.LOCAL,
        replica_key="",
        execution=Execution.EAGER,
        shape=(4,),
        dtype="float32",
        device="cpu",
        metrics=found.metrics,
        values=found.values,
        reasons=("",) * len(found.metrics),
    )
    measurement: Any = found
    with pytest.raises(FrozenInstanceError):
        measurement.mode = "eval"


@pytest.mark.parametrize(
    ("tensor", "dtype", "mean"),
    [
        (torch.tensor([True, False]), "bool", 0.5),
        (torch.tensor([1, 3]), "int64", 2.0),
        (torch.tensor([1.0, 3.0], dtype=torch.bfloat16), "bfloat16", 2.0),
        (torch.tensor([1.0, 3.0], dtype=torch.float64), "float64", 2.0),
    ],
)
def test_dtypes_go_by_torchs_names(
    session: MemorySession, tensor: torch.Tensor, dtype: str, mean: float
) -> None:
    """The prefix is left out."""

    def give(x: torch.Tensor) -> torch.Tensor:
        return tensor

    model = Recorder(give)
    observe(model, session)
    model(torch.ones(1))
    (measurement,) = session.outputs()
    assert (measurement.dtype, value(measurement), measurement.scope) == (dtype, mean, Scope.LOCAL)


def test_an_empty_and_a_meta_tensor_say_what_they_are(session: MemorySession) -> None:
    """Their shape, dtype and device are there, and no value."""

    def give(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:0], torch.empty(3, device="meta")

    model = Recorder(give)
    observe(model, session)
    model(torch.ones(1))
    empty, meta = session.outputs()
    assert (set(empty.reasons), empty.shape) == ({"empty"}, (0,))
    assert (set(meta.reasons), meta.shape, meta.device) == ({"meta_tensor"}, (3,), "meta")


def test_what_samples_of_a_training_model_are_of_is_the_same_object(session: MemorySession) -> None:
    """Of a forward and of a backward each, and the numbers are new ones."""
    layer = nn.Linear(80, 80)
    model = nn.Sequential(layer, nn.Tanh())
    observe(model, session)
    expected: list[float] = []
    for x in (torch.ones(80, 80), 2 * torch.ones(80, 80)):
        linear = nn.functional.linear(x, layer.weight, layer.bias).detach().double()
        expected += [linear.mean().item(), linear.tanh().mean().item()]
        model(x).sum().backward()
    first, second = (
        [sample.columns for sample in session.samples() if sample.ordinal == ordinal] for ordinal in (0, 1)
    )
    assert len(first) == len(second) == 2
    for one, other in zip(first, second, strict=True):
        assert one is not None
        assert other is not None
        assert one.frame is other.frame
        assert one.shapes is other.shapes == [(80, 80)] * 2
        assert (one.timestamp_us <= other.timestamp_us).all()
        assert one.values.shape == other.values.shape == (18,)
        assert not np.array_equal(one.values, other.values)
    assert [m.values[0] for m in session.outputs()] == pytest.approx(expected, rel=1e-5)


def test_what_is_known_of_tensors_keeps_no_model_alive(session: MemorySession) -> None:
    """Neither deliveries nor what they share with later ones refer to a layer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    observe(model, session)
    model(torch.ones(2)).sum().backward()
    layer = weakref.ref(model[0])
    del model
    gc.collect()
    assert layer() is None
    assert {m.layer for m in session.outputs()} == {"0", "1"}


def test_layers_in_focus_have_histograms_of_outputs_and_gradients(session: MemorySession) -> None:
    """Each as numpy counts it, with the tensor's identity; other layers have none."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    observe(model, session, histograms=(histogram(name="spread", bins=5),), max_histogram_modules=2)
    x = torch.randn(16, 4)
    hidden = model[0](x)
    model(x).sum().backward()
    found = session.histograms()
    assert [(h.layer, h.signal, h.tensor_path, h.name) for h in found] == [
        ("0", Signal.OUTPUT, "output", "spread"),
        ("1", Signal.OUTPUT, "output", "spread"),
        ("1", Signal.OUTPUT_GRADIENT, "grad_output", "spread"),
        ("0", Signal.OUTPUT_GRADIENT, "grad_output", "spread"),
    ]
    values = hidden.detach().double().numpy()
    counts, edges = np.histogram(values, bins=5)
    first = found[0]
    assert first.counts == tuple(counts)
    assert first.edges == pytest.approx(tuple(edges))
    assert (first.minimum, first.maximum) == (values.min(), values.max())
    assert first.total == pytest.approx(values.sum())
    assert (first.finite_count, first.nonfinite_count, first.mode) == (128, 0, "train")
    outputs = [m for m in session.outputs() if m.layer == "0"]
    assert first.timestamp_us == outputs[0].timestamp_us
    assert session.errors == []


def test_the_cadence_of_a_histogram_counts_samples(session: MemorySession) -> None:
    """The first sample has it, and the backward of a sample goes with its forward."""
    model = nn.Sequential(nn.Linear(2, 2))
    observe(model, session, histograms=(histogram(name="all"), histogram(name="third", every_n_samples=3)))
    for _ in range(4):
        model(torch.randn(3, 2)).sum().backward()
    assert [(s.ordinal, s.backward_index, [h.name for h in s.histograms]) for s in session.samples()] == [
        (0, None, ["all", "third"]),
        (0, 0, ["all", "third"]),
        (1, None, ["all"]),
        (1, 0, ["all"]),
        (2, None, ["all"]),
        (2, 0, ["all"]),
        (3, None, ["all", "third"]),
        (3, 0, ["all", "third"]),
    ]


def test_a_histogram_that_cannot_be_had_has_the_reason(session: MemorySession) -> None:
    """Of the tensor where there is one, else of the row beside it."""

    def odd(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:0], x * torch.nan, x.to_sparse()

    model = nn.Sequential(Recorder(odd))
    observe(model, session, histograms=(histogram(bins=4),))
    output = model(torch.ones(2, 2, requires_grad=True))
    output[1].sum().backward()
    assert {(h.signal.value, h.tensor_path): h.unavailable_reason for h in session.histograms()} == {
        ("output", "output.0"): "empty",
        ("output", "output.1"): "no_finite_entries",
        ("output", "output.2"): "unsupported_layout: sparse_coo",
        ("output_gradient", "grad_output.0"): NOT_REACHED,
        ("output_gradient", "grad_output.1"): "",
        ("output_gradient", "grad_output.2"): "unsupported_layout: sparse_coo",
    }
    assert {h.name for h in session.histograms()} == {"distribution"}


def test_layers_out_of_focus_pay_nothing_for_histograms(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tensors of layers in focus are asked for them, and none where no histogram is due."""
    asked: list[bool | Sequence[HistogramReducer]] = []
    add = ScalarBatch.add

    def note(
        self: ScalarBatch, tensor: torch.Tensor, *, histograms: bool | Sequence[HistogramReducer] = False
    ) -> int:
        asked.append(histograms)
        return add(self, tensor, histograms=histograms)

    monkeypatch.setattr(ScalarBatch, "add", note)
    model = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU())

    def second(name: str, module: nn.Module) -> bool:
        return name == "1"

    observe(model, session, histograms=(histogram(every_n_samples=2),), histogram_selector=second)
    for _ in range(2):
        model(torch.ones(2))
    assert asked == [False, True, False, False, False, False]


def test_where_nobody_keeps_histograms_none_is_taken(
    session: MemorySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is asked anew for each forward and backward, and scalars are measured all the same."""
    asked: list[bool | Sequence[HistogramReducer]] = []
    add = ScalarBatch.add

    def note(
        self: ScalarBatch, tensor: torch.Tensor, *, histograms: bool | Sequence[HistogramReducer] = False
    ) -> int:
        asked.append(histograms)
        return add(self, tensor, histograms=histograms)

    monkeypatch.setattr(ScalarBatch, "add", note)
    model = nn.Sequential(nn.ReLU())
    observe(model, session, histograms=(histogram(),))
    output = model(torch.ones(2, requires_grad=True))
    session.keeps_histograms = False
    output.sum().backward()
    model(torch.ones(2))
    assert asked == [True, False, False]
    assert [len(sample.histograms) for sample in session.samples()] == [1, 0, 0]
    assert [len(sample.measurements) for sample in session.samples()] == [1, 1, 1]
