"""What runs beside training once a rank has enrolled.

The writer thread carries samples to the run's folder and to the user's sinks; where samples go by time,
another thread keeps them at forwards which all ranks have in common.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from torchinstruments.config import HistoryConfig
from torchinstruments.enrolment import Enrolment
from torchinstruments.observe.aligned import AlignedSampler
from torchinstruments.rank_place import MAX_DIRECT_WORLD_SIZE
from torchinstruments.ranks.policy import Policy
from torchinstruments.ranks.rendezvous import Agreement
from torchinstruments.ranks.timetable import ScheduleThread, schedule
from torchinstruments.records import Counters, ErrorRecord, Identity
from torchinstruments.sinks.delivery import Delivery
from torchinstruments.sinks.directory import RankFolderSink
from torchinstruments.sinks.event_files import HistogramFiles, open_histogram_files
from torchinstruments.sinks.sink import Sink
from torchinstruments.store.writer import RankWriter

__all__ = ["Running"]


class Running:
    """The threads of one observer.

    Args:
        delivery: The writer thread.
        history: Settings of the history.
        policy: Which ranks observe.
        sinks: Take the samples too, beside the run's folder.
        aligned: Measures the same forwards as the other ranks, once they have agreed; None where the sampler
            goes by no time.
    """

    def __init__(
        self,
        delivery: Delivery,
        history: HistoryConfig,
        policy: Policy,
        sinks: Sequence[Sink],
        aligned: AlignedSampler | None,
    ) -> None:
        self._delivery = delivery
        self._history = history
        self._policy = policy
        self._sinks = tuple(sinks)
        self._aligned = aligned
        self._schedule: ScheduleThread | None = None
        self._is_stopped = False
        self.source: Callable[[], Counters] = Counters
        """Tells the training side's counters."""
        self._writer: RankWriter | None = None
        self.wants_histograms = True
        """Whether anyone keeps histograms of this rank; True until it is known."""

    @property
    def agreeing_s(self) -> float:
        """How long the ranks take to agree on the first sample by time."""
        return 0.0 if self._schedule is None else self._schedule.agreeing_s

    def start(self, identity: Identity, enrolment: Enrolment) -> None:
        """Starts what a rank that observes needs; the writer thread where there is a place to write."""
        self._start_schedule(identity, enrolment.agreement)
        if enrolment.target is None:
            return
        self._writer = RankWriter(
            identity,
            enrolment.claim,
            self._history,
            enrolment.target,
            counters=self._training_counters,
            report=self._delivery.report,
            spool_path=enrolment.spool_path,
        )
        histograms = self._open_histogram_files(identity, enrolment)
        # Any sink of the user may read them.
        self.wants_histograms = histograms is not None or bool(self._sinks)
        folder = RankFolderSink(
            self._writer,
            enrolment.copy_folder,
            histograms=histograms,
            report=self._delivery.report,
        )
        self._delivery.start(enrolment.run, [folder, *self._sinks], identity=identity, claim=enrolment.claim)

    def _start_schedule(self, identity: Identity, agreement: Agreement) -> None:
        """Starts the thread that keeps time-based samples at forwards which all ranks have in common."""
        if self._aligned is None:
            return
        if self._policy.chooses_one:
            self._aligned.go_alone()
            return
        self._schedule = schedule(
            self._aligned,
            identity,
            agreement,
            first_rank=self._policy.first_rank,
            on_error=self._schedule_ended,
        )
        if self._schedule is None:
            self._aligned.go_alone()
        elif self._is_stopped:
            return
        else:
            self._schedule.start()

    def _schedule_ended(self, error: Exception) -> None:
        self._delivery.put_error(
            ErrorRecord(
                "alignment",
                "",
                type(error).__name__,
                f"this rank samples by its own time from here on: {error}"[:500],
                datetime.now(UTC).isoformat(timespec="milliseconds"),
            )
        )

    def _open_histogram_files(self, identity: Identity, enrolment: Enrolment) -> HistogramFiles | None:
        """Returns what writes TensorBoard files; in a large world the leader's alone are kept."""
        if enrolment.target is None or (
            identity.world_size > MAX_DIRECT_WORLD_SIZE and not enrolment.agreement.leader
        ):
            return None
        return open_histogram_files(enrolment.target, enrolment.copy_folder, identity, enrolment.claim)

    def stop_schedule(self, timeout_s: float = 1.0) -> None:
        """Ends the thread that keeps samples in common, and lets none begin (any thread).

        Args:
            timeout_s: For which it is waited for.
        """
        self._is_stopped = True
        if self._schedule is not None:
            self._schedule.stop(timeout_s)

    def counters(self, observed: Counters) -> Counters:
        """Returns what the observer counted together with what was stored and dropped here (any thread)."""
        writer = self._writer
        return writer.counters() if writer is not None else self._with_delivery(observed)

    def _training_counters(self) -> Counters:
        return self._with_delivery(self.source())

    def _with_delivery(self, observed: Counters) -> Counters:
        return replace(
            observed,
            rows_dropped=observed.rows_dropped + self._delivery.rows_dropped,
            writer_s=self._delivery.writer_s,
        )
