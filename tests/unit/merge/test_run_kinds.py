"""Each run of rows has the numbers of its own keys, whatever batch the first run of its kind came in."""

import numpy as np
import pyarrow as pa
import pytest

from torchinstruments.merge.run_kinds import RunKinds, Runs

NAMES = ("layer", "call_index", "loss_scale")
Key = tuple[str, int, float | None]


class Numbers:
    """Numbers distinct keys, and remembers how many rows it was shown."""

    def __init__(self) -> None:
        self.known: dict[Key, int] = {}
        self.rows = 0

    def __call__(self, batch: pa.RecordBatch) -> tuple[np.ndarray]:
        """Returns the number of each row."""
        self.rows += batch.num_rows
        keys = [tuple(row.values()) for row in batch.to_pylist()]
        return (np.array([self.known.setdefault(key, len(self.known)) for key in keys]),)


def batch_of(runs: list[list[Key]], texts: str) -> tuple[pa.RecordBatch, Runs]:
    """Returns runs as a batch whose dictionary has the texts in that order."""
    rows = [key for run in runs for key in run]
    places = pa.array([texts.index(layer) for layer, _, _ in rows], pa.int32())
    columns = [
        pa.DictionaryArray.from_arrays(places, pa.array(list(texts))),
        pa.array([call for _, call, _ in rows], pa.int32()),
        pa.array([scale for _, _, scale in rows], pa.float64()),
    ]
    lengths = np.array([len(run) for run in runs])
    return pa.RecordBatch.from_arrays(columns, names=list(NAMES)), Runs(np.cumsum(lengths) - lengths, lengths)


@pytest.mark.parametrize("most", [3, 30])
@pytest.mark.parametrize("seed", range(8))
def test_runs_have_the_numbers_of_their_keys(seed: int, most: int) -> None:
    """So it is for runs that repeat, differ in one key or in length, and for dictionaries in any order."""
    random = np.random.default_rng(seed)
    numbers = Numbers()
    kinds = RunKinds(NAMES, numbers)
    for _ in range(6):
        runs: list[list[Key]] = [
            [
                (
                    "abcd"[(place + int(random.random() < 0.02)) % 4],
                    place % 2,
                    2.0 if random.random() < 0.05 else None,
                )
                for place in range(3 + int(random.integers(most)))
            ]
            for _ in range(40)
        ]
        batch, cut = batch_of(runs, "".join(random.permutation(list("abcde"))))
        found = kinds.find(batch, cut)
        for run, kind in zip(runs, found, strict=True):
            assert kind.numbers[0].tolist() == [numbers.known[key] for key in run]


def test_runs_of_one_kind_are_looked_at_once() -> None:
    """Whatever batch they come in; what has to be equal beside the columns counts too."""
    numbers = Numbers()
    kinds = RunKinds(NAMES, numbers)
    whole: list[Key] = [(layer, 0, None) for layer in "abc"]
    for texts in ("abc", "cba", "cab"):
        batch, runs = batch_of([whole] * 50 + [whole[:2]] * 50, texts)
        found = kinds.find(batch, runs)
        assert len(set(found)) == 2
    assert numbers.rows == 3 + 2
    further = np.zeros(batch.num_rows, np.bool_)
    further[1] = True
    apart = kinds.find(batch, runs, further)
    assert len(set(apart)) == 3
    assert apart[0] not in found
    assert apart[1:] == found[1:]
