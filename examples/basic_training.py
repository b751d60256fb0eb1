"""Trains a small network in one process and says what telemetry saw of it.

python examples/basic_training.py --output-dir /tmp/basic
"""

import argparse
import os

import torch
from torch import nn

from torchinstruments import EveryNStepsSampler, inject_observer, remove_observer


def noisy_rings(num_points: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns points in the plane (num_points, 2), and whether each lies on the outer ring (num_points,)."""
    is_outer = torch.rand(num_points, generator=generator) < 0.5
    angle = torch.rand(num_points, generator=generator) * 2 * torch.pi
    radius = torch.where(is_outer, 2.0, 1.0) + 0.2 * torch.randn(num_points, generator=generator)
    points = torch.stack((angle.cos(), angle.sin()), dim=1) * radius.unsqueeze(1)
    return points, is_outer.long()


def train(model: nn.Module, *, num_steps: int, generator: torch.Generator) -> float:
    """Trains `model` to tell the rings apart and returns the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = torch.zeros(())
    for _ in range(num_steps):
        points, labels = noisy_rings(256, generator)
        loss = nn.functional.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    """Trains once, observed, and prints where the telemetry lies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--output-dir",
        default=os.environ.get("OUTPUT_DIR", "runs/basic"),
        help="folder or URL for the telemetry (default: the variable OUTPUT_DIR, else runs/basic)",
    )
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default: %(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    generator = torch.Generator().manual_seed(0)

    observer = inject_observer(model, output_dir=options.output_dir, sampler=EveryNStepsSampler(10))
    try:
        loss = train(model, num_steps=options.steps, generator=generator)
    finally:
        remove_observer(model)

    print(f"loss {loss:.3f} after {options.steps} steps")
    print(f"samples {observer.counters.samples}, rows {observer.counters.rows}")
    print(f"telemetry: {observer.url}")


if __name__ == "__main__":
    main()
