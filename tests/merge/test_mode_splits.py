"""Forwards that ranks ran in different modes, against which ranks wrote which rows."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from merge.run_folder import RunFolder, process_of
from torchinstruments.merge import comparison_plan
from torchinstruments.merge.engine import merge_run
from torchinstruments.records import Member
from torchinstruments.report.document import as_record
from torchinstruments.report.findings import finding_lines

Row = dict[str, Any]


def bare_run(root: Path, ranks: int) -> RunFolder:
    """A run without rows."""
    run = RunFolder(root, world_size=ranks).run()
    run.generation(
        0, [Member(rank, process_of(rank), "host-a", rank, observing=True) for rank in range(ranks)]
    )
    for rank in range(ranks):
        run.manifest(rank, process_of(rank))
    return run


def split_run(root: Path, ranks: int = 3) -> RunFolder:
    """A run whose frozen part is in eval everywhere, and whose rank 1 is so altogether from attempt 2 on.

    Gradients, of which rank 1 has none then, lie in a later part than their forwards.
    """
    run = bare_run(root, ranks)
    for rank in range(ranks):
        outputs: list[Row] = []
        gradients: list[Row] = []
        for attempt in range(5):
            row: Row = {"sample_id": attempt, "attempt": attempt, "value": rank + attempt / 8}
            is_off = rank == 1 and attempt >= 2
            outputs.append(row | {"layer": "frozen", "mode": "eval"})
            outputs += [row | {"layer": one, "mode": "eval" if is_off else "train"} for one in ("a", "b")]
            if not is_off:
                gradients.append(row | {"layer": "a", "signal": "output_gradient"})
        run.history(rank, outputs, process_of(rank))
        run.history(rank, gradients, process_of(rank), sequence=1)
    return run


def test_ranks_in_different_modes_are_a_fact_of_their_own(tmp_path: Path) -> None:
    """The forwards are counted, the first one names each mode's ranks, and people read it at once."""
    merged = merge_run(split_run(tmp_path / "run").url)
    assert merged.forwards_in_different_modes == 3
    first = merged.first_mode_split
    assert first is not None
    assert (first.generation, first.attempt, first.forward_in_attempt, first.forward_index) == (0, 2, 0, None)
    assert (first.layer, first.num_layers) == ("a", 2)
    assert [(one.value, one.ranks, one.num_ranks) for one in first.values] == [
        ("eval", "1", 1),
        ("train", "0,2", 2),
    ]
    assert dict(finding_lines(dict(merged.result)))["modes"] == (
        "DIFFER in 3 forwards, not compared for that, first in generation 0, attempt 2, forward 0: "
        "eval on rank 1, train on ranks 0,2, in a and 1 further layer"
    )
    told = "modes: DIFFER in 3 forwards, which are not compared, first at generation 0, attempt 2, forward 0"
    assert told in repr(merged)
    assert told.removeprefix("modes: ") in (tmp_path / "run/merged/index.md").read_text()


def test_every_cut_and_executor_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the run is cut into stretches, and whoever compares them."""
    run = split_run(tmp_path / "run")
    whole = merge_run(run.url).to_dict()
    monkeypatch.setattr(comparison_plan, "MAX_BLOCK_CELLS", 1)
    monkeypatch.setattr(comparison_plan, "MAX_TASK_CELLS", 1)
    with ThreadPoolExecutor(2) as pool:
        cut = merge_run(run.url, executor=pool).to_dict()
    for name in ("forwards_in_different_modes", "first_in_different_modes"):
        assert as_record(whole["comparison"])[name] == as_record(cut["comparison"])[name]


def test_ranks_with_different_layers_are_not_in_different_modes(tmp_path: Path) -> None:
    """A stage of a pipeline in eval, an evaluation on all ranks, parts in either: none is a difference."""
    run = bare_run(tmp_path / "run", 2)
    for rank in range(2):
        row: Row = {"sample_id": 0, "value": 1.0}
        rows = [row | {"layer": "frozen", "mode": "eval"}, row | {"layer": f"stage{rank}"}]
        rows.append(row | {"layer": "own" if rank else "other", "mode": "eval"})
        rows.append(row | {"sample_id": 1, "forward_in_attempt": 1, "layer": f"stage{rank}", "mode": "eval"})
        run.history(rank, rows, process_of(rank))
    merged = merge_run(run.url)
    assert (merged.forwards_in_different_modes, merged.first_mode_split) == (0, None)
    assert "modes" not in dict(finding_lines(dict(merged.result)))
    assert "modes" not in repr(merged)


def test_without_attempts_forwards_are_known_by_their_index(tmp_path: Path) -> None:
    """And parts of sharded tensors, which hold no numbers of whole ones, tell the mode too."""
    run = bare_run(tmp_path / "run", 4)
    for rank in range(4):
        row: Row = {"sample_id": 7, "attempt": None, "forward_in_attempt": 7, "forward_index": 7}
        row |= {"layer": "", "value": 1.0, "scope": "local_shard", "mode": "eval" if rank < 2 else "train"}
        run.history(rank, [row | {"replica_key": f"@{rank % 2}/2"}], process_of(rank))
    merged = merge_run(run.url)
    first = merged.first_mode_split
    assert first is not None
    assert (first.attempt, first.forward_in_attempt, first.forward_index) == (None, None, 7)
    assert [(one.value, one.ranks) for one in first.values] == [("eval", "0-1"), ("train", "2-3")]
    told = dict(finding_lines(dict(merged.result)))["furthest"]
    assert told == "not known: no forward was measured on two ranks in the same mode"
