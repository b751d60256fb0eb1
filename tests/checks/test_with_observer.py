"""A session beside an observer of the same model: one clock, and a document in the observer's folder."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from checks.training import batch, mlp, poisoned, scaler, train
from merge.schema_checks import problems
from torchinstruments import AlwaysSampler, inject_observer, open_run, remove_observer
from torchinstruments.checks import ChecksSession, CheckViolationError
from torchinstruments.store.json_schemas import json_schema


def _document(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("checks-*.json")
    return json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.fixture
def observed(tmp_path):
    """Makes a model with an observer, which is removed after the test."""
    model = mlp()
    inject_observer(model, output_dir=str(tmp_path / "run"), sampler=AlwaysSampler())
    yield model, tmp_path / "run"
    remove_observer(model)


@pytest.mark.parametrize("fused", [False, True])
def test_the_session_and_the_run_tell_the_same_attempts(observed, fused):
    """Skips, micro-batches and the caller's numbers, from one clock."""
    model, folder = observed
    grad_scaler = scaler()
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
    session = ChecksSession(model, optimizer)
    session.register_nonfinite_grad_check()
    with session:
        for step in range(4):
            with session.step(global_step=10 + step, micro_batches=2):
                overflows = (0,) if step == 2 else ()
                train(
                    model, optimizer, steps=1, micro_batches=2, grad_scaler=grad_scaler, overflows=overflows
                )
    report = session.report()
    remove_observer(model)
    steps = open_run(str(folder)).steps().collect()
    assert report.disclosures["clock"] == "observer"
    assert steps["outcome"].to_list() == ["applied", "applied", "skipped", "applied"]
    assert steps["global_step"].to_list() == [10, 11, 12, 13]
    ledger = report.ledgers["scale"]
    assert (ledger["accepted_steps"], ledger["skipped_attempts"]) == (3, 1)
    assert ledger["micro_batches_per_attempt"]["most_frequent"] == 2
    assert report.counters["explicit_skipped"] == 1
    (finding,) = report.findings
    assert (finding.moment.attempt, finding.moment.global_step) == (2, 12)
    (kept,) = _document(folder)["sessions"]
    assert kept["findings"][0]["code"] == "param_grad_nonfinite_at_accumulation"


def test_what_is_raised_is_on_storage_first(observed):
    """The document has the finding while the exception is on its way."""
    model, folder = observed
    optimizer = SGD(model.parameters(), lr=0.1)
    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check()
    with session:
        model(batch()).sum().backward()
        poisoned(model[1].bias)
        with pytest.raises(CheckViolationError):
            optimizer.step()
        (kept,) = _document(folder)["sessions"]
        assert kept["findings"][0]["names"] == ["1.bias"]
        assert kept["finalized_reason"] == "violation"
    assert _document(folder)["rank"] == 0


def test_the_document_has_the_shape_of_its_schema(observed):
    """With every check on and findings of several kinds; a finding is described once for both schemas."""
    model, folder = observed
    session = ChecksSession(model, clip_norm=1.0)
    session.register_nonfinite_grad_check()
    session.register_nonfinite_param_check()
    session.register_change_check(action="collect")
    session.register_update_ratio_check()
    session.register_frozen_check(["0.weight"], action="collect")
    session.register_magnitude_check(every=1_000)
    with session:
        train(model, steps=4, grad_scaler=scaler(), overflows=(1,))
    remove_observer(model)
    document = _document(folder)
    assert problems("checks", document) == []
    (kept,) = document["sessions"]
    assert kept["findings"]
    assert kept["finalized_reason"] == "scope_exit"
    assert problems("checks", document | {"sessions": [kept | {"more": 1}]})
    schemas: Any = [json_schema("checks"), json_schema("result")]
    finding = schemas[0]["$defs"]["finding"]
    assert set(finding["properties"]) == set(kept["findings"][0])
    assert schemas[1]["$defs"]["finding"] == finding


def test_the_document_says_how_the_session_ended(observed):
    """By an exception, or by hand; while it goes on it is running."""
    model, folder = observed
    session = ChecksSession(model, scaler=None)
    session.register_change_check(action="collect")
    with contextlib.suppress(KeyError), session:
        train(model, steps=1)
        raise KeyError
    session.attach()
    train(model, steps=1)
    session.detach()
    remove_observer(model)
    reasons = [one["finalized_reason"] for one in _document(folder)["sessions"]]
    assert reasons == ["exception_exit", "detached"]


def test_every_attempt_of_the_session_counts_and_no_other(observed):
    """The step before it and the one after it are the observer's alone; the last one is not lost."""
    model, folder = observed
    optimizer = train(model, steps=1)
    grad_scaler = scaler()
    session = ChecksSession(model)
    session.register_nonfinite_grad_check()
    with session:
        train(model, optimizer, steps=4, micro_batches=2, grad_scaler=grad_scaler, overflows=(1, 3))
    ledger = session.report().ledgers["scale"]
    assert (ledger["attempts"], ledger["accepted_steps"], ledger["skipped_attempts"]) == (4, 2, 2)
    assert (ledger["backoff_events"], ledger["current_scale"]) == (2, 256.0)
    assert dict(ledger["micro_batches_per_attempt"]) == {"lowest": 2, "highest": 2, "most_frequent": 2}
    with session:
        train(model, optimizer, steps=1)
    ledger = session.report().ledgers["scale"]
    assert (ledger["attempts"], ledger["accepted_steps"]) == (5, 3)
    train(model, optimizer, steps=1)
    remove_observer(model)
    assert open_run(str(folder)).steps().collect()["attempt"].to_list() == list(range(7))
    assert [one["ledgers"]["scale"]["attempts"] for one in _document(folder)["sessions"]] == [4, 5]


def test_an_observer_that_ends_first_takes_the_report(observed):
    """And the session goes on without it."""
    model, folder = observed
    session = ChecksSession(model, scaler=None)
    session.register_frozen_check(["0.weight"], action="collect")
    with session:
        train(model, steps=2)
        remove_observer(model)
        assert _document(folder)["sessions"][0]["findings"][0]["code"] == "frozen_param_changed"
        train(model, steps=2)
    assert session.final_report is not None
    assert session.final_report.counters["accepted_steps"] >= 2


@pytest.mark.parametrize("checks", [False, True])
def test_steps_count_after_the_observer_has_ended(observed, checks):
    """Until the session is detached, whether it looks at steps or only counts them."""
    model, _ = observed
    optimizer = SGD(model.parameters(), lr=0.1)
    session = ChecksSession(model, optimizer, scaler=None)
    if checks:
        session.register_nonfinite_grad_check()
    with session:
        train(model, optimizer, steps=2)
        remove_observer(model)
        train(model, optimizer, steps=6)
        assert session.report().counters["accepted_steps"] == 8
    train(model, optimizer, steps=1)
    report = session.report()
    assert (report.counters["accepted_steps"], report.findings) == (8, ())


@pytest.mark.parametrize("checks", [False, True])
def test_of_the_optimizers_that_an_observer_sees_those_that_were_named_are_counted(observed, checks):
    """The observer's watch tells of each step of the model, the session counts its own."""
    model, _ = observed
    named, other = SGD(model[0].parameters(), lr=0.1), SGD(model[1].parameters(), lr=0.1)
    session = ChecksSession(model, named, scaler=None)
    if checks:
        session.register_nonfinite_param_check()
    with session:
        train(model, named, steps=2)
        other.step()
        train(model, named, steps=1)
    assert session.report().counters["accepted_steps"] == 3


def test_two_sessions_have_an_entry_each(observed):
    """In the order in which they were attached; neither takes the other's skips away."""
    model, folder = observed
    grad_scaler = scaler()
    sessions = [ChecksSession(model), ChecksSession(model)]
    for session in sessions:
        session.register_nonfinite_grad_check()
        session.attach()
    train(model, steps=3, grad_scaler=grad_scaler, overflows=(1,))
    for session in sessions:
        session.detach()
    remove_observer(model)
    kept = _document(folder)["sessions"]
    assert [one["ledgers"]["watchdog"]["num_trips"] for one in kept] == [0, 0]
    assert [len(one["findings"]) for one in kept] == [1, 1]


def test_an_observer_changes_no_finding_and_the_session_no_row(observed):
    """Both on the same parameters, with parameter gradients observed too."""
    model, _ = observed
    before = [p.detach().clone() for p in model.parameters()]
    session = ChecksSession(model, scaler=None)
    session.register_update_ratio_check()
    session.register_change_check()
    with session:
        train(model, steps=3)
    plain = mlp()
    train(plain, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_an_observer_that_comes_after_the_session_is_warned_about_once(tmp_path):
    """Its folder has no report of checks, until the session is attached again."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    session = ChecksSession(model, scaler=None)
    session.register_frozen_check(["0.weight"], action="collect")
    session.attach()
    train(model, optimizer)
    inject_observer(model, output_dir=str(tmp_path / "run"), sampler=AlwaysSampler())
    with pytest.warns(
        RuntimeWarning, match="an observer was attached to a model that has a session"
    ) as warned:
        train(model, optimizer, steps=4)
    assert len(warned) == 1
    session.detach()
    assert not list((tmp_path / "run").glob("checks-*.json"))
    with session:
        train(model, optimizer)
    remove_observer(model)
    assert session.report().disclosures["clock"] == "observer"
    assert len(_document(tmp_path / "run")["sessions"]) == 1


@pytest.mark.parametrize("is_own", [True, False])
def test_a_named_optimizer_that_never_steps_is_warned_about_at_the_close(tmp_path, recwarn, is_own):
    """That of another model was named; that of the model says nothing."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.01)
    named = optimizer if is_own else SGD(mlp().parameters(), lr=0.01)
    inject_observer(model, output_dir=str(tmp_path / "run"), sampler=AlwaysSampler(), optimizer=named)
    train(model, optimizer)
    assert not [one for one in recwarn if "no step of the optimizers" in str(one.message)]
    remove_observer(model)
    said = [one for one in recwarn if "no step of the optimizers that were named" in str(one.message)]
    assert len(said) == (0 if is_own else 1)
