"""A run as Polars frames."""

import os
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from torchinstruments.errors import ConfigurationError, RunFormatError
from torchinstruments.merge.engine import merge_run
from torchinstruments.store.filesystem import open_storage
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.run import open_run
from unit.store.folders import begin_run, samples, write_rank, writer
from unit.store.material import backward, forward, measurement, run_record

PART = "part-00000000-000000.parquet"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run of two ranks."""
    storage = LocalStorage(str(tmp_path))
    begin_run(storage)
    for rank in range(2):
        write_rank(storage, rank)
    return tmp_path


def test_history_has_every_scalar_of_every_rank(folder: Path) -> None:
    """Each rank's values are its own, and text is text."""
    history = open_run(str(folder)).history().collect()

    assert history.height == 2 * 3 * 4 * 3
    assert history.schema["layer"] == pl.String
    assert history.schema["timestamp"] == pl.Datetime("us", "UTC")
    means = history.filter(
        pl.col("metric") == "mean", pl.col("signal") == "output", pl.col("layer") == "layer99"
    )
    assert means.select("rank", "sample_id", "value").rows() == [
        (0, 0, 0.0), (0, 1, 0.125), (0, 2, 0.25), (1, 0, 1.0), (1, 1, 1.125), (1, 2, 1.25),
    ]  # fmt: skip


def test_samples_and_steps_are_read_too(folder: Path) -> None:
    """One row a sample and one an attempt, of each rank."""
    run = open_run(str(folder))

    assert run.samples().select("rank", "sample_id", "num_backwards", "rows").collect().rows() == [
        (rank, sample, 1, 12) for rank in range(2) for sample in range(3)
    ]
    assert run.steps().select("rank", "attempt", "outcome").collect().rows() == [
        (rank, attempt, "applied") for rank in range(2) for attempt in range(3)
    ]


def test_a_table_without_parts_is_an_empty_frame_with_its_columns(folder: Path) -> None:
    """A query over fingerprints works before there are any."""
    fingerprints = open_run(str(folder)).fingerprints().collect()

    assert fingerprints.height == 0
    assert fingerprints.schema["digest"] == pl.UInt64


def test_frames_are_lazy_and_see_only_what_is_asked_for(folder: Path) -> None:
    """A filter and a selection give the rows that reading everything would."""
    run = open_run(str(folder))
    query = pl.col("rank") == 1, pl.col("metric") == "std"

    found = run.history().filter(*query).select("sample_id", "layer", "value").collect()

    assert_frame_equal(found, run.history().collect().filter(*query).select("sample_id", "layer", "value"))
    assert found.height == 12


def test_a_superseded_row_of_a_sample_is_left_out(tmp_path: Path) -> None:
    """Of several rows of one sample the one with the largest sums counts, wherever it lies."""
    storage = LocalStorage(str(tmp_path))
    begin_run(storage)
    one = writer(storage, 0)
    one.start(run_record(), ())
    one.add_sample(forward(0, measurement()))
    one.flush()
    one.add_sample(backward(0, measurement(), settled=False))
    one.flush()
    one.add_sample(backward(0, measurement(), index=1))
    one.close(0)

    run = open_run(str(tmp_path))

    assert len(run.inventory.ranks[0].parts["samples"]) == 3
    found = run.samples().select("sample_id", "state", "num_backwards", "rows").collect()
    assert found.rows() == [(0, "backward_observed", 2, 9)]


def test_a_row_that_says_more_at_equal_sums_supersedes(tmp_path: Path) -> None:
    """A sample that failed after its forward has the same rows, but another state."""
    storage = LocalStorage(str(tmp_path))
    begin_run(storage)
    one = writer(storage, 0)
    one.start(run_record(), ())
    one.add_sample(forward(0))
    one.flush()
    one.add_sample(backward(0))
    one.close(0)

    assert open_run(str(tmp_path)).samples().collect()["state"].to_list() == ["backward_observed"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"", "empty_file"), (b"PAR1 and then nothing", "truncated"), (b"not parquet at all", "not_parquet")],
)
def test_a_broken_part_is_quarantined_and_the_rest_is_read(folder: Path, data: bytes, reason: str) -> None:
    """One bad file does not fail a scan of all ranks."""
    (folder / "rank-000" / "history.parts" / PART).write_bytes(data)

    run = open_run(str(folder))

    assert run.history().select("rank").unique().collect()["rank"].to_list() == [1]
    assert [(aside.path, aside.reason) for aside in run.quarantined] == [
        (f"rank-000/history.parts/{PART}", reason)
    ]


def test_a_part_of_another_rank_is_quarantined(folder: Path) -> None:
    """A file that was moved by hand would give rows to the wrong rank's folder."""
    source = folder / "rank-001" / "steps.parts" / "part-00000001-000000.parquet"
    source.rename(folder / "rank-000" / "steps.parts" / source.name)

    (aside,) = open_run(str(folder)).quarantined

    assert aside.reason == "misplaced: it is of rank 1"


def test_quarantine_names_documents_too(folder: Path) -> None:
    """A catalog that cannot be read stands beside the parts that cannot."""
    (folder / "rank-000" / "modules-00000000.json").write_bytes(b"{")
    (folder / "rank-001" / "process-00000001.json").write_bytes(b"")

    run = open_run(str(folder))

    assert sorted(aside.path for aside in run.quarantined) == [
        "rank-000/modules-00000000.json",
        "rank-001/process-00000001.json",
    ]


def test_a_run_tells_who_took_part(folder: Path) -> None:
    """Ranks, generations, manifests, modules and status come without reading a part."""
    run = open_run(str(folder))

    assert run.ranks == (0, 1)
    assert [record.generation for record in run.generations] == [0]
    assert [manifest.process for manifest in run.manifests] == ["00000000", "00000001"]
    assert run.status == {"00000000": "closed", "00000001": "closed"}
    assert [module.layer for module in run.modules()[1]] == ["layer99", "layer98"]
    assert repr(run) == f"<Run 'run-1': 2 ranks, {folder}>"


def test_a_running_process_is_seen_as_running(tmp_path: Path) -> None:
    """A folder can be read while it is written."""
    storage = LocalStorage(str(tmp_path))
    begin_run(storage)
    one = writer(storage, 0, buffer_rows=1)
    one.start(run_record(), ())
    for delivery in samples(1):
        one.add_sample(delivery)

    run = open_run(str(tmp_path))

    assert run.status == {"00000000": "running"}
    assert run.history().collect().height == 12


def test_a_world_of_one_is_read_from_the_runs_own_folder(tmp_path: Path) -> None:
    """Both layouts give the same frames."""
    storage = LocalStorage(str(tmp_path))
    begin_run(storage, world_size=1)
    write_rank(storage, 0, alone=True, world_size=1)

    run = open_run(str(tmp_path))

    assert run.history().collect().height == 36
    assert run.quarantined == ()


def test_several_folders_are_read_as_one_run(tmp_path: Path) -> None:
    """Rows of all hosts are in one frame."""
    for rank, name in enumerate(("host a", "host=b")):
        storage = LocalStorage(str(tmp_path / name))
        begin_run(storage)
        write_rank(storage, rank)

    run = open_run(str(tmp_path / "host a"), str(tmp_path / "host=b"))

    assert run.history().collect()["rank"].unique().sort().to_list() == [0, 1]
    assert run.urls == (str(tmp_path / "host a"), str(tmp_path / "host=b"))


def test_a_run_in_a_store_in_memory_gives_the_same_rows(folder: Path) -> None:
    """Frames read through whatever filesystem the run lies on."""
    url = f"memory://run-{os.getpid()}"
    memory = open_storage(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            memory.create(path.relative_to(folder).as_posix(), path.read_bytes())

    remote, local = open_run(url), open_run(str(folder))

    assert_frame_equal(remote.history().collect(), local.history().collect())
    assert_frame_equal(remote.samples().collect(), local.samples().collect())


def test_no_folder_at_all_is_refused() -> None:
    """The sentence says what to give."""
    with pytest.raises(ConfigurationError, match=r"open_run\(\) names no folder; give the folder"):
        open_run()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """The sentence names the folder."""
    with pytest.raises(RunFormatError, match="holds no run"):
        open_run(str(tmp_path))


def test_the_result_of_the_last_merge_is_read_back(folder: Path) -> None:
    """What the merge returned is what lies there, and its coverage is one of its sections."""
    merged = merge_run(str(folder))

    run = open_run(str(folder))

    assert run.result() == merged.result
    assert run.coverage() == merged.result["coverage"]
    assert run.coverage()["present_ranks"] == [0, 1]


def test_of_several_folders_the_first_has_the_result(tmp_path: Path) -> None:
    """The merge leaves it in the first folder that it was given."""
    urls = [str(tmp_path / name) for name in ("a", "b")]
    for rank, url in enumerate(urls):
        storage = LocalStorage(url)
        begin_run(storage)
        write_rank(storage, rank)
    merged = merge_run(*urls)

    assert open_run(*urls).result() == merged.result
    with pytest.raises(RunFormatError, match=f"`torchinstruments merge {urls[1]} {urls[0]}` first"):
        open_run(*reversed(urls)).result()


def test_without_a_merge_there_is_no_result(folder: Path) -> None:
    """Both say which command makes one."""
    run = open_run(str(folder))

    for ask in (run.result, run.coverage):
        with pytest.raises(
            RunFormatError, match=f"was not merged; run `torchinstruments merge {folder}` first"
        ):
            ask()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"[1, 2]", "cannot be read"),
        (b"{}", "cannot be read"),
        (b'{"run": {"run_id": "other"}}', "is of run 'other', not of 'run-1'"),
        (b'{"run": {"run_id": "run-1"}}', "has no coverage"),
    ],
)
def test_a_result_that_is_none_is_refused(folder: Path, data: bytes, message: str) -> None:
    """A broken document, and another run's, say so and how to make a new one."""
    (folder / "merged").mkdir()
    (folder / "merged" / "result.json").write_bytes(data)

    with pytest.raises(RunFormatError, match=f"{message}.* again"):
        open_run(str(folder)).coverage()


def test_a_notebook_shows_ranks_and_what_became_of_them(folder: Path) -> None:
    """Folders, ranks and processes as a table, in which no name of a run is markup."""
    hostile = folder / "<img src=x>"
    hostile.mkdir()
    storage = LocalStorage(str(hostile))
    begin_run(storage)
    write_rank(storage, 0)
    page = open_run(str(hostile))._repr_html_()
    assert "<img" not in page
    assert "&lt;img src=x&gt;" in page
    page = open_run(str(folder))._repr_html_()
    assert "<th>ranks</th><td>2 of 2</td>" in page
    assert "<th>processes</th><td>2 closed</td>" in page
