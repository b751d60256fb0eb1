"""Runs of any size, written column by column in the encodings of real parts, for tests and benchmarks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from merge.run_folder import HISTORY_DEFAULTS, START, RunFolder, process_of
from torchinstruments.records import Member
from torchinstruments.store import layout, schema
from torchinstruments.store.manifest import TableState
from torchinstruments.store.parts import open_part_writer

METRICS = ("max", "mean", "min", "nonfinite_fraction", "p25", "p50", "p75", "std", "zero_fraction")
SIGNALS = ("output", "output_gradient")


@dataclass(frozen=True)
class SyntheticRun:
    """A training run of one program on many ranks, of one generation.

    Attributes:
        folder: Where it lies.
        samples: Samples of each rank, one an attempt.
        layers: Layers, each with its output and its gradient, and nine statistics of both.
        part_samples: Samples in a part of the first rank.
        cut_apart: Whether ranks cut their parts in different places, as writers of real runs do.
        late_gradients: Whether gradients lie in the part after that of their sample.
        seed: Of the values.
    """

    folder: RunFolder
    samples: int
    layers: int
    part_samples: int = 50
    cut_apart: bool = False
    late_gradients: bool = False
    seed: int = 0

    @property
    def rows(self) -> int:
        """Rows of ``history`` of a rank that misses no sample."""
        return self.samples * self.layers * len(SIGNALS) * len(METRICS)

    def values(self, rank: int) -> npt.NDArray[np.float64]:
        """The values of a rank, shape ``[samples, layers, signals, metrics]``, NaN for a missing one."""
        random = np.random.default_rng((self.seed, rank))
        shape = (self.samples, self.layers, len(SIGNALS), len(METRICS))
        values = random.normal(size=shape).astype(np.float32).astype(np.float64)
        values[..., METRICS.index("nonfinite_fraction")] = 0.0
        return values

    def write(self, without: Mapping[int, Sequence[int]] | None = None) -> "SyntheticRun":
        """Writes everything.

        Args:
            without: Rank to the samples that it does not have.
        """
        ranks = self.folder.world_size
        self.folder.run()
        members = [Member(rank, process_of(rank), "host-a", rank, observing=True) for rank in range(ranks)]
        self.folder.generation(0, members)
        known: dict[bytes, _Keys] = {}
        for rank in range(ranks):
            left_out = set((without or {}).get(rank, ()))
            own = np.array([one for one in range(self.samples) if one not in left_out], np.int64)
            values = self.values(rank)
            parts = self._parts(rank, own)
            for sequence, is_there in enumerate(parts):
                name = is_there.tobytes()
                if name not in known:
                    known[name] = self._keys(is_there)
                self._write_part(rank, sequence, known[name], values)
            self.folder.samples(rank, [{"sample_id": one} for one in own.tolist()], process_of(rank))
            rows = len(own) * self.rows // self.samples
            tables = {
                "history": TableState(next_part=len(parts), rows=rows),
                "samples": TableState(next_part=1, rows=len(own)),
            }
            self.folder.manifest(rank, process_of(rank), tables=tables, last_sample_id=int(own[-1]))
        return self

    def _parts(self, rank: int, own: npt.NDArray[np.int64]) -> list[npt.NDArray[np.bool_]]:
        """Returns for each part which signals of which samples it holds, shape ``[samples, signals]``."""
        size = self.part_samples + (3 * rank % 7 if self.cut_apart else 0)
        cuts = [own[start : start + size] for start in range(0, len(own), size)]
        number = len(cuts) + int(self.late_gradients)
        parts = [np.zeros((self.samples, len(SIGNALS)), np.bool_) for _ in range(number)]
        for place, samples in enumerate(cuts):
            parts[place][samples, 0] = True
            parts[place + int(self.late_gradients)][samples, 1] = True
        return parts

    def _keys(self, is_there: npt.NDArray[np.bool_]) -> "_Keys":
        shape = (self.samples, self.layers, len(SIGNALS), len(METRICS))
        places = np.nonzero(np.broadcast_to(is_there[:, None, :, None], shape))
        sample, layer, signal, metric = (place.astype(np.int64) for place in places)

        def constant(name: str, value: object) -> pa.Array:
            kind = schema.HISTORY.field(name).type
            if pa.types.is_string(kind):
                return _texts([str(value)], np.zeros(len(sample), np.int64))
            return pa.repeat(pa.scalar(value, kind), len(sample))

        columns = {
            "sample_id": pa.array(sample),
            "attempt": pa.array(sample),
            "forward_index": pa.array(sample),
            "timestamp": pa.array(sample * 1_000_000 + int(START.timestamp() * 1e6)),
            "layer": _texts([f"layers.{one:03d}" for one in range(self.layers)], layer),
            "signal": _texts(SIGNALS, signal),
            "tensor_path": _texts(("output", "grad_output.0"), signal),
            "metric": _texts(METRICS, metric),
        }
        for name, value in HISTORY_DEFAULTS.items():
            if name not in columns and name != "value":
                columns[name] = constant(name, value)
        return _Keys(columns, places)

    def _write_part(self, rank: int, sequence: int, keys: "_Keys", values: npt.NDArray[np.float64]) -> None:
        process = process_of(rank)
        own = values[keys.places]
        rows = len(own)
        columns = dict(keys.columns)
        columns["generation"] = pa.repeat(pa.scalar(0, pa.int32()), rows)
        columns["rank"] = pa.repeat(pa.scalar(rank, pa.int32()), rows)
        columns["process"] = _texts([process], np.zeros(rows, np.int64))
        columns["value"] = pa.array(own, mask=np.isnan(own))
        declared = schema.in_memory(schema.HISTORY)
        table = pa.Table.from_arrays(
            [columns[field.name].cast(field.type) for field in declared], schema=declared
        )
        entries = {
            "schema_version": schema.SCHEMA_VERSION,
            "run_id": self.folder.run_id,
            "generation": 0,
            "rank": rank,
            "process": process,
            "world_size": self.folder.world_size,
        }
        folder = self.folder.folder(rank)
        target = self.folder.root / layout.part_file(folder, "history", process, sequence)
        target.parent.mkdir(parents=True, exist_ok=True)
        # A row group ends at a sample's end.
        sample = keys.places[0]
        with target.open("wb") as file, open_part_writer(file, declared) as writer:
            start = 0
            while start < rows:
                end = min(start + schema.MAX_ROW_GROUP_ROWS, rows)
                if end < rows:
                    end = int(np.searchsorted(sample, sample[end]))
                writer.write_table(table.slice(start, end - start), row_group_size=end - start)
                start = end
            writer.add_key_value_metadata(schema.metadata(**entries))


@dataclass(frozen=True)
class _Keys:
    columns: Mapping[str, pa.Array]
    places: tuple[npt.NDArray[np.intp], ...]


def _texts(texts: Sequence[str], positions: npt.NDArray[np.int64]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(positions, pa.int32()), pa.array(texts, pa.string()))
