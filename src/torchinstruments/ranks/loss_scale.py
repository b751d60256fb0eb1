"""Knows the loss scale, and what gradient scalers did with each optimizer, without a handle or a host read.

For each optimizer of the model that a scaler steps, an attempt is filled between two updates: the scale at
the step, what the scaler found, the scale after the update. All three are copied on the device and read by
the writer thread, which decides the outcome; see `torchinstruments.ranks.scaled_attempt`. Gradients that were
unscaled and never stepped before the update are an attempt too, an abandoned one.

An optimizer that the program steps itself after ``unscale_`` has made that attempt, and a step that runs
inside another optimizer's step belongs to the outer one (`StepClock`).

Which scaler scaled a loss of the model is `torchinstruments.ranks.seen_scalers`'s business. What the caller
declared counts before that, until a scaler is seen to contradict it. The ledger takes every scaler that steps
one of the model's optimizers, whatever was declared: what happened to a step is a fact.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from torchinstruments.config import UNSET, Unset
from torchinstruments.ranks import scaler_methods
from torchinstruments.ranks.bare_objects import new_object, new_tuple
from torchinstruments.ranks.clock import StepClock
from torchinstruments.ranks.declared_scale import DeclaredScale
from torchinstruments.ranks.inner_optimizer import inner_optimizer, is_hooked
from torchinstruments.ranks.optimizers import KnownOptimizer, OptimizerWatch, first_lr, unwrapped
from torchinstruments.ranks.ring import Rings, Ticket
from torchinstruments.ranks.scaled_attempt import ScaledAttempt
from torchinstruments.ranks.seen_scalers import SeenScalers
from torchinstruments.ranks.window import Judgement, Prepared
from torchinstruments.records import ScaleProvenance

__all__ = ["ScalerWatch"]

_MAX_OPEN = 256


@dataclass(eq=False)
class _Open:
    """An attempt of one optimizer that its scaler has not updated after.

    Attributes:
        optimizer: Address of what the scaler was given, under which it keeps its findings.
        known: The optimizer that is stepped.
        attempt: What is known of it so far.
        prepared: Tells the clock of it as long as it is not stepped.
        num_ended: Steps of the optimizer that had ended when the scaler's step began.
        is_begun: Whether the scaler's step was called; of one that raised, the optimizer's own hooks tell.
        is_done: Whether that returned, or the program made the step itself.
    """

    optimizer: int
    known: KnownOptimizer
    attempt: ScaledAttempt
    prepared: Prepared | None = None
    num_ended: int = 0
    is_begun: bool = False
    is_done: bool = False

    def begin(self) -> None:
        """Takes that a step comes: the clock need not say that none did."""
        self.is_begun = True
        if self.prepared is not None:
            self.prepared.is_over = True


@dataclass(slots=True, eq=False)
class _Ledger:
    """What one scaler did since its last update.

    Attributes:
        scaler: The scaler.
        open: Attempts of this model's optimizers.
        has_others: Whether it checked gradients of another model's optimizer too.
        is_in_unknown: Whether its step runs with something that cannot be told to be an optimizer.
    """

    scaler: weakref.ref[GradScaler]
    open: list[_Open] = field(default_factory=list)
    has_others: bool = False
    is_in_unknown: bool = False

    def forget(self) -> None:
        """Begins anew, after an update."""
        self.open = []
        self.has_others = self.is_in_unknown = False


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
        self._is_undeclared = isinstance(declared, Unset)
        self._is_contradicted = False
        self._seen = SeenScalers(clock)
        self._led: int | None = None
        self._ledgers: dict[int, _Ledger] = {}

    def attach(self) -> None:
        """Wraps the scaler classes, or shares the wrapping of another watch."""
        # As long as no scaler is there, nothing follows from a step.
        self._optimizers.on_ended = self._step_ended if self._seen.is_any_alive else None
        scaler_methods.listen(self)

    def detach(self) -> None:
        """Stops listening, and tells of attempts that were unscaled and never stepped. Idempotent."""
        self._optimizers.on_ended = None
        scaler_methods.stop_listening(self)
        ledgers = list(self._ledgers.values())
        self._ledgers.clear()
        try:
            for ledger in ledgers:
                self._end(ledger.open)
        except Exception as error:  # noqa: BLE001 - detaching goes on
            self.report(error)

    def current_scale(self, forward_index: int | None = None) -> tuple[torch.Tensor | None, ScaleProvenance]:
        """Returns the tensor that holds the loss scale, and how it is known (training thread, hot path).

        The tensor is the scaler's own, on its device, and changes in place: copy it now, read it later.

        Args:
            forward_index: Of the root forward whose backward asks; None asks before any backward.

        Returns:
            ``(scale, GRADSCALER)``; ``(scale, EXPLICIT)`` and ``(None, UNSCALED)`` as the caller declared;
            ``(None, NONE_SEEN)`` where no enabled scaler scaled since `attach`; ``(None, UNKNOWN)`` where it
            cannot be told whether a scaler scaled this loss, or one contradicts what was declared.
        """
        if self._is_contradicted:
            return None, ScaleProvenance.UNKNOWN
        if self._only is not None:
            only = self._only()
            if only is None:
                return None, ScaleProvenance.UNKNOWN
            return _scale_of(only) if only.is_enabled() else (None, ScaleProvenance.UNSCALED)
        # A subclass that was imported after attach is not wrapped yet.
        scaler_methods.wrap_new_classes()
        if not isinstance(self._declared, Unset):
            if self._seen.is_any_suspect:
                # It may scale this model's loss against what was declared: its first step will tell.
                return None, ScaleProvenance.UNKNOWN
            provenance = ScaleProvenance.UNSCALED if self._fixed is None else ScaleProvenance.EXPLICIT
            return self._fixed, provenance
        if not self._seen.is_any_alive:
            return None, ScaleProvenance.NONE_SEEN
        believed = self._seen.believed(forward_index)
        return (None, ScaleProvenance.UNKNOWN) if believed is None else _scale_of(believed)

    def scale_left(
        self, optimizer: Optimizer, forward_index: int
    ) -> tuple[torch.Tensor | float | None, ScaleProvenance]:
        """Returns the factor by which an optimizer's gradients are still multiplied, and how it is known.

        It is called while the optimizer begins its step, or was skipped (training thread, hot path).

        Args:
            optimizer: The optimizer.
            forward_index: Of the root forward to which the gradients belong.

        Returns:
            ``(1.0, GRADSCALER)`` once a scaler has unscaled them and ``(scale, GRADSCALER)`` where it leaves
            that to the optimizer; ``(None, UNSCALED)`` and ``(None, NONE_SEEN)`` as `current_scale`. Else
            ``(None, UNKNOWN)``: where the program scales by a number of its own, where an optimizer steps
            without the scaler that is there, and where several scaled since the forward.
        """
        if self._is_contradicted:
            return None, ScaleProvenance.UNKNOWN
        begun = self._begun_by(optimizer)
        if len(begun) != 1:
            _, provenance = self.current_scale(forward_index)
            # Whether the program has divided by it already, nothing tells.
            is_scaled = provenance in {ScaleProvenance.GRADSCALER, ScaleProvenance.EXPLICIT}
            return None, ScaleProvenance.UNKNOWN if is_scaled else provenance
        ((scaler, one),) = begun
        if self._only is None and self._seen.num_scaled(forward_index) > 1:
            return None, ScaleProvenance.UNKNOWN
        # Asked for with [], it would make an entry.
        state = scaler._per_optimizer_states.get(one.optimizer)  # noqa: SLF001
        if state is not None and state["stage"] is not OptState.READY:
            return 1.0, ScaleProvenance.GRADSCALER
        return _scale_of(scaler)

    def scaled(self, scaler: GradScaler) -> None:
        """Takes that a scaler has scaled something (training thread, hot path)."""
        self._seen.scaled(scaler)
        if self._optimizers.on_ended is None:
            self._optimizers.on_ended = self._step_ended

    def unscaled(self, scaler: GradScaler, optimizer: object) -> None:
        """Takes that the program had an optimizer's gradients unscaled (training thread, hot path)."""
        known = self._optimizers.known(optimizer)
        if known is None:
            self._ledger(scaler).has_others = True
            return
        opened = self._open(scaler, optimizer, known)
        attempt = opened.attempt
        lr = first_lr(known.reference())
        opened.prepared = self._clock.step_prepared(known.key, lr=lr, amendment=attempt)
        self._keep_before(scaler, opened)

    def step_begins(self, scaler: GradScaler, optimizer: object) -> _Open | None:
        """Returns the attempt, or None for another model's optimizer (training thread, hot path)."""
        known = self._optimizers.asked_for = self._optimizers.known(optimizer)
        if known is None:
            self._ledger(scaler).is_in_unknown = unwrapped(optimizer) is None
            return None
        begun = self._open(scaler, optimizer, known)
        begun.num_ended = known.num_ended
        begun.begin()
        # A program may have changed what an earlier unscale_ found, to make its ranks agree, or the scale. No
        # step changes them, so that both are copied behind it, at once.
        begun.attempt.scale_before = begun.attempt.found_inf = None
        return begun

    def step_returned(self, scaler: GradScaler, optimizer: object, begun: _Open | None) -> None:
        """Takes that a scaler's ``step`` returned without an exception (training thread, hot path).

        Args:
            scaler: The scaler.
            optimizer: What it was to step.
            begun: What `step_begins` returned.
        """
        # Where it was skipped, its next step is not the scaler's.
        self._optimizers.asked_for = None
        if begun is None:
            ledger = self._ledger(scaler)
            ledger.has_others, ledger.is_in_unknown = True, False
            if unwrapped(optimizer) is not None:
                self._seen.stepped(scaler, is_own=False)
            return
        self._seen.stepped(scaler, is_own=True)
        if not self._is_undeclared:
            self._compare_with_declared(scaler)
        try:
            self._tell(scaler, optimizer, begun)
        finally:
            begun.is_done = begun.attempt.is_stepped = True

    def _tell(self, scaler: GradScaler, optimizer: object, begun: _Open) -> None:
        """Tells the clock and the listener what became of a step."""
        attempt = begun.attempt
        attempt.is_plain_scaler = type(scaler) is GradScaler or _is_plain(scaler)
        if attempt.found_inf is None and not attempt.is_over:
            self._keep_before(scaler, begun)
        known = begun.known
        if known.num_ended > begun.num_ended:
            attempt.ran = True
            attempt.decides_on_device = known.decides_on_device
            if attempt.decides_on_device and attempt.found_inf == ():
                # Where there was nothing to find, the optimizer had nothing to decide.
                attempt.decides_on_device = _has_gradients(inner_optimizer(optimizer))
        else:
            stepped = inner_optimizer(optimizer)
            # Torch calls no hooks for a step that it did not wrap, or that was compiled.
            attempt.ran = False if is_hooked(stepped) and not _is_compiled(stepped) else None
            attempt.decides_on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._led = self._clock.running_key
        verdict = attempt.provisional()
        if attempt.ran:
            judgement = new_tuple(Judgement, (verdict.outcome, verdict.evidence, None, attempt))
            self._clock.step_resolved(known.key, judgement)
        else:
            self._clock.step_skipped(
                known.key,
                self._now(),
                lr=first_lr(inner_optimizer(optimizer)),
                outcome=verdict.outcome,
                evidence=verdict.evidence,
                amendment=attempt,
            )
            inner = known.reference() if attempt.ran is False else None
            if inner is not None:
                if self._optimizers.listener is not None:
                    self._optimizers.listener.step_skipped(inner)
                for told in self._optimizers.on_skipped:
                    told(inner)

    def _step_ended(self, known: KnownOptimizer) -> None:
        """Takes that an optimizer of this model has stepped, whoever called it (hot path).

        The program may have called it, after ``unscale_`` or without any scaler. The clock knows of the step.
        """
        mine: _Open | None = None
        is_any_begun = False
        for ledger in self._ledgers.values():
            for one in ledger.open:
                if not one.is_done:
                    is_any_begun |= one.is_begun
                    if one.known is known:
                        mine = one
        if mine is not None and mine.is_begun:
            # The scaler's own call, of which its return tells more.
            return
        if not self._seen.is_any_alive:
            return
        if mine is not None:
            self._step_ended_unscaled(mine)
        elif known.key == self._led:
            self._led = None
        elif unknown := [ledger for ledger in self._ledgers.values() if ledger.is_in_unknown]:
            scaler = unknown[-1].scaler()
            if scaler is not None:
                self._seen.stepped(scaler, is_own=True)
        elif not self._clock.is_stepping and not is_any_begun:
            self._seen.stepped_without()

    def _step_ended_unscaled(self, one: _Open) -> None:
        """Takes that the program stepped an optimizer itself whose gradients the scaler has unscaled."""
        is_told = one.prepared is not None and one.prepared.is_over
        one.begin()
        one.is_done = True
        if is_told:
            # A block ended in between: it was abandoned there, and this step has no row to stand in.
            return
        attempt = one.attempt
        attempt.ran, attempt.decides_on_device = True, one.known.decides_on_device
        self._led = self._clock.running_key
        verdict = attempt.provisional()
        judgement = Judgement(verdict.outcome, verdict.evidence, amendment=attempt)
        self._clock.step_resolved(one.known.key, judgement)
        attempt.is_stepped = True

    def _begun_by(self, optimizer: Optimizer) -> list[tuple[GradScaler, _Open]]:
        """Returns the attempts at stepping an optimizer that began and whose step has not returned."""
        return [
            (scaler, one)
            for ledger in self._ledgers.values()
            if (scaler := ledger.scaler()) is not None
            for one in ledger.open
            if one.known.reference() is optimizer and not one.is_done
        ]

    def update_begins(self, scaler: GradScaler) -> None:
        """Takes that an update begins, which discards the findings (training thread, hot path)."""
        ledger = self._ledgers.get(id(scaler))
        for one in () if ledger is None else ledger.open:
            if one.attempt.found_inf is None:
                self._keep_before(scaler, one)

    def updated(self, scaler: GradScaler, *, is_scale_set: bool) -> None:
        """Takes that an update returned (training thread, hot path).

        Args:
            scaler: The scaler.
            is_scale_set: Whether the program gave it a scale.
        """
        ledger = self._ledgers.get(id(scaler))
        if ledger is None or ledger.scaler() is not scaler:
            return
        done, has_others = ledger.open, ledger.has_others
        ledger.forget()
        if not done:
            return
        (after,) = self._keep(_scales(scaler)) or (None,)
        is_alone = not has_others and (len(done) == 1 or len({one.optimizer for one in done}) == 1)
        for one in done:
            # The scale comes last: the writer thread, if it looks now, must not take it for a backoff.
            one.attempt.is_scale_set = is_scale_set
            one.attempt.is_alone = is_alone
            one.attempt.scale_after = after
        self._end(done)

    def report(self, error: BaseException) -> None:
        """Takes an exception of this package's own code (training or writer thread)."""
        if self._on_error is not None:
            self._on_error("loss_scale", error)

    def _open(self, scaler: GradScaler, optimizer: object, known: KnownOptimizer) -> _Open:
        """Returns the attempt of an optimizer that is not stepped yet, a new one where there is none."""
        ledger = self._ledger(scaler)
        for one in ledger.open:
            if one.optimizer == id(optimizer) and one.known is known and not one.is_done:
                if one.is_begun or one.prepared is None or not one.prepared.is_over:
                    return one
                # Its window is over, as one in which no step came.
                one.is_done = True
        if len(ledger.open) >= _MAX_OPEN:
            # A scaler that is never updated.
            ledger.open.pop(0).attempt.is_over = True
        attempt = new_object(ScaledAttempt)
        attempt.report = self.report
        opened = new_object(_Open)
        opened.optimizer, opened.known, opened.attempt = id(optimizer), known, attempt
        ledger.open.append(opened)
        return opened

    def _ledger(self, scaler: GradScaler) -> _Ledger:
        ledger = self._ledgers.get(id(scaler))
        if ledger is None or ledger.scaler() is not scaler:
            self._ledgers = {key: one for key, one in self._ledgers.items() if one.scaler() is not None}
            ledger = self._ledgers[id(scaler)] = _Ledger(weakref.ref(scaler))
            self._optimizers.on_ended = self._step_ended
        return ledger

    def _end(self, attempts: Sequence[_Open]) -> None:
        """Tells the clock of attempts that were unscaled and never stepped, and that nothing more comes."""
        for one in attempts:
            if one.prepared is not None and not one.prepared.is_over:
                self._led = self._clock.running_key
                self._clock.step_abandoned(one.prepared, self._now())
            one.attempt.is_over = True

    def _keep_before(self, scaler: GradScaler, one: _Open) -> None:
        """Copies the scale and what a scaler found, as an update will change both."""
        scale, found = _scales(scaler), _findings(scaler, one.optimizer)
        tickets = self._keep((*scale, *(found or ())))
        if scale:
            one.attempt.scale_before = tickets[0]
        kept: list[Ticket] = []
        for ticket in tickets[len(scale) :]:
            if ticket is not None:
                kept.append(ticket)  # noqa: PERF401 - a comprehension is a call more
        one.attempt.found_inf = None if found is None or len(kept) < len(found) else tuple(kept)

    def _keep(self, tensors: Sequence[torch.Tensor]) -> list[Ticket | None]:
        try:
            return self._rings.keep_all(tensors)
        except Exception as error:  # noqa: BLE001 - what the host knows is told all the same
            self.report(error)
            return [None] * len(tensors)

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


def _scales(scaler: GradScaler) -> tuple[torch.Tensor, ...]:
    """Returns the tensor with a scaler's scale, where it has one."""
    scale: object = getattr(scaler, "_scale", None)
    return (scale,) if isinstance(scale, torch.Tensor) else ()


def _findings(scaler: GradScaler, optimizer: int) -> tuple[torch.Tensor, ...] | None:
    """Returns what a scaler found, one number a device; None where that is out of reach."""
    states = getattr(scaler, "_per_optimizer_states", None)
    # It makes an entry where one is asked for that is not there.
    state = states.get(optimizer) if isinstance(states, dict) else None
    findings = state.get("found_inf_per_device") if isinstance(state, dict) else None
    return tuple(findings.values()) if isinstance(findings, dict) else None


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
