"""Which root forwards are measured.

The caller's sampler says so, or, where ranks measure the same forwards by time, the plan that they share.
"""

import time
from collections.abc import Callable

from torchinstruments.observe.aligned import AlignedSampler, Due
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.sampling import SamplingEvent, SamplingPolicy, is_own, without_event
from torchinstruments.records import Position
from torchinstruments.statistics.foreign import foreign_code

__all__ = ["Choice"]


class Choice:
    """Chooses root forwards of one model.

    Args:
        sampler: As the caller gave it.
        aligned: Asked in its place, where ranks measure the same forwards by time.
        faults: Takes the errors of the sampler.
        miss_planned: Takes what other ranks measure and this one did not.
    """

    def __init__(
        self,
        sampler: SamplingPolicy,
        aligned: AlignedSampler | None,
        faults: Faults,
        miss_planned: Callable[[Due], None],
    ) -> None:
        self._sampler = sampler
        self._sampler_is_own = is_own(sampler)
        self._by_position = without_event(sampler)
        self._aligned = aligned
        self._faults = faults
        self._miss_planned = miss_planned

    def is_chosen(self, position: Position, started_us: int, *, is_paused: bool) -> bool:
        """Asks the sampler; one that raises did not choose (training thread, hot path).

        Args:
            position: Of a root forward that begins.
            started_us: Microseconds since the epoch.
            is_paused: Whether nothing may be measured at this moment.
        """
        if self._aligned is not None:
            due = self._aligned.forward_started(
                position, started_at_us=started_us, now_s=time.monotonic(), is_paused=is_paused
            )
            self._miss_planned(due)
            return due.sample
        if is_paused:
            return False
        try:
            if self._by_position is not None:
                return self._by_position(position)
            event = SamplingEvent(
                attempt=position.attempt,
                forward_in_attempt=position.forward_in_attempt,
                micro_batch=position.micro_batch,
                forward_index=position.forward_index,
                grad_enabled=position.grad_enabled,
                monotonic_s=time.monotonic(),
            )
            if self._sampler_is_own:
                return self._sampler.should_sample(event)
            with foreign_code():
                # It may return anything; whether that is true may raise too.
                return True if self._sampler.should_sample(event) else False  # noqa: SIM210
        except Exception as error:  # noqa: BLE001 - the user's code
            self._faults.report("sampler", "", error)
            return False

    def finish(self) -> None:
        """Has told what was heard of after the last forward, and lay before it (training thread)."""
        if self._aligned is not None:
            self._miss_planned(self._aligned.finish())

    def disarm(self) -> None:
        """Makes it usable in a forked child, where a lock may be held for ever."""
        if self._aligned is not None:
            self._aligned.disarm()
