"""What a report keeps, and what it says of checks that could not do their work."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.optim import SGD
from typing_extensions import override

from checks.training import batch, compiled, mlp, poisoned, train
from torchinstruments.checks import ChecksSession, CheckViolationError, visitor
from torchinstruments.checks.check import Check
from torchinstruments.checks.findings import Action, Finding, FindingStore, Moment, Severity
from torchinstruments.checks.report import CheckReport
from torchinstruments.checks.watchdog import FALLBACK_BACKWARDS


def _finding(severity, code="c", **options):
    return Finding("check", code, severity, Action.COLLECT, "message", **options)


def test_information_never_makes_way_for_critical_findings():
    """A flood of one kind is counted, the grave one that comes after it is kept and stands first."""
    store = FindingStore(max_findings=10)
    for _ in range(100_000):
        store.add(_finding(Severity.INFO))
    store.add(_finding(Severity.CRITICAL, "nan"))
    findings = store.findings()
    assert findings[0].code == "nan"
    assert len(findings) == 11
    assert store.truncated() == {"info/c": 99_990}
    assert store.num_findings() == {"critical": 1, "warning": 0, "info": 100_000}


def test_numbers_that_are_not_finite_are_null_in_strict_json():
    """Names are cut, their number is not."""
    finding = _finding(Severity.INFO, names=tuple("abcdefghijklmnopqrstuvwxyz"), values={"x": float("inf")})
    shown = json.loads(json.dumps(finding.to_dict(), allow_nan=False))
    assert shown["values"] == {"x": None}
    assert len(shown["names"]) == 20
    assert shown["num_names"] == 26
    assert shown["stage"] is None


def test_a_check_that_never_ran_is_said_to_have_not():
    """It does not read like a pass."""
    session = ChecksSession(mlp(), scaler=None)
    session.register_nonfinite_grad_check()
    report = session.report()
    assert report.checks_run == ()
    assert report.unavailable[0].reason == "never_ran: the session was not attached"
    with session:
        pass
    assert session.report().unavailable[0].reason.startswith("never_ran: no backward was seen and no step")


_SEAMS = (
    "attached",
    "backward_ended",
    "before_write",
    "after_write",
    "attempt_closed",
    "finish",
    "facts",
    "detached",
)


@pytest.mark.parametrize("seam", _SEAMS)
def test_a_check_that_fails_is_unavailable_and_the_others_go_on(seam):
    """Wherever it fails: nothing of it reaches training, another check or the end of the block."""

    def fails(*_args, **_options):
        raise ArithmeticError("mine")

    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    session = ChecksSession(model, optimizer, scaler=None)
    session._register(type("Broken", (Check,), {"name": "broken", seam: fails})())
    session.register_nonfinite_grad_check()

    def loop():
        with session:
            with session.step():
                train(model, optimizer, steps=1)
            train(model, optimizer, steps=2)
            poisoned(model[0].weight)
            optimizer.step()

    with pytest.raises(CheckViolationError):
        loop()
    report = session.report()
    assert not session.is_attached
    assert report.counters["accepted_steps"] == 3
    assert report.checks_run == ("nonfinite_grad",)
    failed = [
        entry for entry in report.unavailable if entry.reason == "internal_error: ArithmeticError: mine"
    ]
    assert [entry.check for entry in failed] == ["broken"]
    assert session.final_report is not None


def test_a_check_is_given_up_after_a_while_and_another_of_its_name_is_not():
    """Eight failures in a row; the same kind of check may be registered twice."""

    class Broken(Check):
        name = "broken"
        calls = 0
        error: type[Exception] | None = ArithmeticError

        @override
        def before_write(self, look):
            assert look.positions
            self.calls += 1
            if self.error is not None:
                raise self.error("mine")

    class Whole(Broken):
        error = None

    model = mlp()
    session = ChecksSession(model, scaler=None)
    checks = Broken(), Whole()
    for check in checks:
        session._register(check)
    with session:
        train(model, steps=20)
    entries = {entry.reason: entry.num_times for entry in session.report().unavailable}
    assert entries["internal_error: ArithmeticError: mine"] == 8
    assert [check.calls for check in checks] == [8, 20]


def test_a_look_that_fails_before_it_begins_is_unavailable(monkeypatch):
    """Training goes on, and each site says what failed."""

    def fails(_place):
        raise ArithmeticError("mine")

    monkeypatch.setattr(visitor, "isolated", fails)
    model = mlp()
    session = ChecksSession(model, scaler=None)
    session.register_nonfinite_grad_check()
    session.register_frozen_check(["0.weight"])
    with session:
        train(model, steps=2)
    report = session.report()
    assert report.counters["accepted_steps"] == 2
    assert {entry.check for entry in report.unavailable} >= {"nonfinite_grad", "frozen"}
    assert any("ArithmeticError: mine" in entry.reason for entry in report.unavailable)


def test_a_session_that_is_paused_looks_at_nothing_and_counts_all():
    """The poisoned step in the pause is not raised, the one after it is."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.0)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check()

    def poisoned_step():
        optimizer.zero_grad()
        model(batch()).sum().backward()
        poisoned(model[0].bias)
        optimizer.step()

    with session:
        with session.paused():
            poisoned_step()
        session.disable()
        with session.paused():
            poisoned_step()
        poisoned_step()
        session.enable()
        with pytest.raises(CheckViolationError):
            poisoned_step()
    assert session.report().ledgers["scale"]["accepted_steps"] == 3


def test_the_overhead_is_measured():
    """Seconds by site, reads of devices, and what a hook takes."""
    model = mlp()
    session = ChecksSession(model, scaler=None)
    session.register_nonfinite_grad_check()
    with session:
        train(model, steps=3)
    overhead = session.overhead()
    assert overhead["visits_by_site"] == {"backward_ended": 3, "before_write": 3}
    assert overhead["num_host_reads"] == 3
    assert overhead["num_accumulation_hooks"] == 12
    assert all(seconds > 0 for seconds in overhead["seconds_by_site"].values())


def test_a_report_prints_what_matters():
    """What was found, what ran, what could not be looked at."""
    model = mlp()
    session = ChecksSession(model, scaler=None, clip_norm=1.0)
    session.register_frozen_check(["0.weight"], action="collect")
    with session:
        train(model)
    text = str(session.report())
    assert "1 critical, 0 warning, 0 info" in text
    assert "frozen_param_changed 0.weight" in text
    assert "ran: frozen" in text
    assert "unavailable: grad_magnitude: clipping_censors" in text


def test_a_report_prints_a_line_for_what_is_the_same():
    """How often, from which attempt and step of the caller to which; the gravest first."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_magnitude_check(vanishing_threshold=1e-9, exploding_threshold=1e-8)
    session.register_frozen_check(["0.weight", "1.bias"], action="collect")
    with session:
        for step in range(30):
            with session.step(global_step=100 + step):
                train(model, optimizer, steps=1)
    lines = str(session.report()).splitlines()
    found = [line for line in lines if line.startswith("  [")]
    assert len(found) < 10
    assert len({line.split(":")[0] for line in found}) == len(found)
    assert "[critical] frozen_param_changed" in found[0]
    assert found[0].endswith("(attempt 0, global_step 100)")
    assert any(line.endswith("(30 times, attempt 0 to 29, global_step 100 to 129)") for line in found)
    assert "[critical]" not in found[-1]


def test_a_report_prints_when_something_was_seen_once_and_what_was_not_kept():
    """One attempt, no count; findings that were only counted have a line by kind."""
    store = FindingStore(max_findings=2)
    for attempt in (3, 4, 4):
        store.add(_finding(Severity.INFO, names=("a",), moment=Moment(attempt=attempt)))
    store.add(_finding(Severity.CRITICAL, "nan", names=("b",), moment=Moment(attempt=4, global_step=9)))
    store.add(_finding(Severity.INFO, "timeless"))
    counters = {"truncated_findings": store.truncated()}
    text = str(CheckReport(store.findings(), (), (), {}, {}, {}, counters))
    assert "  [critical] nan b: message (attempt 4, global_step 9)\n" in text
    assert "  [info] c a: first: message (2 times, attempt 3 to 4)\n" in text
    assert "  [info] timeless : message\n" in text
    assert "  ... and 1 of info/c that were counted and not kept\n" in text


def test_a_compiled_model_is_watched():
    """torch.compile, in place, and compiled after the session was attached."""
    for way in ("wrapper", "in_place", "late"):
        model = mlp()
        called = model
        if way == "wrapper":
            model = called = compiled(model)
        elif way == "in_place":
            model.compile(backend="eager")
        session = ChecksSession(model, scaler=None)
        session.register_nonfinite_grad_check()
        session.register_change_check()
        with session:
            if way == "late":
                called = compiled(model)
            train(called, SGD(model.parameters(), lr=0.1), steps=3, micro_batches=2)
        report = session.report()
        assert report.counters["accepted_steps"] == 3, way
        assert report.counters["backwards"] == 6, way
        assert report.ledgers["scale"]["micro_batches_per_attempt"]["most_frequent"] == 2, way
        assert report.findings == (), way


def test_an_entry_counts_all_of_its_names():
    """However they come, and lists the first of them; of too many reasons the further ones are counted."""
    store = FindingStore(max_findings=3)
    for number in range(200):
        store.add_unavailable("a", "reason", (f"name {number}",))
    for number in range(10):
        store.add_unavailable("b", f"reason {number}")
    first, *_, last = store.unavailable()
    assert (first.num_names, len(first.names), first.num_times) == (200, 20, 200)
    assert (last.reason, last.num_times) == ("too_many_reasons: 3 are kept", 8)


def test_steps_in_a_pause_are_steps():
    """They are not looked at, and nobody says that none comes."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.0)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_change_check(action="collect")
    with session:
        for _ in range(FALLBACK_BACKWARDS + 2):
            optimizer.zero_grad()
            model(batch()).sum().backward()
            with session.paused():
                optimizer.step()
    report = session.report()
    assert (report.findings, report.checks_run) == ((), ())
    assert report.counters["accepted_steps"] == FALLBACK_BACKWARDS + 2


def test_a_report_from_another_thread_changes_nothing():
    """It says what is known; the thread that trains judges."""
    model = mlp()
    session = ChecksSession(model, scaler=None)
    session.register_magnitude_check(vanishing_threshold=1e3, exploding_threshold=1e4)
    session.register_nonfinite_grad_check()
    is_over = threading.Event()
    with session, ThreadPoolExecutor(1) as pool:

        def ask():
            while not is_over.is_set():
                session.report().to_json()

        asking = pool.submit(ask)
        train(model, steps=100)
        is_over.set()
        asking.result()
    assert len(session.report().findings) == 100
    assert session.report().unavailable == ()
