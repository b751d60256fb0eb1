"""Small CPU tensors of a sample, measured together.

A tensor of a few hundred entries costs more in calls than in work: each of some forty NumPy calls takes
about a microsecond, whatever it is given. So small tensors are copied into the rows of a matrix when they are
added, which fixes their values at that moment, and a whole matrix is sorted, searched and summed at once.
Rows are as long as the next power of two; what is left of a row is NaN and sorts last.

Every dtype of at most 32 bits fits float32 or float64 exactly, and integers of 64 bits mostly do. Rows do not
see each other: a tensor's numbers do not depend on its neighbours.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from torchinstruments.records import Absent
from torchinstruments.statistics.bins import Binned, BinRule, bin_edges, thresholds
from torchinstruments.statistics.fact_columns import FactColumns, ValueTable
from torchinstruments.statistics.facts import QUARTERS
from torchinstruments.statistics.host_memory import as_array
from torchinstruments.statistics.measured import Measured
from torchinstruments.statistics.measuring import FactsReducer
from torchinstruments.statistics.moments import Array, exponents_of

__all__ = ["MAX_PACKED_ENTRIES", "PackedBlock", "PackedPlace", "SmallTensors"]

MAX_PACKED_ENTRIES = 4096
"""Larger tensors are measured by themselves."""

_MIN_WIDTH = 16
_BLOCK_ENTRIES = 65_536
"""Entries of a matrix: what its rows take in temporaries stays in the cache, and so does the memory bound."""

_FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
_OF_NUMPY = {
    torch.bool: torch.float32,
    torch.uint8: torch.float32,
    torch.uint16: torch.float32,
    torch.int8: torch.float32,
    torch.int16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float32,
    torch.int32: torch.float64,
    torch.uint32: torch.float64,
    torch.int64: torch.float64,
    torch.uint64: torch.float64,
    torch.float64: torch.float64,
}
"""Dtypes that NumPy knows, with those that hold them exactly; integers of 64 bits up to `_EXACT_BELOW`."""

_EXACT_BELOW = 2**53
"""Whole numbers of a smaller size are all float64 numbers. Ids of tokens are, and what is counted."""

_ROW_DTYPES = {**_OF_NUMPY, **dict.fromkeys((torch.bfloat16, *_FLOAT8), torch.float32)}


class PackedPlace:
    """Where one tensor was put; what was measured of it is read here after its matrix was measured.

    Attributes:
        block: The matrix.
        row: Its row.
    """

    __slots__ = ("block", "row")

    def __init__(self, block: "PackedBlock", row: int) -> None:
        self.block = block
        self.row = row

    def measured(self) -> Measured:
        """Returns what was measured (writer thread).

        Raises:
            RuntimeError: The matrix could not be measured, and why.
        """
        return self.block.measured(self.row)

    def values(self, reducer: FactsReducer) -> Mapping[str, float | Absent]:
        """Returns what a reducer makes of it (writer thread).

        Raises:
            Exception: The matrix could not be measured, or what the reducer raised.
        """
        return self.block.values(self.row, reducer)


class SmallTensors:
    """Collects small tensors and measures them in matrices.

    Memory is bounded by one matrix for each row length and dtype, 7 MB if all of them occur; a full one is
    measured at once and keeps its results alone.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[torch.dtype, int], PackedBlock] = {}
        self._is_adding = False

    def add(self, tensor: torch.Tensor, rules: Sequence[BinRule] = ()) -> PackedPlace | None:
        """Copies a tensor and returns where (training thread, hot path).

        Args:
            tensor: Detached and strided, on the CPU, of at least one entry.
            rules: The histograms that are wanted.

        Returns:
            Its place, or None where it is empty, too large, or of integers that float64 does not hold, and in
            the handler of a signal that came while another one was copied.

        Raises:
            Exception: What the measuring of a full matrix raised, or a lack of memory.
        """
        num_entries = tensor.numel()
        if num_entries > MAX_PACKED_ENTRIES or num_entries == 0 or self._is_adding:
            return None
        dtype = _ROW_DTYPES.get(tensor.dtype)
        if dtype is None or (tensor.dtype.itemsize == 8 and not _fits_float64(tensor)):
            return None
        width = max(_MIN_WIDTH, 1 << (num_entries - 1).bit_length())
        self._is_adding = True
        try:
            block = self._open.get((dtype, width))
            if block is None:
                block = self._open[dtype, width] = PackedBlock(dtype, width)
            place = PackedPlace(block, block.add(tensor, num_entries, rules))
            if block.is_full:
                del self._open[dtype, width]
                block.measure()
        finally:
            self._is_adding = False
        return place

    def measure(self) -> None:
        """Measures what has not been measured (training thread, hot path).

        Raises:
            ExceptionGroup: What the measuring of matrices raised.
        """
        blocks = tuple(self._open.values())
        self._open.clear()
        failures: list[Exception] = []
        for block in blocks:
            try:
                block.measure()
            except Exception as error:  # noqa: BLE001 - one matrix may not cost the others
                failures.append(error)
        if failures:
            raise ExceptionGroup("small tensors could not be measured", failures)


class PackedBlock:
    """A matrix whose rows are tensors."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        self._memory = torch.empty((_BLOCK_ENTRIES // width, width), dtype=dtype, device="cpu")
        self._rows: Array = self._memory.numpy()
        self._dtype = dtype
        self._sizes: list[int] = []
        self._rules: dict[int, tuple[BinRule, ...]] = {}
        self._binned: dict[int, dict[BinRule, Binned]] = {}
        self._columns: FactColumns | None = None
        self._tables: dict[FactsReducer, ValueTable | None] = {}
        self._failure = "they were never measured"

    @property
    def is_full(self) -> bool:
        """Whether no further tensor fits."""
        return len(self._sizes) == self._rows.shape[0]

    def add(self, tensor: torch.Tensor, num_entries: int, rules: Sequence[BinRule]) -> int:
        """Copies a tensor into the next row and returns which one it is."""
        row = len(self._sizes)
        entries = self._rows[row]
        if tensor.dtype is torch.bfloat16:
            # Its bits are the upper half of those of float32.
            source = as_array(tensor, np.uint16)
            bits = _shaped(entries[:num_entries].view(np.uint32), source)
            np.left_shift(source, 16, out=bits, dtype=np.uint32)
        elif tensor.dtype in _OF_NUMPY:
            source = as_array(tensor)
            _shaped(entries[:num_entries], source)[...] = source
        else:
            self._memory[row].narrow(0, 0, num_entries).view(tensor.shape).copy_(tensor)
        entries[num_entries:] = np.nan
        if rules:
            self._rules[row] = tuple(rules)
        self._sizes.append(num_entries)
        return row

    def measure(self) -> None:
        """Measures every row and lets go of the matrix."""
        try:
            with np.errstate(all="ignore"):
                self._measure(self._rows[: len(self._sizes)], np.array(self._sizes))
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            del self._rows, self._memory

    def _measure(self, rows: Array, sizes: Array) -> None:
        """Sorts the rows and reads everything off their order."""
        rows.sort(axis=1)
        every_row = np.arange(sizes.size)
        first, stop = np.zeros_like(sizes), sizes
        if not (np.isfinite(rows[:, 0]) & np.isfinite(rows[every_row, sizes - 1])).all():
            # Ascending order is -inf, the finite entries, inf, NaN.
            first, stop = np.count_nonzero(rows == -np.inf, axis=1), np.count_nonzero(rows < np.inf, axis=1)
        num_finite = stop - first
        ranks = first[:, None] + _ranks(num_finite)
        found = rows[every_row[:, None], np.minimum(ranks, rows.shape[1] - 1)].astype(np.float64)
        found += 0.0  # which of the two zeros a sort puts first is chance
        low, high, pivot = found[:, 0], found[:, 1], found[:, 4]
        exponents = exponents_of(np.maximum(np.abs(low), np.abs(high)))
        shifted = rows.astype(np.float64)
        if exponents.any():
            np.ldexp(shifted, -exponents[:, None], out=shifted)
            pivot = np.ldexp(pivot, -exponents)
        shifted -= pivot[:, None]
        if (num_finite < rows.shape[1]).any():
            place = np.arange(rows.shape[1])
            np.copyto(shifted, 0.0, where=(place < first[:, None]) | (place >= stop[:, None]))
        total = np.add.reduce(shifted, axis=1)
        np.multiply(shifted, shifted, out=shifted)
        total_squares = np.add.reduce(shifted, axis=1)
        self._bin(rows, first.tolist(), stop.tolist(), low, high)
        self._columns = FactColumns(
            num_entries=sizes,
            num_zero=np.count_nonzero(rows == 0, axis=1),
            num_finite=num_finite,
            total=total,
            total_squares=total_squares,
            scaled_pivot=pivot,
            exponent=exponents,
            ordered=found,
        )

    def _bin(self, rows: Array, first: list[int], stop: list[int], low: Array, high: Array) -> None:
        """Counts what lies between the edges of the histograms."""
        by_rule: dict[BinRule, list[int]] = {}
        for row, rules in self._rules.items():
            if first[row] < stop[row]:
                for rule in dict.fromkeys(rules):
                    by_rule.setdefault(rule, []).append(row)
        for rule, of_rule in by_rule.items():
            every_edges = bin_edges(rule, low[of_rule], high[of_rule])
            every_value = thresholds(every_edges, rows.dtype)
            for row, edges, values in zip(of_rule, every_edges, every_value, strict=True):
                counts = rows[row, first[row] : stop[row]].searchsorted(values)
                self._binned.setdefault(row, {})[rule] = Binned(edges, counts)

    def measured(self, row: int) -> Measured:
        """Returns what was measured of a row.

        Raises:
            RuntimeError: It was not, and why.
        """
        binned = tuple([self._binned[row][rule] for rule in self._rules[row]]) if row in self._binned else ()
        return Measured(self._measured_columns().facts(row), binned)

    def values(self, row: int, reducer: FactsReducer) -> Mapping[str, float | Absent]:
        """Returns what a reducer makes of a row.

        Raises:
            RuntimeError: Nothing was measured, and why.
        """
        table = self.table(reducer)
        if table is None:
            return reducer.values(self._measured_columns().facts(row))
        return dict(zip(reducer.metrics, table.row(row), strict=True))

    def table(self, reducer: FactsReducer) -> ValueTable | None:
        """Returns what a reducer makes of all rows, made at the first call; None where it goes row by row.

        Raises:
            RuntimeError: Nothing was measured, and why.
        """
        if reducer not in self._tables:
            self._tables[reducer] = reducer.table(self._measured_columns())
        return self._tables[reducer]

    def _measured_columns(self) -> FactColumns:
        """Returns what was measured.

        Raises:
            RuntimeError: Nothing was, and why.
        """
        if self._columns is None:
            raise RuntimeError(self._failure)
        return self._columns


def _fits_float64(tensor: torch.Tensor) -> bool:
    """Returns whether float64 holds every entry of a tensor of 64 bits."""
    if tensor.dtype is torch.float64:
        return True
    source = as_array(tensor)
    return int(source.max()) < _EXACT_BELOW and int(source.min()) > -_EXACT_BELOW


def _shaped(row: Array, source: Array) -> Array:
    """Returns entries of a row in the shape of what is copied there."""
    return row if source.ndim == 1 else row.reshape(source.shape)


def _ranks(num_finite: Array) -> Array:
    """Returns the 8 ranks that are asked for of each row, as `quartile_position` places them."""
    last = np.maximum(num_finite - 1, 0)
    below = last[:, None] * np.array(QUARTERS) // 4
    ranks = np.empty((num_finite.size, 2 + 2 * len(QUARTERS)), dtype=np.int64)
    ranks[:, 0] = 0
    ranks[:, 1] = last
    ranks[:, 2::2] = below
    ranks[:, 3::2] = np.minimum(below + 1, last[:, None])
    return ranks
