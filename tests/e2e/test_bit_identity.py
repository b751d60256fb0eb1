"""Training with an observer is bit for bit the training without one, in a world of one."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer

NUM_STEPS = 20


class Block(nn.Module):
    """A residual block with dropout and an in-place activation: both react to any disturbance."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) -> the same."""
        return x + self.drop(self.act(self.fc(self.norm(x))))


def build() -> nn.Module:
    """Returns a model with dropout, batch statistics and in-place activations."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), Block(16), nn.BatchNorm1d(16), Block(16), nn.Linear(16, 4))


def train(model: nn.Module) -> dict[str, Any]:
    """Returns everything that 20 steps of training make."""
    torch.manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outputs, gradients = [], []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        output = model(torch.randn(32, 8))
        output.square().mean().backward()
        outputs.append(output.detach().clone())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return {
        "outputs": outputs,
        "gradients": gradients,
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "modules": [(name, type(m)) for name, m in model.named_modules()],
        "rng": torch.get_rng_state(),
    }


def assert_identical(bare: dict[str, Any], observed: dict[str, Any]) -> None:
    """Compares two trainings bit for bit."""
    for mine, theirs in zip(bare["outputs"], observed["outputs"], strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(bare["gradients"], observed["gradients"], strict=True):
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert list(bare["state"]) == list(observed["state"])
    assert all(torch.equal(bare["state"][k], observed["state"][k]) for k in bare["state"])
    assert bare["modules"] == observed["modules"]
    assert torch.equal(bare["rng"], observed["rng"])


@pytest.mark.parametrize("fingerprints", [False, True], ids=["measured", "fingerprinted"])
def test_every_bit_of_training_is_the_same_with_an_observer(tmp_path: Path, fingerprints: bool) -> None:
    """Outputs, gradients, parameters and buffers after 20 steps, module list and RNG state are identical."""
    model = build()
    twin = copy.deepcopy(model)
    bare = train(model)

    observer = inject_observer(
        twin, output_dir=tmp_path / "run", sampler=AlwaysSampler(), fingerprints=fingerprints
    )
    observed = train(twin)
    remove_observer(twin)

    assert observer.counters.samples == NUM_STEPS
    assert observer.counters.rows_dropped == 0
    assert observer.counters.rows == open_run(str(tmp_path / "run")).history().collect().height > 0
    rows = open_run(str(tmp_path / "run")).fingerprints().collect()
    assert rows.height == (NUM_STEPS * len(model.state_dict()) if fingerprints else 0)
    assert_identical(bare, observed)
