"""Says that no step is accepted, or that none is seen: what no look at a gradient or a parameter can tell."""

from collections.abc import Callable, Sequence

from torchinstruments.checks.findings import Action, EvidenceKind, Finding, Moment, Severity
from torchinstruments.checks.unstepped import Unstepped
from torchinstruments.checks.watchdog import Trip, Watchdog

__all__ = ["StepAlarms"]


class StepAlarms:
    """What is said of steps that are missing.

    Args:
        watchdog: Counts what lies between accepted steps.
        unstepped: Watches for gradients that no step takes.
        of_steps: Names of the checks that look at steps.
        moment: Says where training stands.
        emit: Takes a finding.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        unstepped: Unstepped,
        of_steps: Sequence[str],
        moment: Callable[[], Moment],
        emit: Callable[[Finding], None],
    ) -> None:
        self._watchdog = watchdog
        self._unstepped = unstepped
        self._of_steps = of_steps
        self._moment = moment
        self._emit = emit
        self.awaits_step = bool(of_steps)
        """Whether the first step is still to come, without which checks look at nothing."""

    def backward_ended(self, fired: Sequence[int]) -> None:
        """Takes a backward (autograd thread, hot path).

        Args:
            fired: Positions of the parameters that it reached.
        """
        self.backward_counted()
        if self.awaits_step:
            num_rounds = self._unstepped.backward_ended(fired)
            if num_rounds is not None:
                self._say_unseen(num_rounds)

    def backward_counted(self) -> None:
        """Takes a backward where no step is awaited (autograd thread, hot path)."""
        trip = self._watchdog.backward()
        if trip is not None:
            self._say_not_accepted(trip)

    def step_seen(self) -> None:
        """Takes a step, whatever becomes of it (training thread, hot path)."""
        self.awaits_step = False
        self._unstepped.step_seen()

    def skipped(self) -> None:
        """Takes a skipped step (training thread, hot path)."""
        trip = self._watchdog.skipped()
        if trip is not None:
            self._say_not_accepted(trip)

    def _say_not_accepted(self, trip: Trip) -> None:
        self._emit(
            Finding(
                check="watchdog",
                code="check_no_accepted_steps",
                severity=Severity.WARNING,
                action=Action.WARN,
                message=f"{trip.number} {trip.unit} since the last accepted step (allowed: {trip.threshold})",
                values={"number": trip.number, "threshold": trip.threshold, "unit": trip.unit},
                moment=self._moment(),
                evidence=EvidenceKind.LEDGER,
                remedy="look at the scale ledger of the report: under a loss scale that falls without end "
                "every gradient overflows",
            )
        )

    def _say_unseen(self, num_rounds: int) -> None:
        """Says that gradients come and no step does, so that the looks around a write never happen."""
        self._emit(
            Finding(
                check="watchdog",
                code="check_no_step_seen",
                severity=Severity.WARNING,
                action=Action.WARN,
                message=f"{num_rounds} rounds of gradients came and no step of the session's optimizers was "
                f"seen: nothing is looked at before or after a write ({', '.join(self._of_steps)})",
                values={"num_rounds": num_rounds},
                moment=self._moment(),
                evidence=EvidenceKind.COUNTING_HOOK,
                remedy="give as optimizer= the one that steps this model, and leave its step out of what "
                "torch.compile compiles, whose inside is not seen",
            )
        )
