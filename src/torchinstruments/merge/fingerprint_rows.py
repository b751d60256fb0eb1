"""The rows of ``fingerprints`` of one rank, read once: digests of what its replicas have to agree in."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.merge.ranges import PartSpan, RangeTable, RangeTally, row_digests, text_digests, widen
from torchinstruments.store.inventory import PartFile
from torchinstruments.store.row_blocks import integers
from torchinstruments.store.series import texts_of

__all__ = ["FINGERPRINT_COLUMNS", "FINGERPRINT_RANGE", "FingerprintReading", "FingerprintRows"]

FINGERPRINT_RANGE = 8
"""Attempts in a range of ``fingerprints``: each has a row a tensor."""

FINGERPRINT_COLUMNS = ("generation", "rank", "process", "attempt", "tensor", "kind", "replica_key", "digest")


@dataclass(frozen=True, slots=True)
class FingerprintReading:
    """What was read of the ``fingerprints`` of one rank.

    Attributes:
        rows: Rows.
        ranges: Digests of the rows, with the replica key as group.
        spans: The parts that were read.
    """

    rows: int
    ranges: RangeTable
    spans: tuple[PartSpan, ...]


class FingerprintRows:
    """Gathers the ``fingerprints`` of one rank, part by part in the order of writing (worker)."""

    def __init__(self) -> None:
        self._rows = 0
        self._keys: dict[str, int] = {}
        self._ranges = RangeTally(FINGERPRINT_RANGE)
        self._spans: list[PartSpan] = []

    def add(self, part: PartFile, rows: Iterable[pa.RecordBatch]) -> None:
        """Takes the rows of a part, all of which can be decoded."""
        bounds: dict[int, tuple[int, int]] = {}
        for batch in rows:
            if batch.num_rows:
                generation, attempt = integers(batch, "generation"), integers(batch, "attempt")
                widen(bounds, generation, attempt)
                positions, keys = texts_of(batch.column("replica_key"))
                group = np.array([self._keys.setdefault(key, len(self._keys)) for key in keys])[positions]
                columns: list[npt.NDArray[np.generic]] = [attempt]
                for name in ("tensor", "kind"):
                    places, texts = texts_of(batch.column(name))
                    columns.append(text_digests(texts)[places])
                columns.append(batch.column("digest").to_numpy(zero_copy_only=False))
                is_new = np.append(True, attempt[1:] != attempt[:-1])
                self._ranges.add(generation, attempt, group, is_new, row_digests(columns))
                self._rows += batch.num_rows
        self._spans += [PartSpan(part, one, *ends) for one, ends in sorted(bounds.items())]

    def finish(self) -> FingerprintReading:
        """Returns what was read."""
        return FingerprintReading(self._rows, self._ranges.finish(list(self._keys)), tuple(self._spans))
