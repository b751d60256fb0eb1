"""Every document of a real run has the shape that the schemas in the package say."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from merge.schema_checks import folder_problems, problems
from torchinstruments import AlwaysSampler, inject_observer, merge_run, remove_observer
from torchinstruments.merge import compare_runs
from torchinstruments.testing.ranks import RankPool


def train(folder: str) -> None:
    """Two ranks that differ in everything a merge looks at."""
    rank = dist.get_rank()
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(11 + rank)
    signals = ("input", "output", "output_gradient", "parameter", "parameter_gradient")
    inject_observer(
        model, output_dir=folder, run_id="real", sampler=AlwaysSampler(), signals=signals, fingerprints=True
    )
    for step in range(12):
        loss = model(torch.randn(6, 8)).square().mean()
        (loss * (float("nan") if rank == 1 and step == 10 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    remove_observer(model)


def test_the_documents_of_a_real_run(rank_pool: RankPool, tmp_path: Path) -> None:
    """Run, generation, manifests, catalogs, results of ranks and of the merge, and the comparison of two."""
    rank_pool.run(train, str(tmp_path / "run"))
    merge_run(str(tmp_path / "run"))
    found = folder_problems(tmp_path / "run")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert set(found) == {"run", "generation", "manifest", "modules", "rank_result", "result"}
    compared = compare_runs(str(tmp_path / "run"), str(tmp_path / "run"), max_change={"std": 0.1})
    assert problems("comparison", compared.to_dict()) == []
