"""What one gradient scaler did with one optimizer between two of its updates, and what follows from it.

The training thread fills an attempt with what the host knows and with tickets for what only the device does.
The writer thread reads the tickets and decides the outcome.

An ordinary optimizer is called only where the scaler found nothing, and its hooks tell whether it was. A
fused one is always called and decides on the device, by comparing the findings with exactly 1: two findings
that were added up (those of several devices, or of ranks where the program makes them agree) are no 1, and
torch's optimizers then apply what the scaler thinks is skipped. Such an outcome is left unknown, beside the
number that says why. Where the findings are out of reach a scale that fell tells of a skip, unless the
program set it, or another optimizer shares the scaler; a scale that did not fall tells nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torchinstruments.ranks.ring import Ticket
from torchinstruments.records import AttemptRecord, Evidence, Outcome

__all__ = ["ScaledAttempt", "Verdict", "judge"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an attempt.

    Attributes:
        outcome: As in `AttemptRecord`.
        evidence: As in `AttemptRecord`.
    """

    outcome: Outcome
    evidence: Evidence


_UNKNOWN = Verdict(Outcome.UNKNOWN, Evidence.NONE)
_RAN = Verdict(Outcome.APPLIED, Evidence.OPTIMIZER_HOOK)
_NOTHING_FOUND = Verdict(Outcome.APPLIED, Evidence.FOUND_INF)
_FOUND = Verdict(Outcome.SKIPPED, Evidence.FOUND_INF)
_DID_NOT_RUN = Verdict(Outcome.SKIPPED, Evidence.OPTIMIZER_HOOK)
_BACKED_OFF = Verdict(Outcome.SKIPPED, Evidence.SCALE_BACKOFF)


@dataclass(eq=False)
class ScaledAttempt:
    """An amendment of an attempt's record: loss scale, findings and outcome.

    Attributes:
        report: Takes the exception of a device that failed.
        scale_before: The scale that the scaler divided by.
        found_inf: What it found, one number a device; None where that is out of reach.
        scale_after: The scale after the update that followed; None where none did.
        ran: Whether the optimizer's step was seen to run; None where it could not be seen.
        decides_on_device: Whether the optimizer is called in any case.
        is_plain_scaler: Whether the scaler decides as torch's own does.
        is_alone: Whether the update was for this optimizer only.
        is_scale_set: Whether the program gave the update a scale.
        is_stepped: Whether the scaler was asked to step the optimizer.
        is_over: Whether the update came, or none will.
    """

    report: Callable[[BaseException], None]
    scale_before: Ticket | None = None
    found_inf: tuple[Ticket, ...] | None = None
    scale_after: Ticket | None = None
    ran: bool | None = None
    decides_on_device: bool = False
    is_plain_scaler: bool = True
    is_alone: bool = True
    is_scale_set: bool = False
    is_stepped: bool = False
    is_over: bool = False

    def provisional(self) -> Verdict:
        """Returns what the host knows by itself (training thread, hot path)."""
        if self.ran and not self.decides_on_device:
            return _RAN
        return judge(self, None, None, None)

    def is_complete(self) -> bool:
        """Returns whether the update came (writer thread).

        Until then what is known is read, for the ring may go round while an update does not come.
        """
        if self.is_over:
            return True
        try:
            for ticket in (self.scale_before, *(self.found_inf or ())):
                if ticket is not None:
                    ticket.read()
        except Exception as error:  # noqa: BLE001 - what is known is told, and that a device failed
            self.report(error)
            return True
        return False

    def amend(self, record: AttemptRecord) -> AttemptRecord:
        """Returns the record with what the device knew (writer thread)."""
        try:
            found_inf = self._total()
            before, after = self._number(self.scale_before), self._number(self.scale_after)
        except Exception as error:  # noqa: BLE001 - whatever a device did, the row is kept
            self.report(error)
            return record
        record = replace(record, found_inf=found_inf, scale_before=before, scale_after=after)
        if not self.is_stepped:
            return record
        verdict = judge(self, found_inf, before, after)
        return replace(record, outcome=verdict.outcome, evidence=verdict.evidence)

    def _total(self) -> float | None:
        if not self.found_inf:
            return None
        numbers = [self._number(ticket) for ticket in self.found_inf]
        known = [number for number in numbers if number is not None]
        return sum(known) if len(known) == len(numbers) else None

    def _number(self, ticket: Ticket | None) -> float | None:
        if ticket is None:
            return None
        number = ticket.read()
        if number is None:
            self.report(BufferError("a number was overwritten before the writer thread read it"))
        return number


def judge(
    attempt: ScaledAttempt, found_inf: float | None, before: float | None, after: float | None
) -> Verdict:
    """Returns what became of an attempt that the scaler was asked to step (any thread).

    Args:
        attempt: What the host knows.
        found_inf: What the scaler found on all devices together, where known.
        before: Scale at the step, where known.
        after: Scale after the update, where known.
    """
    if attempt.decides_on_device and attempt.ran is not False:
        return _judge_on_device(attempt, found_inf, before, after)
    if attempt.ran:
        return _NOTHING_FOUND if found_inf == 0 else _RAN
    if found_inf:
        return _FOUND
    if attempt.ran is None:
        if found_inf == 0 and attempt.is_plain_scaler:
            return _NOTHING_FOUND
        return _judge_by_scale(attempt, before, after)
    if found_inf == 0 and attempt.is_plain_scaler:
        # Torch's scaler had no reason to skip: the step ran unseen, or was replaced by something else.
        return _UNKNOWN
    return _DID_NOT_RUN


def _judge_on_device(
    attempt: ScaledAttempt, found_inf: float | None, before: float | None, after: float | None
) -> Verdict:
    if found_inf == 0:
        return _NOTHING_FOUND
    if found_inf == 1:
        return _FOUND
    if found_inf is not None:
        return _UNKNOWN
    return _judge_by_scale(attempt, before, after)


def _judge_by_scale(attempt: ScaledAttempt, before: float | None, after: float | None) -> Verdict:
    if before is None or after is None or attempt.is_scale_set or not attempt.is_alone or after >= before:
        return _UNKNOWN
    return _BACKED_OFF
