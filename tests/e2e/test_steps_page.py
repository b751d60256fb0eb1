"""The page on steps: what its run leaves, and its recipes on two ranks that fall out with each other."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from e2e.test_docs import BLOCKS
from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer

PAGE = "docs/steps.md"
FOLDER = "runs/overflow"
PYTHON = [block.text for block in BLOCKS if block.page == PAGE and block.language == "python"]
TEXT = [block.text for block in BLOCKS if block.page == PAGE and block.language == "text"]
LOCAL_LAST = 2
"""The attempt whose last micro-batch is not synchronised."""

OVERFLOWING = (1, LOCAL_LAST)
"""Attempts in which rank 1 overflows."""


def _fall_out(folder: str) -> None:
    """Four attempts of two micro-batches, of which rank 1 overflows in two, in one of them alone."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 2)))
    inject_observer(model, output_dir=folder, run_id="run", sampler=AlwaysSampler(), histograms=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=1024.0)
    for attempt in range(4):
        for micro_batch in range(2):
            is_synced = micro_batch == 1 and attempt != LOCAL_LAST
            with nullcontext() if is_synced else model.no_sync():
                loss = model(torch.ones(2, 4)).square().mean()
                if attempt in OVERFLOWING and (dist.get_rank(), micro_batch) == (1, 0):
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    remove_observer(model)


def _run_blocks(texts: list[str], folder: Path) -> dict[str, Any]:
    """Runs blocks of the page on a folder, and returns the names that they leave."""
    names: dict[str, Any] = {"pl": pl, "open_run": open_run}
    exec("\n".join(texts).replace(FOLDER, str(folder)), names)
    return names


def test_the_run_of_the_page_leaves_the_table_that_it_shows(tmp_path: Path) -> None:
    """Each number of the table under the training loop."""
    (training,) = [text for text in PYTHON if "inject_observer(" in text]
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    exec(training.replace(FOLDER, str(tmp_path)), {"model": model})
    (shown,) = [text for text in TEXT if "scale_after" in text]
    header, *rows = (line.split() for line in shown.splitlines())
    steps = open_run(str(tmp_path)).steps().sort("attempt").select(header).collect()
    assert [[str(value) for value in row] for row in steps.iter_rows()] == rows


def test_the_recipes_find_what_went_wrong_on_two_ranks(rank_pool: Any, tmp_path: Path) -> None:
    """The attempt on which they disagree, how often each skipped, its scale, and why."""
    rank_pool.run(_fall_out, str(tmp_path))
    begin = next(place for place, text in enumerate(PYTHON) if text.startswith("steps = "))
    found = _run_blocks(PYTHON[begin:], tmp_path)
    assert found["first"].select("attempt", "rank", "outcome", "last_micro_batch_sync").rows() == [
        (2, 0, "applied", "local"),
        (2, 1, "skipped", "local"),
    ]
    assert found["skips"].select("rank", "attempts", "skipped", "per_1000").rows() == [
        (0, 4, 1, 250.0),
        (1, 4, 2, 500.0),
    ]
    assert found["scales"].select("rank", "attempt", "scale_before", "scale_after").rows() == [
        (0, 1, 1024.0, 512.0),
        (1, 1, 1024.0, 512.0),
        (1, 2, 512.0, 256.0),
    ]
    assert found["unsynchronised"].select("attempt", "rank", "outcome").rows() == [
        (2, 0, "applied"),
        (2, 1, "skipped"),
    ]


@pytest.mark.parametrize("factor", [1.0, 1024.0])
def test_dividing_by_the_loss_scale_gives_the_gradient_without_one(tmp_path: Path, factor: float) -> None:
    """The same number with a scaler and without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))
    inject_observer(model, output_dir=tmp_path, sampler=AlwaysSampler(), histograms=())
    scaler = GradScaler("cpu", init_scale=factor, enabled=factor != 1.0)
    output = model(torch.arange(8.0).reshape(2, 4))
    scaler.scale(output.square().sum()).backward()
    remove_observer(model)
    (recipe,) = [text for text in PYTHON if "unscaled=" in text]
    (row,) = _run_blocks([recipe], tmp_path)["gradients"].to_dicts()
    assert row["value"] == pytest.approx(factor * row["unscaled"])
    assert row["unscaled"] == pytest.approx((2.0 * output.detach()).std(correction=0).item())
