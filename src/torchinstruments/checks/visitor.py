"""Visits the sites of a training loop with all checks of a session together.

One visit: every check queues its device work, all numbers are fetched at once, then every check judges.
What raises in a check becomes an unavailable entry; after several failures in a row the check is left alone.
Findings that are to raise do so at the end of a visit before or after a write, and nowhere else.
"""

import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from torchinstruments.checks.accumulation import CROWDED, AccumulationSite
from torchinstruments.checks.alarms import StepAlarms
from torchinstruments.checks.attempts import Attempts
from torchinstruments.checks.check import BackwardLook, Check, Judge, StepLook
from torchinstruments.checks.findings import Action, CheckWarning, Finding, FindingStore, Moment
from torchinstruments.checks.guard import guarded, internal_error
from torchinstruments.checks.inventory import Inventory
from torchinstruments.checks.looks import LookMaker
from torchinstruments.checks.measures import norms, sort_out
from torchinstruments.checks.reading import Reading
from torchinstruments.checks.unstepped import Unstepped
from torchinstruments.checks.watchdog import Watchdog
from torchinstruments.errors import CheckViolationError
from torchinstruments.observe.engine import is_capturing_graph
from torchinstruments.records import Reason
from torchinstruments.statistics.isolation import functions_off, isolated
from torchinstruments.warning_place import warn_user

if TYPE_CHECKING:
    from torchinstruments.ranks.optimizers import KnownOptimizer

__all__ = ["SiteVisitor"]

_MAX_WAITING = 32
_MAX_FAILURES = 8


class SiteVisitor:
    """Runs the checks of an attached session.

    Args:
        inventory: What is watched.
        checks: In the order of registration.
        store: Takes findings.
        watchdog: Is told of backwards and of what becomes of steps.
        violated: Told of what will be raised, before it is; returns the report for the exception.
        on_error: Takes probe and exception of this package's own code.
        unstepped: Watches for gradients that no step takes.
    """

    def __init__(
        self,
        inventory: Inventory,
        checks: Sequence[Check],
        store: FindingStore,
        watchdog: Watchdog,
        violated: Callable[[Finding], dict[str, object]],
        on_error: Callable[[str, BaseException], None],
        unstepped: Unstepped,
    ) -> None:
        self.enabled = True
        """Whether sites are visited."""
        self.thread = get_ident()
        """The one that trains, as far as that is known."""
        self.accepted_steps = 0
        """Steps that were applied, as far as the host knew at once."""
        self.reached: set[int] = set()
        """Positions of the parameters to which a gradient has come."""
        self._latest: tuple[Sequence[int], Sequence[int]] = ((), ())
        self.seconds: dict[str, float] = defaultdict(float)
        self.num_visits: Counter[str] = Counter()
        self.reading = Reading()
        self._inventory = inventory
        self._store = store
        self._violated = violated
        self._on_error = on_error
        self._after_backward = _overriding(checks, "backward_ended")
        self._before = _overriding(checks, "before_write")
        self._after = _overriding(checks, "after_write")
        self._failures: Counter[Check] = Counter()
        of_steps = [check.name for check in (*self._before, *self._after) if not check.is_passive]
        self._alarms = StepAlarms(
            watchdog, unstepped, tuple(dict.fromkeys(of_steps)), self._moment, self.emit
        )
        self._accepted = watchdog.accepted
        self._looks: LookMaker | None = None
        self._waiting: list[tuple[Check, Judge]] = []
        self._to_raise: list[Finding] = []
        self._look: StepLook | None = None
        self._is_unlooked = False
        self._early: dict[int, torch.Tensor] = {}
        self._only: tuple[weakref.ref[Optimizer], ...] | None = None
        self._own: KnownOptimizer | None = None
        self._awaited: frozenset[int] | None = None
        self._without_evidence: set[int] = set()

    def connect(
        self, attempts: Attempts, site: AccumulationSite, reduced_by_ddp: frozenset[int] = frozenset()
    ) -> None:
        """Takes where attempts and backwards are counted (training thread, at attach).

        Args:
            attempts: Counts attempts.
            site: Counts backwards.
            reduced_by_ddp: Positions of parameters whose gradients `DistributedDataParallel` reduces.
        """
        self._looks = LookMaker(self._inventory, self.reading, attempts, site, reduced_by_ddp)

    def look_only_at(self, optimizers: Sequence[Optimizer] | None) -> None:
        """Takes which optimizers' steps are looked at; None looks at all that are counted (at attach)."""
        if optimizers is None:
            return
        self._only = tuple([weakref.ref(optimizer) for optimizer in optimizers])
        steps = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        found = [self._inventory.index_of(tensor) for tensors in steps for tensor in tensors]
        # Where sharding exchanges parameters none of them is there, and any backward may be theirs.
        self._awaited = frozenset([index for index in found if index is not None]) or None

    def give_up(self, check: Check) -> None:
        """Asks a check nothing more (training thread, at attach)."""
        self._failures[check] = _MAX_FAILURES

    def go_on_from(self, former: "SiteVisitor") -> None:
        """Takes what was counted by the one of an earlier attach (training thread, at attach)."""
        self.accepted_steps = former.accepted_steps
        self.reached.update(former.reached)
        self.seconds.update(former.seconds)
        self.num_visits.update(former.num_visits)
        self.reading.num_host_reads = former.reading.num_host_reads
        if self._looks is not None:
            self._looks.accepted_steps = self.accepted_steps

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

    def backward_began(self, *, is_counted: bool) -> None:
        """Takes the first gradient of a backward (autograd thread, hot path).

        Args:
            is_counted: Whether nothing looks at its end, which is not told.
        """
        looks = self._looks
        if looks is None:
            return
        if looks.attempts.counts_backwards:
            looks.attempts.backward_began()
        if is_counted and self.enabled:
            self._alarms.backward_counted()

    def backward_ended(self, fired: Sequence[int]) -> None:
        """Looks at what a backward has added to; it never raises (autograd thread, hot path)."""
        looks = self._looks
        if looks is None:
            return
        # Most backwards reach the same parameters in the same order.
        latest, own = self._latest
        if fired is not latest:
            self.reached.update(fired)
            awaited = self._awaited
            own = fired if awaited is None else [index for index in fired if index in awaited]
            # Replaced as a whole, since backwards of two threads may end at once.
            self._latest = fired, own
        if self.enabled and own:
            self._alarms.backward_ended(own)
        if not self._after_backward:
            if not self._alarms.awaits_step:
                looks.site.count_from_here(self.reached, self._awaited)
            return
        if not self.enabled:
            return
        with self._visit("backward_ended") as runs:
            if runs:
                early = self._early
                self._early = {}
                look = looks.of_backward(tuple(dict.fromkeys(fired)), early)
                self._waiting += self._ask(self._after_backward, "backward_ended", look)
                # What waits is numbers: the memory of gradients is the program's to free.
                look.release()
                if len(self._waiting) >= _MAX_WAITING * len(self._after_backward):
                    self._settle()

    def accumulated(self, index: int) -> None:
        """Takes the norm of a gradient that ranks will reduce in place (autograd thread, hot path)."""
        if not self.enabled or not self._after_backward or self._looks is None or is_capturing_graph():
            return
        gradient = self._inventory.entries[index].tensor.grad
        if gradient is None:
            return
        with functions_off(), isolated(self._place()):
            ready, _ = sort_out({index: gradient})
            if ready:
                self._early[index] = norms((ready[index],))[0][1]

    @property
    def only_counts(self) -> bool:
        """Whether nothing looks at a backward or at a step, so that to hear of steps' ends is enough."""
        return not (self._after_backward or self._before or self._after)

    def step_counted(self, known: "KnownOptimizer") -> None:
        """Takes that a step ended, where none is looked at; it never raises (training thread, hot path)."""
        looks = self._looks
        # One that still runs is around this one, which is a part of it.
        if looks is None or looks.attempts.clock.running_key is not None:
            return
        if known is not self._own:
            if self._only is not None and not self._is_named(known.reference()):
                return
            self._own = known
        self.thread = get_ident()
        if len(looks.site.running) >= CROWDED:
            looks.site.forget_unfinished()
        if looks.site.counts_only and not looks.site.lookout.is_over:
            looks.site.stepped()
        if known.decides_on_device and not self._decided_to_write(known.reference()):
            return
        self._accepted()
        looks.accepted_steps = self.accepted_steps = self.accepted_steps + 1

    def _decided_to_write(self, optimizer: Optimizer | None) -> bool:
        """Returns whether a step that ended is known to have written where its optimizer decided that."""
        looks = self._looks
        look: StepLook | None = None
        if optimizer is not None and looks is not None and self.enabled:
            with self._visit("after_write") as runs:
                if runs:
                    made = looks.of_step(optimizer, 0)
                    self._settle()
                    look = made
        if look is not None and look.is_skipped():
            self._alarms.skipped()
            return False
        return look is not None

    def is_own(self, optimizer: Optimizer) -> bool:
        """Returns whether a step is the outermost one of the session's optimizers (hot path)."""
        if self._looks is None:
            return False
        attempts = self._looks.attempts
        running, known = attempts.clock.running_key, attempts.optimizers.latest
        is_latest = (
            known is not None
            and known.key == running
            and known.reference() is optimizer
            # The one before may have raised, and this one steps other parameters by now.
            and known.belongs
        )
        if is_latest and known is self._own:
            # The step that the clock has just been told of, of the optimizer that was asked for last.
            return True
        if self._only is not None and not self._is_named(optimizer):
            return False
        if not is_latest:
            known = attempts.optimizers.known(optimizer)
        if known is None or running not in {known.key, None}:
            return False
        self._own = known
        return True

    def before_write(self, optimizer: Optimizer, evaluation: int) -> None:
        """Looks at gradients before an optimizer writes (training thread, hot path).

        Raises:
            CheckViolationError: A check that was asked to raise found something.
        """
        looks = self._looks
        if looks is None:
            return
        # What is mostly not needed is not called: each call takes a step one or two microseconds.
        running = looks.site.running
        if running and (len(running) >= CROWDED or not looks.site.counts_only):
            looks.site.forget_unfinished()
        if looks.site.counts_only and not looks.site.lookout.is_over:
            looks.site.stepped()
        self.thread = get_ident()
        if self._alarms.awaits_step:
            self._alarms.step_seen()
        self._look = None
        if evaluation == 0 and looks.has_copied:
            looks.step_began()
        decides_on_device = getattr(optimizer, "found_inf", None) is not None
        has_sites = bool(self._before or self._after) and self.enabled
        self._is_unlooked = not (has_sites or decides_on_device)
        if self._is_unlooked or not self.enabled:
            return
        with self._visit("before_write") as runs:
            if runs:
                look = looks.of_step(optimizer, evaluation)
                self._say_without_evidence(look)
                judges = self._ask(self._before, "before_write", look)
                looks.copy_wanted(look)
                self._settle(judges)
                # What is raised for is not written, and nothing of it is to be kept.
                self._look = None if self._to_raise else look
        # A step that could not be looked at is one all the same.
        is_failed = self._look is None and not self._to_raise
        self._is_unlooked = is_failed and not (decides_on_device or is_capturing_graph())
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
            self._alarms.skipped()
            return
        self._accepted()
        if look is not None and self._after:
            with self._visit("after_write") as runs:
                if runs:
                    self._settle(self._ask(self._after, "after_write", look))
        # What was looked at before counts as one accepted step from here on.
        self.accepted_steps += 1
        if self._looks is not None:
            self._looks.accepted_steps = self.accepted_steps
        if self._to_raise:
            self._raise()

    def step_skipped(self, _optimizer: Optimizer) -> None:
        """Takes that the loss scaler skipped a step; it never raises (training thread, hot path)."""
        self._alarms.step_seen()
        if self.enabled:
            self._alarms.skipped()
            self.settle()

    def settle(self) -> None:
        """Has what waits judged, as where the scaler skipped; it never raises (training thread, hot path)."""
        if self._waiting:
            with self._visit("settle") as runs:
                if runs:
                    self._settle()

    def forget(self) -> None:
        """Ends every visit, also of what goes on, and drops copies and what waits (at detach)."""
        self._waiting.clear()
        self._look, self._is_unlooked = None, False
        self._early.clear()
        # It has a weak reference to a parameter, which torch then exchanges for no other.
        self._own = None
        if self._looks is not None:
            self._looks.forget()
        self._looks = None

    def _is_named(self, optimizer: Optimizer | None) -> bool:
        """Returns whether a step is one of the optimizers that were named (hot path)."""
        return any(reference() is optimizer for reference in self._only or ())

    def _moment(self) -> Moment:
        return Moment() if self._looks is None else self._looks.moment(None)

    @contextmanager
    def _visit(self, site: str) -> Generator[bool]:
        """Isolates a visit, times it, and lets nothing out; yields whether it can be made."""
        started_s = time.perf_counter()
        has_begun = False
        try:
            if is_capturing_graph():
                self._store.add_unavailable("session", Reason.GRAPH_CAPTURE.value)
                yield False
                return
            with functions_off(), isolated(self._place()):
                has_begun = True
                yield True
        except Exception as error:  # noqa: BLE001 - nothing of this package's own may reach training
            self._waiting.clear()
            self._on_error(site, error)
            if not has_begun:
                yield False
        finally:
            self.num_visits[site] += 1
            self.seconds[site] += time.perf_counter() - started_s

    def _ask(
        self, checks: Sequence[Check], site: str, look: BackwardLook | StepLook
    ) -> list[tuple[Check, Judge]]:
        """Has checks queue their work; one that raises does not stop the others."""
        judges: list[tuple[Check, Judge]] = []
        for check in checks:
            if self._failures[check] >= _MAX_FAILURES:
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
                self._failures[check] = 0
                check.has_run = True

    def _failed(self, check: Check, error: Exception) -> None:
        self._failures[check] += 1
        self._store.add_unavailable(check.name, internal_error(error))
        if self._failures[check] == _MAX_FAILURES:
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
        report: dict[str, object] = {}
        with guarded("session", self._store.add_unavailable):
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

    def _say_without_evidence(self, look: StepLook) -> None:
        """Says once of which gradients no backward told, so that nothing is known of them before clipping."""
        if not self._after_backward:
            return
        if len(self.reached) >= len(self._inventory.entries):
            return
        missing = [
            index
            for index in look.gradients
            if index not in self.reached and index not in self._without_evidence
        ]
        if missing:
            self._without_evidence.update(missing)
            self._store.add_unavailable(
                "accumulation",
                "no_hook_fired: the gradient came by another way than a backward that adds to it",
                self._inventory.names(missing),
            )

    def _place(self) -> torch.Tensor | str:
        """Returns a tensor, or the type of a device, where the checks compute."""
        entries = self._inventory.entries
        return entries[0].tensor if entries else "cpu"


def _overriding(checks: Sequence[Check], site: str) -> tuple[Check, ...]:
    """Returns the checks that have something of their own for a site; none where all of them are passive."""
    found = [check for check in checks if getattr(type(check), site) is not getattr(Check, site)]
    return () if all(check.is_passive for check in found) else tuple(found)
