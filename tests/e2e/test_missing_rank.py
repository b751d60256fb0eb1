"""A world of three in which one rank never attaches: training ends, and the merge names the rank."""

import functools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchinstruments import EveryNForwardsSampler, api, inject_observer, remove_observer
from torchinstruments.cli.main import main
from torchinstruments.ranks import rendezvous


def _train(folder: str, silent_rank: int) -> int:
    """Trains on every rank, attached on all but one, and returns how many forwards were measured."""
    timing = rendezvous.Timing
    # Rank 1 gives a silent rank 0 twenty seconds before it looks whether to lead; here two are enough.
    rendezvous.Timing = functools.partial(timing, leader_grace_s=2.0, watch_s=2.0)  # pyrefly: ignore
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = None
    try:
        if dist.get_rank() != silent_rank:
            observer = inject_observer(
                model, output_dir=folder, run_id="three", sampler=EveryNForwardsSampler(1)
            )
        else:
            # Observers meet by their ordinal in the process, and these processes are used again.
            next(api._channels)
    finally:
        rendezvous.Timing = timing
    for _ in range(3):
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
    remove_observer(model)
    return observer.counters.samples if observer is not None else 0


@pytest.mark.parametrize("silent_rank", [0, 2])
def test_the_merge_names_the_rank_that_never_attached(
    three_ranks, tmp_path: Path, capsys, silent_rank: int
) -> None:
    """Exit code 1, the rank missing by name in the result and the summary, the others complete.

    Where it is rank 0, rank 1 leads in its place.
    """
    folder = tmp_path / "run"
    assert three_ranks.run(_train, str(folder), silent_rank) == [
        0 if rank == silent_rank else 3 for rank in range(3)
    ]
    assert main(["merge", str(folder)]) == 1
    result = json.loads((folder / "merged" / "result.json").read_text())
    coverage, (generation,) = result["coverage"], result["generations"]
    present = [rank for rank in range(3) if rank != silent_rank]
    assert coverage["expected_ranks"] == [0, 1, 2]
    assert coverage["present_ranks"] == present
    assert coverage["missing_ranks"] == [silent_rank]
    assert [member["rank"] for member in generation["members"]] == present
    assert generation["leader_process"] == generation["members"][0]["process"]
    assert not generation["members_complete"]
    assert coverage["unverified_ranks"] == []
    said = capsys.readouterr()
    assert "missing" in (said.out + said.err)
