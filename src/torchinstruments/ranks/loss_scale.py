"""Knows the loss scale, and what gradient scalers did with each optimizer, without a handle or a host read.

For each optimizer of the model that a scaler steps, an attempt is filled between two updates: the scale at
the step, what the scaler found, the scale after the update. All three are copied on the device and read by
the writer thread, which decides the outcome; see `torchinstruments.ranks.scaled_attempt`. Gradients that were
unscaled and never stepped before the update are an attempt too, an abandoned one.

A scaler belongs to this model once it has stepped one of its optimizers. Until then a single scaler that was
seen to scale counts as this model's; of several, none does. What the caller declared counts before all that,
until a scaler is seen to contradict it. The ledger takes every scaler that steps one of the model's
optimizers, whatever was declared: what happened to a step is a fact.
"""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from torchinstruments.config import UNSET, Unset
from torchinstruments.ranks import scaler_methods
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.inner_optimizer import inner_optimizer, is_hooked
from torchinstruments.ranks.optimizers import KnownOptimizer, OptimizerWatch, first_lr
from torchinstruments.ranks.ring import Rings, Ticket
from torchinstruments.ranks.scaled_attempt import ScaledAttempt
from torchinstruments.records import Evidence, Outcome, ScaleProvenance

__all__ = ["DeclaredScale", "ScalerWatch"]

DeclaredScale = GradScaler | float | None | Unset
"""The scaler of the model, a fixed scale that the loop multiplies with itself, None for none, or not said."""

_MAX_OPEN = 256


@dataclass(slots=True, eq=False)
class _Open:
    """An attempt of one optimizer that its scaler has not updated after.

    Attributes:
        optimizer: Address of what the scaler was given, under which it keeps its findings.
        known: The optimizer that is stepped.
        lr: Its learning rate when the attempt began.
        attempt: What is known of it so far.
        num_ended: Steps of the optimizer that had ended when the scaler's step began.
        is_begun: Whether the scaler's step was called; of one that raised, the optimizer's own hooks tell.
    """

    optimizer: int
    known: KnownOptimizer
    lr: float | None
    attempt: ScaledAttempt
    num_ended: int = 0
    is_begun: bool = False


@dataclass(slots=True, eq=False)
class _Ledger:
    """What one scaler did since its last update.

    Attributes:
        scaler: The scaler.
        open: Attempts of this model's optimizers.
        has_others: Whether it checked gradients of another model's optimizer too.
    """

    scaler: weakref.ref[GradScaler]
    open: list[_Open] = field(default_factory=list)
    has_others: bool = False


class ScalerWatch:
    """Feeds a `StepClock` from gradient scalers, and knows the current loss scale."""

    def __init__(
        self,
        clock: StepClock,
        optimizers: OptimizerWatch,
        *,
        declared: DeclaredScale = UNSET,
        on_error: Callable[[str, BaseException], None] | None = None,
        on_notice: Callable[[str, str], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
        rings: Rings | None = None,
    ) -> None:
        """Makes a watch that is not attached yet.

        Args:
            clock: Receives skipped steps, and evidence for applied ones.
            optimizers: Says which optimizers are this model's.
            declared: What the caller says of the loss scale.
            on_error: Called with the probe ``loss_scale`` and the exception for everything that fails, on
                the writer thread too.
            on_notice: Called with the probe ``loss_scale`` and a sentence where a scaler contradicts what
                was declared; once.
            now: Monotonic seconds, the same clock that the `StepClock` is fed with.
            rings: Where numbers wait, where other bounds than the default ones are wanted.
        """
        self._clock = clock
        self._optimizers = optimizers
        self._on_error = on_error
        self._on_notice = on_notice
        self._now = now
        self._rings = Rings() if rings is None else rings
        self._declared = None if isinstance(declared, GradScaler) else declared
        self._only = weakref.ref(declared) if isinstance(declared, GradScaler) else None
        self._fixed = torch.tensor(declared, dtype=torch.float64) if isinstance(declared, float) else None
        self._is_contradicted = False
        self._seen: list[weakref.ref[GradScaler]] = []
        self._own: weakref.ref[GradScaler] | None = None
        self._foreign: list[weakref.ref[GradScaler]] = []
        self._ledgers: dict[int, _Ledger] = {}

    def attach(self) -> None:
        """Wraps the scaler classes, or shares the wrapping of another watch."""
        scaler_methods.listen(self)

    def detach(self) -> None:
        """Stops listening, and tells of attempts that were unscaled and never stepped. Idempotent."""
        scaler_methods.stop_listening(self)
        ledgers = list(self._ledgers.values())
        self._ledgers.clear()
        try:
            for ledger in ledgers:
                self._abandon(ledger)
        except Exception as error:  # noqa: BLE001 - detaching goes on
            self.report(error)

    def current_scale(self) -> tuple[torch.Tensor | None, ScaleProvenance]:
        """Returns the tensor that holds the loss scale, and how it is known (training thread, hot path).

        The tensor is the scaler's own, on its device, and changes in place: copy it now, read it later.

        Returns:
            ``(scale, GRADSCALER)``; ``(scale, EXPLICIT)`` and ``(None, UNSCALED)`` as the caller declared;
            ``(None, NONE_SEEN)`` where no enabled scaler scaled since `attach`; ``(None, UNKNOWN)`` where it
            cannot be told whether a scaler is this model's, or one contradicts what was declared.
        """
        if self._is_contradicted:
            return None, ScaleProvenance.UNKNOWN
        if self._only is not None:
            only = self._only()
            if only is None:
                return None, ScaleProvenance.UNKNOWN
            return _scale_of(only) if only.is_enabled() else (None, ScaleProvenance.UNSCALED)
        own = self._own() if self._own is not None else None
        if own is not None:
            return _scale_of(own)
        seen = _alive(self._seen)
        if not seen:
            # A subclass that was imported after attach is not wrapped yet.
            scaler_methods.wrap_new_classes()
        if not isinstance(self._declared, Unset):
            if not all(_holds(self._foreign, scaler) for scaler in seen):
                # It may scale this model's loss against what was declared: its first step will tell.
                return None, ScaleProvenance.UNKNOWN
            provenance = ScaleProvenance.UNSCALED if self._fixed is None else ScaleProvenance.EXPLICIT
            return self._fixed, provenance
        if not seen:
            return None, ScaleProvenance.NONE_SEEN
        if len(seen) == 1 and not _holds(self._foreign, seen[0]):
            return _scale_of(seen[0])
        return None, ScaleProvenance.UNKNOWN

    def scale_left(self, optimizer: Optimizer) -> tuple[torch.Tensor | float | None, ScaleProvenance]:
        """Returns the factor by which an optimizer's gradients are still multiplied, and how it is known.

        It is called while the optimizer begins its step, or was skipped (training thread, hot path).

        Returns:
            What `current_scale` returns, but ``(1.0, GRADSCALER)`` once the scaler has unscaled them, and
            ``(None, UNKNOWN)`` where the program scales by a number of its own, and where the scaler knows
            other optimizers alone: one of them may wrap this one.
        """
        scale, provenance = self.current_scale()
        if provenance is ScaleProvenance.EXPLICIT:
            # Whether the program has divided by it already, nothing tells.
            return None, ScaleProvenance.UNKNOWN
        if scale is None:
            return None, provenance
        for scaler in _alive([*self._seen, *([] if self._own is None else [self._own])]):
            if scaler._scale is not scale:  # noqa: SLF001
                continue
            # Asked for with [], it would make an entry.
            states = scaler._per_optimizer_states  # noqa: SLF001
            state = states.get(id(optimizer))
            if state is not None and state["stage"] is not OptState.READY:
                return 1.0, provenance
            if state is None and states:
                return None, ScaleProvenance.UNKNOWN
        return scale, provenance

    def scaled(self, scaler: GradScaler) -> None:
        """Takes that a scaler has scaled something (training thread, hot path)."""
        if not _holds(self._seen, scaler):
            self._seen = [weakref.ref(one) for one in _alive(self._seen)]
            self._seen.append(weakref.ref(scaler))

    def unscaled(self, scaler: GradScaler, optimizer: object) -> None:
        """Takes that the program had an optimizer's gradients unscaled (training thread, hot path)."""
        known = self._optimizers.known(inner_optimizer(optimizer))
        if known is None:
            self._ledger(scaler).has_others = True
            return
        attempt = self._open(scaler, optimizer, known).attempt
        attempt.scale_before = self._keep_scale(scaler)
        attempt.found_inf = self._keep_findings(scaler, id(optimizer))

    def step_begins(self, scaler: GradScaler, optimizer: object) -> _Open | None:
        """Returns the attempt, or None for another model's optimizer (training thread, hot path)."""
        known = self._optimizers.known(inner_optimizer(optimizer))
        if known is None:
            return None
        begun = self._open(scaler, optimizer, known)
        begun.num_ended = known.num_ended
        begun.is_begun = True
        begun.attempt.scale_before = self._keep_scale(scaler)
        # A program may have changed what an earlier unscale_ found, to make its ranks agree.
        begun.attempt.found_inf = None
        return begun

    def step_returned(self, scaler: GradScaler, optimizer: object, begun: _Open | None) -> None:
        """Takes that a scaler's ``step`` returned without an exception (training thread, hot path).

        Args:
            scaler: The scaler.
            optimizer: What it was to step.
            begun: What `step_begins` returned.
        """
        self.scaled(scaler)
        if begun is None:
            self._ledger(scaler).has_others = True
            if not _holds(self._foreign, scaler):
                self._foreign = [weakref.ref(one) for one in _alive(self._foreign)]
                self._foreign.append(weakref.ref(scaler))
            return
        if self._own is None or self._own() is not scaler:
            self._own = weakref.ref(scaler)
            self._compare_with_declared(scaler)
        attempt = begun.attempt
        attempt.is_stepped = True
        attempt.is_plain_scaler = _is_plain(scaler)
        if attempt.found_inf is None:
            attempt.found_inf = self._keep_findings(scaler, begun.optimizer)
        stepped = inner_optimizer(optimizer)
        known = begun.known
        if known.num_ended > begun.num_ended:
            attempt.ran = True
            attempt.decides_on_device = known.decides_on_device
            if attempt.decides_on_device and attempt.found_inf == () and not _has_gradients(stepped):
                # There was nothing to find, and the optimizer had nothing to decide.
                attempt.decides_on_device = False
        else:
            # Torch calls no hooks for a step that it did not wrap, or that was compiled.
            attempt.ran = False if is_hooked(stepped) and not _is_compiled(stepped) else None
            attempt.decides_on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        verdict = attempt.provisional()
        if attempt.ran:
            self._clock.step_resolved(
                known.key, outcome=verdict.outcome, evidence=verdict.evidence, amendment=attempt
            )
        else:
            self._clock.step_skipped(
                known.key,
                self._now(),
                lr=first_lr(stepped),
                outcome=verdict.outcome,
                evidence=verdict.evidence,
                amendment=attempt,
            )
            if attempt.ran is False and self._optimizers.listener is not None:
                inner = known.reference()
                if inner is not None:
                    self._optimizers.listener.step_skipped(inner)

    def update_begins(self, scaler: GradScaler) -> None:
        """Takes that an update begins, which discards the findings (training thread, hot path)."""
        ledger = self._ledgers.get(id(scaler))
        for one in () if ledger is None else ledger.open:
            if one.attempt.found_inf is None:
                one.attempt.found_inf = self._keep_findings(scaler, one.optimizer)

    def updated(self, scaler: GradScaler, *, is_scale_set: bool) -> None:
        """Takes that an update returned (training thread, hot path).

        Args:
            scaler: The scaler.
            is_scale_set: Whether the program gave it a scale.
        """
        ledger = self._ledgers.pop(id(scaler), None)
        if ledger is None or not ledger.open:
            return
        after = self._keep_scale(scaler)
        is_alone = not ledger.has_others and len({one.optimizer for one in ledger.open}) == 1
        for one in ledger.open:
            one.attempt.scale_after = after
            one.attempt.is_scale_set = is_scale_set
            one.attempt.is_alone = is_alone
        self._abandon(ledger)

    def report(self, error: BaseException) -> None:
        """Takes an exception of this package's own code (training or writer thread)."""
        if self._on_error is not None:
            self._on_error("loss_scale", error)

    def _open(self, scaler: GradScaler, optimizer: object, known: KnownOptimizer) -> _Open:
        """Returns the attempt of an optimizer that is not stepped yet, a new one where there is none."""
        ledger = self._ledger(scaler)
        for one in ledger.open:
            if one.optimizer == id(optimizer) and one.known is known and not one.attempt.is_stepped:
                return one
        if len(ledger.open) >= _MAX_OPEN:
            # A scaler that is never updated.
            del ledger.open[0]
        opened = _Open(id(optimizer), known, first_lr(known.reference()), ScaledAttempt(self.report))
        ledger.open.append(opened)
        return opened

    def _ledger(self, scaler: GradScaler) -> _Ledger:
        ledger = self._ledgers.get(id(scaler))
        if ledger is None or ledger.scaler() is not scaler:
            self._ledgers = {key: one for key, one in self._ledgers.items() if one.scaler() is not None}
            ledger = self._ledgers[id(scaler)] = _Ledger(weakref.ref(scaler))
        return ledger

    def _abandon(self, ledger: _Ledger) -> None:
        """Tells the clock of attempts that were unscaled and never stepped."""
        for one in ledger.open:
            if not one.is_begun:
                self._clock.step_skipped(
                    one.known.key,
                    self._now(),
                    lr=one.lr,
                    outcome=Outcome.ABANDONED,
                    evidence=Evidence.NONE,
                    amendment=one.attempt,
                )

    def _keep_scale(self, scaler: GradScaler) -> Ticket | None:
        scale: object = getattr(scaler, "_scale", None)
        return self._keep(scale) if isinstance(scale, torch.Tensor) else None

    def _keep_findings(self, scaler: GradScaler, optimizer: int) -> tuple[Ticket, ...] | None:
        """Copies what a scaler found, one number a device; None where that is out of reach."""
        states = getattr(scaler, "_per_optimizer_states", None)
        # It makes an entry where one is asked for that is not there.
        state = states.get(optimizer) if isinstance(states, dict) else None
        findings = state.get("found_inf_per_device") if isinstance(state, dict) else None
        if not isinstance(findings, dict):
            return None
        tickets = tuple([ticket for found in findings.values() if (ticket := self._keep(found)) is not None])
        return tickets if len(tickets) == len(findings) else None

    def _keep(self, tensor: torch.Tensor) -> Ticket | None:
        try:
            return self._rings.keep(tensor)
        except Exception as error:  # noqa: BLE001 - what the host knows is told all the same
            self.report(error)
            return None

    def _compare_with_declared(self, scaler: GradScaler) -> None:
        """Says once that a scaler steps an optimizer of the model against what was declared."""
        if self._is_contradicted:
            return
        only = self._only() if self._only is not None else None
        if self._only is not None:
            if only is None or only is scaler or getattr(only, "_scale", None) is not None:
                return
            given = "a scaler that has not scaled anything was given, but another"
        elif isinstance(self._declared, Unset):
            return
        else:
            given = f"scaler={self._declared} was given, but a"
        self._is_contradicted = True
        if self._on_notice is not None:
            self._on_notice(
                "loss_scale",
                f"{given} {type(scaler).__name__} stepped an optimizer of this model; "
                f"the loss scale of gradients is recorded as unknown from here on; give that scaler as "
                f"scaler=, or leave the argument out",
            )


def _scale_of(scaler: GradScaler) -> tuple[torch.Tensor | None, ScaleProvenance]:
    scale: object = getattr(scaler, "_scale", None)
    if scale is None:
        return None, ScaleProvenance.NONE_SEEN
    if isinstance(scale, torch.Tensor):
        return scale, ScaleProvenance.GRADSCALER
    # A subclass may hold what is no tensor.
    return None, ScaleProvenance.UNKNOWN


def _is_plain(scaler: GradScaler) -> bool:
    """Returns whether a scaler calls its optimizer if and only if it found nothing, as torch's own does."""
    for owner in type(scaler).__mro__:
        if owner is GradScaler:
            return True
        if "step" in vars(owner) or "_maybe_opt_step" in vars(owner):
            return False
    return False


def _is_compiled(optimizer: object) -> bool:
    """Returns whether an optimizer's step was compiled, which takes its hooks away."""
    return hasattr(getattr(optimizer, "step", None), "_torchdynamo_orig_callable")


def _has_gradients(optimizer: object) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    return any(parameter.grad is not None for group in groups for parameter in group.get("params", ()))


def _alive(references: list[weakref.ref[GradScaler]]) -> list[GradScaler]:
    return [scaler for scaler in (reference() for reference in references) if scaler is not None]


def _holds(references: list[weakref.ref[GradScaler]], scaler: GradScaler) -> bool:
    return any(reference() is scaler for reference in references)
