"""What follows from what a scaler did; the cases are held to real optimizers in test_skip_ledger."""

from typing import Any

import pytest
import torch

from torchinstruments.ranks.ring import Ring, Ticket
from torchinstruments.ranks.scaled_attempt import ScaledAttempt, Verdict, judge
from torchinstruments.records import AttemptRecord, Evidence, GradSync, Outcome

RECORD = AttemptRecord(
    attempt=3,
    optimizer=0,
    optimizer_attempt=3,
    first_forward_index=3,
    last_forward_index=3,
    micro_batches=1,
    micro_batches_synced=0,
    last_micro_batch_sync=GradSync.NOT_DISTRIBUTED,
    outcome=Outcome.SKIPPED,
    evidence=Evidence.OPTIMIZER_HOOK,
    started_at_us=0,
    gap_s=0.0,
    forward_s=0.0,
    backward_s=0.0,
    optimizer_s=0.0,
)

APPLIED, SKIPPED = Outcome.APPLIED, Outcome.SKIPPED
HOOK, FOUND, SCALE = Evidence.OPTIMIZER_HOOK, Evidence.FOUND_INF, Evidence.SCALE_BACKOFF
NOTHING = (Outcome.UNKNOWN, Evidence.NONE)


def _attempt(**facts: Any) -> ScaledAttempt:
    def fail(error: BaseException) -> None:
        raise error

    return ScaledAttempt(fail, is_stepped=True, **facts)


@pytest.mark.parametrize(
    ("facts", "found_inf", "expected"),
    [
        # An ordinary optimizer: its hooks tell, and the findings say why.
        ({"ran": True}, 0.0, (APPLIED, FOUND)),
        ({"ran": True}, None, (APPLIED, HOOK)),
        ({"ran": True}, 1.0, (APPLIED, HOOK)),
        ({"ran": False}, 1.0, (SKIPPED, FOUND)),
        ({"ran": False}, 2.0, (SKIPPED, FOUND)),
        ({"ran": False}, None, (SKIPPED, HOOK)),
        ({"ran": False}, 0.0, NOTHING),
        ({"ran": False, "is_plain_scaler": False}, 0.0, (SKIPPED, HOOK)),
        # A step without hooks.
        ({"ran": None}, 0.0, (APPLIED, FOUND)),
        ({"ran": None}, 1.0, (SKIPPED, FOUND)),
        ({"ran": None}, None, NOTHING),
        ({"ran": None, "is_plain_scaler": False}, 0.0, NOTHING),
        # A fused optimizer: it is called in any case.
        ({"ran": True, "decides_on_device": True}, 0.0, (APPLIED, FOUND)),
        ({"ran": True, "decides_on_device": True}, 1.0, (SKIPPED, FOUND)),
        ({"ran": True, "decides_on_device": True}, 2.0, NOTHING),
        ({"ran": True, "decides_on_device": True}, None, NOTHING),
        ({"ran": False, "decides_on_device": True}, 1.0, (SKIPPED, FOUND)),
        ({"ran": None, "decides_on_device": True}, 1.0, (SKIPPED, FOUND)),
    ],
)
def test_the_outcome_follows_from_hooks_and_findings(
    facts: dict[str, Any], found_inf: float | None, expected: tuple[Outcome, Evidence]
) -> None:
    """Without a scale."""
    assert judge(_attempt(**facts), found_inf, None, None) == Verdict(*expected)


@pytest.mark.parametrize(
    ("facts", "before", "after", "expected"),
    [
        ({}, 8.0, 4.0, (SKIPPED, SCALE)),
        ({}, 8.0, 8.0, NOTHING),
        ({}, 8.0, 16.0, NOTHING),
        ({}, 8.0, None, NOTHING),
        ({}, None, 4.0, NOTHING),
        ({"is_scale_set": True}, 8.0, 4.0, NOTHING),
        ({"is_alone": False}, 8.0, 4.0, NOTHING),
    ],
)
def test_without_findings_only_a_scale_that_fell_by_itself_tells(
    facts: dict[str, Any], before: float | None, after: float | None, expected: tuple[Outcome, Evidence]
) -> None:
    """Of a fused optimizer, and of one without hooks."""
    for kind in ({"ran": True, "decides_on_device": True}, {"ran": None}):
        assert judge(_attempt(**kind, **facts), None, before, after) == Verdict(*expected)


def _tickets(*numbers: float) -> tuple[Ticket, ...]:
    ring = Ring(torch.zeros(()), num_slots=8)
    return tuple(ring.keep(torch.tensor(number)) for number in numbers)


def test_what_several_devices_found_is_added_up() -> None:
    """A single finding of theirs is enough for a skip."""
    before, *found, after = _tickets(8.0, 0.0, 1.0, 4.0)
    record = _attempt(ran=False, scale_before=before, found_inf=tuple(found), scale_after=after).amend(RECORD)
    assert (record.found_inf, record.scale_before, record.scale_after) == (1.0, 8.0, 4.0)
    assert (record.outcome, record.evidence) == (SKIPPED, FOUND)


def test_findings_of_which_one_was_lost_are_no_findings() -> None:
    """The sum of the others could be right or wrong; the loss is reported."""
    errors: list[BaseException] = []
    ring = Ring(torch.zeros(()), num_slots=2)
    found = tuple(ring.keep(torch.zeros(())) for _ in range(3))
    attempt = ScaledAttempt(errors.append, ran=True, is_stepped=True, found_inf=found)
    record = attempt.amend(RECORD)
    assert (record.outcome, record.evidence, record.found_inf) == (APPLIED, HOOK, None)
    assert [str(error) for error in errors] == ["a number was overwritten before the writer thread read it"]


def test_an_attempt_that_was_not_stepped_keeps_its_outcome() -> None:
    """It is the clock's to say; the numbers come all the same."""
    (found,) = _tickets(1.0)
    abandoned = ScaledAttempt(list[BaseException]().append, found_inf=(found,))
    record = abandoned.amend(RECORD)
    assert (record.outcome, record.evidence, record.found_inf) == (RECORD.outcome, RECORD.evidence, 1.0)


def test_a_device_that_fails_costs_its_numbers_and_not_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host knew is what remains."""
    errors: list[BaseException] = []

    def fail(self: Ring, ordinal: int) -> float:
        raise RuntimeError("device-side assert triggered")

    (found,) = _tickets(1.0)
    monkeypatch.setattr(Ring, "read", fail)
    attempt = ScaledAttempt(errors.append, ran=False, is_stepped=True, found_inf=(found,))
    assert attempt.amend(RECORD) == RECORD
    assert [str(error) for error in errors] == ["device-side assert triggered"]


def test_an_attempt_is_complete_once_it_is_over_and_keeps_until_then_what_is_known() -> None:
    """The ring may go round while the update does not come."""
    ring = Ring(torch.zeros(()), num_slots=2)
    attempt = _attempt(scale_before=ring.keep(torch.tensor(8.0)), found_inf=(ring.keep(torch.tensor(1.0)),))
    assert not attempt.is_complete()
    for _ in range(2):
        ring.keep(torch.tensor(99.0))
    attempt.is_over = True
    assert attempt.is_complete()
    amended = attempt.amend(RECORD)
    assert (amended.scale_before, amended.found_inf) == (8.0, 1.0)


def test_an_attempt_whose_device_fails_waits_for_nothing() -> None:
    """It is told with what the host knows, and the failure is reported."""
    told: list[BaseException] = []

    class Failing:
        def read(self) -> float | None:
            raise RuntimeError("the device is lost")

    failing: Any = Failing()
    assert ScaledAttempt(told.append, scale_before=failing).is_complete()
    assert [str(error) for error in told] == ["the device is lost"]
