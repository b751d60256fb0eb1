"""fp16 training whose overflows are real, from the loop to the run's folder, held to the loop's own log."""

import pickle
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer

NUM_STEPS = 12


def _build() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def _train(model: nn.Module, kind: str, scaler: GradScaler) -> dict[str, list[Any]]:
    """Trains in fp16 with two micro-batches and clipping; the scale begins far too high."""
    torch.manual_seed(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=kind == "fused")
    log: dict[str, list[Any]] = {name: [] for name in ("applied", "before", "after", "losses", "weights")}
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(16, 4)).float().square().mean()
            scaler.scale(loss).backward()
            log["losses"].append(loss.item())
        log["before"].append(scaler.get_scale())
        weights = [parameter.tolist() for parameter in model.parameters()]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        log["after"].append(scaler.get_scale())
        log["weights"].append([parameter.tolist() for parameter in model.parameters()])
        log["applied"].append(log["weights"][-1] != weights)
    log["scaler"] = [
        scaler.state_dict(),
        pickle.loads(pickle.dumps(scaler)).state_dict(),
        sorted(vars(scaler)),
    ]
    log["moments"] = [
        value.tolist() for state in optimizer.state.values() for value in state.values() if value is not None
    ]
    return log


def _scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**22, growth_interval=2)


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("declares", [True, False])
def test_every_row_of_the_ledger_is_what_the_loop_saw(tmp_path: Path, kind: str, declares: bool) -> None:
    """Skips, growth and the scale beside each gradient; the observer goes right behind the last update."""
    bare = _train(_build(), kind, _scaler())
    model, scaler = _build(), _scaler()
    declared: dict[str, Any] = {"scaler": scaler} if declares else {}
    inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler(), **declared)
    log = _train(model, kind, scaler)
    remove_observer(model)
    assert log == bare
    assert {True, False} == set(log["applied"])
    assert max(log["after"][index] / log["before"][index] for index in range(NUM_STEPS)) == 2.0

    run = open_run(str(tmp_path / "run"))
    steps = run.steps().sort("attempt").collect()
    assert steps["outcome"].to_list() == ["applied" if applied else "skipped" for applied in log["applied"]]
    assert steps["found_inf"].to_list() == [float(not applied) for applied in log["applied"]]
    assert steps["scale_before"].to_list() == log["before"]
    assert steps["scale_after"].to_list() == log["after"]
    assert set(steps["evidence"]) == {"found_inf"}
    assert set(steps["micro_batches"]) == {2}
    assert set(steps["lr"]) == {0.01}
    gradients = run.history().filter(pl.col("signal") == "output_gradient").collect()
    assert set(gradients.select("attempt", "loss_scale").iter_rows()) == set(enumerate(log["before"]))
    assert set(gradients["scale_provenance"]) == {"gradscaler"}
    assert set(run.samples().collect()["errors"]) == {0}


def _train_by_hand(model: nn.Module, factor: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        (model(torch.ones(3, 4)).sum() * factor).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("scaler", "loss_scale", "provenance"),
    [(None, None, "unscaled"), (64, 64.0, "explicit"), (0.5, 0.5, "explicit")],
)
def test_what_the_caller_declares_stands_beside_each_gradient(
    tmp_path: Path, scaler: float | None, loss_scale: float | None, provenance: str
) -> None:
    """None says that nothing scales; a number, that the loop multiplies with it."""
    model = _build()
    inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler(), scaler=scaler)
    _train_by_hand(model, 1.0 if scaler is None else scaler)
    remove_observer(model)
    run = open_run(str(tmp_path / "run"))
    gradients = run.history().filter(pl.col("signal") == "output_gradient").collect()
    assert set(gradients.select("loss_scale", "scale_provenance").iter_rows()) == {(loss_scale, provenance)}
    steps = run.steps().collect()
    assert set(steps.select("outcome", "evidence", "found_inf", "scale_before").iter_rows()) == {
        ("applied", "optimizer_hook", None, None)
    }


@pytest.mark.parametrize("scaler", [None, 64.0])
def test_a_scaler_against_what_was_declared_is_warned_about_and_no_scale_is_claimed(
    tmp_path: Path, scaler: float | None
) -> None:
    """The gradients that came before the first step showed it are labelled so too."""
    model = _build()
    observer = inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler(), scaler=scaler)
    with pytest.warns(RuntimeWarning, match=f"scaler={scaler} was given, but a GradScaler stepped") as warned:
        log = _train(model, "plain", _scaler())
    assert len(warned) == 1
    remove_observer(model)
    assert observer.counters.errors == {"loss_scale": 1}
    run = open_run(str(tmp_path / "run"))
    gradients = run.history().filter(pl.col("signal") == "output_gradient").collect()
    assert set(gradients.select("loss_scale", "scale_provenance").iter_rows()) == {(None, "unknown")}
    steps = run.steps().sort("attempt").collect()
    assert steps["scale_before"].to_list() == log["before"]
    assert steps["outcome"].to_list() == ["applied" if applied else "skipped" for applied in log["applied"]]
