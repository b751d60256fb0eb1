"""Samples as JSON files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import ErrorRecord, Identity, SampleState, Signal
from torchinstruments.sinks.delivery import Delivery
from torchinstruments.sinks.sink import RankAware, TelemetrySink
from torchinstruments.sinks.snapshots import SnapshotSink
from torchinstruments.store.local import LocalStorage
from unit.sinks.deliveries import Resolved
from unit.store.folders import begin_run
from unit.store.material import at_step, backward, claim, forward, measurement, module, run_record

ALONE = Identity(0, 1, 0, "node-a", "1a2b3c4d")
CLAIM = dataclasses.replace(claim(), alone=True)


def read(path: Path) -> Any:
    """Returns a JSON file that holds neither NaN nor infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(path.read_text(), parse_constant=refuse)


def begun(folder: Path, *, run_id: str = "run-1") -> SnapshotSink:
    """Returns the sink of a world of one, after its beginning."""
    sink = SnapshotSink(folder)
    sink.place(ALONE, dataclasses.replace(CLAIM, run_id=run_id))
    sink.initialize(run_record(run_id), (module(0),))
    return sink


def test_the_run_is_described_once(tmp_path: Path) -> None:
    """Versions, time and sampling, with the schema of these files."""
    run = dataclasses.replace(run_record(), versions={"torch": "2.13.0", "torchinstruments": "0.1.0"})
    SnapshotSink(tmp_path).initialize(run, ())
    assert read(tmp_path / "run.json") == {
        "schema_version": 1,
        "run_id": "run-1",
        "created_at": "2026-01-01T00:00:00Z",
        "torch_version": "2.13.0",
        "observer_version": "0.1.0",
        "sampling": {"type": "AlwaysSampler", "settings": {}},
        "world_size": 2,
    }


def test_modules_are_described_and_follow_the_model(tmp_path: Path) -> None:
    """How often a layer fired is no reason to write the file anew."""
    sink = begun(tmp_path)
    entry = {"type": "Linear", "aliases": [], "parameter_count": 12, "trainable_parameter_count": 12}
    path = tmp_path / "modules.json"
    assert read(path) == {"layer99": entry}
    stamp = path.stat().st_ino
    sink.modules((module(0, fired=5),))
    assert path.stat().st_ino == stamp
    sink.modules((module(0), module(1)))
    assert read(path) == {"layer99": entry, "layer98": entry}


def test_a_forward_is_a_snapshot_of_its_own(tmp_path: Path) -> None:
    """Every field of the first release, and where the numbers come from."""
    sink = begun(tmp_path)
    sink.observe(
        forward(
            0,
            measurement(0, values=(0.0, None, 2.0), reasons=("", "overflow", "")),
            measurement(1, call_index=1),
        )
    )
    snapshot = read(tmp_path / "snapshots" / "000000.json")
    calls = snapshot.pop("modules")
    assert snapshot == {
        "schema_version": 1,
        "snapshot_id": 0,
        "forward_index": 0,
        "attempt": 0,
        "forward_in_attempt": 0,
        "micro_batch": 0,
        "step_provenance": "inferred",
        "grad_sync": "synced",
        "loss_scale": None,
        "scale_provenance": "none_seen",
        "timestamp": "2023-11-14T22:13:20Z",
        "state": "forward_complete",
        "collection_duration_ms": 250.0,
        "errors": [],
        "errors_left_out": 0,
    }
    assert calls["layer98"][0]["call_index"] == 1
    assert calls["layer99"] == [
        {
            "call_index": 0,
            "outputs": {
                "output": {
                    "shape": [8, 1024],
                    "dtype": "float32",
                    "device": "cpu",
                    "numel": 8192,
                    "mode": "train",
                    "grad_enabled": True,
                    "scope": "local",
                    "execution": "eager",
                    "stats": {"zero_fraction": 0.0, "std": 2.0},
                    "unavailable_stats": {"mean": "overflow"},
                }
            },
            "output_gradients": {},
        }
    ]


def test_a_backward_replaces_the_snapshot_in_one_step(tmp_path: Path) -> None:
    """A reader that has the old file open keeps it whole; the new one holds both."""
    sink = begun(tmp_path)
    sink.observe(forward(0, measurement(0)))
    path = tmp_path / "snapshots" / "000000.json"
    with path.open() as old:
        sink.observe(backward(0, measurement(0, Signal.OUTPUT_GRADIENT)))
        assert json.load(old)["state"] == "forward_complete"
    snapshot = read(path)
    (call,) = snapshot["modules"]["layer99"]
    assert (snapshot["state"], snapshot["collection_duration_ms"]) == ("backward_observed", 750.0)
    assert (snapshot["loss_scale"], snapshot["scale_provenance"]) == (1024.0, "gradscaler")
    assert (list(call["outputs"]), list(call["output_gradients"])) == (["output"], ["grad_output"])
    assert [one.name for one in path.parent.iterdir()] == ["000000.json"]


def test_a_second_traversal_stands_beside_the_first(tmp_path: Path) -> None:
    """Neither loss of two overwrites the other's gradients."""
    sink = begun(tmp_path)
    sink.observe(forward(0, measurement(0)))
    sink.observe(backward(0, measurement(0, Signal.OUTPUT_GRADIENT), settled=False))
    sink.observe(backward(0, measurement(0, Signal.OUTPUT_GRADIENT, backward_index=1), index=1))
    (call,) = read(tmp_path / "snapshots" / "000000.json")["modules"]["layer99"]
    assert list(call["output_gradients"]) == ["grad_output", "grad_output/backward_1"]


def test_a_backward_whose_forward_was_dropped_is_kept(tmp_path: Path) -> None:
    """A full queue may have taken the first delivery."""
    sink = begun(tmp_path)
    sink.observe(backward(3, measurement(0, Signal.OUTPUT_GRADIENT)))
    snapshot = read(tmp_path / "snapshots" / "000003.json")
    assert (snapshot["state"], snapshot["modules"]["layer99"][0]["outputs"]) == ("backward_observed", {})


def test_a_missed_sample_leaves_no_snapshot(tmp_path: Path) -> None:
    """Nothing was measured."""
    begun(tmp_path).observe(dataclasses.replace(forward(0), state=SampleState.MISSED))
    assert not (tmp_path / "snapshots").exists()


def test_errors_stand_in_the_snapshot_after_them(tmp_path: Path) -> None:
    """Each once; what comes after the last is added to it at the end."""
    sink = begun(tmp_path)
    sink.observe(forward(0))
    sink.error(ErrorRecord("reducer", "a", "ValueError", "odd", "2026-01-01T00:00:00Z"))
    sink.observe(forward(1))
    sink.error(ErrorRecord("sampler", "", "RuntimeError", "late", "2026-01-01T00:00:01Z"))
    assert sink.finish(1.0, complete=True)
    sink.close()

    errors = [read(tmp_path / "snapshots" / f"00000{number}.json")["errors"] for number in range(2)]
    assert errors[0] == []
    assert errors[1][0] == {
        "timestamp": "2026-01-01T00:00:00Z",
        "module": "a",
        "probe": "reducer",
        "exception_type": "ValueError",
        "message": "odd",
    }
    assert errors[1][1]["module"] == {"status": "absent", "reason": "the error is not of one module"}
    assert len(errors[1]) == 2


def test_errors_are_bounded_and_those_left_out_counted(tmp_path: Path) -> None:
    """A snapshot cannot grow without end."""
    sink = begun(tmp_path)
    for number in range(130):
        sink.error(ErrorRecord("reducer", "a", "ValueError", str(number)))
    sink.observe(forward(0))
    snapshot = read(tmp_path / "snapshots" / "000000.json")
    assert (len(snapshot["errors"]), snapshot["errors"][0]["message"]) == (100, "30")
    assert snapshot["errors_left_out"] == 30


def test_several_ranks_have_folders_of_their_own(tmp_path: Path) -> None:
    """One description of the run lies above them."""
    for rank in range(2):
        sink = SnapshotSink(tmp_path)
        sink.place(Identity(rank, 2, rank, "node-a", f"{rank:08x}"), claim())
        sink.initialize(run_record(), (module(0),))
        sink.observe(forward(rank))
        assert sink.path == str(tmp_path / f"rank-{rank:03d}")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")) == [
        "rank-000/modules.json",
        "rank-000/snapshots/000000.json",
        "rank-001/modules.json",
        "rank-001/snapshots/000001.json",
        "run.json",
    ]


def test_rank_0_alone_uses_the_folder_itself(tmp_path: Path) -> None:
    """As the run's own folder does under that policy."""
    sink = SnapshotSink(tmp_path)
    sink.place(Identity(0, 2, 0, "node-a", "1a2b3c4d"), claim())
    sink.initialize(dataclasses.replace(run_record(), rank_policy="rank0"), ())
    assert sink.path == str(tmp_path)


def test_another_run_goes_beside_and_the_same_one_goes_on(tmp_path: Path) -> None:
    """Nothing of another run is touched."""
    begun(tmp_path, run_id="first").observe(forward(0))
    before = (tmp_path / "run.json").read_bytes()
    again = begun(tmp_path, run_id="first")
    other = begun(tmp_path, run_id="second")
    other.observe(forward(0))
    assert again.path == str(tmp_path)
    assert other.path == str(tmp_path / "run-second")
    assert (tmp_path / "run-second" / "snapshots" / "000000.json").exists()
    assert (tmp_path / "run.json").read_bytes() == before


def test_the_runs_own_folder_is_left_alone(tmp_path: Path) -> None:
    """Snapshots given the same folder go into one of their own in it."""
    begin_run(LocalStorage(str(tmp_path)))
    sink = begun(tmp_path)
    assert sink.path == str(tmp_path / "run-run-1")


def test_a_restart_keeps_the_snapshots_of_the_first_start(tmp_path: Path) -> None:
    """Sample ids of another generation are others."""
    begun(tmp_path).observe(forward(0))
    sink = SnapshotSink(tmp_path)
    sink.place(ALONE, dataclasses.replace(claim(1), alone=True))
    sink.initialize(run_record(), ())
    sink.observe(forward(0))
    names = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
    assert names == ["000000.json", "1000000000.json"]


def test_the_writer_thread_gives_it_samples_errors_and_modules(tmp_path: Path) -> None:
    """It takes what stands around samples too, and knows its rank."""
    assert issubclass(SnapshotSink, TelemetrySink)
    assert issubclass(SnapshotSink, RankAware)
    delivery = Delivery()
    delivery.put_error(ErrorRecord("reducer", "a", "ValueError", "odd"))
    delivery.put_sample(Resolved(forward(0, measurement(0))))
    delivery.put_modules((module(0), module(1)))
    sink = SnapshotSink(tmp_path)
    delivery.start(run_record(), [sink], identity=ALONE, claim=CLAIM)
    assert delivery.close(30.0)
    assert delivery.pending_error() is None
    assert list(read(tmp_path / "modules.json")) == ["layer98", "layer99"]
    assert len(read(tmp_path / "snapshots" / "000000.json")["errors"]) == 1


def test_a_file_that_is_no_snapshot_is_not_written_over(tmp_path: Path) -> None:
    """The backward fails, and says so."""
    sink = begun(tmp_path)
    sink.observe(forward(0))
    path = tmp_path / "snapshots" / "000000.json"
    for text, error in (("[]", TypeError), ("{", ValueError)):
        path.write_text(text)
        with pytest.raises(error):
            sink.observe(backward(0))
        assert path.read_text() == text


@pytest.mark.parametrize("output_dir", [None, 3, "", "s3://key:hidden@bucket/run"])
def test_what_is_no_local_folder_is_refused(output_dir) -> None:
    """Without telling secrets."""
    with pytest.raises(ConfigurationError, match=r"SnapshotSink\(") as raised:
        SnapshotSink(output_dir)
    assert "hidden" not in str(raised.value)


def test_parameters_and_their_gradients_stand_under_their_signals(tmp_path: Path) -> None:
    """What a step finds comes into the same file, with the factor that is left, and changes no state."""
    sink = begun(tmp_path)
    weight = measurement(0, Signal.PARAMETER, tensor_path="weight")
    gradient = measurement(0, Signal.PARAMETER_GRADIENT, tensor_path="weight", stage="reduced")
    sink.observe(forward(0, weight, measurement(0, Signal.INPUT, tensor_path="input")))
    sink.observe(dataclasses.replace(backward(0, gradient), loss_scale=8.0))
    sink.observe(at_step(0, dataclasses.replace(gradient, stage="applied")))
    snapshot = read(tmp_path / "snapshots" / "000000.json")
    (call,) = snapshot["modules"]["layer99"]
    assert list(call["parameters"]) == ["weight"]
    assert list(call["inputs"]) == ["input"]
    gradients = call["parameter_gradients"]
    assert {path: one["loss_scale"] for path, one in gradients.items()} == {
        "weight/reduced": 8.0,
        "weight/applied": 1.0,
    }
    assert (snapshot["state"], snapshot["loss_scale"]) == ("backward_observed", 8.0)


def test_a_tensor_that_json_cannot_hold_does_not_cost_the_others(tmp_path: Path) -> None:
    """The snapshot names it among its errors and has the rest."""
    sink = begun(tmp_path)
    odd = dataclasses.replace(measurement(1), shape=(2, object()))  # type: ignore[arg-type]
    sink.observe(forward(0, odd, measurement(0)))
    snapshot = read(tmp_path / "snapshots" / "000000.json")
    assert list(snapshot["modules"]["layer99"][0]["outputs"]) == ["output"]
    assert snapshot["modules"]["layer98"][0]["outputs"] == {}
    (error,) = snapshot["errors"]
    assert (error["module"], error["probe"], error["exception_type"]) == ("layer98", "snapshot", "TypeError")
