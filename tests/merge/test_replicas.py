"""Whether replicas hold equal bytes, held to a plain comparison of the rows themselves."""

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from merge.run_folder import RunFolder, process_of
from torchinstruments.merge import ranges
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.rank_sets import ranks_text

Row = dict[str, Any]

TENSORS = ("zeta.weight", "fc.weight", "fc.bias", "norm.weight")


def whole(root: Path, world_size: int = 3) -> RunFolder:
    """A run without rows."""
    run = RunFolder(root, world_size=world_size).run()
    run.generation()
    for rank in range(world_size):
        run.manifest(rank, process_of(rank))
    return run


def replicas_of(run: RunFolder) -> dict[str, Any]:
    """Merges a run and returns the section."""
    section: Any = merge_run(run.url).result["replicas"]
    return section


def rows_of(attempts: range | list[int], digests: dict[int, int] | None = None, **changes: Any) -> list[Row]:
    """One tensor in some attempts; `digests` are those that are not the usual one of their attempt."""
    return [
        {"attempt": attempt, "digest": (digests or {}).get(attempt, 1000 + attempt)} | changes
        for attempt in attempts
    ]


def test_equal_replicas_are_equal(tmp_path: Path) -> None:
    """Equal digests in every attempt: equal, with the number of attempts that were judged."""
    run = whole(tmp_path / "run")
    for rank in range(3):
        run.fingerprints(rank, rows_of(range(0, 100, 5)), process_of(rank))
    section = replicas_of(run)
    assert section["equal"] is True
    assert section["judged_attempts"] == 20
    assert (section["replica_keys"], section["ranks"]) == (1, "0-2")
    assert section["first_divergence"] is None


def test_the_rank_that_went_astray_is_named_first(tmp_path: Path) -> None:
    """One rank of four differs from attempt 40 on: it is named before the majority, with what was before."""
    run = whole(tmp_path / "run", 4)
    for rank in range(4):
        digests = dict.fromkeys(range(40, 100), 2**64 - 1) if rank == 2 else {}
        run.fingerprints(rank, rows_of(range(0, 100, 4), digests), process_of(rank))
    section = replicas_of(run)
    assert section["equal"] is False
    first = section["first_divergence"]
    assert (first["generation"], first["attempt"], first["tensor"]) == (0, 40, "fc.weight")
    assert first["values"] == [
        {"value": "ffffffffffffffff", "ranks": "2", "num_ranks": 1},
        {"value": f"{1040:016x}", "ranks": "0-1,3", "num_ranks": 3},
    ]
    assert first["has_majority"]
    assert first["last_equal_before"] == {"generation": 0, "attempt": 36, "num_ranks": 4}
    assert (first["healed"], first["equal_again"]) == (False, None)
    assert (section["differing_attempts"], first["differing_attempts"]) == (15, 15)
    assert (first["kind"], first["shape"], first["dtype"]) == ("parameter", "4x8", "float32")


@pytest.mark.parametrize("max_rows", [1_000_000, 3])
def test_a_divergence_that_healed_says_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    """After the last difference the next attempt at which all are equal again is named."""
    monkeypatch.setattr(ranges, "MAX_BLOCK_ROWS", max_rows)
    run = whole(tmp_path / "run")
    for rank in range(3):
        digests = {3: 1, 5: 2} if rank == 1 else {}
        run.fingerprints(rank, rows_of(range(30), digests), process_of(rank))
    first = replicas_of(run)["first_divergence"]
    assert first["attempt"] == 3
    assert first["last_differing"] == {"generation": 0, "attempt": 5, "num_ranks": 3}
    assert first["healed"] is True
    assert first["equal_again"] == {"generation": 0, "attempt": 6, "num_ranks": 3}
    assert first["last_equal_before"] == {"generation": 0, "attempt": 2, "num_ranks": 3}


def test_a_restart_may_heal(tmp_path: Path) -> None:
    """A later generation in which the replicas are equal again heals, and is named."""
    run = whole(tmp_path / "run", 2)
    run.generation(1)
    for rank in range(2):
        run.fingerprints(rank, rows_of(range(16), {15: rank}), process_of(rank))
        run.manifest(rank, f"000000f{rank}", generation=1)
        run.fingerprints(rank, rows_of(range(4)), f"000000f{rank}", generation=1)
    section = replicas_of(run)
    assert section["first_divergence"]["equal_again"] == {"generation": 1, "attempt": 0, "num_ranks": 2}
    assert section["first_divergence"]["has_majority"] is False
    assert section["healed_tensors"] == 1


def test_fewer_ranks_do_not_prove_a_healing(tmp_path: Path) -> None:
    """Where fewer ranks tell than differed, equality says nothing of those that do not."""
    run = whole(tmp_path / "run")
    for rank in range(3):
        attempts = range(10) if rank < 2 else range(8)
        run.fingerprints(rank, rows_of(attempts, {7: 1} if rank == 2 else {}), process_of(rank))
    first = replicas_of(run)["first_divergence"]
    assert first["healed"] is None
    assert first["equal_again"] == {"generation": 0, "attempt": 8, "num_ranks": 2}


def test_only_keys_are_judged_and_each_by_itself(tmp_path: Path) -> None:
    """Rows without a key never differ, and ranks of two keys are not compared with each other."""
    run = whole(tmp_path / "run", 4)
    for rank in range(4):
        keyed = rows_of(range(5), dict.fromkeys(range(5), rank % 2), replica_key=f"mesh shard={rank % 2}")
        loose = rows_of(range(5), dict.fromkeys(range(5), rank), replica_key="", tensor="buffer")
        run.fingerprints(rank, [*keyed, *loose], process_of(rank))
    section = replicas_of(run)
    assert section["equal"] is True
    assert (section["replica_keys"], section["judged_attempts"]) == (2, 5)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "no_fingerprints"),
        ([{"attempt": 0, "replica_key": ""}], "no_replica_keys"),
        (None, "no_common_attempts"),
    ],
)
def test_what_cannot_be_judged_is_not(tmp_path: Path, rows: list[Row] | None, reason: str) -> None:
    """Without rows, keys or common attempts nothing is called equal, and the reason is told."""
    run = whole(tmp_path / "run", 2)
    for rank in range(2):
        own = [{"attempt": 100 * rank}] if rows is None else rows
        if own:
            run.fingerprints(rank, own, process_of(rank))
    section = replicas_of(run)
    assert (section["equal"], section["unavailable_reason"]) == (None, reason)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (("mesh dp=S(0)@0 ranks=0", "mesh dp=S(0)@1 ranks=1"), "no_replicas"),
        (("ddp ranks=0", "mesh dp=S(0)@1 ranks=1,3"), "no_common_attempts"),
    ],
)
def test_a_model_of_which_no_two_ranks_hold_the_same_has_no_replicas(
    tmp_path: Path, keys: tuple[str, str], reason: str
) -> None:
    """Their attempts are common; a key that names a rank whose rows are not there is another matter."""
    run = whole(tmp_path / "run", 2)
    for rank, key in enumerate(keys):
        run.fingerprints(rank, rows_of(range(4), replica_key=key), process_of(rank))
    section = replicas_of(run)
    assert (section["equal"], section["unavailable_reason"]) == (None, reason)
    assert section["replica_keys"] == 2


def test_two_processes_of_one_attempt_are_not_judged(tmp_path: Path) -> None:
    """Two processes under one rank and attempt are named as ambiguous; they are no divergence."""
    run = whole(tmp_path / "run")
    for rank in range(3):
        run.fingerprints(rank, rows_of(range(4)), process_of(rank))
    run.manifest(1, "000000ee")
    run.fingerprints(1, rows_of([3], {3: 5}), "000000ee")
    section = replicas_of(run)
    assert (section["equal"], section["ambiguous_ranks"]) == (True, "1")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_rows", [1_000_000, 25])
def test_all_that_is_said_agrees_with_a_plain_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, max_rows: int
) -> None:
    """Random divergences, holes and keys: every tensor's history is that of a plain comparison."""
    monkeypatch.setattr(ranges, "MAX_BLOCK_ROWS", max_rows)
    generator = random.Random(seed)
    run = whole(tmp_path / "run", 5)
    by_place: dict[tuple[str, str], dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    attempts = sorted(generator.sample(range(200), 40))
    astray = {(generator.randrange(5), tensor): generator.choice(attempts) for tensor in TENSORS[:3]}
    for rank in range(5):
        rows: list[Row] = []
        for attempt in attempts:
            if generator.random() < 0.1:
                continue
            for place, tensor in enumerate(TENSORS):
                key = "" if tensor == "zeta.weight" else f"mesh shard={rank % 2 if place == 1 else 0}"
                since = astray.get((rank, tensor), 1000)
                digest = 10 * attempt + place + (1 if since <= attempt < since + 60 else 0)
                rows.append({"attempt": attempt, "tensor": tensor, "replica_key": key, "digest": digest})
                if key:
                    by_place[tensor, key][attempt][rank] = digest
        half = len(rows) // 2
        run.fingerprints(rank, rows[:half], process_of(rank))
        run.fingerprints(rank, rows[half:], process_of(rank), 1)
    section = replicas_of(run)
    differing: set[int] = set()
    judged: set[int] = set()
    expected: dict[tuple[str, str], Row] = {}
    for place, histories in by_place.items():
        common = {attempt: held for attempt, held in histories.items() if len(held) > 1}
        judged |= set(common)
        bad = sorted(attempt for attempt, held in common.items() if len(set(held.values())) > 1)
        if bad:
            differing |= set(bad)
            held = common[bad[0]]
            values = {value: [rank for rank in held if held[rank] == value] for value in held.values()}
            before = [attempt for attempt in common if attempt < bad[0]]
            after = [attempt for attempt in common if attempt > bad[-1]]
            expected[place] = {
                "attempt": bad[0],
                "last": bad[-1],
                "number": len(bad),
                "values": sorted(
                    ((ranks_text(ranks), f"{value:016x}") for value, ranks in values.items()),
                    key=lambda item: (len(values[int(item[1], 16)]), values[int(item[1], 16)][0]),
                ),
                "before": max(before, default=None),
                "after": min(after, default=None),
            }
    found = {
        (one["tensor"], one["replica_key"]): {
            "attempt": one["attempt"],
            "last": one["last_differing"]["attempt"],
            "number": one["differing_attempts"],
            "values": [(held["ranks"], held["value"]) for held in one["values"]],
            "before": one["last_equal_before"] and one["last_equal_before"]["attempt"],
            "after": one["equal_again"] and one["equal_again"]["attempt"],
        }
        for one in section["tensors"]
    }
    assert found == expected
    assert found
    assert section["judged_attempts"] == len(judged)
    assert section["differing_attempts"] == len(differing)
    first = min(one["attempt"] for one in expected.values())
    in_order = [place for place in by_place if place in expected and expected[place]["attempt"] == first]
    shown = section["first_divergence"]
    order = {tensor: place for place, tensor in enumerate(TENSORS)}
    assert shown["tensor"] == min((place[0] for place in in_order), key=order.__getitem__)
