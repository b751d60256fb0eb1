"""The examples that break something on purpose: what they print is what they broke, and where."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.example_runs import run_example

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Printed:
    """What an example printed, and the folder of its runs."""

    folder: Path
    said: str


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """All five faults, in ten samples each."""
    folder = tmp_path_factory.mktemp("problems")
    return Printed(folder, run_example("find_problems", "--output-dir", folder, cwd=folder))


def columns(said: str, title: str) -> tuple[list[str], list[str], list[str], str]:
    """Returns baseline, broken and fixed of the table under a title, and the line below it."""
    table, _, after = said.partition(f"{title}\n")[2].partition("\n\n")[0].rpartition("\n")
    rows = [line.split()[3::2] for line in table.splitlines() if re.match(r"│ \d", line)]
    baseline, broken, fixed = zip(*rows, strict=True)
    return list(baseline), list(broken), list(fixed), after


@pytest.mark.parametrize(
    ("title", "first_layer"),
    [
        ("inactive ReLUs: active output zero_fraction", "active output"),
        ("sigmoid saturation: first output_gradient std", "first output"),
        ("growing scale: branches.5 output std", "branches.1 output"),
        ("invalid arithmetic: log output nonfinite_fraction", "log output"),
        ("detached branch: branch output_gradient std", "branch output_gradient"),
    ],
)
def test_a_fault_is_seen_after_four_samples_where_it_was_made(
    problems: Printed, title: str, first_layer: str
) -> None:
    """Broken is baseline for four samples; the first number that differs is of the broken layer."""
    baseline, broken, fixed, after = columns(problems.said, title)
    assert len(baseline) == 10
    assert broken[:4] == baseline[:4]
    assert broken[4] != baseline[4]
    assert after.endswith(f"sample 4, {first_layer}")
    assert "no_gradient" not in fixed


def test_each_fault_has_its_own_sign_and_its_fix_has_none(problems: Printed) -> None:
    """All ReLUs off, gradients that fade, a scale that grows, values that are no numbers, no gradient."""
    baseline, broken, fixed, _ = columns(problems.said, "inactive ReLUs: active output zero_fraction")
    assert broken[4:] == ["1.0"] * 6
    assert all(0.4 < float(value) < 0.6 for value in baseline + fixed)

    baseline, broken, fixed, _ = columns(problems.said, "sigmoid saturation: first output_gradient std")
    for healthy, faulty, repaired in zip(baseline[4:], broken[4:], fixed[4:], strict=True):
        assert float(faulty) < float(healthy) / 5
        assert float(repaired) == pytest.approx(float(healthy), rel=0.2)

    baseline, broken, fixed, _ = columns(problems.said, "growing scale: branches.5 output std")
    assert float(broken[9]) > 5 * float(broken[4])
    assert float(fixed[9]) < 2 * float(baseline[9])

    baseline, broken, fixed, _ = columns(problems.said, "invalid arithmetic: log output nonfinite_fraction")
    assert 0 < float(broken[4]) < 1
    assert broken[5:] == ["1.0"] * 5
    assert set(baseline + fixed) == {"0.0"}

    baseline, broken, fixed, _ = columns(problems.said, "detached branch: branch output_gradient std")
    assert broken[4:] == ["no_gradient"] * 6
    assert fixed == baseline


def test_the_plots_are_one_page_that_asks_nobody(problems: Printed) -> None:
    """Every fault has its title there and every missing number its reason; no script comes from elsewhere."""
    page = (problems.folder / "problems.html").read_text(encoding="utf-8")
    for title in ("inactive ReLUs", "sigmoid saturation", "growing scale", "invalid arithmetic", "detached"):
        assert f'"text":"{title}' in page
    assert "no_gradient" in page
    assert not re.search(r"<script[^>]+src=", page)


@pytest.fixture(scope="module", params=[2, 3])
def faulty_rank(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Printed]:
    """How many ranks there were, and what the merge said of five runs in which the last one went wrong."""
    folder = tmp_path_factory.mktemp("ranks")
    arguments = ("--output-dir", folder, "--ranks", request.param)
    return request.param, Printed(folder, run_example("find_the_rank", *arguments, cwd=folder))


def said_of(fault: str, printed: Printed) -> str:
    """Returns what the merge said of a fault."""
    found = re.search(rf"^{fault} \(.*\)\n  put in: .*\n  merge says:  (.*)$", printed.said, re.MULTILINE)
    assert found, printed.said
    return found[1]


def test_the_merge_names_rank_layer_and_attempt_of_each_fault(faulty_rank: tuple[int, Printed]) -> None:
    """What was put in at step 5 of the last rank is found there; of two replicas neither is accused."""
    ranks, printed = faulty_rank
    faulty, healthy = f"rank {ranks - 1}", "rank 0" if ranks == 2 else "rank 0-1"

    shard = re.fullmatch(
        rf"{faulty}, attempt 5: roots input mean is (\d+), on rank \d (\d+)",
        said_of("bad data shard", printed),
    )
    assert shard
    assert 80 < int(shard[1]) / int(shard[2]) < 120
    assert said_of("NaN on one rank", printed) == f"{faulty}, attempt 5: roots output, forward"
    digests = re.fullmatch(
        r"attempt 5: hidden\.weight ([0-9a-f]{16}) on (.+), ([0-9a-f]{16}) on (.+)",
        said_of("bit flip", printed),
    )
    assert digests
    assert digests[1] != digests[3]
    holders = [digests[2], digests[4]]
    assert holders == [faulty, healthy] or (ranks == 2 and holders == [healthy, faulty])
    assert re.fullmatch(
        rf"{faulty}: late by its own work, [1-9]\d* ms an attempt", said_of("slow loader", printed)
    )
    attempt, _, rest = said_of("skip on one rank", printed).partition(": ")
    outcomes, _, replicas = rest.partition("; ")
    assert attempt == "attempt 5"
    assert set(outcomes.split(", ")) == {f"skipped on {faulty}", f"applied on {healthy}"}
    assert replicas == "replicas differ from attempt 6 on"


def test_polars_and_duckdb_read_the_same_of_one_rank(problems: Printed) -> None:
    """Each of the three tables is equal; the missing gradients of the detached branch have their reason."""
    said = run_example("read_with_polars_and_duckdb", "detached-branch/broken", cwd=problems.folder)
    assert said.count("DuckDB has the same: True") == 3
    # Six samples of nine statistics.
    assert re.search(r"│ 0 +┆ branch ┆ output_gradient ┆ no_gradient +┆ 54 ", said)


def test_polars_and_duckdb_read_the_same_of_several_ranks(faulty_rank: tuple[int, Printed]) -> None:
    """Each of the three tables is equal; the step on a NaN was skipped by all."""
    ranks, printed = faulty_rank
    said = run_example("read_with_polars_and_duckdb", "NaN-on-one-rank", cwd=printed.folder)
    assert said.count("DuckDB has the same: True") == 3
    steps = said.rpartition("steps of each rank")[2]
    found = [line.split()[1:6:2] for line in steps.splitlines() if re.match(r"│ \d", line)]
    assert found == [[str(rank), "16", "15"] for rank in range(ranks)]


def test_without_a_folder_the_reader_makes_a_run_of_its_own(tmp_path: Path) -> None:
    """The smallest example is run, and its fifty steps are read."""
    said = run_example("read_with_polars_and_duckdb", "--output-dir", "made", cwd=tmp_path)
    assert said.count("DuckDB has the same: True") == 3
    assert re.search(r"│ 0 +┆ 50 +┆ 50 ", said)
