"""Joined parts against the part that a writer would have made of the same rows at once."""

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchinstruments.records import Measurement, Sample, Signal
from torchinstruments.store import schema
from torchinstruments.store.columns import (
    Columns,
    Origin,
    fingerprints_columns,
    samples_columns,
    steps_columns,
)
from torchinstruments.store.history_columns import history_columns
from torchinstruments.store.joining import UnreadablePartError, join_parts
from torchinstruments.store.parts import encode_columns
from unit.store.material import attempt, backward, fingerprint, forward, measurement, sample_row

ORIGIN = Origin(0, 0, "1a2b3c4d")
METADATA = schema.metadata(
    schema_version=1, run_id="run-1", generation=0, rank=0, process="1a2b3c4d", world_size=2
)
LAYERS = tuple(f"layer{99 - index:02d}" for index in range(8))

Delivery = tuple[int, Sample]


def write(folder: Path, number: int, columns: Columns) -> Path:
    """Writes one spooled part."""
    path = folder / f"{number:06d}.parquet"
    path.write_bytes(encode_columns(columns, METADATA))
    return path


def join(
    folder: Path, pieces: Sequence[Sequence[Delivery]], layers: Sequence[str] = LAYERS
) -> pq.ParquetFile:
    """Returns the joined part of some spooled ones."""
    paths = [write(folder, number, history_columns(piece, ORIGIN)) for number, piece in enumerate(pieces)]
    return pq.ParquetFile(io.BytesIO(join_parts("history", paths, layers)))


def at_once(pieces: Sequence[Sequence[Delivery]]) -> tuple[pa.Table, tuple[int, ...]]:
    """Returns the rows of all pieces as one part holds them, and its row groups."""
    columns = history_columns([delivery for piece in pieces for delivery in piece], ORIGIN)
    return pq.read_table(io.BytesIO(encode_columns(columns, METADATA))), columns.group_rows


def group_rows(part: pq.ParquetFile) -> tuple[int, ...]:
    """Returns the rows of each row group."""
    return tuple(part.metadata.row_group(number).num_rows for number in range(part.num_row_groups))


def test_a_gradient_that_was_spooled_later_stands_beside_its_output(tmp_path: Path) -> None:
    """Rows are ordered by layer in catalog order, call, signal, path, backward and metric in each sample."""
    outputs = [measurement(layer, call_index=call) for layer in (2, 0) for call in (1, 0)]
    gradients = [
        measurement(layer, Signal.OUTPUT_GRADIENT, backward_index=index, tensor_path=path)
        for layer in (0, 2)
        for index in (1, 0)
        for path in ("grad_output.10", "grad_output.2")
    ]
    pieces = [
        [(0, forward(0, *outputs)), (1, forward(1, *outputs))],
        [(1, backward(1, *gradients[:3])), (0, backward(0, *gradients))],
        [(1, backward(1, *gradients[3:])), (2, forward(2, *outputs))],
    ]

    part = join(tmp_path, pieces)

    expected, groups = at_once(pieces)
    assert part.read().equals(expected)
    assert group_rows(part) == groups
    first = part.read().slice(0, 24).to_pylist()
    assert [(row["layer"], row["signal"], row["call_index"]) for row in first[::3]] == [
        ("layer99", "output", 0),
        ("layer99", "output_gradient", 0),
        ("layer99", "output_gradient", 0),
        ("layer99", "output_gradient", 0),
        ("layer99", "output_gradient", 0),
        ("layer99", "output", 1),
        ("layer97", "output", 0),
        ("layer97", "output_gradient", 0),
    ]


def test_what_is_joined_reads_like_any_part(tmp_path: Path) -> None:
    """Declared types, the writer's metadata, and statistics of the sample id."""
    part = join(tmp_path, [[(0, forward(0, measurement()))], [(1, forward(1, measurement()))]])

    assert part.schema_arrow.remove_metadata().equals(schema.HISTORY)
    assert schema.parse_metadata(part.metadata.metadata)["process"] == "1a2b3c4d"
    assert b"ARROW:schema" not in part.metadata.metadata
    statistics = part.metadata.row_group(0).column(3).statistics
    assert (statistics.min, statistics.max) == (0, 1)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_however_rows_were_spread_the_join_is_what_a_writer_makes_at_once(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Any deliveries, in any parts, with small row groups, give the same rows in the same groups."""
    deliveries: list[Delivery] = []
    for ordinal in range(data.draw(st.integers(1, 6))):
        layers = data.draw(st.lists(st.integers(0, 7), unique=True, max_size=5))
        deliveries.append((ordinal, forward(ordinal, *(measurement(layer) for layer in layers))))
        for index in range(data.draw(st.integers(0, 2))):
            gradients = (
                measurement(layer, Signal.OUTPUT_GRADIENT, backward_index=index) for layer in reversed(layers)
            )
            deliveries.append((ordinal, backward(ordinal, *gradients, index=index)))
    deliveries = [one for one in data.draw(st.permutations(deliveries)) if one[1].measurements]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(deliveries)), max_size=5)))
    pieces = [deliveries[start:end] for start, end in pairwise([0, *cuts, len(deliveries)]) if start < end]
    if not pieces:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "MAX_ROW_GROUP_ROWS", data.draw(st.sampled_from([5, 20, 36_000])))
        part = join(tmp_path, pieces)
        expected, groups = at_once(pieces)

    assert part.read().equals(expected)
    assert group_rows(part) == groups


def test_row_groups_of_a_large_join_end_at_samples_and_are_bounded(tmp_path: Path) -> None:
    """Many rows in many parts, each sample's gradients a part later, give full groups of whole samples."""
    metrics = tuple(f"m{index:02d}" for index in range(50))
    values = [float(index) for index in range(50)]

    def tensors(signal: Signal) -> list[Measurement]:
        return [measurement(layer, signal, metrics=metrics, values=values) for layer in range(8)]

    def outputs(start: int) -> list[Delivery]:
        return [(one, forward(one, *tensors(Signal.OUTPUT))) for one in range(start, start + 5)]

    def gradients(start: int) -> list[Delivery]:
        return [(one, backward(one, *tensors(Signal.OUTPUT_GRADIENT))) for one in range(start, start + 5)]

    starts = range(0, 60, 5)
    pieces = [outputs(0), *(outputs(start) + gradients(start - 5) for start in starts[1:]), gradients(55)]

    part = join(tmp_path, pieces)

    expected, groups = at_once(pieces)
    assert expected.num_rows > 36_000
    assert part.read().equals(expected)
    assert group_rows(part) == groups
    assert max(groups) <= schema.MAX_ROW_GROUP_ROWS
    ends = [
        part.read_row_group(number).column("sample_id").to_pylist() for number in range(part.num_row_groups)
    ]
    assert all(first[-1] < second[0] for first, second in pairwise(ends))


def test_a_sample_larger_than_a_row_group_is_split_by_itself(tmp_path: Path) -> None:
    """Its neighbours stay whole in groups of their own."""
    metrics = tuple(f"m{index:04d}" for index in range(5000))
    large = [measurement(layer, metrics=metrics, values=[0.0] * 5000) for layer in range(8)]
    pieces = [
        [(0, forward(0, measurement()))],
        [(1, forward(1, *large[:4]))],
        [(1, backward(1, *large[4:]))],
        [(2, forward(2, measurement()))],
    ]

    part = join(tmp_path, pieces)

    assert group_rows(part) == (3, 36_000, 4_003)
    assert part.read().equals(at_once(pieces)[0])


def test_layers_that_the_catalog_does_not_know_come_last_as_they_were_seen(tmp_path: Path) -> None:
    """Without a catalog the order is that of the files, each of which is in catalog order."""
    pieces = [
        [(0, forward(0, measurement(3), measurement(1)))],
        [(1, forward(1, measurement(0), measurement(3)))],
    ]
    for layers, expected in (
        ((), ["layer98", "layer96", "layer96", "layer99"]),
        (("layer96",), ["layer96", "layer98", "layer96", "layer99"]),
    ):
        rows = join(tmp_path, pieces, layers).read().to_pylist()
        assert [row["layer"] for row in rows[::3]] == expected


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    """An upload can be repeated after a crash."""
    pieces = [[(0, forward(0, measurement(1)))], [(0, backward(0, measurement(0)))]]
    paths = [write(tmp_path, number, history_columns(piece, ORIGIN)) for number, piece in enumerate(pieces)]

    assert join_parts("history", paths, LAYERS) == join_parts("history", paths, LAYERS)
    assert join_parts("history", paths[:1], LAYERS) == paths[0].read_bytes()


def test_rows_of_samples_are_by_sample_and_the_later_row_of_one_stays_later(tmp_path: Path) -> None:
    """A superseding row stands behind the one that it supersedes."""
    pieces = [[sample_row(1, rows=3), sample_row(0, rows=1)], [sample_row(1, rows=6), sample_row(2, rows=2)]]
    paths = [write(tmp_path, number, samples_columns(piece, ORIGIN)) for number, piece in enumerate(pieces)]

    rows = pq.read_table(io.BytesIO(join_parts("samples", paths))).to_pylist()

    assert [(row["sample_id"], row["rows"]) for row in rows] == [(0, 1), (1, 3), (1, 6), (2, 2)]


def test_rows_of_steps_are_by_attempt_and_optimizer(tmp_path: Path) -> None:
    """Windows that closed out of order are in order in what is uploaded."""
    pieces = [[attempt(3), attempt(1, optimizer=1)], [attempt(2), attempt(1)]]
    paths = [write(tmp_path, number, steps_columns(piece, ORIGIN)) for number, piece in enumerate(pieces)]

    rows = pq.read_table(io.BytesIO(join_parts("steps", paths))).to_pylist()

    assert [(row["attempt"], row["optimizer"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (3, 0)]


@pytest.mark.parametrize("damage", ["footer", "page"])
def test_a_part_that_parquet_cannot_read_is_named(tmp_path: Path, damage: str) -> None:
    """Whether its footer or a page behind a sound footer is broken, the error tells which file it is."""
    paths = [
        write(tmp_path, number, history_columns([(number, forward(number, measurement()))], ORIGIN))
        for number in range(2)
    ]
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[:-9] if damage == "footer" else b"PAR1" + b"\xff" * 600 + data[604:])

    with pytest.raises(UnreadablePartError) as caught:
        join_parts("history", paths, LAYERS)

    assert caught.value.path == paths[1]


def test_a_disk_that_does_not_answer_is_no_broken_part(tmp_path: Path) -> None:
    """A file that is gone raises what the disk says, so that nothing is set aside for it."""
    with pytest.raises(FileNotFoundError):
        join_parts("history", [tmp_path / "a.parquet", tmp_path / "b.parquet"])


def test_fingerprints_of_several_parts_are_joined_by_attempt(tmp_path: Path) -> None:
    """Digests keep all their bits, and the tensors of an attempt the order of the model."""
    names = ("b.weight", "a.weight")
    pieces = [[fingerprint(at, name, 2**64 - 1 - at) for name in names] for at in (1, 0, 2)]
    paths = [write(tmp_path, at, fingerprints_columns(piece, ORIGIN)) for at, piece in enumerate(pieces)]

    rows = pq.read_table(io.BytesIO(join_parts("fingerprints", paths, LAYERS)))

    whole = fingerprints_columns([record for piece in pieces for record in piece], ORIGIN)
    assert rows.equals(pq.read_table(io.BytesIO(encode_columns(whole, METADATA))))
    assert rows["tensor"].to_pylist() == [*names] * 3
    assert rows["digest"].to_pylist() == [2**64 - 1 - at for at in (0, 0, 1, 1, 2, 2)]
