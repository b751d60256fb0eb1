"""Attach, detach and ask, in a world of one."""

import gc
import inspect
import json
import re
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from typing_extensions import override

from torchinstruments import (
    AlwaysSampler,
    CompositeSink,
    ConfigurationError,
    DirectorySink,
    EveryNForwardsSampler,
    HistoryConfig,
    ObserverAlreadyAttachedError,
    SnapshotSink,
    TimedSampler,
    api,
    has_observer,
    histogram,
    inject_observer,
    merge_run,
    open_run,
    remove_observer,
    session,
)
from torchinstruments.enrolment import Enrolment, enrol
from torchinstruments.ranks.device_times import DeviceTimes
from torchinstruments.records import Sample, Signal
from torchinstruments.sinks.delivery import THREAD_NAME


def make_model() -> nn.Module:
    """Returns two layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def train(model: nn.Module, num_steps: int = 2) -> None:
    """Runs forwards and backwards."""
    for _ in range(num_steps):
        model(torch.randn(3, 4)).sum().backward()


def test_an_observer_is_there_from_inject_to_remove(tmp_path: Path) -> None:
    """has_observer follows, a second removal does nothing, and the model can be attached again."""
    model = make_model()
    assert not has_observer(model)
    inject_observer(model, output_dir=tmp_path / "first", sampler=AlwaysSampler())
    assert has_observer(model)
    train(model)
    remove_observer(model)
    remove_observer(model)
    assert not has_observer(model)
    again = inject_observer(model, output_dir=tmp_path / "second", sampler=AlwaysSampler())
    train(model)
    remove_observer(model)
    assert again.counters.samples == 2


def test_no_hook_is_left_on_the_model_after_removal(tmp_path: Path) -> None:
    """Every module's hook dictionaries are empty again, and no attribute was added."""
    model = make_model()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    train(model)
    remove_observer(model)
    for name, module in model.named_modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert set(vars(module)) == before[name]


def test_a_second_observer_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """The refused attach leaves nothing behind."""
    model = make_model()
    observer = inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    with pytest.raises(ObserverAlreadyAttachedError, match="remove_observer"):
        inject_observer(model, output_dir=tmp_path / "other")
    train(model)
    remove_observer(model)
    assert observer.counters.samples == 2
    assert not (tmp_path / "other").exists()


def test_an_interval_and_a_sampler_conflict_even_where_the_interval_is_the_default(tmp_path: Path) -> None:
    """What is given explicitly is seen, whatever its value."""
    with pytest.raises(ConfigurationError, match=r"interval.*sampler"):
        inject_observer(
            make_model(), output_dir=tmp_path, interval=timedelta(minutes=1), sampler=TimedSampler()
        )


class Odd:
    """An object that raises whatever is asked of it."""

    def _raise(self, *_: object) -> Any:
        raise ArithmeticError("odd")

    __eq__ = __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __getattr__ = __hash__ = _raise
    __repr__ = __str__ = __int__ = __float__ = __index__ = __fspath__ = _raise


class OddList(list[object]):
    """A sequence that cannot be read."""

    __iter__ = __len__ = __bool__ = __repr__ = __getitem__ = Odd._raise


ARGUMENTS = sorted(set(inspect.signature(inject_observer).parameters) - {"model"})


@pytest.mark.parametrize("odd", [Odd(), OddList()], ids=["object", "list"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_cannot_be_read_is_named_and_claims_nothing(
    tmp_path: Path, name: str, odd: object
) -> None:
    """What its own methods raise never surfaces by itself, and a corrected try finds the folder as it was."""
    options: dict[str, Any] = {"output_dir": tmp_path / "run", name: odd}
    with pytest.raises(ConfigurationError, match=name):
        inject_observer(make_model(), **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "value"), [("scaler", 10**400), ("scaler", -1), ("signals", np.array([7]))])
def test_an_odd_value_is_refused_with_the_way_out(tmp_path: Path, name: str, value: object) -> None:
    """A number that is no float, and an array, whose truth is no bool."""
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigurationError, match=rf"^{name}.*; give"):
        inject_observer(make_model(), output_dir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_an_array_of_names_is_a_collection_of_signals(tmp_path: Path) -> None:
    """Its truth value raises, and its entries are texts."""
    model = make_model()
    given: Any = np.array(["output", "input"])
    inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler(), signals=given)
    train(model, 1)
    remove_observer(model)
    assert set(open_run(str(tmp_path / "run")).history().collect()["signal"]) == {"output", "input"}


class Wrapper:
    """Holds an optimizer, as those of training frameworks do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_several_optimizers_may_be_named_in_wrappers_too(tmp_path: Path) -> None:
    """Their steps alone count, and in the order of first sight."""
    model = make_model()
    named = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.25, 0.5)]
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    given: Any = (Wrapper(named[0]), named[1])
    inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler(), optimizer=given)
    train(model, 1)
    for optimizer in (other, *named):
        optimizer.step()
    remove_observer(model)
    steps = open_run(str(tmp_path / "run")).steps().collect()
    assert steps.select("optimizer", "lr", "clock").rows() == [(0, 0.25, "host"), (1, 0.5, "host")]


class HostEvent:
    """Stands for a timing event of an accelerator, with the host's clock behind it; nothing runs on one."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def query(self) -> bool:
        """Returns that the device has come to it."""
        return True

    def elapsed_time(self, end_event: "HostEvent", /) -> float:
        """Returns milliseconds, a thousand times too many, so that they are known again."""
        return 1000.0 * 1000.0 * (end_event.at_s - self.at_s)


def test_a_model_on_an_accelerator_has_the_times_of_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the hooks of model, backward and optimizer to the table, with events that are stand-ins."""

    def record(event: HostEvent) -> None:
        event.at_s = time.perf_counter()

    def pretended(device: torch.device | None, on_error: Any) -> DeviceTimes:
        assert device == torch.device("cpu")
        return DeviceTimes(HostEvent, record, is_capturing=bool, on_error=on_error)

    monkeypatch.setattr(api, "device_times", pretended)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    began_s = time.perf_counter()
    inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    for _ in range(3):
        train(model, 2)
        optimizer.step()
    remove_observer(model)
    passed_s = time.perf_counter() - began_s
    steps = open_run(str(tmp_path / "run")).steps().collect()
    assert steps["clock"].to_list() == ["device"] * 3
    phases = steps.select("gap_s", "forward_s", "backward_s", "optimizer_s").rows()
    assert 0.0 < sum(map(sum, phases)) <= 1000.0 * passed_s
    assert all(forward_s > 0.0 and optimizer_s > 0.0 for _, forward_s, _, optimizer_s in phases)


def test_two_models_that_are_trained_in_turn_have_no_gap_of_their_own(tmp_path: Path) -> None:
    """As a GAN's: between the forwards of either there is work of the other, and the merge judges no rank."""
    models = {name: make_model() for name in ("generator", "critic")}
    optimizers = {name: torch.optim.SGD(one.parameters(), lr=0.25) for name, one in models.items()}
    for name, model in models.items():
        inject_observer(model, output_dir=tmp_path / name, sampler=AlwaysSampler())
    for _ in range(12):
        for name, model in models.items():
            train(model, 1)
            optimizers[name].step()
    for name, model in models.items():
        remove_observer(model)
        gaps = open_run(str(tmp_path / name)).steps().sort("attempt").collect()["gap_s"].to_list()
        assert gaps == [0.0] + [None] * 11
        (judged,) = merge_run(str(tmp_path / name)).own_work
        assert (judged.judged, judged.unavailable_reason) == (False, "other_model_trained")


def test_a_step_marked_by_the_program_is_in_the_tables(tmp_path: Path) -> None:
    """Its number and its declaration in `steps`, its provenance beside every value."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    observer = inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    for number in (1000, 1001):
        with observer.step(global_step=number, micro_batches=2):
            train(model, 2)
            optimizer.step()
    remove_observer(model)
    run = open_run(str(tmp_path / "run"))
    columns = ("attempt", "global_step", "micro_batches", "micro_batches_declared", "outcome")
    assert run.steps().collect().select(columns).rows() == [
        (0, 1000, 2, 2, "applied"),
        (1, 1001, 2, 2, "applied"),
    ]
    assert set(run.history().collect()["step_provenance"]) == {"explicit"}


def test_disabled_by_the_environment_nothing_happens_but_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The observer is inert, no folder is made, and a wrong argument raises all the same."""
    monkeypatch.setenv("TORCHINSTRUMENTS_DISABLED", "1")
    model = make_model()
    observer = inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    train(model)
    assert not has_observer(model)
    assert observer.counters.forwards == 0
    assert observer.close()
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigurationError, match="error_policy"):
        inject_observer(make_model(), error_policy="loud")


def test_a_rank_that_the_policy_leaves_out_gets_an_inert_observer(tmp_path: Path) -> None:
    """A callable that says no: no rows, no sample, and the run's record all the same."""
    model = make_model()
    observer = inject_observer(
        model, output_dir=tmp_path / "run", sampler=AlwaysSampler(), rank_policy=lambda _: False
    )
    train(model)
    assert not has_observer(model)
    remove_observer(model)
    assert observer.counters.samples == 0
    assert not list((tmp_path / "run").rglob("*.parquet"))


def test_a_world_of_one_uses_the_runs_folder_itself(tmp_path: Path) -> None:
    """The layout has no rank folder, the copy of the history is there, and run.json says what was asked."""
    model = make_model()
    observer = inject_observer(model, output_dir=tmp_path / "run", run_id="one", sampler=AlwaysSampler())
    train(model)
    assert observer.close()
    assert observer.url == str(tmp_path / "run")
    assert not (tmp_path / "run" / "rank-000").exists()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["run_id"] == "one"
    assert record["world_size"] == 1
    assert record["sampling"] == {"type": "always", "settings": {}}
    copied = pl.read_parquet(tmp_path / "run" / "history.parquet")
    assert copied.height == observer.counters.rows == open_run(observer.url).history().collect().height > 0


def test_the_run_id_goes_into_the_address(tmp_path: Path) -> None:
    """{run_id} in output_dir is replaced, and nothing else appears in the folder around it."""
    model = make_model()
    observer = inject_observer(
        model, output_dir=str(tmp_path / "all" / "run-{run_id}"), run_id="x7", sampler=AlwaysSampler()
    )
    train(model)
    remove_observer(model)
    assert observer.url == str(tmp_path / "all" / "run-x7")
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["run-x7"]


def test_the_same_run_id_goes_on_as_the_next_generation(tmp_path: Path) -> None:
    """A second job under one id joins the folder; sample ids order the whole history."""
    for _ in range(2):
        model = make_model()
        inject_observer(model, output_dir=tmp_path / "run", run_id="same", sampler=AlwaysSampler())
        train(model)
        remove_observer(model)
    run = open_run(str(tmp_path / "run"))
    samples = run.samples().sort("sample_id").collect()
    assert samples["generation"].to_list() == [0, 0, 1, 1]
    assert samples["sample_id"].to_list() == [0, 1, 1_000_000_000, 1_000_000_001]


def test_an_empty_run_says_why_once(tmp_path: Path) -> None:
    """A run shorter than its interval closes with one warning that names both times."""
    model = make_model()
    inject_observer(model, output_dir=tmp_path / "run", interval=timedelta(hours=1))
    train(model)
    with pytest.warns(RuntimeWarning, match=r"no sample.*3600 s.*immediate=True") as caught:
        remove_observer(model)
    assert len(caught) == 1


def test_an_attached_model_that_is_never_called_says_so(tmp_path: Path) -> None:
    """The warning tells to attach to the module that is called, and the folder holds a closed manifest."""
    model = make_model()
    inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    with pytest.warns(RuntimeWarning, match="never called"):
        remove_observer(model)
    (manifest,) = (tmp_path / "run").glob("process-*.json")
    assert json.loads(manifest.read_text())["status"] == "closed"


def test_a_model_that_is_only_traced_says_so(tmp_path: Path) -> None:
    """The warning counts what was traced, by whatever means, and the manifest says by which."""
    model = make_model()
    x = torch.randn(3, 4)
    inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    torch.jit.trace(model, x, check_trace=False)
    for _ in range(2):
        torch.export.export(model, (x,))
    with pytest.warns(RuntimeWarning, match="was only traced, 3 times") as caught:
        remove_observer(model)
    assert len(caught) == 1
    (path,) = (tmp_path / "run").glob("process-*.json")
    manifest = json.loads(path.read_text())
    assert manifest["counters"]["errors"] == {"tracing": 3}
    assert [error["message"] for error in manifest["errors"]] == [
        "1 forward under torch.jit.trace was not observed",
        "2 forwards under torch.export were not observed",
    ]


def test_a_model_without_parameters_is_observed(tmp_path: Path) -> None:
    """Nothing to step and no gradient: outputs are stored all the same."""
    model = nn.Sequential(nn.ReLU(), nn.Flatten())
    inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    model(torch.randn(2, 3))
    remove_observer(model)
    history = open_run(str(tmp_path / "run")).history().collect()
    assert set(history["layer"]) == {"0", "1"}
    assert set(history["signal"]) == {"output"}


def test_a_flush_right_after_the_first_forward_makes_it_durable(tmp_path: Path) -> None:
    """Flushing waits until the run is known, which the first forward only began to settle."""
    model = make_model()
    observer = inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    train(model, 1)
    assert observer.flush()
    assert open_run(str(tmp_path / "run")).history().collect().height == 2 * 3 * 9
    remove_observer(model)


def test_a_program_that_just_ends_keeps_its_samples(tmp_path: Path) -> None:
    """Without remove_observer, and before the first forward's claim is done, the exit waits and flushes."""
    program = (
        "import sys, torch; from torch import nn\n"
        "from torchinstruments import AlwaysSampler, inject_observer\n"
        "model = nn.Linear(2, 2); inject_observer(model, output_dir=sys.argv[1], sampler=AlwaysSampler())\n"
        "model(torch.ones(1, 2)).sum().backward()"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], check=True, timeout=100)
    run = open_run(str(tmp_path / "run"))
    assert run.history().collect().height == 2 * 9
    assert [manifest.status for manifest in run.manifests] == ["closed"]


def test_two_models_as_one_run_in_one_folder_are_refused(tmp_path: Path) -> None:
    """They would mix their rows; after the first is removed, its run goes on as a second generation."""
    first, second = make_model(), make_model()
    inject_observer(first, output_dir=tmp_path / "run", run_id="r", sampler=AlwaysSampler())
    train(first)
    observer = inject_observer(second, output_dir=tmp_path / "run", run_id="r", sampler=AlwaysSampler())
    with pytest.warns(RuntimeWarning, match="another observer of this process"):
        train(second)
    remove_observer(first)
    remove_observer(second)
    assert observer.counters.samples == 0
    assert open_run(str(tmp_path / "run")).samples().collect().height == 2


def test_a_dropped_model_leaves_no_thread_and_no_row_behind(tmp_path: Path) -> None:
    """Garbage collection of a model that was never removed ends its writer and closes its manifest."""
    threads = threading.active_count()
    model = make_model()
    observer = inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    train(model)
    assert observer.flush()
    train(model)
    del model, observer
    gc.collect()
    for _ in range(200):
        if threading.active_count() == threads:
            break
        time.sleep(0.05)
    assert threading.active_count() == threads
    run = open_run(str(tmp_path / "run"))
    assert run.samples().collect().height == 4
    assert [manifest.status for manifest in run.manifests] == ["closed"]


def test_a_model_that_is_dropped_while_its_folder_is_claimed_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim goes on in a thread of its own, which writes what waits once it has the folder."""
    is_dropped = threading.Event()

    def claim_slowly(*arguments: Any, **options: Any) -> Enrolment:
        assert is_dropped.wait(30)
        return enrol(*arguments, **options)

    monkeypatch.setattr(session, "enrol", claim_slowly)
    model = make_model()
    inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    model(torch.randn(3, 4))
    del model
    gc.collect()
    is_dropped.set()

    deadline_s = time.monotonic() + 60
    names = {"torchinstruments-enrolment", THREAD_NAME}
    while any(thread.name in names for thread in threading.enumerate()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert open_run(str(tmp_path / "run")).samples().collect().height == 1


def test_two_models_of_one_process_keep_apart(tmp_path: Path) -> None:
    """A GAN's two models each have their own run, folder and counters."""
    generator, critic = make_model(), make_model()
    first = inject_observer(generator, output_dir=tmp_path / "generator", sampler=AlwaysSampler())
    second = inject_observer(critic, output_dir=tmp_path / "critic", sampler=AlwaysSampler())
    train(generator, 1)
    train(critic, 3)
    remove_observer(generator)
    remove_observer(critic)
    assert (first.counters.samples, second.counters.samples) == (1, 3)


def test_a_training_loop_under_warnings_as_errors_never_sees_one(tmp_path: Path) -> None:
    """A reducer that always raises is counted, and no exception reaches the loop."""

    def broken(tensor: torch.Tensor) -> dict[str, float]:
        raise ValueError("no")

    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observer = inject_observer(
            model, output_dir=tmp_path / "run", sampler=AlwaysSampler(), reducers=(broken,)
        )
        train(model)
        remove_observer(model)
    assert observer.counters.errors["reducer"] == 2 * 2 * 3
    reasons = open_run(str(tmp_path / "run")).history().collect()["unavailable_reason"].unique().to_list()
    assert reasons == ["reducer_error: ValueError: no"]


def test_a_clean_close_leaves_everything_that_a_rank_promises(tmp_path: Path) -> None:
    """Parts, their copy, the summaries, the guide, the catalog, the manifest and histograms lie there."""
    model = make_model()
    inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    train(model)
    remove_observer(model)
    names = {
        path.relative_to(tmp_path / "run").parts[0].partition("-")[0]
        for path in (tmp_path / "run").rglob("*")
    }
    assert names >= {
        *("run.json", "generations", "result.json", "index.md", "history.parquet", "history.parts"),
        *("samples.parts", "steps.parts", "tensorboard", "process", "modules"),
    }
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [record["layer"] for record in result] == ["0", "1", "2"]
    assert result[0]["tensors"][0]["statistics"][0]["observations"] == 2


def test_the_catalog_and_the_guide_are_there_before_the_first_sample(tmp_path: Path) -> None:
    """With a rank that is known at attach, result.json lists every layer with no measurements."""
    model = make_model()
    observer = inject_observer(model, output_dir=tmp_path / "run", sampler=EveryNForwardsSampler(100))
    train(model, 1)
    assert observer.flush()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [(record["layer"], record["tensors"]) for record in result] == [("0", []), ("1", []), ("2", [])]
    assert (tmp_path / "run" / "index.md").read_text().startswith("# How to read this folder")
    with pytest.warns(RuntimeWarning, match="no sample"):
        remove_observer(model)


def test_histograms_cover_the_layers_in_focus_alone(tmp_path: Path) -> None:
    """A selector and a maximum choose; the rest of the layers have statistics and no histogram."""
    model = make_model()
    seen: list[Sample] = []

    class Keep:
        """Keeps what it is given."""

        def initialize(self, run: object, modules: object) -> None:
            """Takes the run."""

        def observe(self, sample: Sample) -> None:
            """Keeps a sample."""
            seen.append(sample)

        def close(self) -> None:
            """Ends."""

    inject_observer(
        model,
        output_dir=tmp_path / "run",
        sampler=AlwaysSampler(),
        histogram_selector=lambda name, _: name != "1",
        max_histogram_modules=1,
        sink=Keep(),
    )
    train(model, 1)
    remove_observer(model)
    drawn = [(one.layer, one.signal, sum(one.counts)) for sample in seen for one in sample.histograms]
    assert drawn == [("0", "output", 3 * 8), ("0", "output_gradient", 3 * 8)]
    assert {one.layer for sample in seen for one in sample.measurements} == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"histogram_selector": lambda *_: False}, "histogram_selector"),
        ({"max_histogram_modules": 0}, "max_histogram_modules=0"),
        ({"max_histogram_modules": True}, "max_histogram_modules=True"),
        ({"histograms": (histogram(), histogram())}, "'distribution' twice"),
        ({"histograms": histogram()}, "histograms="),
        ({"sink": 3}, "3"),
        (
            {"output_dir": "runs/{foo}/{run_id}"},
            "output_dir='runs/{foo}/{run_id}' has the placeholder {foo}, which stands for nothing; {run_id}",
        ),
        ({"output_dir": "runs/{}"}, "has the placeholder {}, "),
        (
            {"sink": DirectorySink("x"), "output_dir": "y"},
            "output_dir and a DirectorySink conflict, since the DirectorySink has its own output_dir",
        ),
        ({"sink": DirectorySink("x"), "run_id": "y"}, "run_id and a DirectorySink conflict"),
        (
            {"sink": DirectorySink("x"), "history_config": HistoryConfig()},
            "history_config and a DirectorySink",
        ),
        ({"capture_direct_forwards": 1}, "capture_direct_forwards=1"),
        ({"scaler": "1024"}, "scaler='1024' is not possible; give the torch.amp.GradScaler"),
        ({"scaler": True}, "scaler=True"),
        ({"scaler": 0}, "scaler=0"),
        ({"scaler": -1.0}, "scaler=-1.0"),
        ({"scaler": float("nan")}, "scaler=nan"),
        ({"scaler": float("inf")}, "scaler=inf"),
        ({"scaler": GradScaler}, "scaler=<class"),
        ({"fingerprints": "all"}, "fingerprints='all'"),
        ({"compiled": "eager"}, "compiled='eager' is not known; give one of 'boundary', 'force_eager'"),
        ({"compiled": True}, "compiled=True"),
        ({"signals": ()}, "signals=() is empty"),
        ({"signals": "output"}, "signals='output' is no collection"),
        ({"signals": None}, "signals=None"),
        (
            {"signals": ("output", "weights")},
            "signals has 'weights', which is not possible; give any of ",
        ),
        ({"signals": [("output",)]}, "signals has ('output',)"),
        ({"optimizer": 3}, "optimizer=3"),
        ({"optimizer": None}, "optimizer=None"),
        ({"optimizer": ()}, "optimizer=()"),
        ({"optimizer": (nn.Identity(),)}, "optimizer=(Identity(),)"),
    ],
)
def test_arguments_that_cannot_work_name_what_is_wrong(arguments: dict[str, Any], words: str) -> None:
    """Nothing is attached, and the sentence has the argument and its value."""
    model = make_model()
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        inject_observer(model, **arguments)
    assert not has_observer(model)


def test_signals_are_told_once_in_one_order(tmp_path: Path) -> None:
    """run.json has those that were asked for, and history nothing else."""
    model = make_model()
    inject_observer(
        model,
        output_dir=tmp_path,
        sampler=AlwaysSampler(),
        signals=["parameter", Signal.INPUT, "parameter", "output_gradient"],
    )
    train(model)
    remove_observer(model)
    described = json.loads((tmp_path / "run.json").read_text())
    assert described["signals"] == ["output_gradient", "input", "parameter"]
    history = open_run(str(tmp_path)).history().collect()
    assert set(history["signal"].to_list()) == {"output_gradient", "input", "parameter"}
    assert set(history["unavailable_reason"].to_list()) == {""}


def test_a_directory_sink_stands_for_the_folder(tmp_path: Path) -> None:
    """Inside a composite it says where the run lies, and the default folder is not made."""
    model = make_model()
    observer = inject_observer(
        model,
        sampler=AlwaysSampler(),
        sink=CompositeSink(
            DirectorySink(tmp_path / "mine", run_id="named"), SnapshotSink(tmp_path / "snapshots")
        ),
    )
    train(model)
    remove_observer(model)
    assert observer.url == str(tmp_path / "mine")
    assert json.loads((tmp_path / "mine" / "run.json").read_text())["run_id"] == "named"
    assert len(list((tmp_path / "snapshots" / "snapshots").iterdir())) == 2


def test_direct_forwards_are_captured_when_asked_for(tmp_path: Path) -> None:
    """model.forward(x) is a root forward then, once, and the model is clean again after removal."""
    model = make_model()
    observer = inject_observer(
        model, output_dir=tmp_path / "run", sampler=AlwaysSampler(), capture_direct_forwards=True
    )
    model.forward(torch.randn(3, 4)).sum().backward()
    train(model, 1)
    remove_observer(model)
    assert observer.counters.samples == 2
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_scripted_model_is_refused_before_anything_is_claimed(tmp_path: Path) -> None:
    """The sentence says what to attach to instead, and the folder is still free for that."""
    with pytest.raises(ConfigurationError, match="scripted"):
        inject_observer(torch.jit.script(make_model()), output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_copies_for_several_devices_are_said_not_to_be_measured(tmp_path: Path) -> None:
    """DataParallel with two devices runs copies in threads: one warning names the way out."""
    model = nn.DataParallel(make_model())
    model.device_ids = [0, 1]
    with pytest.warns(RuntimeWarning, match="DataParallel.*DistributedDataParallel"):
        inject_observer(model, output_dir=tmp_path / "run", sampler=AlwaysSampler())
    with pytest.warns(RuntimeWarning, match="no sample"):
        remove_observer(model)


def test_compiled_says_what_is_observed_of_a_compiled_model(tmp_path: Path) -> None:
    """Its boundary, or every layer; with a sampler by time too in a world of one."""
    for mode, expected in (
        ("boundary", {"": "eager"} | dict.fromkeys("012", "inside_compiled")),
        ("force_eager", dict.fromkeys("012", "forced_eager")),
    ):
        model = torch.compile(make_model(), backend="eager")
        assert isinstance(model, nn.Module)
        sampler = TimedSampler(timedelta(hours=1), immediate=True)
        inject_observer(model, output_dir=tmp_path / mode, sampler=sampler, compiled=mode)
        train(model)
        remove_observer(model)
        history = open_run(str(tmp_path / mode)).history().collect()
        assert dict(history.select("layer", "execution").unique().iter_rows()) == expected


class Ragged(nn.Module):
    """Puts out a tensor whose rows have different lengths."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns two rows."""
        return torch.nested.nested_tensor([x[:2], x], layout=torch.jagged)


def test_a_layer_without_a_plain_shape_costs_no_other_one_anything(tmp_path: Path) -> None:
    """Of a jagged tensor the reason is kept, without a shape, in every document up to the merge."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ragged = Ragged()
            self.linear = nn.Linear(4, 2)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.ragged(x)
            out: torch.Tensor = self.linear(x)
            return out

    model = Model()
    inject_observer(
        model, output_dir=tmp_path / "run", sampler=AlwaysSampler(), sink=SnapshotSink(tmp_path / "shots")
    )
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    remove_observer(model)

    reason = "unsupported_layout: NestedTensor"
    run = open_run(str(tmp_path / "run"))
    rows = run.history().select("layer", "signal", "shape", "unavailable_reason").unique().collect().rows()
    assert sorted(rows) == [
        ("linear", "output", "3x2", ""),
        ("linear", "output_gradient", "3x2", ""),
        ("ragged", "output", "", reason),
    ]
    layers = {one["layer"]: one for one in json.loads((tmp_path / "run" / "result.json").read_bytes())}
    assert [tensor["latest_shape"] for tensor in layers["ragged"]["tensors"]] == [[]]
    assert [tensor["latest_shape"] for tensor in layers["linear"]["tensors"]] == [[3, 2], [3, 2]]
    snapshot = json.loads((tmp_path / "shots" / "snapshots" / "000001.json").read_bytes())
    assert (snapshot["state"], snapshot["errors"]) == ("backward_observed", [])
    ragged = snapshot["modules"]["ragged"][0]["outputs"]["output"]
    assert (ragged["shape"], set(ragged["unavailable_stats"].values())) == ([], {reason})
    merged: Any = merge_run(str(tmp_path / "run")).result["layers"]
    assert {one["layer"]: len(one["tensors"]) for one in merged} == {"linear": 2, "ragged": 1}
