"""A world of three in which one rank never attaches: training ends, and the merge names the rank."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from torchinstruments import EveryNForwardsSampler, inject_observer, remove_observer
from torchinstruments.cli.main import main


def _train(folder: str, silent_rank: int) -> int:
    """Trains on every rank, attached on all but one, and returns how many forwards were measured."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = None
    if dist.get_rank() != silent_rank:
        observer = inject_observer(model, output_dir=folder, run_id="three", sampler=EveryNForwardsSampler(1))
    for _ in range(3):
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
    remove_observer(model)
    return observer.counters.samples if observer is not None else 0


def test_the_merge_names_the_rank_that_never_attached(three_ranks, tmp_path: Path, capsys) -> None:
    """Exit code 1, rank 2 missing by name in the result and in the summary, the others complete."""
    folder = tmp_path / "run"
    assert three_ranks.run(_train, str(folder), 2) == [3, 3, 0]
    assert main(["merge", str(folder)]) == 1
    coverage = json.loads((folder / "merged" / "result.json").read_text())["coverage"]
    assert coverage["expected_ranks"] == [0, 1, 2]
    assert coverage["present_ranks"] == [0, 1]
    assert coverage["missing_ranks"] == [2]
    said = capsys.readouterr()
    assert "missing" in (said.out + said.err)
