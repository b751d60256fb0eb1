"""Steps with a scaler, in blocks of `Observer.step` and without, from the loop to the run's folder."""

from pathlib import Path

import polars as pl
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from typing_extensions import override

from torchinstruments import AlwaysSampler, EveryNStepsSampler, inject_observer, open_run, remove_observer
from torchinstruments.statistics.batching import ScalarBatch
from torchinstruments.statistics.transfer import Transfer

EVERYTHING = ("input", "output", "output_gradient", "parameter", "parameter_gradient")


def _adamw(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=kind == "fused")


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_a_block_that_overflows_is_skipped_with_its_numbers(
    tmp_path: Path, kind: str, unscales: bool, num_micro_batches: int
) -> None:
    """In its last micro-batch; what was applied is what changed the parameters."""
    model, scaler = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), GradScaler("cpu", init_scale=64.0)
    optimizer = _adamw(model, kind)
    observer = inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    applied = []
    for number in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with observer.step(global_step=100 + number, micro_batches=num_micro_batches):
            for micro_batch in range(num_micro_batches):
                overflows = number == 1 and micro_batch == num_micro_batches - 1
                entries = torch.full((2, 3), float("inf") if overflows else 1.0)
                scaler.scale(model(entries).square().mean()).backward()
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        applied.append(any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)))
    remove_observer(model)
    assert applied == [True, False, True]
    columns = (
        "attempt", "global_step", "micro_batches", "micro_batches_declared", "outcome", "evidence",
        "found_inf", "scale_before", "scale_after",
    )  # fmt: skip
    count = num_micro_batches
    assert open_run(str(tmp_path / "run")).steps().sort("attempt").select(columns).collect().rows() == [
        (0, 100, count, count, "applied", "found_inf", 0.0, 64.0, 64.0),
        (1, 101, count, count, "skipped", "found_inf", 1.0, 64.0, 32.0),
        (2, 102, count, count, "applied", "found_inf", 0.0, 32.0, 32.0),
    ]


class _Branches(nn.Module):
    """Two layers of which the second runs on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 1, bias=False)
        self.idle = nn.Linear(3, 1, bias=False)

    @override
    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.used(x) + self.idle(x) if both else self.used(x)


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_block_in_which_a_parameter_is_not_used_is_applied_without_a_gradient_of_it(
    tmp_path: Path, kind: str
) -> None:
    """Its micro-batches and its step count as any other's; the layer has rows where it ran."""
    model, scaler = _Branches(), GradScaler("cpu", init_scale=64.0)
    optimizer = _adamw(model, kind)
    observer = inject_observer(
        model, output_dir=tmp_path / "run", sampler=AlwaysSampler(), signals=EVERYTHING
    )
    for number in range(3):
        with observer.step(global_step=number, micro_batches=2):
            for _ in range(2):
                scaler.scale(model(torch.ones(2, 3), both=number != 1).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    remove_observer(model)
    run = open_run(str(tmp_path / "run"))
    columns = ("attempt", "global_step", "micro_batches", "outcome", "found_inf")
    assert run.steps().sort("attempt").select(columns).collect().rows() == [
        (number, number, 2, "applied", 0.0) for number in range(3)
    ]
    gradients = (
        run.history()
        .filter(pl.col("signal") == "parameter_gradient", pl.col("metric") == "mean")
        .sort("attempt", "micro_batch", "layer", "stage")
        .select("attempt", "micro_batch", "layer", "stage", "value", "unavailable_reason")
        .collect()
    )
    # The loss is a mean over two rows of ones, so that every entry of a weight has the gradient 1, scaled by
    # 64. What a fused optimizer is given is still scaled.
    at_step = 128.0 if kind == "fused" else 2.0
    expected = []
    for attempt in range(3):
        for micro_batch in range(2):
            for layer in ("idle", "used"):
                absent = layer == "idle" and attempt == 1
                found = [
                    ("local_accumulated", 64.0 * (micro_batch + 1)),
                    ("reduced", 64.0 * (micro_batch + 1)),
                ]
                if micro_batch == 1:
                    found.insert(0, ("applied", at_step))
                expected += [
                    (attempt, micro_batch, layer, stage, None, "no_gradient")
                    if absent
                    else (attempt, micro_batch, layer, stage, value, "")
                    for stage, value in found
                ]
    assert gradients.rows() == expected


@pytest.fixture
def seals(monkeypatch: pytest.MonkeyPatch) -> list[ScalarBatch]:
    """The batches that were sealed: what is measured for one delivery."""
    sealed: list[ScalarBatch] = []
    seal = ScalarBatch.seal

    def counted(self: ScalarBatch, transfer: Transfer | None = None) -> None:
        sealed.append(self)
        seal(self, transfer)

    monkeypatch.setattr(ScalarBatch, "seal", counted)
    return sealed


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize(("signals", "at_step"), [(("output", "output_gradient"), 0), (EVERYTHING, 1)])
def test_a_sampled_step_measures_once_a_delivery_and_an_unsampled_one_never(
    tmp_path: Path,
    seals: list[ScalarBatch],
    kind: str,
    num_micro_batches: int,
    signals: tuple[str, ...],
    at_step: int,
) -> None:
    """Once a forward and once a backward, of all signals together, and once where an optimizer steps."""
    model, scaler = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), GradScaler("cpu", init_scale=64.0)
    optimizer = _adamw(model, kind)

    def count_of_a_step() -> int:
        before = len(seals)
        for _ in range(num_micro_batches):
            scaler.scale(model(torch.ones(2, 3)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return len(seals) - before

    sampler = EveryNStepsSampler(2)
    inject_observer(model, output_dir=tmp_path / "run", sampler=sampler, signals=signals)
    sampled = 2 * num_micro_batches + at_step
    assert [count_of_a_step() for _ in range(5)] == [0, sampled, 0, sampled, 0]
    remove_observer(model)
