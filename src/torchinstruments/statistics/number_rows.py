"""The numbers of one reducer, side by side, a row for each tensor of a batch.

Of most tensors all numbers follow from one look, which has been taken when the tensor is added. They are made
there and then, while what they follow from is in the cache, and put beside each other, so that the writer
thread has an array and fetches nothing. A tensor of which that is not so has an empty row, which is filled in
as it is read: from the table of its matrix, or from what a device has sent.
"""

import math
from struct import Struct
from typing import NamedTuple

import numpy as np

from torchinstruments.statistics.facts import Facts
from torchinstruments.statistics.held import Look, Seen
from torchinstruments.statistics.measured import Measured
from torchinstruments.statistics.measuring import FactsReducer
from torchinstruments.statistics.moments import Array
from torchinstruments.statistics.packing import PackedBlock, PackedPlace

__all__ = ["NumberRows", "ReadRows"]


class ReadRows(NamedTuple):
    """Rows as far as they can be read together.

    Attributes:
        values: A row for each tensor, a column for each metric; NaN where a value is missing; float64.
        reasons: Why, by row and column.
        unread: Rows of tensors that have to be read alone.
    """

    values: Array
    reasons: dict[tuple[int, int], str]
    unread: list[int]


class NumberRows:
    """Collects the numbers of one reducer.

    Args:
        reducer: The reducer, of at least one metric.
    """

    def __init__(self, reducer: FactsReducer) -> None:
        self.reducer = reducer
        self.metrics = reducer.metrics
        self._row = Struct(f"{len(self.metrics)}d")
        self._row_bytes = self._row.size
        self._missing = self._row.pack(*[math.nan] * len(self.metrics))
        self._numbers = bytearray()
        self._packed: dict[PackedBlock, list[int]] = {}
        self._waiting: dict[int, Look] = {}
        self._lone: dict[int, Look | None] = {}
        self._looks: dict[int, Look | None] | None = None

    def add(self, found: Measured | Look | None) -> int:
        """Returns a new row (training thread, hot path).

        It never raises. An interrupt may leave a row of which nobody knows, and nothing else. A signal's
        handler that calls a layer, and so comes here in between, gets a row of its own.

        Args:
            found: What was measured of the tensor, or will have been; None where it has to be read alone.
        """
        made = self._made(found.facts) if isinstance(found, Measured) else None
        # Which row it is, it is asked only now: up to here a handler may have added others. The interpreter
        # runs none before it has called `len`.
        self._numbers += made or self._missing
        row = len(self._numbers) // self._row_bytes - 1
        if made is not None:
            return row
        if isinstance(found, Measured):
            self._lone[row] = Seen(found)
        elif type(found) is PackedPlace:
            self._packed.setdefault(found.block, []).extend((row, found.row))
        elif found is None:
            self._lone[row] = None
        else:
            self._waiting[row] = found
        return row

    def _made(self, facts: Facts) -> bytes | None:
        """Returns the bytes of a row where all of its numbers follow from facts, and are finite."""
        try:
            numbers = self.reducer.numbers(facts)
            # The sum is finite only where each of them is.
            if numbers is not None and math.isfinite(sum(numbers)):
                return self._row.pack(*numbers)
        except Exception:  # noqa: BLE001 - reading it alone says why
            return None
        return None

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._numbers) // self._row_bytes

    @property
    def is_filled(self) -> bool:
        """Whether all numbers were made when their tensors were added."""
        return not (self._packed or self._waiting or self._lone)

    def values(self) -> Array:
        """Returns the numbers of all rows, one after the other, in place; float64 (writer thread)."""
        return np.frombuffer(self._numbers, np.float64)

    def numbers(self, row: int) -> tuple[float, ...] | None:
        """Returns the numbers of a row that is filled; None where it is not (writer thread)."""
        numbers = self._row.unpack_from(self._numbers, row * self._row_bytes)
        return None if math.isnan(sum(numbers)) else numbers

    def look(self, row: int) -> Look | None:
        """Returns what the numbers of a row are read alone from, which is not filled (writer thread)."""
        if self._looks is None:
            self._looks = self._lone | self._waiting
            for block, of_block in self._packed.items():
                pairs = zip(of_block[::2], of_block[1::2], strict=True)
                self._looks |= {row: PackedPlace(block, place) for row, place in pairs}
        return self._looks.get(row)

    def read(self) -> ReadRows:
        """Returns all rows; nothing is added afterwards (writer thread)."""
        values = self.values().reshape(-1, len(self.metrics))
        reasons: dict[tuple[int, int], str] = {}
        unread = [*self._lone]
        for block, of_block in self._packed.items():
            places = np.array(of_block, np.int64).reshape(-1, 2)
            if not self._fill_in(block, places, values, reasons):
                unread += places[:, 0].tolist()
        for row, look in self._waiting.items():
            try:
                made = self._made(look.measured().facts)
            except Exception:  # noqa: BLE001 - the device failed: reading it alone says why
                made = None
            if made is None:
                unread.append(row)
            else:
                values[row] = np.frombuffer(made)
        return ReadRows(values, reasons, unread)

    def _fill_in(
        self, block: PackedBlock, places: Array, values: Array, reasons: dict[tuple[int, int], str]
    ) -> bool:
        """Fills in the rows of a matrix, and returns whether that was possible.

        Args:
            block: The matrix.
            places: Rows here, and rows of the matrix.
            values: Takes the values.
            reasons: Takes why one is missing.
        """
        try:
            table = block.table(self.reducer)
        except Exception:  # noqa: BLE001 - reading them alone says why
            table = None
        if table is None:
            return False
        values[places[:, 0]] = table.values[places[:, 1]]
        if table.missing:
            row_of = dict(zip(places[:, 1].tolist(), places[:, 0].tolist(), strict=True))
            for (row, column), absent in table.missing.items():
                if row in row_of:
                    reasons[row_of[row], column] = absent.reason
        return True
