"""Under DDP on two ranks training stays bit for bit what it was, and the observer issues no collective."""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchinstruments import AlwaysSampler, EveryNStepsSampler, inject_observer, open_run, remove_observer
from torchinstruments.testing.collectives import no_collectives

NUM_STEPS = 20
MICRO_BATCHES = 2


def _build() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(16, 4))


def _train(model: DistributedDataParallel) -> list[torch.Tensor]:
    """Returns outputs, gradients and parameters of every step, and the state of the generator."""
    torch.manual_seed(11 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[torch.Tensor] = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.randn(5, 8)).square().mean().backward()
        output = model(torch.randn(5, 8))
        output.square().mean().backward()
        seen.append(output.detach().clone())
        seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        seen.extend(p.detach().clone() for p in model.parameters())
    seen.append(torch.get_rng_state())
    return seen


def _compare(folder: str) -> tuple[bool, int, int]:
    """Returns whether both trainings are equal, how many tensors were compared, and the samples taken."""
    inner = _build()
    twin = copy.deepcopy(inner)
    bare = _train(DistributedDataParallel(inner))
    observed_model = DistributedDataParallel(twin)
    observer = inject_observer(observed_model, output_dir=folder, run_id="twin", sampler=AlwaysSampler())
    observed = _train(observed_model)
    remove_observer(observed_model)
    same = len(bare) == len(observed) and all(torch.equal(a, b) for a, b in zip(bare, observed, strict=True))
    return same, len(bare), observer.counters.samples


def _train_without_collectives(folder: str) -> int:
    """Returns how many samples were taken while every collective was forbidden to the observer."""
    model = DistributedDataParallel(_build())
    with no_collectives():
        observer = inject_observer(model, output_dir=folder, run_id="guarded", sampler=EveryNStepsSampler(2))
        _train(model)
        remove_observer(model)
    return observer.counters.samples


def test_every_bit_of_a_ddp_training_is_the_same_with_an_observer(rank_pool, tmp_path: Path):
    """Outputs, gradients, parameters after each of 20 steps and RNG state are equal on both ranks."""
    per_rank = rank_pool.run(_compare, str(tmp_path / "run"))
    assert per_rank == [(True, NUM_STEPS * 9 + 1, NUM_STEPS * MICRO_BATCHES)] * 2


def test_the_observer_issues_no_collective_from_attach_to_close(rank_pool, tmp_path: Path):
    """With all collectives patched to fail when this package calls them, every sample is taken and stored."""
    folder = tmp_path / "run"
    assert rank_pool.run(_train_without_collectives, str(folder)) == [NUM_STEPS // 2 * MICRO_BATCHES] * 2
    samples = open_run(str(folder)).samples().collect()
    assert samples.height == 2 * NUM_STEPS // 2 * MICRO_BATCHES
    assert set(samples["errors"]) == {0}
