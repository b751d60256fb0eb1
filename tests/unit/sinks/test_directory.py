"""The run's folder as a sink."""

from pathlib import Path

import polars as pl
import pytest

from torchinstruments.config import HistoryConfig
from torchinstruments.records import ErrorRecord, Sample
from torchinstruments.sinks.delivery import Delivery
from torchinstruments.sinks.directory import DirectorySink
from torchinstruments.sinks.sink import TelemetrySink
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.manifest import decode_manifest
from torchinstruments.store.run import open_run
from torchinstruments.store.writer import RankWriter
from unit.store.folders import begin_run, samples, writer
from unit.store.material import MemoryTarget, attempt, claim, identity, module, run_record


def directory_sink(folder: Path, *, copies: bool = True) -> DirectorySink:
    """Returns the sink of rank 0 into a run's folder."""
    storage = LocalStorage(str(folder))
    begin_run(storage)
    return DirectorySink(writer(storage, 0), folder / "rank-000" if copies else None)


class Resolved:
    """A sample whose scalars are on the host."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.num_scalars = sum(len(one.metrics) for one in sample.measurements)

    def resolve(self) -> Sample:
        """Returns the sample."""
        return self.sample


def test_a_directory_sink_takes_what_stands_around_samples_too() -> None:
    """The writer thread recognises it by its methods."""
    assert issubclass(DirectorySink, TelemetrySink)


def test_what_is_put_lies_in_the_folder_after_the_close(tmp_path: Path) -> None:
    """The whole way: queue, thread, sink, writer, parts, frames."""
    delivery = Delivery()
    delivery.put_modules((module(0), module(1)))
    for sample in samples():
        delivery.put_sample(Resolved(sample))
    delivery.put_attempts([attempt(0)])
    delivery.put_error(ErrorRecord("reducer", "layer99", "ValueError", "odd"))

    delivery.start(run_record(), [directory_sink(tmp_path)])
    assert delivery.close(60.0)

    run = open_run(str(tmp_path))
    assert run.history().collect().height == 36
    assert run.samples().collect()["state"].to_list() == ["backward_observed"] * 3
    assert run.steps().collect().height == 1
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


@pytest.mark.parametrize("complete", [True, False], ids=["close", "exit"])
def test_a_folder_that_refuses_rows_counts_them_before_it_closes(complete: bool) -> None:
    """Explicitly closed or at the end of the interpreter: the last manifest tells what was given up."""
    target = MemoryTarget()
    target.refused_tables = {"history"}
    sink = DirectorySink(RankWriter(identity(), claim(), HistoryConfig(), target))
    delivery = Delivery()
    delivery.put_sample(Resolved(samples()[0]))
    delivery.start(run_record(), [sink])

    assert not delivery.close(2.0, complete=complete)

    manifest = decode_manifest(target.last("process-"))
    assert (manifest.status, manifest.counters.rows_dropped) == ("closed", 6)
    assert (manifest.tables["history"].rows_dropped, manifest.tables["samples"].rows_dropped) == (6, 0)
