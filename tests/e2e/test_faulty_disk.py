"""A folder that is removed under the writer, and clocks that run backwards, while a model trains."""

import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchinstruments import AlwaysSampler, Observer, inject_observer, merge_run, open_run

ROWS_OF_A_SAMPLE = 2 * 9


def attach(model: nn.Module, folder: Path | str) -> Observer:
    """Attaches with a sample at each forward."""
    return inject_observer(model, output_dir=folder, run_id="r", sampler=AlwaysSampler(), histograms=())


def train(model: nn.Module, steps: int) -> None:
    """Runs forwards with their backwards."""
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()


def test_a_folder_that_was_removed_comes_back_and_readers_take_it(tmp_path: Path) -> None:
    """Training goes on, one warning says what is lost, and the merge counts the parts that are gone."""
    model = nn.Linear(4, 2)
    observer = attach(model, tmp_path / "run")
    train(model, 2)
    assert observer.flush()
    for turn in range(2):
        shutil.rmtree(tmp_path / "run")
        train(model, 3)
        if turn == 0:
            with pytest.warns(RuntimeWarning, match="was removed while this process wrote to it") as told:
                assert observer.flush()
            assert len(told) == 1
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert observer.flush()
    assert observer.close()

    run = open_run(str(tmp_path / "run"))
    assert run.samples().collect()["sample_id"].sort().to_list() == [5, 6, 7]
    assert run.history().collect().height == 3 * ROWS_OF_A_SAMPLE
    (manifest,) = run.manifests
    assert (manifest.status, manifest.counters.errors) == ("closed", {"storage": 2})
    result: Any = merge_run(str(tmp_path / "run")).result
    assert result["run"]["run_id"] == "r"
    assert not result["coverage"]["complete"]


def test_a_spool_that_was_removed_is_told_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lay in it counts as dropped, and everything after it arrives."""
    monkeypatch.setenv("TORCHINSTRUMENTS_SPOOL_DIR", str(tmp_path / "spool"))
    url = "memory://spool-that-was-removed/run"
    model = nn.Linear(4, 2)
    observer = attach(model, url)
    train(model, 2)
    assert observer.flush()
    shutil.rmtree(tmp_path / "spool")
    train(model, 3)
    with pytest.warns(RuntimeWarning, match="the spool .* was removed, or a part of it") as told:
        assert observer.flush()
    assert len(told) == 1
    assert observer.close()

    run = open_run(url)
    assert run.samples().collect()["sample_id"].sort().to_list() == [2, 3, 4]
    (manifest,) = run.manifests
    history = manifest.tables["history"]
    assert (history.rows, history.rows_in_spool) == (3 * ROWS_OF_A_SAMPLE, 0)
    assert history.rows_dropped == 2 * ROWS_OF_A_SAMPLE
    assert not merge_run(url, output=str(tmp_path / "merged")).complete


def test_a_clock_that_is_set_back_changes_nothing_but_timestamps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, heartbeat and order go by the clock that never runs backwards and by the sample's number."""
    model = nn.Linear(4, 2)
    real_ns, real_s = time.time_ns, time.time
    observer = attach(model, tmp_path / "run")
    train(model, 2)
    assert observer.flush()
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() - 3600 * 10**9)
    monkeypatch.setattr(time, "time", lambda: real_s() - 3600.0)
    train(model, 2)
    assert observer.flush()
    assert observer.close()
    monkeypatch.undo()

    samples = open_run(str(tmp_path / "run")).samples().collect().sort("sample_id")
    assert samples["sample_id"].to_list() == [0, 1, 2, 3]
    started = samples["started_at"].to_list()
    assert (started[1] - started[2]).total_seconds() > 3000.0
    assert merge_run(str(tmp_path / "run")).complete
