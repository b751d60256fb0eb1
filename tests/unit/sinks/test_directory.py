"""The run's folder as a sink."""

import dataclasses
import os
from pathlib import Path

import polars as pl
import pytest
import torch

from torchinstruments.config import HistoryConfig
from torchinstruments.observe.fingerprints import Fingerprints
from torchinstruments.records import ClosedAttempt, ErrorRecord
from torchinstruments.sinks.delivery import Delivery
from torchinstruments.sinks.directory import RankFolderSink
from torchinstruments.sinks.event_files import HistogramFiles, _file_version
from torchinstruments.sinks.sink import TelemetrySink
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.manifest import decode_manifest
from torchinstruments.store.run import open_run
from torchinstruments.store.segments import SegmentFiles
from torchinstruments.store.writer import RankWriter
from unit.sinks.deliveries import Resolved, histogram_record, missing_record, with_histograms
from unit.sinks.event_reading import read_histograms
from unit.store.folders import begin_run, samples, writer
from unit.store.material import MemoryTarget, attempt, claim, identity, module, run_record


def directory_sink(folder: Path, *, copies: bool = True) -> RankFolderSink:
    """Returns the sink of rank 0 into a run's folder."""
    storage = LocalStorage(str(folder))
    begin_run(storage)
    return RankFolderSink(writer(storage, 0), folder / "rank-000" if copies else None)


def sink_with_histograms(
    folder: Path, told: list[tuple[str, str]] | None = None, *, first_sample_id: int = 0
) -> RankFolderSink:
    """Returns the sink of rank 0 with event files; failures to write them are kept."""
    storage = LocalStorage(str(folder))
    begin_run(storage)

    def report(probe: str, error: Exception) -> None:
        if told is not None:
            told.append((probe, type(error).__name__))

    files = SegmentFiles(
        folder / "rank-000" / "tensorboard", host="node-a", process="00000000", header=_file_version
    )
    histograms = HistogramFiles(files, first_sample_id=first_sample_id)
    return RankFolderSink(writer(storage, 0), None, histograms=histograms, report=report)


def test_a_directory_sink_takes_what_stands_around_samples_too() -> None:
    """The writer thread recognises it by its methods."""
    assert issubclass(RankFolderSink, TelemetrySink)


def test_what_is_put_lies_in_the_folder_after_the_close(tmp_path: Path) -> None:
    """The whole way: queue, thread, sink, writer, parts, frames."""
    delivery = Delivery()
    delivery.put_modules((module(0), module(1)))
    for sample in samples():
        delivery.put_sample(Resolved(sample))
    delivery.put_attempts([ClosedAttempt(attempt(0))])
    row = ("0.weight", "parameter", "", torch.Size([2]), torch.int8)
    delivery.put_fingerprints(Fingerprints(0, (row,), (2**64 - 1,)))
    delivery.put_error(ErrorRecord("reducer", "layer99", "ValueError", "odd"))

    delivery.start(run_record(), [directory_sink(tmp_path)])
    assert delivery.close(60.0)

    run = open_run(str(tmp_path))
    assert run.history().collect().height == 36
    assert run.samples().collect()["state"].to_list() == ["backward_observed"] * 3
    assert run.steps().collect().height == 1
    assert run.fingerprints().collect()["digest"].to_list() == [2**64 - 1]
    (manifest,) = run.manifests
    assert (manifest.status, manifest.counters.errors) == ("closed", {"reducer": 1})
    assert [one.layer for one in run.modules()[0]] == ["layer99", "layer98"]
    assert run.quarantined == ()


def test_an_explicit_close_leaves_a_copy_for_people(tmp_path: Path) -> None:
    """``history.parquet`` lies beside the parts."""
    sink = directory_sink(tmp_path)
    sink.initialize(run_record(), ())
    for sample in samples():
        sink.observe(sample)

    sink.close()

    assert pl.read_parquet(tmp_path / "rank-000" / "history.parquet").height == 36


def test_the_end_of_the_interpreter_leaves_no_copy(tmp_path: Path) -> None:
    """Only what is needed is done then: rows and the manifest."""
    sink = directory_sink(tmp_path)
    sink.initialize(run_record(), ())
    sink.observe(samples()[0])

    assert sink.finish(5.0, complete=False)

    assert not (tmp_path / "rank-000" / "history.parquet").exists()
    assert open_run(str(tmp_path)).manifests[0].status == "closed"


def test_a_remote_folder_gets_no_copy(tmp_path: Path) -> None:
    """Without a local folder there is nowhere to put it."""
    sink = directory_sink(tmp_path, copies=False)
    sink.initialize(run_record(), ())
    sink.observe(samples()[0])

    sink.close()

    assert not (tmp_path / "rank-000" / "history.parquet").exists()


def test_finishing_twice_gives_the_same_answer(tmp_path: Path) -> None:
    """The second time nothing is done."""
    sink = directory_sink(tmp_path)
    sink.initialize(run_record(), ())

    assert sink.finish(5.0, complete=True)
    assert sink.finish(5.0, complete=True)


def test_histograms_lie_beside_the_rows(tmp_path: Path) -> None:
    """The directory of the rank is what TensorBoard is pointed to; readers of the run leave it alone."""
    sink = sink_with_histograms(tmp_path, first_sample_id=10)
    sink.initialize(run_record(), ())
    for sample in samples():
        sink.observe(with_histograms(sample, histogram_record()))

    assert sink.flush()
    assert sink.finish(5.0, complete=True)

    (events,) = read_histograms(tmp_path / "rank-000" / "tensorboard").values()
    assert [event.step for event in events] == [10, 10, 11, 11, 12, 12]
    run = open_run(str(tmp_path))
    assert run.quarantined == ()
    assert run.inventory.strange == ()
    assert run.history().collect().height == 36


def test_a_histogram_that_fails_is_an_error_with_its_reason_listed_once(tmp_path: Path) -> None:
    """It is counted every time; another tensor is listed too."""
    sink = sink_with_histograms(tmp_path)
    sink.initialize(run_record(), ())
    for ordinal in range(3):
        missing = (missing_record("reducer_error: no"), missing_record("one of its own", layer="b"))
        sink.observe(with_histograms(samples()[2 * ordinal], histogram_record(), *missing))
    sink.finish(5.0, complete=True)

    (manifest,) = open_run(str(tmp_path)).manifests
    assert manifest.counters.errors == {"histogram": 6}
    assert manifest.counters.histograms_missing == {}
    assert [(one.probe, one.module, one.type, one.message) for one in manifest.errors] == [
        ("histogram", "block/0", "reducer_error", "distribution of output: reducer_error: no"),
        ("histogram", "b", "one of its own", "distribution of output: one of its own"),
    ]


def test_a_histogram_of_a_tensor_that_has_nothing_to_show_is_counted_and_no_error(tmp_path: Path) -> None:
    """Its tensor's numbers are missing for the same reason; manifest and page count it by that."""
    sink = sink_with_histograms(tmp_path)
    sink.initialize(run_record(), ())
    reasons = ("empty", "no_gradient", "no_gradient", "unsupported_dtype: complex64")
    sink.observe(with_histograms(samples()[0], histogram_record(), *map(missing_record, reasons)))
    sink.finish(5.0, complete=True)

    (manifest,) = open_run(str(tmp_path)).manifests
    assert manifest.counters.histograms_missing == {"empty": 1, "no_gradient": 2, "unsupported_dtype": 1}
    assert manifest.counters.errors == {}
    assert manifest.errors == ()
    page = (tmp_path / "rank-000" / "index.md").read_text()
    assert "* Histograms without entries: empty 1, no_gradient 2, unsupported_dtype 1\n" in page
    assert "0 in all." in page


def test_histograms_that_cannot_be_written_harm_no_row(tmp_path: Path) -> None:
    """A file where the folder should be: each histogram is counted, the owner is told once."""
    (tmp_path / "rank-000").mkdir()
    (tmp_path / "rank-000" / "tensorboard").write_text("in the way")
    told: list[tuple[str, str]] = []
    sink = sink_with_histograms(tmp_path, told)
    sink.initialize(run_record(), ())
    for sample in samples():
        sink.observe(with_histograms(sample, histogram_record(), histogram_record("b")))
    assert sink.finish(5.0, complete=True)

    assert told == [("storage", "FileExistsError")]
    run = open_run(str(tmp_path))
    assert run.history().collect().height == 36
    assert run.manifests[0].counters.errors == {"histogram": 12}
    assert [one.type for one in run.manifests[0].errors] == ["FileExistsError", "FileExistsError"]


def test_event_files_that_were_deleted_are_told_at_the_flush(tmp_path: Path) -> None:
    """The kernel takes writes to a file that nobody will ever see."""
    told: list[tuple[str, str]] = []
    sink = sink_with_histograms(tmp_path, told)
    sink.initialize(run_record(), ())
    sink.observe(with_histograms(samples()[0], histogram_record()))
    (path,) = (tmp_path / "rank-000" / "tensorboard").iterdir()
    os.unlink(path)

    assert not sink.flush()
    sink.observe(with_histograms(samples()[2], histogram_record()))
    assert sink.flush()

    assert told == [("storage", "FileNotFoundError")]
    (events,) = read_histograms(tmp_path / "rank-000" / "tensorboard").values()
    assert [event.step for event in events] == [1]


def test_a_record_that_cannot_be_encoded_takes_no_other_with_it(tmp_path: Path) -> None:
    """It is missing with what went wrong."""
    sink = sink_with_histograms(tmp_path)
    sink.initialize(run_record(), ())
    broken = dataclasses.replace(histogram_record("broken"), edges=(0.0,))
    sink.observe(with_histograms(samples()[0], broken, histogram_record("fine")))
    sink.finish(5.0, complete=True)

    assert list(read_histograms(tmp_path / "rank-000" / "tensorboard")) == [
        "torchinstruments/modules/fine/call_0/output/histograms/distribution"
    ]
    (error,) = open_run(str(tmp_path)).manifests[0].errors
    assert (error.module, error.type) == ("broken", "ValueError")


@pytest.mark.parametrize("complete", [True, False], ids=["close", "exit"])
def test_a_folder_that_refuses_rows_counts_them_before_it_closes(complete: bool) -> None:
    """Explicitly closed or at the end of the interpreter: the last manifest tells what was given up."""
    target = MemoryTarget()
    target.refused_tables = {"history"}
    sink = RankFolderSink(RankWriter(identity(), claim(), HistoryConfig(), target))
    delivery = Delivery()
    delivery.put_sample(Resolved(samples()[0]))
    delivery.start(run_record(), [sink])

    assert not delivery.close(2.0, complete=complete)

    manifest = decode_manifest(target.last("process-"))
    assert (manifest.status, manifest.counters.rows_dropped) == ("closed", 6)
    assert (manifest.tables["history"].rows_dropped, manifest.tables["samples"].rows_dropped) == (6, 0)
