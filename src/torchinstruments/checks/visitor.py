"""Visits the sites of a training loop with all checks of a session together.

One visit: every check queues its device work, all numbers are fetched at once, then every check judges.
What raises in a check becomes an unavailable entry; after several failures in a row the check is left alone.
Findings that are to raise do so at the end of a visit before or after a write, and nowhere else.
"""

import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from torchinstruments.checks.accumulation import AccumulationSite
from torchinstruments.checks.attempts import Attempts
from torchinstruments.checks.check import BackwardLook, Check, Judge, StepLook
from torchinstruments.checks.findings import (
    Action,
    CheckWarning,
    EvidenceKind,
    Finding,
    FindingStore,
    GradientStage,
    Moment,
    Severity,
)
from torchinstruments.checks.inventory import Inventory
from torchinstruments.checks.measures import norms, scope_of, sort_out
from torchinstruments.checks.reading import Reading
from torchinstruments.checks.unstepped import Unstepped
from torchinstruments.checks.watchdog import Trip, Watchdog
from torchinstruments.errors import CheckViolationError
from torchinstruments.observe.engine import is_capturing_graph
from torchinstruments.records import GradSync, Reason, ScaleProvenance, Scope, error_text
from torchinstruments.statistics.isolation import functions_off, isolated
from torchinstruments.warning_place import warn_user

__all__ = ["SiteVisitor"]

_MAX_WAITING = 32
_MAX_FAILURES = 8


class SiteVisitor:
    """Runs the checks of an attached session.

    Args:
        inventory: What is watched.
        attempts: Counts attempts.
        checks: In the order of registration.
        store: Takes findings.
        watchdog: Is told of backwards and of what becomes of steps.
        violated: Told of what will be raised, before it is; returns the report for the exception.
        on_error: Takes probe and exception of this package's own code.
        accumulation_steps: Backwards that make one step, where the caller declared them.
    """

    def __init__(
        self,
        inventory: Inventory,
        checks: Sequence[Check],
        store: FindingStore,
        watchdog: Watchdog,
        violated: Callable[[Finding], dict[str, object]],
        on_error: Callable[[str, BaseException], None],
        accumulation_steps: int | None = None,
    ) -> None:
        self.enabled = True
        """Whether sites are visited."""
        self.accepted_steps = 0
        """Steps that were applied, as far as the host knew at once."""
        self.last_fired: frozenset[int] = frozenset()
        self.fire_counts: Counter[int] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.num_visits: Counter[str] = Counter()
        self.reading = Reading()
        self._inventory = inventory
        self._store = store
        self._watchdog = watchdog
        self._violated = violated
        self._on_error = on_error
        self._attempts: Attempts | None = None
        self._site: AccumulationSite | None = None
        self._after_backward = _overriding(checks, "backward_ended")
        self._before = _overriding(checks, "before_write")
        self._after = _overriding(checks, "after_write")
        self._failures: Counter[str] = Counter()
        self._unstepped = Unstepped(inventory.entries, accumulation_steps)
        self._of_steps = [check for check in (*self._before, *self._after) if not check.is_passive]
        if not self._of_steps:
            self._unstepped.step_seen()
        self._waiting: list[tuple[Check, Judge]] = []
        self._to_raise: list[Finding] = []
        self._look: StepLook | None = None
        self._is_unlooked = False
        self._early: dict[int, torch.Tensor] = {}
        self._only: tuple[weakref.ref[Optimizer], ...] | None = None
        self._reduced_by_ddp: frozenset[int] = frozenset()
        self._without_evidence: set[int] = set()
        self._owned: dict[int, tuple[tuple[int, ...], dict[int, int]]] = {}
        self._buffers: dict[int, torch.Tensor] = {}

    def connect(
        self, attempts: Attempts, site: AccumulationSite, reduced_by_ddp: frozenset[int] = frozenset()
    ) -> None:
        """Takes where attempts and backwards are counted (training thread, at attach).

        Args:
            attempts: Counts attempts.
            site: Counts backwards.
            reduced_by_ddp: Positions of parameters whose gradients `DistributedDataParallel` reduces.
        """
        self._attempts, self._site, self._reduced_by_ddp = attempts, site, reduced_by_ddp

    def look_only_at(self, optimizers: Sequence[Optimizer] | None) -> None:
        """Takes which optimizers' steps are looked at; None looks at all that are counted (at attach)."""
        if optimizers is not None:
            self._only = tuple([weakref.ref(optimizer) for optimizer in optimizers])

    def emit(self, finding: Finding) -> None:
        """Takes a finding of a check (training or autograd thread)."""
        self._store.add(finding)
        if finding.action is Action.RAISE:
            self._to_raise.append(finding)
        elif finding.action is Action.WARN:
            try:
                warn_user(f"torchinstruments: {finding.message}; {finding.remedy}", CheckWarning)
            except CheckWarning:
                # A filter of the program's made it an exception, which must not come out of a hook. The
                # finding stands in the report.
                self._store.add_unavailable(finding.check, "warning_was_an_error")

    def backward_began(self) -> None:
        """Takes the first gradient of a backward (autograd thread, hot path)."""
        if self._attempts is not None:
            self._attempts.backward_began()

    def backward_ended(self, fired: Sequence[int]) -> None:
        """Looks at what a backward has added to; it never raises (autograd thread, hot path)."""
        attempts = self._attempts
        if attempts is None:
            return
        self.fire_counts.update(fired)
        attempts.backward_ended()
        if self.enabled:
            self._speak(self._watchdog.backward())
            self._say_unstepped(self._unstepped.backward_ended(fired))
        if not self.enabled or not self._after_backward:
            return
        with self._visit("backward_ended") as runs:
            if runs:
                look = self._backward_look(attempts, tuple(dict.fromkeys(fired)))
                self._waiting += self._ask(self._after_backward, "backward_ended", look)
                if len(self._waiting) >= _MAX_WAITING * len(self._after_backward):
                    self._settle()

    def accumulated(self, index: int) -> None:
        """Takes the norm of a gradient that ranks will reduce in place (autograd thread, hot path)."""
        if not self.enabled or not self._after_backward or is_capturing_graph():
            return
        gradient = self._inventory.entries[index].tensor.grad
        if gradient is None:
            return
        with functions_off(), isolated(self._device_type()):
            ready, _ = sort_out({index: gradient})
            if ready:
                self._early[index] = norms((ready[index],))[0][1]

    def is_own(self, optimizer: Optimizer) -> bool:
        """Returns whether a step is the outermost one of the session's optimizers (hot path)."""
        attempts = self._attempts
        if attempts is None or not self.enabled:
            return False
        if self._only is not None and not any(reference() is optimizer for reference in self._only):
            return False
        known = attempts.optimizers.known(optimizer)
        return known is not None and attempts.clock.running_key in {known.key, None}

    def before_write(self, optimizer: Optimizer, evaluation: int) -> None:
        """Looks at gradients before an optimizer writes (training thread, hot path).

        Raises:
            CheckViolationError: A check that was asked to raise found something.
        """
        attempts, site = self._attempts, self._site
        if attempts is None or site is None:
            return
        site.forget_unfinished()
        self._unstepped.step_seen()
        self._look = None
        self._is_unlooked = not (
            self._before or self._after or getattr(optimizer, "found_inf", None) is not None
        )
        if self._is_unlooked:
            return
        with self._visit("before_write") as runs:
            if runs:
                look = self._step_look(attempts, optimizer, evaluation)
                self._say_without_evidence(look)
                judges = self._ask(self._before, "before_write", look)
                self._copy_wanted(look)
                self._settle(judges)
                # What is raised for is not written, and nothing of it is to be kept.
                self._look = None if self._to_raise else look
        self._raise()

    def after_write(self, optimizer: Optimizer) -> None:
        """Looks at parameters after an optimizer wrote (training thread, hot path).

        Raises:
            CheckViolationError: A check that was asked to raise found something.
        """
        look, self._look = self._look, None
        if (look is None and not self._is_unlooked) or (look is not None and look.optimizer is not optimizer):
            return
        if look is not None and look.is_skipped():
            self._speak(self._watchdog.skipped())
            return
        self._watchdog.accepted()
        if look is not None and self._after:
            with self._visit("after_write") as runs:
                if runs:
                    self._settle(self._ask(self._after, "after_write", look))
        # What was looked at before counts as one accepted step from here on.
        self.accepted_steps += 1
        self._raise()

    def step_skipped(self) -> None:
        """Takes that the loss scaler skipped a step; it never raises (training thread, hot path)."""
        self._unstepped.step_seen()
        if self.enabled:
            self._speak(self._watchdog.skipped())
            self.settle()

    def settle(self) -> None:
        """Has what waits judged, as where the scaler skipped; it never raises (training thread, hot path)."""
        if self._waiting:
            with self._visit("settle") as runs:
                if runs:
                    self._settle()

    def forget(self) -> None:
        """Drops copies and what waits (training thread, at detach)."""
        self._waiting.clear()
        self._look = None
        self._buffers.clear()
        self._owned.clear()

    def _speak(self, trip: Trip | None) -> None:
        """Says what the watchdog has to say."""
        if trip is None or self._attempts is None:
            return
        self.emit(
            Finding(
                check="watchdog",
                code="check_no_accepted_steps",
                severity=Severity.WARNING,
                action=Action.WARN,
                message=f"{trip.number} {trip.unit} since the last accepted step (allowed: {trip.threshold})",
                values={"number": trip.number, "threshold": trip.threshold, "unit": trip.unit},
                moment=self._moment(self._attempts, None),
                evidence=EvidenceKind.LEDGER,
                remedy="look at the scale ledger of the report: under a loss scale that falls without end "
                "every gradient overflows",
            )
        )

    def _say_unstepped(self, num_rounds: int | None) -> None:
        """Says that gradients come and no step does, so that the looks around a write never happen."""
        if num_rounds is None or self._attempts is None:
            return
        names = ", ".join(dict.fromkeys(check.name for check in self._of_steps))
        self.emit(
            Finding(
                check="watchdog",
                code="check_no_step_seen",
                severity=Severity.WARNING,
                action=Action.WARN,
                message=f"{num_rounds} rounds of gradients came and no step of the session's optimizers was "
                f"seen: nothing is looked at before or after a write ({names})",
                values={"num_rounds": num_rounds},
                moment=self._moment(self._attempts, None),
                evidence=EvidenceKind.COUNTING_HOOK,
                remedy="give as optimizer= the one that steps this model, and leave its step out of what "
                "torch.compile compiles, whose inside is not seen",
            )
        )

    @contextmanager
    def _visit(self, site: str) -> Generator[bool]:
        """Isolates a visit, times it, and lets nothing out; yields whether it can be made."""
        started_s = time.perf_counter()
        try:
            if is_capturing_graph():
                self._store.add_unavailable("session", Reason.GRAPH_CAPTURE.value)
                yield False
                return
            with functions_off(), isolated(self._device_type()):
                yield True
        except Exception as error:  # noqa: BLE001 - nothing of this package's own may reach training
            self._waiting.clear()
            self._on_error(site, error)
        finally:
            self.num_visits[site] += 1
            self.seconds[site] += time.perf_counter() - started_s

    def _ask(
        self, checks: Sequence[Check], site: str, look: BackwardLook | StepLook
    ) -> list[tuple[Check, Judge]]:
        """Has checks queue their work; one that raises does not stop the others."""
        judges: list[tuple[Check, Judge]] = []
        for check in checks:
            if self._failures[check.name] >= _MAX_FAILURES:
                continue
            try:
                judge: Judge | None = getattr(check, site)(look)
            except Exception as error:  # noqa: BLE001 - isolated from the next check
                self._failed(check, error)
                continue
            if judge is not None:
                judges.append((check, judge))
        return judges

    def _settle(self, judges: Sequence[tuple[Check, Judge]] = ()) -> None:
        """Fetches every number that was asked for, and has it judged."""
        waiting = [*self._waiting, *judges]
        self._waiting = []
        self.reading.fetch()
        for check, judge in waiting:
            try:
                judge()
            except Exception as error:  # noqa: BLE001 - isolated from the next check
                self._failed(check, error)
            else:
                self._failures[check.name] = 0
                check.has_run = True

    def _failed(self, check: Check, error: Exception) -> None:
        self._failures[check.name] += 1
        self._store.add_unavailable(
            check.name, f"internal_error: {type(error).__name__}: {error_text(error)}"
        )
        if self._failures[check.name] == _MAX_FAILURES:
            self._store.add_unavailable(check.name, f"given_up: it failed {_MAX_FAILURES} times in a row")

    def _raise(self) -> None:
        """Raises the gravest finding that is to be raised, when all of the visit is in the report.

        Raises:
            CheckViolationError: There is one.
        """
        if not self._to_raise:
            return
        finding = self._to_raise[0]
        self._to_raise = []
        report = self._violated(finding)
        error = CheckViolationError(f"{finding.message}; {finding.remedy}")
        error.fields = {
            "code": finding.code,
            "finding": finding.to_dict(),
            "names": list(finding.names),
            "attempt": finding.moment.attempt,
            "accepted_step": finding.moment.accepted_step,
            "remedy": finding.remedy,
            "report": report,
        }
        raise error

    def _backward_look(self, attempts: Attempts, fired: tuple[int, ...]) -> BackwardLook:
        entries = self._inventory.entries
        gradients = {
            index: gradient for index in fired if (gradient := entries[index].tensor.grad) is not None
        }
        scale, provenance = attempts.scale.current_scale(attempts.clock.num_forwards - 1)
        stage = GradientStage.PRE_CLIP_UNSCALED
        if provenance in {ScaleProvenance.GRADSCALER, ScaleProvenance.EXPLICIT}:
            stage = GradientStage.PRE_CLIP_SCALED
        elif provenance is ScaleProvenance.UNKNOWN:
            stage = GradientStage.PRE_CLIP_UNKNOWN
        early = self._early
        self._early = {}
        return BackwardLook(
            moment=self._moment(attempts, None),
            fired=fired,
            gradients=gradients,
            reading=self.reading,
            stage=stage,
            scale_provenance=provenance,
            loss_scale=None if scale is None else self.reading.add_one(scale),
            grad_sync=self._grad_sync(gradients),
            early={index: norm for index, norm in early.items() if index in gradients},
        )

    def _say_without_evidence(self, look: StepLook) -> None:
        """Says once of which gradients no backward told, so that nothing is known of them before clipping."""
        fires = self.fire_counts
        if not self._after_backward or len(fires) >= len(self._inventory.entries):
            return
        missing = [
            index for index in look.gradients if index not in fires and index not in self._without_evidence
        ]
        if missing:
            self._without_evidence.update(missing)
            self._store.add_unavailable(
                "accumulation",
                "no_hook_fired: the gradient came by another way than a backward that adds to it",
                self._inventory.names(missing),
            )

    def _grad_sync(self, gradients: Mapping[int, torch.Tensor]) -> GradSync:
        """Returns whether ranks have reduced the gradients of a backward that ends."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return GradSync.NOT_DISTRIBUTED
        if torch.distributed.get_world_size() == 1:
            return GradSync.NOT_DISTRIBUTED
        if not gradients:
            return GradSync.UNKNOWN
        if all(scope_of(gradient) is not Scope.LOCAL for gradient in gradients.values()):
            return GradSync.SYNCED
        # It writes what ranks have reduced after the end of the backward at which this looks.
        return GradSync.LOCAL if self._reduced_by_ddp.issuperset(gradients) else GradSync.UNKNOWN

    def _step_look(self, attempts: Attempts, optimizer: Optimizer, evaluation: int) -> StepLook:
        scale, provenance = attempts.scale.scale_left(optimizer, attempts.clock.num_forwards - 1)
        known = attempts.optimizers.known(optimizer)
        found_inf: object = getattr(optimizer, "found_inf", None)
        return StepLook(
            optimizer=optimizer,
            moment=self._moment(attempts, None if known is None else attempts.clock.ordinal_of(known.key)),
            positions=self._positions(optimizer),
            reading=self.reading,
            inventory=self._inventory,
            scale_provenance=provenance,
            loss_scale=self.reading.add_one(scale) if isinstance(scale, torch.Tensor) else scale,
            found_inf=self.reading.add_one(found_inf) if isinstance(found_inf, torch.Tensor) else None,
            evaluation=evaluation,
        )

    def _moment(self, attempts: Attempts, optimizer: int | None) -> Moment:
        clock, is_step = attempts.clock, optimizer is not None
        return Moment(
            attempt=clock.attempt,
            micro_batch=None if is_step else clock.micro_batch,
            backward=None if is_step or self._site is None else self._site.num_backwards - 1,
            optimizer=optimizer,
            accepted_step=self.accepted_steps,
            global_step=clock.global_step,
            step_provenance=clock.step_provenance,
        )

    def _positions(self, optimizer: Optimizer) -> dict[int, int]:
        """Returns which tensors of the inventory an optimizer steps, and in which group each is."""
        groups = optimizer.param_groups
        signature = tuple([id(tensor) for group in groups for tensor in group["params"]])
        known = self._owned.get(id(optimizer))
        if known is not None and known[0] == signature:
            return known[1]
        positions: dict[int, int] = {}
        for number, group in enumerate(groups):
            for tensor in group["params"]:
                index = self._inventory.index_of(tensor)
                if index is not None:
                    positions.setdefault(index, number)
        self._owned[id(optimizer)] = signature, positions
        return positions

    def _copy_wanted(self, look: StepLook) -> None:
        """Copies the parameters that checks will compare with, into buffers that are kept for that."""
        wanted = [index for index in look.positions if index in look.wanted]
        if not wanted:
            return
        entries, buffers = self._inventory.entries, self._buffers
        sources, _ = sort_out({index: entries[index].tensor for index in wanted})
        for index, source in sources.items():
            held = buffers.get(index)
            if (
                held is None
                or held.dtype is not source.dtype
                or held.shape != source.shape
                or held.device != source.device
            ):
                buffers[index] = torch.empty_like(source)
        look.snapshots = {index: buffers[index] for index in sources}
        if sources:
            torch._foreach_copy_(list(look.snapshots.values()), list(sources.values()))

    def _device_type(self) -> str:
        entries = self._inventory.entries
        return entries[0].tensor.device.type if entries else "cpu"


def _overriding(checks: Sequence[Check], site: str) -> tuple[Check, ...]:
    """Returns the checks that have something of their own for a site; none where all of them are passive."""
    found = [check for check in checks if getattr(type(check), site) is not getattr(Check, site)]
    return () if all(check.is_passive for check in found) else tuple(found)
