"""How a run ends where a sink ends it, or ends more than itself, and what is said of one that has nothing."""

import asyncio
import json
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchinstruments import AlwaysSampler, Observer, inject_observer, merge_run, open_run, remove_observer
from torchinstruments.records import ModuleRecord, RunRecord, Sample
from torchinstruments.sinks.delivery import THREAD_NAME

NUM_SAMPLES = 4
ROWS_OF_A_SAMPLE = 2 * 9


class Acting:
    """A sink that does something at one of its samples."""

    def __init__(self, act: Callable[[], object], ordinal: int = 1) -> None:
        self.act = act
        self.ordinal = ordinal
        self.num_closed = 0

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Nothing is needed."""

    def observe(self, sample: Sample) -> None:
        """Acts, once or more."""
        if sample.ordinal == self.ordinal:
            self.act()

    def close(self) -> None:
        """Counts."""
        self.num_closed += 1


def cancel() -> None:
    """Ends a task that the writer thread does not have."""
    raise asyncio.CancelledError


def attach(model: nn.Module, folder: Path, **arguments: Any) -> Observer:
    """Attaches with a sample at each forward."""
    return inject_observer(model, output_dir=folder, sampler=AlwaysSampler(), histograms=(), **arguments)


def train(model: nn.Module, steps: int = NUM_SAMPLES) -> None:
    """Runs forwards with their backwards."""
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()


def manifest(folder: Path) -> dict[str, Any]:
    """Returns the only manifest of a world of one."""
    (path,) = folder.glob("process-*.json")
    return json.loads(path.read_bytes())


def test_a_sink_that_cancels_loses_no_row_of_the_folder(tmp_path: Path) -> None:
    """The failure is counted, one warning names it, and the folder has every sample."""
    model = nn.Linear(4, 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        attach(model, tmp_path, sink=Acting(cancel))
        train(model)
        remove_observer(model)

    assert [str(one.message) for one in told] == [
        "torchinstruments: sink failed: CancelledError; training goes on"
    ]
    assert open_run(str(tmp_path)).history().collect().height == NUM_SAMPLES * ROWS_OF_A_SAMPLE
    found = manifest(tmp_path)
    assert found["status"] == "closed"
    assert {(one["probe"], one["module"], one["type"]) for one in found["errors"]} == {
        ("sink", "Acting", "CancelledError")
    }


def test_what_a_sink_would_end_the_program_with_is_a_plain_error_for_the_training(tmp_path: Path) -> None:
    """With error_policy="raise" the training gets an Exception, which it may handle."""

    def leave() -> None:
        raise SystemExit(3)

    model = nn.Linear(4, 2)
    attach(model, tmp_path, sink=Acting(leave, ordinal=0), error_policy="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, 1)
        with pytest.raises(RuntimeError, match="a sink raised SystemExit: 3"):
            remove_observer(model)


def test_a_run_without_one_value_says_so_at_its_close(tmp_path: Path) -> None:
    """A model without memory has shapes alone; the warning names that and a way."""
    model = nn.Linear(4, 2, device="meta")
    attach(model, tmp_path / "meta")
    for _ in range(2):
        model(torch.ones(3, 4, device="meta")).sum().backward()
    with pytest.warns(RuntimeWarning) as told:
        remove_observer(model)
    (warning,) = told
    assert str(warning.message) == (
        "torchinstruments: the run has samples, but not one value: 36 of 36 rows say 'meta_tensor': "
        "meta tensors have no entries; measure the model after it has its parameters"
    )

    # The way that it names leads to values, and to no warning.
    model.to_empty(device="cpu").reset_parameters()
    attach(model, tmp_path / "memory")
    train(model, 2)
    remove_observer(model)
    assert open_run(str(tmp_path / "memory")).history().collect()["value"].null_count() == 0


@pytest.mark.parametrize(
    ("raised", "kinds"),
    [
        (ZeroDivisionError("password"), ["ZeroDivisionError"]),
        (SystemExit(3), ["SystemExit"]),
        (SystemExit(0), []),
    ],
)
def test_an_exception_that_ends_the_program_is_told_by_its_type(
    tmp_path: Path, raised: BaseException, kinds: list[str]
) -> None:
    """As a loop with try and finally leaves it; the merge names the rank, and no message is kept."""
    model = nn.Linear(4, 2)
    with pytest.raises(type(raised)):  # noqa: PT012 - what is raised is raised in the middle
        attach(model, tmp_path / "run")
        try:
            train(model)
            raise raised
        finally:
            remove_observer(model)
    errors = manifest(tmp_path / "run")["errors"]
    assert [(one["probe"], one["type"]) for one in errors] == [("process", kind) for kind in kinds]
    assert "password" not in json.dumps(errors)
    merged = merge_run(str(tmp_path / "run"))
    assert merged.complete
    assert [(one.kind, one.ranks) for one in merged.coverage.ended_by] == [(kind, "0") for kind in kinds]
    assert all(f"ended by {kind} on 0" in repr(merged) for kind in kinds)


def test_an_exception_amid_which_the_run_began_does_not_end_it(tmp_path: Path) -> None:
    """A program that trains while it handles one, as after a first try that failed."""
    model = nn.Linear(4, 2)
    try:
        (tmp_path / "missing").read_bytes()
    except OSError:
        attach(model, tmp_path / "run")
        train(model)
        remove_observer(model)
    assert manifest(tmp_path / "run")["errors"] == []


def test_a_sink_may_end_the_run(tmp_path: Path) -> None:
    """Its samples so far are all there, the manifest is closed, and nothing is warned of."""
    model = nn.Linear(4, 2)
    sink = Acting(lambda: remove_observer(model))
    observer = attach(model, tmp_path, sink=sink)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model)
        assert not observer.flush() or sink.num_closed == 1
        assert observer.close()

    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]
    assert sink.num_closed == 1
    assert manifest(tmp_path)["status"] == "closed"
    assert open_run(str(tmp_path)).history().collect().height == NUM_SAMPLES * ROWS_OF_A_SAMPLE
