"""The examples and the launch scripts as a user starts them, compared with what they saw themselves."""

import json
import re
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from e2e.example_runs import PROJECT, run
from e2e.ports import free_port
from torchinstruments import Run, open_run
from torchinstruments.store.filesystem import open_storage
from torchinstruments.testing.object_store import ObjectStore

pytestmark = pytest.mark.timeout(300)

SMALL = ("--batch-size", "3", "--context", "16", "--text-bytes", "100000")


def reference(values: npt.NDArray[np.float64]) -> dict[str, float]:
    """Returns the nine statistics of finite values, by their definitions, in float64."""
    flat = values.ravel()
    assert np.isfinite(flat).all(), "the small model trains without overflow"
    return {
        "mean": float(flat.mean()),
        "std": float(flat.std()),
        "min": float(flat.min()),
        "max": float(flat.max()),
        "p25": float(np.quantile(flat, 0.25)),
        "p50": float(np.quantile(flat, 0.50)),
        "p75": float(np.quantile(flat, 0.75)),
        "zero_fraction": float((flat == 0).mean()),
        "nonfinite_fraction": 0.0,
    }


def expected_rows(log: Path) -> dict[tuple[int, int, str, str, str], float]:
    """Returns values by (attempt, micro-batch, layer, signal, metric), from a script's log."""
    rows: dict[tuple[int, int, str, str, str], float] = {}
    with np.load(log) as arrays:
        for key in arrays.files:
            step, micro_batch, layer, signal = key.split("/")
            for metric, value in reference(arrays[key]).items():
                rows[int(step), int(micro_batch), layer, signal, metric] = value
    return rows


def stored_rows(history: pl.DataFrame) -> dict[tuple[int, int, str, str, str], float]:
    """Returns the same from rows of history, each of which must be there once and have a value."""
    columns = ("attempt", "micro_batch", "layer", "signal", "metric")
    rows = {tuple(row[:5]): row[5] for row in history.select(*columns, "value").iter_rows()}
    assert len(rows) == history.height, "a row is there twice"
    return rows


def assert_close(found: dict[Any, float], expected: dict[Any, float]) -> None:
    """Compares to 1e-9 of the value, or 1e-13 where the value itself is nearly nothing."""
    assert set(found) == set(expected)
    wrong = {
        key: (found[key], value)
        for key, value in expected.items()
        if found[key] is None or not np.isclose(found[key], value, rtol=1e-9, atol=1e-13)
    }
    assert not wrong, f"{len(wrong)} of {len(expected)} differ: {dict(list(wrong.items())[:5])}"


@dataclass(frozen=True)
class Launched:
    """A run of ``launch/local.sh`` on two ranks, merged."""

    url: str
    options: dict[str, object] | None
    log_prefix: Path
    launch_output: str
    merge_output: str
    result: dict[str, Any]

    def open(self) -> Run:
        """Returns the run as a reader opens it."""
        return open_run(self.url, storage_options=self.options)


@pytest.fixture(scope="module", params=["local disk", "object store"])
def launched(
    request: pytest.FixtureRequest, seaweed: ObjectStore, tmp_path_factory: pytest.TempPathFactory
) -> Launched:
    """Two ranks, six steps of two micro-batches, every second step sampled; from a folder with blanks."""
    folder = tmp_path_factory.mktemp("a folder with blanks")
    target, url, options = "telemetry of a run", str(folder / "telemetry of a run"), None
    variables: dict[str, Any] = {}
    if request.param == "object store":
        target = url = f"s3://{seaweed.make_bucket(f'run-{uuid.uuid4().hex[:12]}')}/telemetry"
        options = dict(seaweed.storage_options)
        variables = {**seaweed.env, "TORCHINSTRUMENTS_SPOOL_DIR": str(folder / "spool")}
    launch = run(
        *(PROJECT / "launch" / "local.sh", *SMALL, "--steps", "6", "--sample-every-steps", "2"),
        *("--log-tensors", folder / "log"),
        cwd=folder,
        OUTPUT_DIR=target,
        NPROC="2",
        **variables,
    )
    merge = run("torchinstruments", "merge", target, cwd=folder, **variables)
    result = json.loads(open_storage(url, options).read("merged/result.json"))
    said = launch.stdout + launch.stderr
    return Launched(url, options, folder / "log", said, merge.stdout + merge.stderr, result)


def test_basic_training_prints_the_folder_that_its_samples_lie_in(tmp_path: Path) -> None:
    """One process with fifty steps leaves five samples of its five layers in the folder that it names."""
    done = run(
        sys.executable, PROJECT / "examples" / "basic_training.py", "--output-dir", "out", cwd=tmp_path
    )
    printed = done.stdout.rsplit("telemetry: ", 1)[1].strip()
    opened = open_run(printed)
    assert opened.samples().select("sample_id").unique().collect().height == 5
    layers = set(opened.history().select("layer").unique().collect()["layer"])
    assert layers == {"0", "1", "2", "3", "4"}
    assert (tmp_path / "out" / "history.parquet").exists()


def test_local_launch_says_how_to_merge(launched: Launched) -> None:
    """The launch script prints the folder and a merge command that a shell reads as it is meant."""
    shown = launched.url if launched.options else r"telemetry\ of\ a\ run"
    assert f"torchinstruments merge {shown}" in launched.launch_output
    assert f"telemetry: {launched.url}" in launched.launch_output


def test_both_ranks_are_there_and_closed(launched: Launched) -> None:
    """The merge of a whole run expects two ranks, finds both, and sets nothing aside."""
    coverage = launched.result["coverage"]
    assert coverage["expected_ranks"] == coverage["present_ranks"] == [0, 1]
    assert not coverage["missing_ranks"]
    assert not coverage["quarantined"]
    assert coverage["rows_dropped"] == 0
    assert [rank["status"] for rank in launched.result["ranks"]] == ["closed", "closed"]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_stored_what_its_script_saw(launched: Launched, rank: int) -> None:
    """Every number of a rank equals a NumPy float64 reference from the tensors that its script logged."""
    history = launched.open().history().filter(pl.col("rank") == rank).collect()
    expected = expected_rows(Path(f"{launched.log_prefix}-rank-{rank:03d}.npz"))
    assert {key[0] for key in expected} == {1, 3, 5}
    assert_close(stored_rows(history), expected)


def test_the_merge_keeps_each_ranks_own_values(launched: Launched) -> None:
    """Per rank the latest, lowest and highest value of a series are those of that rank's reference."""
    series: dict[tuple[str, str, str, str], dict[tuple[int, int], float]] = {}
    for rank in (0, 1):
        for (attempt, micro_batch, layer, signal, metric), value in expected_rows(
            Path(f"{launched.log_prefix}-rank-{rank:03d}.npz")
        ).items():
            series.setdefault((str(rank), layer, signal, metric), {})[attempt, micro_batch] = value
    found: dict[Any, float] = {}
    expected: dict[Any, float] = {}
    for record in launched.result["layers"]:
        for tensor in record["tensors"]:
            for statistic in tensor["statistics"]:
                for rank, summary in statistic["ranks"].items():
                    key = (rank, record["layer"], tensor["signal"], statistic["metric"])
                    for name in ("latest", "minimum", "maximum"):
                        found[*key, name] = summary[name]["value"]
    for key, values in series.items():
        expected[*key, "latest"] = values[max(values)]
        expected[*key, "minimum"] = min(values.values())
        expected[*key, "maximum"] = max(values.values())
    assert_close(found, expected)
    assert found["0", "head", "output", "mean", "latest"] != found["1", "head", "output", "mean", "latest"]


def test_accumulation_is_told_apart_from_synchronisation(launched: Launched) -> None:
    """The micro-batch under no_sync is local, the last one of a step synced, and each step was applied."""
    opened = launched.open()
    sync = opened.history().select("micro_batch", "grad_sync").unique().collect()
    assert set(sync.iter_rows()) == {(0, "local"), (1, "synced")}
    steps = (
        opened.steps().select("rank", "attempt", "micro_batches", "micro_batches_synced", "outcome").collect()
    )
    assert set(steps.iter_rows()) == {
        (rank, attempt, 2, 1, "applied") for rank in (0, 1) for attempt in range(6)
    }


def test_float16_in_a_world_of_one_keeps_the_loss_scale_beside_scaled_gradients(tmp_path: Path) -> None:
    """Under autocast and a GradScaler stored gradients are the scaled ones, with the scale beside them."""
    run(
        *(sys.executable, PROJECT / "examples" / "ddp_language_model.py", *SMALL, "--fp16", "--steps", "4"),
        *("--sample-every-steps", "4", "--output-dir", "out", "--log-tensors", "log"),
        cwd=tmp_path,
    )
    history = open_run(str(tmp_path / "out")).history().collect()
    assert_close(stored_rows(history), expected_rows(tmp_path / "log-rank-000.npz"))
    gradients = history.filter(pl.col("signal") == "output_gradient")
    assert set(gradients["scale_provenance"]) == {"gradscaler"}
    assert set(gradients["loss_scale"]) == {65536.0}
    assert "float16" in set(history["dtype"])


@dataclass(frozen=True)
class Sharded:
    """A run of the sharded example on two ranks."""

    url: str
    said: str
    warned: str

    def open(self) -> Run:
        """Returns the run as a reader opens it."""
        return open_run(self.url)


@pytest.fixture(scope="module", params=["one node", "two nodes"])
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sharded:
    """Two ranks on one node, or one on each of two; four steps of two micro-batches, every second sampled."""
    folder = tmp_path_factory.mktemp("sharded")
    script, variables = "local.sh", {"NPROC": "2", "PORT": ""}
    if request.param == "two nodes":
        script, variables = "two_nodes_local.sh", {"NPROC": "1", "PORT": free_port()}
    done = run(
        *(PROJECT / "launch" / script, *SMALL, "--steps", "4", "--sample-every-steps", "2"),
        cwd=folder,
        OUTPUT_DIR="telemetry of a run",
        EXAMPLE="fsdp_language_model",
        RUN_ID="pair-1",
        NPROC=variables["NPROC"],
        PORT=variables["PORT"],
    )
    return Sharded(str(folder / "telemetry of a run"), done.stdout, done.stderr)


def test_the_sharded_example_gives_torch_nothing_to_warn_of(sharded: Sharded) -> None:
    """No module that is sharded returns a view, which could end in wrong gradients."""
    assert "UserWarning" not in sharded.warned


def test_a_local_launch_names_its_run(sharded: Sharded) -> None:
    """RUN_ID is the run's id, with one agent of torchrun and with two."""
    assert json.loads((Path(sharded.url) / "run.json").read_text())["run_id"] == "pair-1"


def test_the_sharded_example_counts_one_reduction_a_step(sharded: Sharded) -> None:
    """Micro-batches before the last are not reduced, in the ledger of each rank and beside each gradient."""
    assert f"telemetry: {sharded.url}" in sharded.said
    columns = ("micro_batches", "micro_batches_synced", "last_micro_batch_sync", "outcome")
    steps = sharded.open().steps().select("rank", "attempt", *columns).collect()
    assert sorted(steps.iter_rows()) == [
        (rank, attempt, 2, 1, "synced", "applied") for rank in (0, 1) for attempt in range(4)
    ]
    history = sharded.open().history().filter(pl.col("signal") == "output_gradient").collect()
    found = history.select("attempt", "micro_batch", "grad_sync").unique()
    assert sorted(found.iter_rows()) == [
        (attempt, micro_batch, "local" if micro_batch == 0 else "synced")
        for attempt in (1, 3)
        for micro_batch in (0, 1)
    ]


def test_the_sharded_example_computes_in_bfloat16_under_the_names_of_the_other(sharded: Sharded) -> None:
    """Checkpointing and sharding leave no trace in a layer's name; outputs are whole on every rank."""
    history = sharded.open().history().filter(pl.col("signal") == "output").collect()
    layers = set(history["layer"])
    block = ("attention_norm", "attention.query_key_value", "attention.projection", "mlp_norm")
    inside = (*block, "mlp.0", "mlp.1", "mlp.2")
    blocks = {f"blocks.{index}.{layer}" for index in range(5) for layer in inside}
    assert layers == {"characters", "positions", "norm", "head", *blocks}
    assert set(history["scope"]) == {"local"}
    assert set(history["dtype"]) == {"bfloat16"}


def test_the_sharded_example_in_a_world_of_one(tmp_path: Path) -> None:
    """Started as a plain program it shards over itself."""
    script = PROJECT / "examples" / "fsdp_language_model.py"
    run(sys.executable, script, *SMALL, "--steps", "2", "--sample-every-steps", "2", cwd=tmp_path)
    steps = open_run(str(tmp_path / "runs" / "sharded-language-model")).steps().collect()
    assert steps["outcome"].to_list() == ["applied"] * 2


def test_two_nodes_fail_where_their_script_fails(tmp_path: Path) -> None:
    """An option that the script does not know ends both agents."""
    script = PROJECT / "launch" / "two_nodes_local.sh"
    done = run(script, "--no-such-option", cwd=tmp_path, expected_code=1, PORT=free_port())
    assert "--no-such-option" in done.stderr


def test_a_launch_of_an_example_that_is_not_there_says_which_are(tmp_path: Path) -> None:
    """Nothing is started, and no folder made."""
    done = run(PROJECT / "launch" / "local.sh", cwd=tmp_path, expected_code=2, EXAMPLE="no_such_example")
    assert "fsdp_language_model" in done.stderr
    assert not list(tmp_path.iterdir())


def test_local_launch_without_torchrun_uses_the_given_python(tmp_path: Path) -> None:
    """Where no torchrun is on the PATH, the module of the interpreter in PYTHON starts the ranks."""
    done = run(
        *(PROJECT / "launch" / "local.sh", "--help"),
        cwd=tmp_path,
        PATH="/usr/bin:/bin",
        PYTHON=sys.executable,
        NPROC="1",
    )
    assert "--sample-every-steps" in done.stdout
    assert "telemetry goes to:  runs/" in done.stdout


def test_every_example_takes_the_folder_that_the_launch_names(tmp_path: Path) -> None:
    """The example of one process writes where the launch script said, and nowhere else."""
    done = run(
        *(PROJECT / "launch" / "local.sh", "--steps", "10"),
        cwd=tmp_path,
        EXAMPLE="basic_training",
        OUTPUT_DIR="named",
        NPROC="1",
    )
    assert "telemetry goes to:  named" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["named"]
    assert open_run(str(tmp_path / "named")).samples().collect().height == 1


@pytest.mark.parametrize("script", ["local.sh", "two_nodes_local.sh"])
def test_a_launch_with_telemetry_off_names_no_folder(tmp_path: Path, script: str) -> None:
    """Nothing will lie there, so that the launch says that telemetry is off in place of where it goes."""
    done = run(
        *(PROJECT / "launch" / script, "--help"),
        cwd=tmp_path,
        EXAMPLE="basic_training",
        OUTPUT_DIR="named",
        NPROC="1",
        PORT=free_port(),
        TORCHINSTRUMENTS_DISABLED=" True",
    )
    assert "telemetry is off:   TORCHINSTRUMENTS_DISABLED= True" in done.stdout
    assert "telemetry goes to" not in done.stdout
    assert "torchinstruments merge" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_local_launch_fails_where_its_script_fails(tmp_path: Path) -> None:
    """An option that the script does not know ends the launch with torchrun's own exit code."""
    done = run(PROJECT / "launch" / "local.sh", "--no-such-option", cwd=tmp_path, expected_code=1, NPROC="1")
    assert "--no-such-option" in done.stderr


def test_local_launch_refuses_a_second_word_on_the_folder(tmp_path: Path) -> None:
    """An --output-dir beside OUTPUT_DIR would make what the script prints untrue, so nothing is started."""
    done = run(
        PROJECT / "launch" / "local.sh", "--output-dir=elsewhere", cwd=tmp_path, expected_code=2, NPROC="1"
    )
    assert "OUTPUT_DIR" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_demo_prints_one_table_and_the_result(tmp_path: Path) -> None:
    """The demonstration exits with 0, sets both ranks side by side once, and names its result once."""
    done = run(sys.executable, PROJECT / "launch" / "demo.py", tmp_path / "run", cwd=tmp_path)
    assert len(re.findall(r"lowest +rank of lowest +highest +rank of highest", done.stdout)) == 1
    (printed,) = (Path(path) for path in re.findall(r"\S+result\.json", done.stdout))
    assert json.loads(printed.read_text())["coverage"]["present_ranks"] == [0, 1]


def test_the_demo_trains_nothing_where_it_is_asked_for_help(tmp_path: Path) -> None:
    """``--help`` names the argument and makes no folder."""
    done = run(sys.executable, PROJECT / "launch" / "demo.py", "--help", cwd=tmp_path)
    assert "folder" in done.stdout
    assert not list(tmp_path.iterdir())
