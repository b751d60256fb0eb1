"""On which rank and where a value that is not finite stood first, held to a plain search of the rows."""

import random
from pathlib import Path
from typing import Any

import pytest

from merge.run_folder import RunFolder, process_of
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.records import Member, ModuleRecord

Row = dict[str, Any]

LAYERS = ("zulu", "alpha", "mike")
"""In the order of their calls; the catalog lists them by name."""

OUTPUT = {"signal": "output", "tensor_path": "output"}
GRADIENT = {"signal": "output_gradient", "tensor_path": "grad_output.0"}
LOCAL = {"signal": "parameter_gradient", "stage": "local_accumulated", "tensor_path": "weight"}
REDUCED = LOCAL | {"stage": "reduced"}
APPLIED = LOCAL | {"stage": "applied"}
SIGNALS = (OUTPUT, GRADIENT, LOCAL, REDUCED, APPLIED)


def whole(root: Path, world_size: int = 3) -> RunFolder:
    """A run with catalogs and without rows."""
    run = RunFolder(root, world_size=world_size).run()
    run.generation()
    for rank in range(world_size):
        run.manifest(rank, process_of(rank))
        catalog(run, rank, process_of(rank))
    return run


def catalog(run: RunFolder, rank: int, process: str) -> None:
    """Writes the catalog of one process."""
    run.catalog(
        rank,
        [ModuleRecord(name, "Linear", (), 1, 1, LAYERS.index(name), fired=1) for name in sorted(LAYERS)],
        process,
    )


def row(sample: int, layer: str, signal: Row, share: float | None = 0.0, **changes: Any) -> Row:
    """A row that tells the share of entries that are not finite; two forwards an attempt."""
    own: Row = {"sample_id": sample, "attempt": sample // 2, "forward_in_attempt": sample % 2}
    own |= {"forward_index": sample, "layer": layer, "metric": "nonfinite_fraction", "value": share}
    return own | signal | changes


def samples(num_samples: int) -> list[Row]:
    """The samples of these rows."""
    return [
        {"sample_id": one, "attempt": one // 2, "forward_in_attempt": one % 2, "forward_index": one}
        for one in range(num_samples)
    ]


def found_in(run: RunFolder, **arguments: Any) -> dict[str, Any]:
    """Merges a run and returns the section."""
    section: Any = merge_run(run.url, **arguments).result["first_nonfinite"]
    return section


def write(run: RunFolder, bad: dict[int, set[tuple[int, str, int]]], num_samples: int = 6) -> None:
    """Writes every tensor of every sample; `bad` are rank to (sample, layer, place in `SIGNALS`)."""
    for rank in range(run.world_size):
        rows = [
            row(sample, layer, signal, 0.25 if (sample, layer, place) in bad.get(rank, ()) else 0.0)
            for sample in range(num_samples)
            for layer in LAYERS
            for place, signal in enumerate(SIGNALS)
        ]
        run.history(rank, rows, process_of(rank))
        run.samples(rank, samples(num_samples), process_of(rank))


def test_a_finite_run_has_none(tmp_path: Path) -> None:
    """All fractions are 0: none was found, and that is known."""
    run = whole(tmp_path / "run")
    write(run, {})
    section = found_in(run)
    assert (section["found"], section["unavailable_reason"], section["first"]) == (False, "", None)
    assert section["by_phase"] == dict.fromkeys(("forward", "backward", "reduced", "applied"))


def test_without_a_statistic_that_tells_nothing_is_said(tmp_path: Path) -> None:
    """Rows of a mean alone do not tell whether anything was nonfinite."""
    run = whole(tmp_path / "run")
    for rank in range(3):
        run.history(rank, [row(0, "zulu", OUTPUT, 1.0, metric="mean")], process_of(rank))
    section = found_in(run)
    assert (section["found"], section["unavailable_reason"]) == (None, "no_statistic_tells")


def test_evidence_from_before_the_reduction_names_the_rank(tmp_path: Path) -> None:
    """NaN is born in one rank's backward and is everywhere after the reduction: the one rank is named."""
    run = whole(tmp_path / "run", 4)
    everywhere = {(3, layer, place) for layer in LAYERS for place in (3, 4)}
    bad = {rank: everywhere | {(4, layer, 0) for layer in LAYERS} for rank in range(4)}
    bad[2] = bad[2] | {(3, "zulu", 1), (3, "alpha", 1), (3, "alpha", 2)}
    write(run, bad)
    section = found_in(run)
    first = section["first"]
    assert (first["phase"], first["before_reduction"]) == ("backward", True)
    assert (first["generation"], first["attempt"], first["forward_in_attempt"]) == (0, 1, 1)
    # The backward runs from the last layer to the first.
    assert (first["rank"], first["layer"], first["signal"]) == (2, "alpha", "output_gradient")
    assert (first["ranks"], first["ranks_finite"], first["ranks_missing"]) == ("2", "0-1,3", {})
    assert first["nonfinite_tensors"] == 3
    assert first["nonfinite_fraction"] == 0.25
    reduced = section["by_phase"]["reduced"]
    assert (reduced["ranks"], reduced["before_reduction"], reduced["attempt"]) == ("0-3", False, 1)
    assert section["by_phase"]["forward"]["attempt"] == 2


def test_layers_come_in_the_order_of_execution(tmp_path: Path) -> None:
    """Of one forward the layer that was called first counts, not the first one by name or in the part."""
    run = whole(tmp_path / "run")
    write(run, {1: {(2, "alpha", 0), (2, "zulu", 0)}, 0: {(2, "mike", 0)}})
    first = found_in(run)["first"]
    assert (first["rank"], first["layer"], first["ranks"], first["num_ranks"]) == (1, "zulu", "0-1", 2)
    assert [(one["rank"], one["layer"]) for one in first["by_rank"]] == [(1, "zulu"), (0, "mike")]


def test_a_container_ends_after_its_layers(tmp_path: Path) -> None:
    """A container is called before the layer in it and returns after it: the layer is named."""
    run = RunFolder(tmp_path / "run", world_size=1).run()
    run.generation()
    run.manifest(0)
    names = ("block", "block.fc", "block.norm")
    run.catalog(0, [ModuleRecord(name, "M", (), 1, 1, place, fired=1) for place, name in enumerate(names)])
    rows = [row(0, name, signal, 1.0) for name in names for signal in (OUTPUT, GRADIENT)]
    run.history(0, rows)
    section = found_in(run)
    assert section["by_phase"]["forward"]["layer"] == "block.fc"
    assert section["by_phase"]["backward"]["layer"] == "block"


def test_ranks_whose_data_is_missing_are_named_with_the_reason(tmp_path: Path) -> None:
    """A rank without the sample, one that missed it, one without that row or value, one that left nothing."""
    run = RunFolder(tmp_path / "run", world_size=8).run()
    run.generation(0, [Member(rank, process_of(rank), "host-a", rank, observing=True) for rank in range(8)])
    for rank in range(7):
        run.manifest(rank, process_of(rank))
        catalog(run, rank, process_of(rank))
        rows = [row(sample, "zulu", OUTPUT, 0.5 if (rank, sample) == (3, 2) else 0.0) for sample in range(4)]
        listed = samples(4)
        if rank == 0:
            del rows[2], listed[2]
        if rank == 1:
            del rows[2]
            listed[2]["state"] = "missed"
        if rank == 2:
            rows[2] = row(2, "alpha", OUTPUT, 0.0)
        if rank == 4:
            rows[2] |= {"value": None, "unavailable_reason": "overflow: too large"}
        if rank == 5:
            rows[2] = row(2, "zulu", OUTPUT, 0.0, mode="eval")
        run.history(rank, rows, process_of(rank))
        run.samples(rank, listed, process_of(rank))
    first = found_in(run)["first"]
    assert (first["rank"], first["attempt"], first["forward_in_attempt"]) == (3, 1, 0)
    assert first["ranks_finite"] == "6"
    assert first["ranks_missing"] == {
        "missed": "1",
        "no_rows": "7",
        "no_sample": "0",
        "not_measured": "2,5",
        "overflow": "4",
    }


def test_samples_that_only_the_history_knows_are_found(tmp_path: Path) -> None:
    """After a kill a sample may stand in history alone; its rank is known to be finite all the same."""
    run = whole(tmp_path / "run", 2)
    for rank in range(2):
        rows = [row(one, "zulu", OUTPUT, 0.5 if (rank, one) == (0, 3) else 0.0) for one in range(4)]
        run.history(rank, rows, process_of(rank))
        run.samples(rank, samples(3), process_of(rank))
    assert found_in(run)["first"]["ranks_finite"] == "1"


def test_other_statistics_tell_too(tmp_path: Path) -> None:
    """A finite fraction below 1, and a mean of nothing finite, are evidence like a nonfinite fraction."""
    run = whole(tmp_path / "run", 2)
    run.history(0, [row(one, "zulu", OUTPUT, 1.0 - 0.25 * one, metric="finite_fraction") for one in range(2)])
    empty = row(0, "zulu", GRADIENT, None, metric="mean", unavailable_reason="no_finite_entries")
    run.history(1, [empty], process_of(1))
    section = found_in(run)
    assert section["by_phase"]["forward"]["nonfinite_fraction"] == 0.25
    assert section["first"]["nonfinite_fraction"] == 1.0
    assert (section["first"]["rank"], section["first"]["phase"]) == (1, "backward")


def test_forwards_without_attempts_are_known_by_their_index(tmp_path: Path) -> None:
    """Where no optimizer was seen the moment is the ordinal of the forward."""
    run = whole(tmp_path / "run", 2)
    for rank in range(2):
        rows = [
            row(one, "zulu", OUTPUT, float((rank, one) == (1, 3)), attempt=None, forward_in_attempt=0)
            for one in range(5)
        ]
        run.history(rank, rows, process_of(rank))
        run.samples(rank, [one | {"attempt": None} for one in samples(5)], process_of(rank))
    first = found_in(run)["first"]
    assert (first["attempt"], first["forward_in_attempt"], first["forward_index"]) == (None, None, 3)
    assert (first["ranks"], first["ranks_finite"]) == ("1", "0")


def test_the_loss_scale_stands_beside_the_finding(tmp_path: Path) -> None:
    """An infinite gradient at a high loss scale is told with it."""
    run = whole(tmp_path / "run", 1)
    run.history(0, [row(0, "zulu", GRADIENT, 0.5, loss_scale=65536.0, scale_provenance="gradscaler")])
    assert found_in(run)["first"]["loss_scale"] == 65536.0


@pytest.mark.parametrize("seed", range(6))
def test_the_first_one_is_that_of_a_plain_search(tmp_path: Path, seed: int) -> None:
    """Random evidence in two generations: moment, phase, ranks and layer are those of a sort of all rows."""
    generator = random.Random(seed)
    run = RunFolder(tmp_path / "run", world_size=4).run()
    candidates: list[tuple[Any, ...]] = []
    there: set[tuple[int, ...]] = set()
    for generation in range(2):
        run.generation(generation)
        for rank in range(4):
            process = f"{rank:07x}{generation}"
            run.manifest(rank, process, generation=generation)
            catalog(run, rank, process)
            rows: list[Row] = []
            first_id = generation * 1_000_000_000
            for sample in range(30):
                if generator.random() < 0.3:
                    continue
                there.add((generation, sample, rank))
                for layer in LAYERS:
                    for place, signal in enumerate(SIGNALS):
                        is_bad = generation + sample > 3 and generator.random() < 0.02
                        one = row(sample, layer, signal, 0.5 if is_bad else 0.0)
                        rows.append(one | {"sample_id": first_id + sample})
                        if is_bad:
                            phase = (0, 1, 1, 2, 3)[place]
                            order = LAYERS.index(layer)
                            key = (-order if phase == 1 else order, place)
                            moment = (generation, sample // 2, sample % 2, phase)
                            candidates.append((moment, key, rank, layer, signal))
            generator.shuffle(rows)
            half = len(rows) // 2
            run.history(rank, rows[:half], process, generation=generation)
            run.history(rank, rows[half:], process, 1, generation=generation)
    first = found_in(run)["first"]
    moment, _, rank, layer, signal = min(candidates, key=lambda one: one[:3])
    names = ("forward", "backward", "reduced", "applied")
    assert (first["generation"], first["attempt"], first["forward_in_attempt"]) == moment[:3]
    assert first["phase"] == names[moment[3]]
    assert (first["rank"], first["layer"], first["signal"]) == (rank, layer, signal["signal"])
    ranks = {one[2] for one in candidates if one[0] == moment}
    assert first["ranks"] == ranks_text(ranks)
    sample = 2 * moment[1] + moment[2]
    present = {one for one in range(4) if (moment[0], sample, one) in there}
    assert first["ranks_finite"] == ranks_text(present - ranks)
    absent = set(range(4)) - present
    assert first["ranks_missing"] == ({"no_sample": ranks_text(absent)} if absent else {})
