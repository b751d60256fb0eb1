"""One session of training checks: what a user holds.

A session is silent and free until it is attached. Attached, it watches three sites: where gradients are added
to, the moment before an optimizer writes, the moment after. Nothing of its own raises into training; a check
that was asked to raise does, with the finding in the report first.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from torchinstruments import environment
from torchinstruments.checks.accumulation import AccumulationSite
from torchinstruments.checks.attempts import Attempts, OwnAttempts
from torchinstruments.checks.blocks import Blocks
from torchinstruments.checks.check import Check, Ground
from torchinstruments.checks.clip_ledger import ClipLedger
from torchinstruments.checks.findings import Finding, FindingStore
from torchinstruments.checks.guard import guarded, internal_error
from torchinstruments.checks.inventory import Inventory
from torchinstruments.checks.kept_reports import KeptReports
from torchinstruments.checks.measures import local_numel
from torchinstruments.checks.overhead import hook_s, num_bytes, scan_s
from torchinstruments.checks.registrars import Registrars
from torchinstruments.checks.registration import (
    cadence_of,
    positive_of,
)
from torchinstruments.checks.relays import weakly
from torchinstruments.checks.replicated import reduced_by_ddp, reduced_in_place
from torchinstruments.checks.report import CheckReport
from torchinstruments.checks.scale_ledger import ScaleLedger
from torchinstruments.checks.session_report import ReportMaker, Watch
from torchinstruments.checks.shared_attempts import shared_attempts
from torchinstruments.checks.stepping import StepSite
from torchinstruments.checks.targets import (
    checked_model,
    holder_of,
    optimizers_of,
    refuse_strangers,
)
from torchinstruments.checks.unstepped import Unstepped
from torchinstruments.checks.visitor import SiteVisitor
from torchinstruments.checks.watchdog import Watchdog
from torchinstruments.config import UNSET, Unset
from torchinstruments.errors import CheckLifecycleError
from torchinstruments.observe.observer import observer_of
from torchinstruments.observe.registry import listed
from torchinstruments.ranks.declared_scale import DeclaredScale, declared_scale_of
from torchinstruments.records import AttemptRecord, ClosedAttempt, error_text
from torchinstruments.warning_place import warn_user

__all__ = ["ChecksSession"]

_MAX_NUMBER = 2**63 - 1


class ChecksSession(Registrars):
    """Watches the gradients, updates and parameters of one model while it trains.

    Args:
        model: As the training loop calls it, or a mapping from names to tensors.
        optimizer: The one, or those, whose steps are looked at; None for every one that steps a parameter of
            the model. A wrapper of an optimizer stands for the one inside.
        scaler: What scales the loss: a gradient scaler, a number that the loop multiplies the loss with, or
            None for nothing. Where it is not given, a gradient scaler is found by itself.
        clip_norm: The ``max_norm`` that the loop clips gradients to, where it does.
        accumulation_steps: Backwards that make one step, where no step may ever tell.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        optimizer: object = None,
        *,
        scaler: DeclaredScale = UNSET,
        clip_norm: float | None = None,
        accumulation_steps: int | None = None,
    ) -> None:
        super().__init__(Inventory(checked_model(model)))
        self._model = model
        self._optimizers = optimizers_of(optimizer)
        self._scaler = declared_scale_of(scaler)
        self._clip_norm = None if clip_norm is None else positive_of("clip_norm", clip_norm)
        self._accumulation_steps = (
            None if accumulation_steps is None else cadence_of(accumulation_steps, "accumulation_steps")
        )
        self._holder = model if isinstance(model, nn.Module) else holder_of(model)
        self._store = FindingStore()
        self._ledger = ScaleLedger(self._take_record)
        self._clip = ClipLedger(self._clip_norm)
        self._watchdog = Watchdog(self._accumulation_steps)
        self._blocks = Blocks()
        self._reports = ReportMaker(
            model,
            self._checks,
            self._store,
            self._ledger,
            self._clip,
            self._watchdog,
            self._blocks,
            self._declared(),
            self._clip_norm,
        )
        self._kept = KeptReports(self._store)
        self._watch: Watch | None = None
        self._last: Watch | None = None
        self._steps: StepSite | None = None
        self._is_seen_apart = False
        self._finalizer: weakref.finalize[..., ChecksSession] | None = None
        self._final_report: CheckReport | None = None
        self._is_enabled = True
        self._is_disabled_by_environment = False
        self._noticed: set[str] = set()

    @property
    @override
    def is_attached(self) -> bool:
        """Whether it watches."""
        return self._watch is not None

    def attach(self) -> Self:
        """Begins to watch: a hook for each parameter, two for all optimizers, one on the model.

        Raises:
            CheckLifecycleError: The session is attached.
            ConfigurationError: A check names what the model does not have, or an optimizer that was given has
                no parameter of the model.
        """
        if self._watch is not None:
            raise CheckLifecycleError("this session is attached already; call detach() first")
        if environment.is_disabled():
            self._is_disabled_by_environment = True
            return self
        self._inventory = Inventory(self._model)
        refuse_strangers(self._optimizers, self._inventory, self._holder)
        # The ledger goes last: it takes what other checks have asked for.
        checks = (*self._checks, self._clip)
        visitor = SiteVisitor(
            self._inventory,
            checks,
            self._store,
            self._watchdog,
            self._violated,
            self._report_error,
            Unstepped(self._inventory.entries, self._accumulation_steps),
        )
        ground = Ground(self._inventory, visitor.emit, self._store.add_unavailable, self._clip_norm)
        for check in checks:
            with guarded(check.name, self._store.add_unavailable) as guard:
                check.attached(ground)
            if guard.has_failed:
                visitor.give_up(check)
        attempts = self._make_attempts(weakly(visitor, "step_skipped"))
        # One whose clock the session could not take is none that came later.
        self._is_seen_apart = self._kept.shared is not None or observer_of(self._holder) is not None
        visitor.look_only_at(self._optimizers)
        site = AccumulationSite(visitor, lambda: attempts.clock.num_forwards, weakly(self, "_report_error"))
        steps = StepSite(visitor)
        visitor.connect(attempts, site, reduced_by_ddp(self._holder, self._inventory))
        visitor.enabled = self._is_enabled
        if self._last is not None:
            visitor.go_on_from(self._last.visitor)
            site.go_on_from(self._last.site)
        self._last = self._watch = Watch(visitor, site, attempts)
        self._steps = steps
        self._finalizer = weakref.finalize(self, _detach_all, attempts, site, steps)
        self._finalizer.atexit = False
        try:
            attempts.attach()
            # After the clock's, which says whether a step is the outermost.
            steps.attach(attempts.optimizers if visitor.only_counts else None)
            early = reduced_in_place(self._holder, self._inventory)
            for entry, error in site.attach(self._inventory.parameters, early):
                self._store.add_unavailable(
                    "session", f"takes_no_hook: {type(error).__name__}: {error_text(error)}", (entry.name,)
                )
        except BaseException:
            self.detach()
            raise
        return self

    def _make_attempts(self, on_skipped: Callable[[Optimizer], None]) -> Attempts:
        """Returns the observer's attempts where the model has one, else those of the session's own clock."""
        shared = shared_attempts(
            self._holder,
            self._optimizers,
            on_skipped=on_skipped,
            on_closed=weakly(self, "_take_closed"),
            on_end=weakly(self, "_keep_report"),
        )
        if shared is not None:
            self._kept.shared = shared
            return shared
        former = None if self._last is None else self._last.attempts.clock
        return OwnAttempts(
            self._holder,
            self._optimizers,
            self._scaler,
            on_skipped=on_skipped,
            on_closed=weakly(self, "_take_closed"),
            on_error=weakly(self, "_report_error"),
            on_notice=weakly(self, "_notice"),
            first_attempt=0 if former is None else former.next_attempt,
        )

    def detach(self) -> None:
        """Leaves no hook and no copy of a parameter. Idempotent."""
        self._detach("detached")

    def _detach(self, reason: str) -> None:
        watch, steps = self._watch, self._steps
        if watch is None or steps is None:
            return
        watch.visitor.settle()
        if self._finalizer is not None:
            self._finalizer.detach()
        _detach_all(watch.attempts, watch.site, steps)
        watch.site.catch_up(is_final=True)
        self._ledger.settle(final=True)
        try:
            # What is open is judged as it is, before the checks let go of the model.
            self._kept.keep(self._make_report(reason, is_final=True))
        finally:
            for check in self._checks:
                with guarded(check.name, self._store.add_unavailable):
                    check.detached()
            watch.visitor.forget()
            self._watch = self._steps = None
            self._kept.shared = None

    def __enter__(self) -> Self:
        """Attaches, where it is not attached."""
        if self._watch is None:
            self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Detaches, and keeps the report as `final_report`, after an exception too."""
        reason = "scope_exit" if kind is None else "exception_exit"
        self._detach(reason)
        self._final_report = self._make_report(reason)

    @property
    def final_report(self) -> CheckReport | None:
        """The report of the last ``with`` block; None before one ended."""
        return self._final_report

    @property
    def estimated_snapshot_bytes(self) -> int:
        """Bytes of the copies that the registered checks keep: sizes alone, nothing is allocated or read."""
        inventory = self._inventory
        shared = frozenset[int]().union(*(check.snapshot_indices(inventory) for check in self._checks))
        copied = list(shared)
        for check in self._checks:
            copied += check.baseline_indices(inventory)
        entries = inventory.entries
        return sum(num_bytes(entries[index].tensor) for index in copied)

    @contextlib.contextmanager
    def step(self, global_step: int | None = None, micro_batches: int | None = None) -> Generator[None]:
        """Makes one attempt of everything inside the ``with`` block, in place of what optimizers tell.

        A block inside another one is ignored, and said once. A number that cannot be used is left out, and
        said once.

        Args:
            global_step: The caller's number of this step, from 0; it stands in every finding.
            micro_batches: How many forwards with gradients the caller means to run, from 1; it stands beside
                the number that was seen.
        """
        if self._watch is None:
            yield
            return
        attempts = self._watch.attempts
        step = self._number("global_step", global_step, 0)
        declared = self._number("micro_batches", micro_batches, 1)
        if not attempts.boundary_entered(step, declared):
            self._notice("step", "a block of ChecksSession.step inside another one is ignored")
            yield
            return
        failed = True
        try:
            yield
            failed = False
        finally:
            closed = attempts.boundary_left(failed=failed)
            self._ledger.settle()
            self._blocks.ended(closed, declared, failed=failed)

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Looks at nothing inside the ``with`` block; attempts are counted all the same."""
        before = self._is_enabled
        self.disable()
        try:
            yield
        finally:
            if before:
                self.enable()

    def disable(self) -> None:
        """Looks at nothing from here on; attempts are counted all the same."""
        self._is_enabled = False
        if self._watch is not None:
            self._watch.visitor.enabled = False

    def enable(self) -> None:
        """Looks again."""
        self._is_enabled = True
        if self._watch is not None:
            self._watch.visitor.enabled = True

    def report(self) -> CheckReport:
        """Returns what is known now; on the training thread it reads what waits on devices first."""
        return self._make_report("on_demand")

    def overhead(self) -> dict[str, Any]:
        """Returns what the session itself has added to training so far, as measured, and what a scan takes.

        Returns:
            ``seconds_by_site`` and ``visits_by_site`` on the host, ``num_host_reads``,
            ``num_accumulation_hooks`` that were called and ``accumulation_hook_s`` that one takes here now,
            ``scan_s`` for the norms of all parameters (the fastest of three), ``num_tensors``,
            ``num_elements``, ``estimated_snapshot_bytes``.
        """
        visitor = None if self._last is None else self._last.visitor
        entries = self._inventory.parameters
        return {
            "seconds_by_site": {} if visitor is None else dict(visitor.seconds),
            "visits_by_site": {} if visitor is None else dict(visitor.num_visits),
            "num_host_reads": 0 if visitor is None else visitor.reading.num_host_reads,
            "num_accumulation_hooks": 0 if self._last is None else self._last.site.num_fires,
            "accumulation_hook_s": hook_s(),
            "scan_s": min(scan_s([entry.tensor for entry in entries]) for _ in range(3)),
            "num_tensors": len(entries),
            "num_elements": sum(local_numel(entry.tensor) for entry in entries),
            "estimated_snapshot_bytes": self.estimated_snapshot_bytes,
        }

    def _make_report(self, reason: str, *, is_final: bool = False) -> CheckReport:
        watch = self._last
        if watch is None or watch.visitor.thread == threading.get_ident():
            # Another thread may not judge what the one that trains is about to.
            if watch is not None:
                watch.visitor.settle()
                watch.site.catch_up()
            self._ledger.settle()
        return self._reports.make(
            reason,
            self._inventory,
            watch,
            is_final=is_final,
            notices=list(self._noticed),
            disabled=self._is_disabled_by_environment,
            disclosures={"estimated_snapshot_bytes": self.estimated_snapshot_bytes},
        )

    def _declared(self) -> dict[str, object]:
        """Returns what the session was given, as plain values."""
        scaler: object = self._scaler
        if isinstance(scaler, Unset):
            scaler = "not given"
        elif scaler is not None and not isinstance(scaler, float):
            scaler = type(scaler).__name__
        return {
            "optimizers": None
            if self._optimizers is None
            else [type(optimizer).__name__ for optimizer in self._optimizers],
            "scaler_declared": scaler,
            "clip_norm_declared": self._clip_norm,
            "accumulation_steps_declared": self._accumulation_steps,
        }

    def _violated(self, finding: Finding) -> dict[str, object]:  # noqa: ARG002 - what is raised is in the report
        """Returns the report that travels with a violation; with an observer it is on storage first."""
        report = self._make_report("violation")
        self._kept.keep_durably(report)
        return report.to_dict()

    def _keep_report(self, reason: str = "running") -> None:
        """Leaves what is known for the observer's folder (training thread)."""
        if self._kept.shared is not None:
            self._kept.keep(self._make_report(reason))

    def _take_closed(self, closed: Sequence[ClosedAttempt]) -> None:
        self._ledger.put(closed)
        if listed and not self._is_seen_apart:
            self._say_of_later_observer()
        if self._kept.shared is not None and self._kept.is_due():
            self._keep_report()

    def _say_of_later_observer(self) -> None:
        """Says once that an observer came after the session, which leaves it no report (training thread)."""
        observer = observer_of(self._holder)
        if observer is not None and observer.observing:
            self._is_seen_apart = True
            self._notice(
                "checks",
                "an observer was attached to a model that has a session of checks already: the session "
                "counts apart and leaves no report in the observer's folder; attach the observer first, or "
                "attach the session again",
            )

    def _take_record(self, record: AttemptRecord) -> None:
        for check in self._checks:
            if type(check).attempt_closed is not Check.attempt_closed:
                with guarded(check.name, self._store.add_unavailable):
                    check.attempt_closed(record)

    def _number(self, name: str, value: object, lowest: int) -> int | None:
        if value is None:
            return None
        is_integer = isinstance(value, Integral) and not isinstance(value, bool)
        if is_integer and lowest <= int(value) <= _MAX_NUMBER:
            return int(value)
        self._notice(
            name,
            f"step({name}=...) was given a {type(value).__name__} that is no integer from {lowest}; left out",
        )
        return None

    def _notice(self, kind: str, sentence: str) -> None:
        """Says something once (training thread)."""
        if sentence in self._noticed:
            return
        self._noticed.add(sentence)
        with contextlib.suppress(RuntimeWarning):  # a filter made it an exception; the report has it
            warn_user(f"torchinstruments: {kind}: {sentence}")

    def _report_error(self, probe: str, error: BaseException) -> None:
        self._store.add_unavailable("session", f"{internal_error(error)}, in {probe}")


def _detach_all(attempts: Attempts, site: AccumulationSite, steps: StepSite) -> None:
    steps.detach()
    site.detach()
    attempts.detach()
