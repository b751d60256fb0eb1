"""A delivery holds no tensor and resolves to a sample."""

import gc
import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from torchinstruments.observe.observation import absence_metrics
from torchinstruments.records import Scope
from torchinstruments.statistics.profile import PROFILE_METRICS, ExactProfile
from unit.observe.memory import MemorySession, Recorder, observe, value


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
