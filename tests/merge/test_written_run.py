"""The merge over what the real writer wrote."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merge.run_folder import RunFolder, process_of
from torchinstruments.config import HistoryConfig
from torchinstruments.merge.engine import merge_run
from torchinstruments.records import (
    Claim,
    Execution,
    GradSync,
    Identity,
    Measurement,
    ModuleRecord,
    Position,
    Sample,
    SampleState,
    ScaleProvenance,
    Scope,
    Signal,
    StepProvenance,
)
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.local_target import LocalTarget
from torchinstruments.store.writer import RankWriter
from unit.store.material import run_record

_START_US = 1_767_225_600_000_000


def sample(ordinal: int, value: float, *, of_backward: bool) -> Sample:
    """One delivery of a sample of one layer: its output, or its gradient."""
    signal = Signal.OUTPUT_GRADIENT if of_backward else Signal.OUTPUT
    measurement = Measurement(
        layer="fc",
        layer_index=0,
        call_index=0,
        signal=signal,
        stage="",
        tensor_path="grad_output.0" if of_backward else "output",
        backward_index=0,
        timestamp_us=_START_US + ordinal,
        mode="train",
        grad_enabled=True,
        scope=Scope.LOCAL,
        replica_key="",
        execution=Execution.EAGER,
        shape=(8, 4),
        dtype="float32",
        device="cpu",
        metrics=("mean", "std"),
        values=(value, None),
        reasons=("", "overflow"),
    )
    return Sample(
        ordinal=ordinal,
        position=Position(ordinal, 0, 0, ordinal, grad_enabled=True, step_provenance=StepProvenance.INFERRED),
        started_at_us=_START_US + ordinal,
        state=SampleState.BACKWARD_OBSERVED if of_backward else SampleState.FORWARD_COMPLETE,
        backward_index=0 if of_backward else None,
        grad_sync=GradSync.SYNCED,
        loss_scale=None,
        scale_provenance=ScaleProvenance.NONE_SEEN,
        collection_s=0.0,
        errors=0,
        modules_expected=1,
        modules_fired=1,
        settled=of_backward,
        measurements=(measurement,),
    )


def write_rank(run: RunFolder, rank: int, num_samples: int) -> None:
    """Writes a rank whose gradients lie in the part after their outputs, the last sample's first."""
    process = process_of(rank)
    storage = LocalStorage(run.url)
    writer = RankWriter(
        Identity(rank, run.world_size, rank, "host-a", process),
        Claim(run.url, run.run_id, 0, 0, verified=True),
        HistoryConfig(buffer_rows=8, window=run.window),
        LocalTarget(storage, run.folder(rank), process),
    )
    writer.start(run_record(), [ModuleRecord("fc", "Linear", (), 10, 10)])
    for ordinal in range(num_samples):
        writer.add_sample(sample(ordinal, 10.0 * rank + ordinal, of_backward=False))
    writer.flush()
    for ordinal in reversed(range(num_samples)):
        writer.add_sample(sample(ordinal, -10.0 * rank - ordinal, of_backward=True))
    writer.set_modules([dataclasses.replace(ModuleRecord("fc", "Linear", (), 10, 10), fired=num_samples)])
    writer.close(10.0)


def test_what_ranks_wrote_is_what_the_merge_says(tmp_path: Path) -> None:
    """What two writers left, gradients late and in reverse, merges into each rank's own values."""
    run = RunFolder(tmp_path / "run", world_size=2, window=2).run()
    run.generation()
    for rank in range(2):
        write_rank(run, rank, 6)
    merged = merge_run(run.url)
    coverage: Any = merged.result["coverage"]
    ranks: Any = merged.result["ranks"]
    layers: Any = merged.result["layers"]
    assert merged.complete, coverage
    assert [(rank["status"], rank["samples"], rank["rows"]) for rank in ranks] == [("closed", 6, 24)] * 2
    assert coverage["alignment"]["share_common_to_all_ranks"] == 1.0
    assert coverage["disagreements"] == coverage["modules_never_fired"] == []
    output, gradient = layers[0]["tensors"]
    assert (output["latest_shape"], gradient["tensor_path"]) == ("8x4", "grad_output.0")
    own = output["statistics"][0]["ranks"]
    assert [own[rank]["latest"]["value"] for rank in ("0", "1")] == [5.0, 15.0]
    assert [own[rank]["recent_window"]["mean"] for rank in ("0", "1")] == [4.5, 14.5]
    late = gradient["statistics"][0]
    assert late["ranks"]["1"]["first"]["value"] == -10.0
    assert late["ranks"]["1"]["latest"]["sample_id"] == 5
    assert late["ranks"]["1"]["previous_window"]["mean"] == -12.5
    assert late["across_ranks"]["lowest"] == {"rank": 1, "value": -15.0, "sample_id": 5}
    missing = output["statistics"][1]["ranks"]["0"]["latest"]
    assert (missing["value"], missing["unavailable_reason"]) == (None, "overflow")


@given(st.permutations([(ordinal, of_backward) for ordinal in range(7) for of_backward in (False, True)]))
@settings(max_examples=25, deadline=None)
def test_a_processes_own_result_is_what_the_merge_says_of_its_rank(
    tmp_path_factory: pytest.TempPathFactory, deliveries: list[tuple[int, bool]]
) -> None:
    """In whichever order forwards and backwards come, both summaries of a rank are the same."""
    run = RunFolder(tmp_path_factory.mktemp("run") / "run", window=2).run()
    storage = LocalStorage(run.url)
    writer = RankWriter(
        Identity(0, 1, 0, "host-a", process_of(0)),
        Claim(run.url, run.run_id, 0, 0, verified=True),
        HistoryConfig(buffer_rows=5, window=run.window),
        LocalTarget(storage, run.folder(0), process_of(0)),
    )
    writer.start(run_record(), [ModuleRecord("fc", "Linear", (), 10, 10)])
    for ordinal, of_backward in deliveries:
        writer.add_sample(sample(ordinal, float(ordinal * ordinal % 5), of_backward=of_backward))
    writer.close(10.0)

    own: Any = json.loads(storage.read("result.json"))
    layers: Any = merge_run(run.url).result["layers"]
    merged = [
        {statistic["metric"]: statistic["ranks"]["0"] for statistic in tensor["statistics"]}
        for tensor in layers[0]["tensors"]
    ]
    found = [{one.pop("metric"): one for one in tensor["statistics"]} for tensor in own[0]["tensors"]]
    assert found == merged
    assert found[0]["mean"]["observations"] == 7
