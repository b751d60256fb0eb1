"""What one observer counted; read by the writer thread for as long as the run lives.

It is an object of its own so that whoever reads it holds neither the model nor its layers.
"""

import threading

from torchinstruments.observe.faults import Faults
from torchinstruments.ranks.clock import StepClock
from torchinstruments.records import Counters

__all__ = ["Counts"]


class Counts:
    """Counters of the training side.

    Args:
        faults: Counts the errors.
        clock: Counts the forwards.
    """

    def __init__(self, faults: Faults, clock: StepClock) -> None:
        self._faults = faults
        self._clock = clock
        # A signal handler may run the model while its thread is in here.
        self._lock = threading.RLock()
        self._samples = 0
        self._missed = 0
        self._collection_s = 0.0

    def add(self, *, samples: int = 0, missed: int = 0, collection_s: float = 0.0) -> None:
        """Adds to the counters (training or autograd thread, hot path)."""
        with self._lock:
            self._samples += samples
            self._missed += missed
            self._collection_s += collection_s

    def read(self) -> Counters:
        """Returns the counters; what is stored is the session's to add (any thread)."""
        with self._lock:
            return Counters(
                forwards=self._clock.num_forwards,
                samples=self._samples,
                missed=self._missed,
                collection_s=self._collection_s,
                errors=self._faults.counts,
            )

    def disarm(self) -> None:
        """Makes it usable in a forked child, where a lock may be held for ever."""
        self._lock = threading.RLock()
        self._faults.disarm()
