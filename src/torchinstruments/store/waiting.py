"""Encoded parts on their way to a target that may refuse them for a while: a full disk, a full spool.

What is refused waits in encoded form, a few bytes a row, so that a long outage fits into a bounded memory.
Beyond the bound the oldest part is given up and its rows are counted; at the end whatever is still refused.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from torchinstruments.store.target import PartTarget

__all__ = ["MAX_WAITING_BYTES", "RETRY_AFTER_S", "EncodedPart", "WaitingParts"]

MAX_WAITING_BYTES = 64 * 2**20
"""Encoded bytes that may wait for a target."""

RETRY_AFTER_S = 5.0
"""A refused part is tried again after so many seconds."""


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """A part that is not durable yet.

    Attributes:
        table: One of `layout.TABLES`.
        num_rows: Its rows.
        data: An encoded Parquet file.
        last_sample_id: Highest sample id in it, or None.
        last_sample_us: When that sample began: microseconds since the epoch, UTC.
    """

    table: str
    num_rows: int
    data: bytes
    last_sample_id: int | None = None
    last_sample_us: int = 0


class WaitingParts:
    """Writes parts in order and keeps what the target refuses, within a bound (writer thread only).

    Args:
        target: Where parts become durable.
        on_failure: Told of each refusal, and of each part that is given up.
        max_bytes: Encoded bytes that may wait.

    Attributes:
        durable_rows: Rows that became durable, by table.
        dropped_rows: Rows that were given up, by table.
        num_parts: Parts that became durable.
        num_bytes: Their size.
        last_sample_id: Highest sample id that is durable, or None.
        last_sample_us: When that sample began: microseconds since the epoch, UTC.
    """

    def __init__(
        self,
        target: PartTarget,
        on_failure: Callable[[Exception], None],
        max_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._target = target
        self._on_failure = on_failure
        self._max_bytes = max_bytes
        self._parts: deque[EncodedPart] = deque()
        self._waiting_bytes = 0
        self._retry_at_s = 0.0
        self.durable_rows: Counter[str] = Counter()
        self.dropped_rows: Counter[str] = Counter()
        self.num_parts = 0
        self.num_bytes = 0
        self.last_sample_id: int | None = None
        self.last_sample_us = 0

    def __len__(self) -> int:
        """Parts that wait."""
        return len(self._parts)

    def add(self, part: EncodedPart) -> None:
        """Takes a part; `write` tries it."""
        self._parts.append(part)
        self._waiting_bytes += len(part.data)

    def write(self, now_s: float, *, at_once: bool = False) -> None:
        """Writes what waits, in order, until the target refuses; then gives up what is beyond the bound.

        Args:
            now_s: Monotonic time.
            at_once: Whether to try although the target refused less than `RETRY_AFTER_S` ago.
        """
        if at_once or now_s >= self._retry_at_s:
            try:
                while self._parts:
                    part = self._parts[0]
                    self._target.write_part(part.table, part.num_rows, part.data)
                    self._remove_first()
                    self._note_durable(part)
            except OSError as error:
                self._retry_at_s = now_s + RETRY_AFTER_S
                self._on_failure(error)
        while self._waiting_bytes > self._max_bytes:
            part = self._remove_first()
            self.dropped_rows[part.table] += part.num_rows
            self._on_failure(
                OSError(
                    f"{part.num_rows} rows of {part.table} given up: {self._max_bytes} bytes wait already"
                )
            )

    def give_up(self) -> bool:
        """Tries each part that waits once more, by itself, and gives up those that are refused.

        A smaller part behind one that does not fit may still find room, so each of them is tried.

        Returns:
            Whether every part became durable.
        """
        refused: Counter[str] = Counter()
        reasons: dict[str, OSError] = {}
        while self._parts:
            part = self._parts[0]
            try:
                self._target.write_part(part.table, part.num_rows, part.data)
            except OSError as error:
                refused[part.table] += part.num_rows
                reasons[part.table] = error
            else:
                self._note_durable(part)
            self._remove_first()
        self.dropped_rows += refused
        for table, error in reasons.items():
            self._on_failure(OSError(f"{refused[table]} rows of {table} given up at the close: {error}"))
        return not refused

    def _remove_first(self) -> EncodedPart:
        part = self._parts.popleft()
        self._waiting_bytes -= len(part.data)
        return part

    def _note_durable(self, part: EncodedPart) -> None:
        self.durable_rows[part.table] += part.num_rows
        self.num_parts += 1
        self.num_bytes += len(part.data)
        if part.last_sample_id is not None and part.last_sample_id >= (self.last_sample_id or 0):
            self.last_sample_id = part.last_sample_id
            self.last_sample_us = part.last_sample_us
