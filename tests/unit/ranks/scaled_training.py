"""A training with gradient scalers under the watch, and an oracle that looks at the parameters."""

import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from torchinstruments.config import UNSET
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.declared_scale import DeclaredScale
from torchinstruments.ranks.loss_scale import ScalerWatch
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.records import AttemptRecord, ClosedAttempt, GradSync, Outcome

__all__ = ["ScaledTraining", "grad_scaler", "overflows"]


def grad_scaler(init_scale: float = 1024.0, **options: Any) -> GradScaler:
    """Returns a scaler of the CPU."""
    return GradScaler("cpu", init_scale=init_scale, **options)


def overflows(steps: str) -> list[bool]:
    """Returns which steps overflow: ``x`` does, ``.`` does not."""
    return [step == "x" for step in steps]


class ScaledTraining:
    """A small model of two halves, its clock, and both watches.

    Attributes:
        truth: Of every try at a step, in order: whether a parameter of its optimizer changed.
        scales: Of every try: the scale that `GradScaler.get_scale` gave before the step.
        scales_after: The same after each update.
        losses: Of every forward.
        errors: What was reported.
        notices: What was noticed.
    """

    def __init__(self, declared: DeclaredScale = UNSET, *, watched: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        self.errors: list[tuple[str, BaseException]] = []
        self.notices: list[tuple[str, str]] = []
        self.truth: list[bool] = []
        self.scales: list[float] = []
        self.scales_after: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.clock = StepClock()
        self.optimizers = OptimizerWatch(self.clock, weakref.ref(self.model), on_error=self._report)
        self.scalers = ScalerWatch(
            self.clock,
            self.optimizers,
            declared=declared,
            on_error=self._report,
            on_notice=self._notice,
        )
        self._closed: list[ClosedAttempt] = []
        self._watched = watched

    def _report(self, probe: str, error: BaseException) -> None:
        self.errors.append((probe, error))

    def _notice(self, probe: str, sentence: str) -> None:
        self.notices.append((probe, sentence))

    def __enter__(self) -> Self:
        """Attaches both watches."""
        if self._watched:
            self.optimizers.attach()
            self.scalers.attach()
        return self

    def __exit__(self, *_: object) -> None:
        """Detaches them; nothing may have failed."""
        self.detach()
        assert self.errors == []

    def detach(self) -> None:
        """Detaches both watches, in the order in which a probe does it."""
        self.optimizers.detach()
        self.scalers.detach()

    def forward(self, half: str = "a", *, overflow: bool = False) -> torch.Tensor:
        """Runs a root forward of one half; returns its loss."""
        started = self.clock.forward_started(grad_enabled=True, now_s=0.0, now_us=0)
        self._closed += started.closed
        entries = torch.full((2, 3), float("inf") if overflow else 1.0)
        loss = self.model[half](entries).square().mean()
        self.clock.forward_ended(0.0, GradSync.NOT_DISTRIBUTED)
        self.losses.append(loss.detach().clone())
        return loss

    def backward(self, scaler: GradScaler, half: str = "a", *, overflow: bool = False) -> None:
        """Runs forward and backward of one micro-batch."""
        scaler.scale(self.forward(half, overflow=overflow)).backward()

    @contextmanager
    def oracle(self, scaler: GradScaler, parameters: Iterable[torch.Tensor]) -> Generator[None]:
        """Notes whether any of these changed, and the scale, around a try at a step."""
        watched = list(parameters)
        before = [parameter.detach().clone() for parameter in watched]
        self.scales.append(scaler.get_scale())
        yield
        self.truth.append(any(not torch.equal(a, b.detach()) for a, b in zip(before, watched, strict=True)))

    def step(
        self,
        scaler: GradScaler,
        optimizer: Any,
        half: str = "a",
        *,
        overflow: bool = False,
        between: Callable[[], object] | None = None,
    ) -> None:
        """Runs one whole attempt: forward, backward, step, update."""
        optimizer.zero_grad()
        self.backward(scaler, half, overflow=overflow)
        if between is not None:
            between()
        with self.oracle(scaler, self.model[half].parameters()):
            scaler.step(optimizer)
        scaler.update()
        self.scales_after.append(scaler.get_scale())

    def records(self) -> list[AttemptRecord]:
        """Ends the watch as a probe does, and returns the whole ledger, as the writer thread resolves it."""
        self.detach()
        self._closed += self.clock.close(0.0)
        return [attempt.resolve() for attempt in self._closed]

    def judged(self) -> list[AttemptRecord]:
        """Returns the ledger after it was held to the oracle."""
        records = self.records()
        told = [record.outcome for record in records]
        assert told == [Outcome.APPLIED if applied else Outcome.SKIPPED for applied in self.truth]
        assert [record.scale_before for record in records] == self.scales
        return records
