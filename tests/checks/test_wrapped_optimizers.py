"""Optimizers behind a wrapper, as training libraries have them: the one inside is looked at, once a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from typing_extensions import override

from checks.training import INF, batch, mlp, poisoned, scaler
from torchinstruments.checks import ChecksSession, CheckViolationError


class ShapedLikeAccelerate(Optimizer):
    """Holds an optimizer, steps it through the scaler, and patches ``step`` to hear whether it was called."""

    def __init__(self, optimizer: Optimizer, grad_scaler: Any = None) -> None:
        self.optimizer = optimizer
        self.grad_scaler = grad_scaler
        self.sync_gradients = True
        self.step_was_skipped = False

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the one inside."""
        return self.optimizer.param_groups

    @property
    @override
    def state(self) -> Any:  # type: ignore[override]
        """That of the one inside."""
        return self.optimizer.state

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does so where gradients are whole."""
        if self.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Does so where gradients are whole, and notes whether the scaler skipped."""
        if not self.sync_gradients:
            return
        if self.grad_scaler is None:
            self.optimizer.step(closure)
            return
        original, called = self.optimizer.step, []

        def patched(*args: Any, **kwargs: Any) -> Any:
            called.append(True)
            return original(*args, **kwargs)

        self.optimizer.step = patched  # type: ignore[method-assign]
        self.grad_scaler.step(self.optimizer, closure)
        self.grad_scaler.update()
        self.step_was_skipped = not called
        self.optimizer.step = original  # type: ignore[method-assign]


def _train(model: Any, wrapper: ShapedLikeAccelerate, steps: int, overflows: tuple[int, ...] = ()) -> None:
    """Trains with two micro-batches a step."""
    for step in range(steps):
        for micro_batch in range(2):
            wrapper.sync_gradients = micro_batch == 1
            loss = model(batch()).square().mean() * (INF if step in overflows else 1.0)
            (loss if wrapper.grad_scaler is None else wrapper.grad_scaler.scale(loss)).backward()
            wrapper.step()
            wrapper.zero_grad()


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_step_through_a_wrapper_is_one_step(is_given: bool, kind: type[SGD | AdamW]):
    """Given as the wrapper, or found by itself; the wrapper's calls between steps are none."""
    model = mlp()
    wrapper = ShapedLikeAccelerate(kind(model.parameters(), lr=0.01))
    session = ChecksSession(model, wrapper if is_given else None, scaler=None)
    session.register_update_ratio_check()
    with session:
        _train(model, wrapper, 3)
    report = session.report()
    assert report.counters["accepted_steps"] == 3
    assert report.counters["backwards"] == 6
    ledger = report.ledgers["scale"]
    assert (ledger["attempts"], len(ledger["optimizers"])) == (3, 1)
    assert dict(ledger["micro_batches_per_attempt"]) == {"lowest": 2, "highest": 2, "most_frequent": 2}
    ratios = report.ledgers["update_ratio"][0]["parameters"]
    assert {one["num_looks"] for one in ratios.values()} == {3}


def test_a_skip_behind_a_wrapper_is_counted_and_not_raised_for():
    """The wrapper patches the step of the one inside; the scaler decides all the same."""
    model = mlp()
    grad_scaler = scaler()
    wrapper = ShapedLikeAccelerate(SGD(model.parameters(), lr=0.01), grad_scaler)
    session = ChecksSession(model, wrapper, scaler=grad_scaler)
    session.register_nonfinite_grad_check()
    with session:
        _train(model, wrapper, 4, overflows=(1, 2))
    report = session.report()
    ledger = report.ledgers["scale"]
    assert (ledger["accepted_steps"], ledger["skipped_attempts"], ledger["backoff_events"]) == (2, 2, 2)
    assert not [one for one in report.findings if one.severity == "critical"]
    assert report.counters["accepted_steps"] == 2


def test_a_nan_behind_a_wrapper_is_raised_before_the_write():
    """Weights are bitwise what they were."""
    model = mlp()
    wrapper = ShapedLikeAccelerate(SGD(model.parameters(), lr=0.01))
    session = ChecksSession(model, wrapper, scaler=None)
    session.register_nonfinite_grad_check()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with session:
        model(batch()).sum().backward()
        poisoned(model[1].bias)
        with pytest.raises(CheckViolationError):
            wrapper.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
