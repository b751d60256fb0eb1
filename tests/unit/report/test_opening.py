"""Where a page opens: on what ranks have apart, never on what one rank alone has."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from merge.run_folder import process_of, whole_run
from torchinstruments.merge import MergeResult, merge_run
from torchinstruments.report.opening import opening_row


def merged(root: Path, ranks: Sequence[Sequence[Mapping[str, object]]]) -> MergeResult:
    """Returns the merge of a run whose ranks have these rows."""
    run = whole_run(root, len(ranks))
    for rank, rows in enumerate(ranks):
        run.history(rank, rows, process_of(rank))
    return merge_run(run.url)


def of_forward(sample: int, **settings: object) -> dict[str, object]:
    """Returns a row of a training forward."""
    return {"sample_id": sample, "attempt": sample, "metric": "std", **settings}


def opened(found: MergeResult) -> tuple[object, ...] | None:
    """Returns layer, statistic and attempt on which the page opens."""
    row = opening_row(found.result, found.overview())
    return None if row is None else (row["layer"], row["metric"], row["attempt"])


def test_of_three_ranks_it_is_the_furthest_of_the_result(tmp_path: Path) -> None:
    """The widest series, at its widest forward, which is neither the last one nor of the first layer."""
    ranks = [
        [
            of_forward(
                sample, layer=layer, value=90.0 if (rank, layer, sample) == (2, "b", 1) else 1.0 + rank
            )
            for sample in range(4)
            for layer in ("a", "b", "c")
        ]
        for rank in range(3)
    ]
    found = merged(tmp_path, ranks)
    assert found.widest[0].layer == "b"
    assert opened(found) == ("b", "std", 1)


def test_of_two_ranks_it_is_the_largest_spread(tmp_path: Path) -> None:
    """Nor is it a mean about zero, nor a mode that one rank alone has, however large its values."""
    ranks = [
        [
            of_forward(sample, layer=layer, value=4.0 if (rank, layer, sample) == (1, "b", 2) else 2.0)
            for sample in range(4)
            for layer in ("a", "b")
        ]
        + [of_forward(sample, layer="a", metric="mean", value=rank - 0.5) for sample in range(4)]
        for rank in range(2)
    ]
    ranks[0] += [of_forward(3, layer="a", mode="eval", value=1e6)]
    assert opened(merged(tmp_path, ranks)) == ("b", "std", 2)


def test_nothing_of_one_rank_is_chosen(tmp_path: Path) -> None:
    """There is nothing to hold its values against."""
    assert opened(merged(tmp_path, [[of_forward(0, layer="a", value=1.0)]])) is None
