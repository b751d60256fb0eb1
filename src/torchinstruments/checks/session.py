"""One session of training checks: what a user holds.

A session is silent and free until it is attached. Attached, it watches three sites: where gradients are added
to, the moment before an optimizer writes, the moment after. Nothing of its own raises into training; a check
that was asked to raise does, with the finding in the report first.
"""

import contextlib
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from typing_extensions import override

from torchinstruments import environment
from torchinstruments.checks.accumulation import AccumulationSite
from torchinstruments.checks.attempts import Attempts, OwnAttempts
from torchinstruments.checks.check import Check, Ground
from torchinstruments.checks.clip_ledger import ClipLedger
from torchinstruments.checks.disclosures import of_model
from torchinstruments.checks.findings import Finding, FindingStore
from torchinstruments.checks.inventory import Inventory
from torchinstruments.checks.measures import local_numel
from torchinstruments.checks.overhead import hook_s, num_bytes, scan_s
from torchinstruments.checks.registrars import Registrars
from torchinstruments.checks.registration import (
    cadence_of,
    positive_of,
)
from torchinstruments.checks.relays import SkipRelay, weakly
from torchinstruments.checks.replicated import reduced_by_ddp, reduced_in_place
from torchinstruments.checks.report import CheckReport, frozen
from torchinstruments.checks.scale_ledger import ScaleLedger
from torchinstruments.checks.shared_attempts import SharedAttempts, shared_attempts
from torchinstruments.checks.stepping import StepSite
from torchinstruments.checks.targets import (
    checked_model,
    checked_scaler,
    holder_of,
    optimizers_of,
    refuse_strangers,
)
from torchinstruments.checks.unseen import (
    UNSEEN_STEP,
    changed_parameters,
    never_before_write,
    why_never,
    without_attempt,
)
from torchinstruments.checks.visitor import SiteVisitor
from torchinstruments.checks.watchdog import Watchdog
from torchinstruments.config import UNSET, Unset
from torchinstruments.errors import CheckLifecycleError
from torchinstruments.observe.observer import observer_of
from torchinstruments.ranks.loss_scale import DeclaredScale
from torchinstruments.ranks.optimizers import StepListener
from torchinstruments.records import AttemptRecord, ClosedAttempt, Outcome, error_text
from torchinstruments.warning_place import warn_user

__all__ = ["ChecksSession"]

_MAX_NUMBER = 2**63 - 1
_KEPT_AT_MOST_EVERY_S = 60.0
_DURABLE_WITHIN_S = 10.0


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
        self._scaler = checked_scaler(scaler)
        self._clip_norm = None if clip_norm is None else positive_of("clip_norm", clip_norm)
        self._accumulation_steps = (
            None if accumulation_steps is None else cadence_of(accumulation_steps, "accumulation_steps")
        )
        self._holder = model if isinstance(model, nn.Module) else holder_of(model)
        self._store = FindingStore()
        self._ledger = ScaleLedger(self._take_record)
        self._clip = ClipLedger(self._clip_norm)
        self._watchdog = Watchdog(self._accumulation_steps)
        self._attempts: Attempts | None = None
        self._shared: SharedAttempts | None = None
        self._kept_s = 0.0
        self._num_kept = -1
        self._site: AccumulationSite | None = None
        self._steps: StepSite | None = None
        self._visitor: SiteVisitor | None = None
        self._is_seen_apart = False
        self._finalizer: weakref.finalize[..., ChecksSession] | None = None
        self._last_visitor: SiteVisitor | None = None
        self._final_report: CheckReport | None = None
        self._is_enabled = True
        self._is_disabled_by_environment = False
        self._in_block = False
        self._noticed: set[str] = set()
        self._explicit: dict[str, int] = {"attempts": 0, "accepted": 0, "skipped": 0, "unknown": 0}
        self._boundary: dict[str, object] = {"declared": 0, "mismatches": 0, "first_mismatch": None}

    @property
    @override
    def is_attached(self) -> bool:
        """Whether it watches."""
        return self._visitor is not None

    def attach(self) -> Self:
        """Begins to watch: a hook for each parameter, two for all optimizers, two on the model.

        Raises:
            CheckLifecycleError: The session is attached.
            ConfigurationError: A check names what the model does not have, or an optimizer that was given has
                no parameter of the model.
        """
        if self._visitor is not None:
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
            self._accumulation_steps,
        )
        ground = Ground(self._inventory, visitor.emit, self._store.add_unavailable, self._clip_norm)
        for check in checks:
            check.attached(ground)
        attempts = self._make_attempts(SkipRelay(visitor))
        # One whose clock the session could not take is none that came later.
        self._is_seen_apart = self._shared is not None or observer_of(self._holder) is not None
        visitor.look_only_at(self._optimizers)
        site = AccumulationSite(visitor, lambda: attempts.clock.num_forwards, weakly(self, "_report_error"))
        steps = StepSite(visitor)
        visitor.connect(attempts, site, reduced_by_ddp(self._holder, self._inventory))
        visitor.enabled = self._is_enabled
        self._attempts, self._site, self._steps, self._visitor = attempts, site, steps, visitor
        self._finalizer = weakref.finalize(self, _detach_all, attempts, site, steps)
        self._finalizer.atexit = False
        try:
            attempts.attach()
            # After those of the clock, which says whether a step is the outermost.
            steps.attach()
            early = reduced_in_place(self._holder, self._inventory)
            for entry, error in site.attach(self._inventory.parameters, early):
                self._store.add_unavailable(
                    "session", f"takes_no_hook: {type(error).__name__}: {error_text(error)}", (entry.name,)
                )
        except BaseException:
            self.detach()
            raise
        return self

    def _make_attempts(self, relay: StepListener) -> Attempts:
        """Returns the observer's attempts where the model has one, else those of the session's own clock."""
        shared = shared_attempts(
            self._holder,
            self._optimizers,
            listener=relay,
            on_closed=weakly(self, "_take_closed"),
            on_end=weakly(self, "_keep_report"),
        )
        if shared is not None:
            self._shared = shared
            return shared
        return OwnAttempts(
            self._holder,
            self._optimizers,
            self._scaler,
            listener=relay,
            on_closed=weakly(self, "_take_closed"),
            on_error=weakly(self, "_report_error"),
            on_notice=weakly(self, "_notice"),
        )

    def detach(self) -> None:
        """Leaves no hook and no copy of a parameter. Idempotent."""
        self._detach("detached")

    def _detach(self, reason: str) -> None:
        visitor = self._visitor
        if visitor is None:
            return
        visitor.settle()
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._attempts is not None and self._site is not None and self._steps is not None:
            _detach_all(self._attempts, self._site, self._steps)
        self._ledger.settle(final=True)
        for check in self._checks:
            check.detached()
        visitor.forget()
        self._last_visitor, self._visitor = visitor, None
        if self._shared is not None:
            self._keep_report(reason)
            self._shared = None

    def __enter__(self) -> Self:
        """Attaches, where it is not attached."""
        if self._visitor is None:
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
        attempts = self._attempts if self._visitor is not None else None
        if attempts is None:
            yield
            return
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
            self._take_block(attempts.boundary_left(failed=failed), declared, failed=failed)

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
        if self._visitor is not None:
            self._visitor.enabled = False

    def enable(self) -> None:
        """Looks again."""
        self._is_enabled = True
        if self._visitor is not None:
            self._visitor.enabled = True

    def report(self) -> CheckReport:
        """Returns what is known now; it reads what waits on devices."""
        return self._make_report("on_demand")

    def overhead(self) -> dict[str, Any]:
        """Returns what the session itself has added to training so far, as measured, and what a scan takes.

        Returns:
            ``seconds_by_site`` and ``visits_by_site`` on the host, ``num_host_reads``,
            ``num_accumulation_hooks`` that were called and ``accumulation_hook_s`` that one takes here now,
            ``scan_s`` for the norms of all parameters (the fastest of three), ``num_tensors``,
            ``num_elements``, ``estimated_snapshot_bytes``.
        """
        visitor = self._visitor or self._last_visitor
        entries = self._inventory.parameters
        return {
            "seconds_by_site": {} if visitor is None else dict(visitor.seconds),
            "visits_by_site": {} if visitor is None else dict(visitor.num_visits),
            "num_host_reads": 0 if visitor is None else visitor.reading.num_host_reads,
            "num_accumulation_hooks": 0 if self._site is None else self._site.num_fires,
            "accumulation_hook_s": hook_s(),
            "scan_s": min(scan_s([entry.tensor for entry in entries]) for _ in range(3)),
            "num_tensors": len(entries),
            "num_elements": sum(local_numel(entry.tensor) for entry in entries),
            "estimated_snapshot_bytes": self.estimated_snapshot_bytes,
        }

    def _make_report(self, reason: str) -> CheckReport:
        if self._visitor is not None:
            self._visitor.settle()
        self._ledger.settle()
        for check in self._checks:
            check.finish()
        unavailable = list(self._store.unavailable())
        visitor = self._visitor or self._last_visitor
        num_fired = 0 if visitor is None else len(visitor.fire_counts)
        store = FindingStore()
        for check in self._checks:
            if not check.has_run:
                store.add_unavailable(check.name, self._why_never())
        for name in never_before_write(self._checks, visitor):
            store.add_unavailable(name, UNSEEN_STEP)
        if self._clip_norm is not None and not any(check.name == "grad_magnitude" for check in self._checks):
            store.add_unavailable(
                "grad_magnitude",
                "clipping_censors: magnitudes are known before clipping only; register the check",
            )
        for reason, names in changed_parameters(self._model, self._inventory, self._site):
            store.add_unavailable("session", reason, names)
        if self._attempts is not None and visitor is not None:
            for check_name, reason in without_attempt(
                self._attempts.clock.num_forwards, visitor.accepted_steps
            ):
                store.add_unavailable(check_name, reason)
        unavailable += store.unavailable()
        parameters = self._inventory.parameters
        site = self._site
        return CheckReport(
            findings=self._store.findings(),
            checks_run=tuple(dict.fromkeys(check.name for check in self._checks if check.has_run)),
            unavailable=tuple(unavailable),
            disclosures=_frozen_map(self._disclosures()),
            ledgers=_frozen_map(self._ledgers()),
            coverage=_frozen_map(
                {
                    "watched_parameters": sum(entry.tensor.requires_grad for entry in parameters),
                    "inventory_parameters": len(parameters),
                    "parameters_that_fired": num_fired,
                }
            ),
            counters=_frozen_map(
                {
                    "backwards": 0 if site is None else site.num_backwards,
                    "accepted_steps": 0 if visitor is None else visitor.accepted_steps,
                    "host_reads": 0 if visitor is None else visitor.reading.num_host_reads,
                    **{f"explicit_{name}": number for name, number in self._explicit.items()},
                    "findings": self._store.num_findings(),
                    "truncated_findings": self._store.truncated(),
                }
            ),
            finalized_reason=reason,
        )

    def _why_never(self) -> str:
        if self._is_disabled_by_environment:
            return f"never_ran: {environment.DISABLED} is set"
        return why_never(self._site, self._visitor or self._last_visitor)

    def _ledgers(self) -> dict[str, object]:
        facts: dict[str, list[object]] = {}
        for check in self._checks:
            if (found := check.facts()) is not None:
                facts.setdefault(check.name, []).append(found)
        return {
            **facts,
            "scale": self._ledger.snapshot(),
            "clip": self._clip.snapshot(),
            "watchdog": self._watchdog.snapshot(),
        }

    def _disclosures(self) -> dict[str, object]:
        return {
            **of_model(self._model, self._inventory),
            "optimizers": None
            if self._optimizers is None
            else [type(optimizer).__name__ for optimizer in self._optimizers],
            "scaler_declared": "not given"
            if isinstance(self._scaler, Unset)
            else _shown_scaler(self._scaler),
            "clock": "observer" if isinstance(self._attempts, SharedAttempts) else "own",
            "clip_norm_declared": self._clip_norm,
            "accumulation_steps_declared": self._accumulation_steps,
            "disabled_by_environment": self._is_disabled_by_environment,
            "estimated_snapshot_bytes": self.estimated_snapshot_bytes,
            "boundary_micro_batches": self._boundary,
            "notices": sorted(self._noticed),
        }

    def _violated(self, finding: Finding) -> dict[str, object]:  # noqa: ARG002 - what is raised is in the report
        """Returns the report that travels with a violation; with an observer it is on storage first."""
        report = self._make_report("violation")
        if self._shared is not None:
            is_durable = self._shared.keep_durably(report.to_json(indent=None).encode(), _DURABLE_WITHIN_S)
            if not is_durable:
                self._store.add_unavailable("session", "report_not_durable: the store did not answer in time")
        return report.to_dict()

    def _keep_report(self, reason: str = "running") -> None:
        """Leaves what is known for the observer's folder (training thread)."""
        if self._shared is not None:
            self._kept_s = time.monotonic()
            self._num_kept = sum(self._store.num_findings().values())
            self._shared.keep(self._make_report(reason).to_json(indent=None).encode())

    def _take_closed(self, closed: Sequence[ClosedAttempt]) -> None:
        self._ledger.put(closed)
        self._say_of_later_observer()
        if self._shared is None or time.monotonic() - self._kept_s < _KEPT_AT_MOST_EVERY_S:
            return
        if sum(self._store.num_findings().values()) != self._num_kept:
            self._keep_report()

    def _say_of_later_observer(self) -> None:
        """Says once that an observer came after the session, which leaves it no report (training thread)."""
        if self._is_seen_apart:
            return
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
                check.attempt_closed(record)

    def _take_block(self, closed: Sequence[ClosedAttempt], declared: int | None, *, failed: bool) -> None:
        self._explicit["attempts"] += 1
        self._ledger.settle()
        outcomes = {one.resolve().outcome for one in closed}
        if outcomes == {Outcome.APPLIED}:
            self._explicit["accepted"] += 1
        elif Outcome.SKIPPED in outcomes:
            self._explicit["skipped"] += 1
        else:
            self._explicit["unknown"] += 1
        if declared is None or not closed:
            return
        seen = closed[0].record.micro_batches
        self._boundary["declared"] = declared
        if seen != declared and not failed:
            self._boundary["mismatches"] = int(str(self._boundary["mismatches"])) + 1
            if self._boundary["first_mismatch"] is None:
                attempt = closed[0].record.attempt
                self._boundary["first_mismatch"] = {"attempt": attempt, "declared": declared, "seen": seen}

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
        self._store.add_unavailable(
            "session", f"internal_error: {probe}: {type(error).__name__}: {error_text(error)}"
        )


def _detach_all(attempts: Attempts, site: AccumulationSite, steps: StepSite) -> None:
    steps.detach()
    site.detach()
    attempts.detach()


def _shown_scaler(scaler: DeclaredScale) -> object:
    return scaler if scaler is None or isinstance(scaler, float) else type(scaler).__name__


def _frozen_map(values: Mapping[str, object]) -> Mapping[str, object]:
    made = frozen(values)
    assert isinstance(made, Mapping)
    return made
