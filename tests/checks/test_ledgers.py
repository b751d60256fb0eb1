"""What became of steps, what clipping did, and when nothing is accepted any more."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from checks.training import batch, mlp, scaler, train
from torchinstruments.checks import ChecksSession, CheckWarning
from torchinstruments.checks.watchdog import FALLBACK_BACKWARDS, Watchdog


def _clipped(model, clip_norm, factor, *, declared=True, checked=True, steps=8, clips=True):
    optimizer = SGD(model.parameters(), lr=0.0)
    session = ChecksSession(model, optimizer, scaler=None, clip_norm=clip_norm if declared else None)
    if checked:
        session.register_nonfinite_grad_check()
    with session:
        for _ in range(steps):
            optimizer.zero_grad()
            (model(batch()).sum() * factor).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return session.report().ledgers["clip"]


@pytest.mark.parametrize("total", [0.004, 0.04, 0.37, 3.7])
def test_clipped_steps_are_saturated_at_any_total(total):
    """Clipping stops 1e-6 short of its norm, which small totals are sensitive to."""
    model = mlp()
    model(batch()).sum().backward()
    own = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    ledger = _clipped(model, total / 4, total / own)
    assert ledger["saturated_steps"] == 8
    assert ledger["tier"] == "a"
    assert ledger["applied_clip_factors"][-1] == pytest.approx(0.25, rel=1e-3)


def test_steps_that_are_not_clipped_are_not_saturated():
    """A total far below the norm, and a factor of one."""
    ledger = _clipped(mlp(), 1e6, 1.0)
    assert ledger["saturated_steps"] == 0
    assert ledger["applied_clip_factors"][-1] == pytest.approx(1.0)


def test_without_other_checks_the_declared_norm_alone_tells():
    """Tier b."""
    ledger = _clipped(mlp(), 0.01, 1.0, checked=False)
    assert (ledger["tier"], ledger["saturated_steps"], ledger["applied_clip_factors"]) == ("b", 8, ())


def test_a_constant_total_is_only_a_hint():
    """Tier c: nothing is declared."""
    ledger = _clipped(mlp(), 0.01, 1.0, declared=False)
    assert ledger["saturated_steps"] is None
    assert ledger["constancy_hint"] is True
    assert ledger["constant_total"] == pytest.approx(0.01, rel=1e-3)


def test_two_optimizers_of_one_scaler_have_ledgers_of_their_own():
    """Only b overflows; then both do."""
    model, grad_scaler = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}), scaler()
    a, b = (SGD(model[name].parameters(), lr=0.01) for name in "ab")
    with ChecksSession(model, [a, b], scaler=grad_scaler) as session:
        for step in range(4):
            a.zero_grad()
            b.zero_grad()
            loss_a = model["a"](batch()).sum() * (float("inf") if step == 2 else 1.0)
            loss_b = model["b"](batch()).sum() * (float("inf") if step in {1, 2} else 1.0)
            grad_scaler.scale(loss_a + loss_b * 1.0).backward()
            grad_scaler.step(a)
            grad_scaler.step(b)
            grad_scaler.update()
    ledger = session.report().ledgers["scale"]
    assert [(one["applied"], one["skipped"]) for one in ledger["optimizers"]] == [(3, 1), (2, 2)]
    assert ledger["backoff_events"] == 2


def test_a_scale_that_the_program_sets_is_no_skip():
    """update(new_scale=...) from 1024 to 256."""
    model, grad_scaler = mlp(), scaler()
    optimizer = SGD(model.parameters(), lr=0.01)
    with ChecksSession(model, optimizer, scaler=grad_scaler) as session:
        for step in range(4):
            optimizer.zero_grad()
            grad_scaler.scale(model(batch()).sum()).backward()
            grad_scaler.step(optimizer)
            grad_scaler.update(256.0 if step == 1 else None)
    ledger = session.report().ledgers["scale"]
    assert (ledger["skipped_attempts"], ledger["scale_sets"], ledger["backoff_events"]) == (0, 1, 0)
    assert ledger["current_scale"] == 256.0


def test_a_scaler_that_was_declared_away_leaves_the_scale_unknown():
    """scaler=None, and the loop scales: no number is called unscaled, and one warning says so."""
    model, grad_scaler = mlp(), scaler()
    session = ChecksSession(model, scaler=None)
    session.register_nonfinite_grad_check()
    with pytest.warns(RuntimeWarning, match="scaler=None was given"), session:
        train(model, steps=4, grad_scaler=grad_scaler, overflows=(3,))
    (finding,) = [f for f in session.report().findings if f.moment.attempt == 3]
    assert finding.scale_provenance == "unknown"
    assert finding.stage == "pre_clip_unknown"
    assert session.report().ledgers["scale"]["skipped_attempts"] == 1


def test_a_disabled_scaler_scales_nothing():
    """Its labels say so."""
    model, grad_scaler = mlp(), scaler(enabled=False)
    session = ChecksSession(model, scaler=grad_scaler)
    session.register_nonfinite_grad_check(action="collect")
    with session:
        train(model, steps=2, grad_scaler=grad_scaler, overflows=(1,))
    finding = session.report().findings[-1]
    assert (finding.stage, finding.scale_provenance) == ("pre_clip_unscaled", "unscaled")


@pytest.mark.parametrize("overflows", [(), (2,)])
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_the_watchdog_is_silent_while_steps_are_accepted(micro_batches, overflows):
    """Whatever is accumulated, and nothing declared; with a scaler, and without one."""
    model, grad_scaler = mlp(), scaler() if overflows else None
    with ChecksSession(model, scaler=grad_scaler) as session:
        train(model, steps=8, micro_batches=micro_batches, grad_scaler=grad_scaler, overflows=overflows)
    report = session.report()
    assert (report.ledgers["watchdog"]["num_trips"], report.findings) == (0, ())
    assert report.ledgers["scale"]["micro_batches_per_attempt"]["most_frequent"] == micro_batches
    assert report.ledgers["scale"]["skipped_attempts"] == len(overflows)


class _Unasked(torch.amp.GradScaler):
    """A scaler whose scale nobody asks for, which on a GPU would wait for it."""

    def get_scale(self):
        """Refuses."""
        raise AssertionError("the scale was asked for")


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_fused_optimizer_skips_inside_its_step(is_checked):
    """Which the scaler calls all the same; nothing is clipped, and the scale is no factor of clipping."""
    model, grad_scaler = mlp(), _Unasked("cpu", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    session = ChecksSession(model, optimizer, scaler=grad_scaler)
    if is_checked:
        session.register_magnitude_check()
        session.register_nonfinite_grad_check()
    with session:
        train(model, optimizer, steps=8, grad_scaler=grad_scaler, overflows=(3,))
    report = session.report()
    assert report.counters["accepted_steps"] == report.ledgers["scale"]["accepted_steps"] == 7
    assert report.ledgers["scale"]["skipped_attempts"] == 1
    assert report.ledgers["clip"]["applied_clip_factors"] == (pytest.approx(1.0),) * (7 * is_checked)


@pytest.mark.parametrize("fused", [False, True])
def test_the_watchdog_speaks_once_where_every_attempt_is_skipped(fused):
    """At the fifth of eight, while it lasts."""
    model, grad_scaler = mlp(), scaler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    with pytest.warns(CheckWarning, match="5 attempts since the last accepted step"):
        with ChecksSession(model, optimizer, scaler=grad_scaler) as session:
            train(model, optimizer, steps=8, grad_scaler=grad_scaler, overflows=tuple(range(8)))
    (finding,) = session.report().findings
    assert finding.code == "check_no_accepted_steps"
    assert session.report().ledgers["watchdog"]["attempts_since_accepted"] == 8


def test_the_watchdog_counts_backwards_where_no_attempt_is_seen():
    """The fallback says what it counts, and is armed again by an accepted step."""
    dog = Watchdog(accumulation_steps=2)
    trips = [dog.backward() for _ in range(10)]
    (trip,) = [trip for trip in trips if trip is not None]
    assert (trip.unit, trip.number, trip.threshold) == ("backwards", 9, 8)
    dog.accepted()
    assert [dog.backward() for _ in range(8)] == [None] * 8
    assert dog.backward() is not None
    undeclared = Watchdog()
    assert [undeclared.backward() for _ in range(FALLBACK_BACKWARDS)] == [None] * FALLBACK_BACKWARDS


class _Patient(torch.amp.GradScaler):
    """A scaler that lowers its scale at every second skip only."""

    skips = 0

    def update(self, new_scale=None):
        _Patient.skips += 1
        if _Patient.skips % 2:
            self._per_optimizer_states.clear()
            return
        super().update(new_scale)


def test_a_skip_that_lowers_no_scale_is_a_skip():
    """Hysteresis: two skips, one decrement."""
    model, grad_scaler = mlp(), _Patient("cpu", init_scale=1024.0)
    with ChecksSession(model, scaler=grad_scaler) as session:
        train(model, steps=4, grad_scaler=grad_scaler, overflows=(0, 1))
    ledger = session.report().ledgers["scale"]
    assert (ledger["skipped_attempts"], ledger["accepted_steps"]) == (2, 2)


def test_an_explicit_unscale_and_clipping_change_no_count():
    """The canonical loop with one infinity."""
    model, grad_scaler = mlp(), scaler()
    optimizer = SGD(model.parameters(), lr=0.01)
    session = ChecksSession(model, optimizer, scaler=grad_scaler, clip_norm=1e-3)
    session.register_nonfinite_grad_check()
    with session:
        for step in range(4):
            optimizer.zero_grad()
            grad_scaler.scale(model(batch()).sum() * (float("inf") if step == 1 else 1.0)).backward()
            grad_scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            grad_scaler.step(optimizer)
            grad_scaler.update()
    ledgers = session.report().ledgers
    assert (ledgers["scale"]["skipped_attempts"], ledgers["scale"]["accepted_steps"]) == (1, 3)
    assert (ledgers["clip"]["tier"], ledgers["clip"]["saturated_steps"]) == ("a", 3)
    assert max(ledgers["clip"]["applied_clip_factors"]) < 1e-2


def test_an_optimizer_that_steps_in_the_backward_is_counted_right():
    """One optimizer a parameter, stepped and cleared as its gradient comes."""
    model = mlp()
    optimizers = {p: SGD([p], lr=0.01) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    session = ChecksSession(model, scaler=None)
    session.register_change_check(action="collect", window=(1, 1))
    session.register_nonfinite_grad_check()
    with session:
        for _ in range(6):
            model(batch()).sum().backward()
    for handle in handles:
        handle.remove()
    report = session.report()
    assert report.counters["backwards"] == 6
    assert report.counters["accepted_steps"] == 24
    assert report.findings == ()


def test_the_optimizer_of_a_finding_is_that_of_the_ledger():
    """Numbered as their attempts are, one that was skipped first included."""
    model, grad_scaler = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}), scaler()
    other = mlp()
    a, b = (SGD(model[name].parameters(), lr=0.01) for name in "ab")
    session = ChecksSession(model, scaler=grad_scaler)
    session.register_update_ratio_check(bounds=(1e9, None))
    with session:
        train(other, steps=1)
        loss = model["a"](batch()).sum() * float("inf") + model["b"](batch()).sum()
        grad_scaler.scale(loss).backward()
        grad_scaler.step(a)
        grad_scaler.step(b)
        grad_scaler.update()
    (finding,) = session.report().findings
    assert finding.names == ("b.weight", "b.bias")
    assert finding.moment.optimizer == 1
    assert [one["skipped"] for one in session.report().ledgers["scale"]["optimizers"]] == [1, 0]


def test_the_watchdog_sleeps_in_a_pause():
    """However many backwards there are in it."""
    model = mlp()
    with ChecksSession(model, scaler=None, accumulation_steps=1) as session, session.paused():
        for _ in range(8):
            model(batch()).sum().backward()
    assert session.report().ledgers["watchdog"]["num_trips"] == 0
