"""Whether all ranks did the same steps, held to a plain comparison of the rows themselves."""

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from merge.run_folder import RunFolder, process_of
from torchinstruments.errors import StorageError
from torchinstruments.merge import engine, ranges, steps
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.rank_sets import parse_ranks, ranks_text
from torchinstruments.records import GradSync, Outcome

Row = dict[str, Any]

_COLUMNS = ("outcome", "found_inf", "scale_before", "scale_after")


def whole(root: Path, world_size: int = 3) -> RunFolder:
    """A run without rows."""
    run = RunFolder(root, world_size=world_size).run()
    run.generation()
    for rank in range(world_size):
        run.manifest(rank, process_of(rank))
    return run


def steps_of(run: RunFolder) -> dict[str, Any]:
    """Merges a run and returns the section."""
    section: Any = merge_run(run.url).result["steps"]
    return section


def table_of(run: RunFolder) -> pl.DataFrame:
    """The disagreements of the last merge."""
    return pl.read_parquet(run.root / "merged" / "steps.parquet")


def expected_disagreements(rows: dict[int, list[Row]]) -> dict[tuple[int, int], set[tuple[Any, ...]]]:
    """Says in plain Python which attempts ranks disagree on: (generation, attempt) to what and who."""
    found: dict[tuple[int, int], set[tuple[Any, ...]]] = defaultdict(set)
    places = {(row["generation"], row["attempt"]) for own in rows.values() for row in own}
    for place in places:
        there = {
            rank: sorted(
                (row for row in own if (row["generation"], row["attempt"]) == place),
                key=lambda row: (row["optimizer"], row["optimizer_attempt"]),
            )
            for rank, own in rows.items()
        }
        there = {rank: own for rank, own in there.items() if own}
        claims: dict[tuple[Any, ...], dict[int, Any]] = defaultdict(dict)
        for rank, own in there.items():
            claims[None, None, "micro_batches"][rank] = own[0]["micro_batches"]
            claims[None, None, "optimizer_steps"][rank] = sum(row["optimizer"] >= 0 for row in own)
            counts: dict[int, int] = defaultdict(int)
            for row in own:
                step = (row["optimizer"], counts[row["optimizer"]])
                counts[row["optimizer"]] += 1
                for column in _COLUMNS:
                    value = row[column]
                    if value is not None and value != Outcome.UNKNOWN:
                        claims[*step, column][rank] = value
        stepped = {key[:2] for key in claims if key[0] is not None and key[0] >= 0}
        for rank, own in there.items():
            if own[0]["optimizer"] < 0 and stepped and own[0]["outcome"] != Outcome.UNKNOWN:
                for step in stepped:
                    claims[*step, "outcome"][rank] = own[0]["outcome"]
        for (optimizer, step, column), held in claims.items():
            if len(set(held.values())) > 1:
                by_value: dict[Any, list[int]] = defaultdict(list)
                for rank, value in sorted(held.items()):
                    by_value[value].append(rank)
                values = sorted(by_value.items(), key=lambda item: (len(item[1]), item[1][0]))
                found[place].add(
                    (optimizer, step, column, tuple((value, ranks_text(ranks)) for value, ranks in values))
                )
    return dict(found)


def shown_disagreements(section: dict[str, Any]) -> dict[tuple[int, int], set[tuple[Any, ...]]]:
    """Brings the section into the form of `expected_disagreements`."""
    return {
        (one["generation"], one["attempt"]): {
            (
                difference["optimizer"],
                difference["optimizer_step"],
                difference["column"],
                tuple((held["value"], held["ranks"]) for held in difference["values"]),
            )
            for difference in one["differences"]
        }
        for one in section["disagreements"]
    }


def random_steps(seed: int) -> dict[int, list[Row]]:
    """Five ranks, two generations and two optimizers that mostly do the same."""
    generator = random.Random(seed)
    rows: dict[int, list[Row]] = {rank: [] for rank in range(5)}
    for generation in range(2):
        for attempt in range(40):
            if generation == 0 and attempt % 3 == 0:
                optimizers = [0, 1]
            else:
                optimizers = [0, 0] if attempt % 7 == 0 else [0]
            scale = 2.0 ** (16 - attempt // 8)
            for rank, own in rows.items():
                if generator.random() < 0.05:
                    continue
                is_odd = generator.random() < 0.04
                if is_odd and generator.random() < 0.3:
                    row = {"optimizer": -1, "outcome": generator.choice(["abandoned", "unknown"])}
                    own.append(filled(generation, attempt, 0, row))
                    continue
                for step, optimizer in enumerate(optimizers):
                    skipped = is_odd and generator.random() < 0.7
                    row = {
                        "optimizer": optimizer,
                        "micro_batches": 2 + (is_odd and rank == 3),
                        "outcome": "skipped" if skipped else generator.choice(["applied"] * 20 + ["unknown"]),
                        "found_inf": generator.choice([None, float(skipped)]),
                        "scale_before": scale,
                        "scale_after": scale / 2 if skipped else scale,
                    }
                    own.append(filled(generation, attempt, step, row))
    return rows


def filled(generation: int, attempt: int, step: int, row: Row) -> Row:
    """A row with everything that is compared."""
    own: Row = {"generation": generation, "attempt": attempt, "optimizer_attempt": 2 * attempt + step}
    defaults: Row = {"micro_batches": 2, "found_inf": None, "scale_before": None, "scale_after": None}
    return own | defaults | row


def write(run: RunFolder, rows: dict[int, list[Row]], num_parts: int = 3) -> None:
    """Writes the rows of each rank and generation into some parts, a process a generation."""
    for rank, own in rows.items():
        for generation in sorted({row["generation"] for row in own}):
            process = f"{rank:07x}{generation}"
            run.manifest(rank, process, generation=generation)
            chosen = [row for row in own if row["generation"] == generation]
            size = -(-len(chosen) // num_parts)
            for part in range(num_parts):
                if some := chosen[part * size : (part + 1) * size]:
                    run.steps(rank, some, process, part, generation=generation)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_rows", [1_000_000, 40])
def test_every_disagreement_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, max_rows: int
) -> None:
    """Attempts, columns, values and ranks are those of a plain comparison, however the run is cut."""
    monkeypatch.setattr(ranges, "MAX_BLOCK_ROWS", max_rows)
    if max_rows == 40:
        monkeypatch.setattr("torchinstruments.merge.step_rows.STEP_RANGE", 8)
        monkeypatch.setattr(steps, "STEP_RANGE", 8)
    run = RunFolder(tmp_path / "run", world_size=5).run()
    for generation in range(2):
        run.generation(generation)
    rows = random_steps(seed)
    write(run, rows)
    section = steps_of(run)
    expected = expected_disagreements(rows)
    assert len(expected) > 5
    assert shown_disagreements(section) == expected
    assert section["disagreeing_attempts"] == len(expected)
    first = min(expected)
    assert (section["first_disagreement"]["generation"], section["first_disagreement"]["attempt"]) == first
    assert section["same_steps"] is False
    held = [{(row["generation"], row["attempt"]) for row in own} for own in rows.values()]
    everywhere = set.union(*held)
    assert section["compared_attempts"] == sum(sum(one in own for own in held) > 1 for one in everywhere)
    incomplete = [one for one in everywhere if not all(one in own for own in held)]
    assert section["incomplete_attempts"] == len(incomplete)
    shown = section["first_incomplete"]
    assert (shown["generation"], shown["attempt"]) == min(incomplete)
    without = {rank for rank, own in enumerate(held) if min(incomplete) not in own}
    assert parse_ranks(shown["ranks_without_row"]) == without
    for record in section["ranks"]:
        own = rows[record["rank"]]
        counts = {one.value: sum(row["outcome"] == one for row in own) for one in Outcome}
        assert {name: record[name] for name in counts} == counts
        assert record["attempts"] == len({(row["generation"], row["attempt"]) for row in own})
    table = table_of(run)
    told = {(one["generation"], one["attempt"]) for one in table.iter_rows(named=True)}
    assert told == set(expected)
    values = table.filter(pl.col("unavailable_reason") == "")
    assert len(values) == sum(len(one[3]) for found in expected.values() for one in found)


def test_ranks_that_did_the_same_are_not_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal rows the digests suffice; a rank that stopped early is named and disagrees with nobody."""
    run = whole(tmp_path / "run")
    for rank in range(3):
        run.steps(rank, [{"attempt": i} for i in range(3000 - 1000 * (rank == 2))], process_of(rank))

    def refuse(_: object) -> None:
        raise AssertionError("a block was read")

    monkeypatch.setattr(engine, "compare_steps", refuse)
    # Up to a whole number of ranges, so that each is there as a whole or not at all.
    monkeypatch.setattr("torchinstruments.merge.step_rows.STEP_RANGE", 1000)
    monkeypatch.setattr(steps, "STEP_RANGE", 1000)
    section = steps_of(run)
    assert section["same_steps"] is True
    assert section["compared_attempts"] == 3000
    assert section["incomplete_attempts"] == 1000
    assert section["first_incomplete"] == {"generation": 0, "attempt": 2000, "ranks_without_row": "2"}
    assert len(table_of(run)) == 0


def test_a_skipped_step_on_one_rank_is_named_first(tmp_path: Path) -> None:
    """One rank skips: its outcome stands before that of the others; what is not known is no difference."""
    run = whole(tmp_path / "run", 4)
    for rank in range(4):
        rows: list[Row] = [{"attempt": i, "scale_before": 8.0} for i in range(10)]
        rows[6] |= {"found_inf": 0.0}
        if rank == 2:
            rows[6] |= {"outcome": "skipped", "found_inf": 1.0}
        if rank == 1:
            rows[6] |= {"outcome": "unknown", "found_inf": None}
        if rank == 3:
            del rows[8:]
        run.steps(rank, rows, process_of(rank))
    section = steps_of(run)
    [outcome, found_inf] = section["first_disagreement"]["differences"]
    assert section["first_disagreement"]["attempt"] == 6
    assert outcome == {
        "column": "outcome",
        "optimizer": 0,
        "optimizer_step": 0,
        "values": [
            {"value": "skipped", "ranks": "2", "num_ranks": 1},
            {"value": "applied", "ranks": "0,3", "num_ranks": 2},
        ],
        "num_values": 2,
        "ranks_with_further_values": "",
        "ranks_without_value": "1",
    }
    assert [one["value"] for one in found_inf["values"]] == [1.0, 0.0]
    assert section["disagreeing_attempts"] == 1
    assert section["incomplete_attempts"] == 2
    assert section["first_incomplete"] == {"generation": 0, "attempt": 8, "ranks_without_row": "3"}


def test_values_are_never_averaged_over_ranks(tmp_path: Path) -> None:
    """Of scales equal to the rank every single one is named, up to the bound, and no mean of them."""
    run = whole(tmp_path / "run", 20)
    for rank in range(20):
        run.steps(rank, [{"attempt": 0, "scale_before": float(rank)}], process_of(rank))
    [difference] = steps_of(run)["first_disagreement"]["differences"]
    assert [(one["value"], one["ranks"]) for one in difference["values"]] == [
        (float(rank), str(rank)) for rank in range(16)
    ]
    assert (difference["num_values"], difference["ranks_with_further_values"]) == (20, "16-19")
    table = table_of(run)
    assert table["value"].to_list() == [*map(float, range(16)), None]
    assert table.row(-1, named=True)["unavailable_reason"] == "further_values"


def test_steps_after_an_unsynchronised_backward_are_counted(tmp_path: Path) -> None:
    """A step applied to gradients that were not synchronised counts, a skipped one does not."""
    run = whole(tmp_path / "run")
    syncs = {3: GradSync.LOCAL, 5: GradSync.REDUCED_ONLY, 7: GradSync.NOT_DISTRIBUTED, 8: GradSync.UNKNOWN}
    for rank in range(3):
        rows: list[Row] = [
            {"attempt": i, "last_micro_batch_sync": syncs.get(i, GradSync.SYNCED).value} for i in range(10)
        ]
        rows[3] |= {"outcome": "skipped"}
        if rank == 0:
            rows[5]["last_micro_batch_sync"] = "synced"
        run.steps(rank, rows, process_of(rank))
    section = steps_of(run)
    assert section["unsynchronised_steps"] == {
        "steps": 2,
        "ranks": "1-2",
        "first": {
            "generation": 0,
            "attempt": 5,
            "optimizer": 0,
            "ranks": "1-2",
            "grad_sync": ["reduced_only"],
        },
    }
    assert [one["unsynchronised_steps"] for one in section["ranks"]] == [0, 1, 1]


def test_two_processes_of_one_attempt_are_not_compared(tmp_path: Path) -> None:
    """Rows of two processes under one rank and attempt are named as ambiguous and disagree with nobody."""
    run = whole(tmp_path / "run")
    for rank in range(3):
        run.steps(rank, [{"attempt": i} for i in range(4)], process_of(rank))
    run.manifest(1, "000000ee")
    run.steps(1, [{"attempt": i, "outcome": "skipped"} for i in range(2, 5)], "000000ee")
    section = steps_of(run)
    assert section["ambiguous_ranks"] == "1"
    assert section["disagreeing_attempts"] == 0
    assert section["compared_attempts"] == 4


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    """Without any row nothing is said to be the same, and ranks without steps are named."""
    section = steps_of(whole(tmp_path / "run"))
    assert section["same_steps"] is None
    assert section["ranks_without_steps"] == "0-2"
    assert section["first_disagreement"] is None


def test_only_so_many_attempts_stand_inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The section has the first hundred disagreements and the count, the table has all of them."""
    run = whole(tmp_path / "run", 2)
    for rank in range(2):
        run.steps(rank, [{"attempt": i, "micro_batches": 1 + rank} for i in range(2500)], process_of(rank))
    monkeypatch.setattr(steps, "_GROUP_ROWS", 1000)
    section = steps_of(run)
    assert section["disagreeing_attempts"] == 2500
    assert [one["attempt"] for one in section["disagreements"]] == list(range(100))
    table = table_of(run)
    assert table["attempt"].to_list() == [attempt for attempt in range(2500) for _ in range(2)]
    assert table["place"].to_list() == [0, 1] * 2500


def test_a_part_that_goes_away_meanwhile_has_the_merge_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that was read and then is gone counts nowhere; where more go, the merge stops with a name."""
    run = whole(tmp_path / "run", 3)
    rows = [[{"attempt": 0, "micro_batches": 1 + rank}] for rank in range(3)]
    parts = [run.steps(rank, rows[rank], process_of(rank)) for rank in range(3)]
    compare = engine.compare_steps
    doomed = parts[2:]

    def vanish(task: Any) -> Any:
        if doomed:
            doomed.pop().unlink()
        return compare(task)

    monkeypatch.setattr(engine, "compare_steps", vanish)
    section = steps_of(run)
    assert section["ranks_without_steps"] == "2"
    assert [one["ranks"] for one in section["first_disagreement"]["differences"][0]["values"]] == ["0", "1"]
    before = (run.root / "merged" / "result.json").read_bytes()
    run.steps(2, rows[2], process_of(2))
    doomed = parts[1:]
    with pytest.raises(StorageError, match=r"rank-001/steps.parts/.* is gone: .* merge again"):
        merge_run(run.url)
    assert (run.root / "merged" / "result.json").read_bytes() == before
