"""The clocks that a writer reads, behind a seam, so that hours pass in a test without waiting.

And the other way round: what a document says of a time, which is text that anybody may have written.
"""

import time
from datetime import datetime
from typing import Protocol

__all__ = ["Clock", "SystemClock", "seconds_of"]


class Clock(Protocol):
    """What a writer asks for the time."""

    def monotonic_s(self) -> float:
        """Returns seconds that never run backwards (writer thread)."""
        ...

    def wall_us(self) -> int:
        """Returns microseconds since the epoch, UTC (writer thread)."""
        ...

    def sleep(self, seconds: float) -> None:
        """Lets some time pass (writer thread, while it closes)."""
        ...


class SystemClock:
    """This host's clocks."""

    def monotonic_s(self) -> float:
        """Returns `time.monotonic`."""
        return time.monotonic()

    def wall_us(self) -> int:
        """Returns `time.time_ns` in microseconds."""
        return time.time_ns() // 1000

    def sleep(self, seconds: float) -> None:
        """Calls `time.sleep`."""
        time.sleep(seconds)


def seconds_of(text: str) -> float | None:
    """Returns an ISO 8601 text as seconds since the epoch, None where it tells no time (offline)."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
