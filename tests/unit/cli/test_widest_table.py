"""The table of the layers whose ranks lie furthest apart: what it chooses, names and leaves out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from merge.run_folder import whole_run
from torchinstruments.cli.main import main


def shown_lines(
    root: Path, by_rank: Sequence[Sequence[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Merges a run with these rows of each rank and returns the lines of the table."""
    run = whole_run(root, len(by_rank), num_samples=1)
    for rank, rows in enumerate(by_rank):
        run.history(rank, [{"sample_id": 0} | row for row in rows], f"{rank + 10:08x}")
    main(["merge", run.url])
    lines = capsys.readouterr().out.splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith("widest between ranks")]
    return lines[starts[0] :] if starts else []


def tensor(mean: float, std: float, **own: Any) -> list[dict[str, Any]]:
    """Rows of one tensor."""
    return [own | {"metric": "mean", "value": mean}, own | {"metric": "std", "value": std}]


def test_a_turned_sign_is_seen_and_rounding_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of std and mean the one that lies further apart stands there, a mean as a share of the largest std."""
    gradient = {"signal": "output_gradient", "tensor_path": "grad_output"}
    ranks = [
        [*tensor(-0.0102, 0.04, **gradient), *tensor(1e-9, 3.0, layer="head")],
        [*tensor(0.0210, 0.039, **gradient), *tensor(-1e-9, 2.97, layer="head")],
    ]
    lines = shown_lines(tmp_path / "run", ranks, capsys)
    assert lines[1] == (
        "spread = (highest - lowest) / larger magnitude of the two, of a mean / the tensor's largest std "
        "where that is larger"
    )
    assert [" ".join(line.split()) for line in lines[3:]] == [
        "fc output_gradient mean 0 0 0 -0.0102 0 0.021 1 78.0%",
        "head output std 0 0 0 2.97 1 3 0 1.0%",
    ]


def test_integers_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Token ids, lengths and masks differ by right, whether ranks hold them in one dtype or in several."""
    ranks = [
        [
            *tensor(1000.0 * rank, 9.0 + 90 * rank, tensor_path="output.1.batch_sizes", dtype="int64"),
            *tensor(1.0 * rank, 0.5, tensor_path="output.1.mask", dtype="bool"),
            *tensor(1.0 * rank, 0.5, layer="ids", dtype=("uint8", "int32")[rank]),
            *tensor(0.0, 1.0 + rank, tensor_path="output.0", dtype=("float32", "int64")[rank]),
        ]
        for rank in range(2)
    ]
    lines = shown_lines(tmp_path / "run", ranks, capsys)
    assert lines[0] == (
        "widest between ranks: std or mean of each layer's signal, at its widest forward; left out: 3 "
        "tensors of integers or bool"
    )
    assert [line.split()[:4] for line in lines[3:]] == [["fc", "output", "output.0", "std"]]
    only = [[row for row in rows if row.get("layer") == "ids"] for rows in ranks]
    assert shown_lines(tmp_path / "only", only, capsys) == [
        "widest between ranks: nothing; left out: 1 tensor of integers or bool"
    ]


def test_which_tensor_of_a_layer_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path stands there where it says something; of a signal with several tensors the widest is shown."""
    ranks = [
        [
            *tensor(0.0, 1.0 + rank, layer="rnn", tensor_path="output.0.data"),
            *tensor(0.0, 1.0 + 3 * rank, layer="rnn", tensor_path="output.1"),
            *tensor(0.0, 1.0 + 2 * rank, layer="rnn", tensor_path="output", signal="input"),
            *tensor(0.0, 1.0 + 2 * rank, layer="rnn", tensor_path="input.hidden", signal="input"),
            *tensor(0.0, 1.0 + 0.25 * rank, layer="plain"),
        ]
        for rank in range(2)
    ]
    lines = shown_lines(tmp_path / "run", ranks, capsys)
    assert [" ".join(line.split()) for line in lines[3:]] == [
        "rnn output output.1 std 0 0 0 1 0 4 1 75.0%",
        "rnn input input.hidden std 0 0 0 1 0 3 1 66.7%",
        "plain output std 0 0 0 1 0 1.25 1 20.0%",
    ]


def test_no_more_than_five_and_always_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal spreads stand by the layers' names."""
    names = ["g", "b", "f", "a", "e", "c", "d"]
    ranks = [[row for name in names for row in tensor(0.0, 1.0 + rank, layer=name)] for rank in range(2)]
    lines = shown_lines(tmp_path / "run", ranks, capsys)
    assert [line.split()[0] for line in lines[3:]] == ["a", "b", "c", "d", "e"]
