"""Makes the report of a session: what it found, what it could not look at, and what it was given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torchinstruments import environment
from torchinstruments.checks.accumulation import AccumulationSite
from torchinstruments.checks.attempts import Attempts
from torchinstruments.checks.blocks import Blocks
from torchinstruments.checks.check import Check
from torchinstruments.checks.clip_ledger import ClipLedger
from torchinstruments.checks.disclosures import of_model
from torchinstruments.checks.findings import FindingStore
from torchinstruments.checks.guard import guarded
from torchinstruments.checks.inventory import Inventory
from torchinstruments.checks.report import CheckReport, frozen
from torchinstruments.checks.scale_ledger import ScaleLedger
from torchinstruments.checks.shared_attempts import SharedAttempts
from torchinstruments.checks.unseen import (
    UNSEEN_STEP,
    changed_parameters,
    missed_backwards,
    never_before_write,
    why_never,
    without_attempt,
)
from torchinstruments.checks.visitor import SiteVisitor
from torchinstruments.checks.watchdog import Watchdog

__all__ = ["ReportMaker", "Watch"]


@dataclass(frozen=True, slots=True)
class Watch:
    """What a session watches with from one attach to the next; also after it was detached.

    Attributes:
        visitor: Visits the sites.
        site: Counts backwards.
        attempts: Counts attempts.
    """

    visitor: SiteVisitor
    site: AccumulationSite
    attempts: Attempts


class ReportMaker:
    """Makes reports of one session.

    Args:
        model: As it was given.
        checks: In the order of registration; more may come.
        store: Has what was found.
        ledger: Has what became of attempts.
        clip: Has what is known of clipping.
        watchdog: Counts what lies between accepted steps.
        blocks: Has what became of the program's own blocks.
        declared: What the session was given, as plain values.
        clip_norm: Of it, what the loop clips to.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        checks: Sequence[Check],
        store: FindingStore,
        ledger: ScaleLedger,
        clip: ClipLedger,
        watchdog: Watchdog,
        blocks: Blocks,
        declared: Mapping[str, object],
        clip_norm: float | None,
    ) -> None:
        self._model = model
        self._checks = checks
        self._store = store
        self._ledger = ledger
        self._clip = clip
        self._watchdog = watchdog
        self._blocks = blocks
        self._declared = declared
        self._clip_norm = clip_norm

    def make(
        self,
        reason: str,
        inventory: Inventory,
        watch: Watch | None,
        *,
        is_final: bool,
        notices: Sequence[str],
        disabled: bool,
        disclosures: Mapping[str, object],
    ) -> CheckReport:
        """Returns what is known now (any thread).

        Args:
            reason: Why it is made.
            inventory: What is watched.
            watch: What it is watched with; None where that never was.
            is_final: Whether nothing more will come.
            notices: What was said once.
            disabled: Whether the environment turned the session off.
            disclosures: Further facts.
        """
        store = FindingStore()
        for check in self._checks:
            with guarded(check.name, store.add_unavailable):
                check.finish(store.add_unavailable, is_final=is_final)
        ledgers = self._ledgers(store)
        self._say_what_never_ran(store, watch, disabled=disabled)
        for kind, names in changed_parameters(self._model, inventory, None if watch is None else watch.site):
            store.add_unavailable("session", kind, names)
        visitor, site = (None, None) if watch is None else (watch.visitor, watch.site)
        parameters = inventory.parameters
        return CheckReport(
            findings=self._store.findings(),
            checks_run=tuple(dict.fromkeys(check.name for check in self._checks if check.has_run)),
            unavailable=(*self._store.unavailable(), *store.unavailable()),
            disclosures=_frozen_map(
                {
                    **of_model(self._model, inventory),
                    **self._declared,
                    **disclosures,
                    "clock": "observer"
                    if watch is not None and isinstance(watch.attempts, SharedAttempts)
                    else "own",
                    "disabled_by_environment": disabled,
                    "boundary_micro_batches": self._blocks.micro_batches,
                    "notices": sorted(notices),
                }
            ),
            ledgers=_frozen_map(ledgers),
            coverage=_frozen_map(
                {
                    "watched_parameters": sum(entry.tensor.requires_grad for entry in parameters),
                    "inventory_parameters": len(parameters),
                    "parameters_that_fired": 0 if visitor is None else len(visitor.reached),
                }
            ),
            counters=_frozen_map(
                {
                    "backwards": 0 if site is None else site.num_backwards,
                    "accepted_steps": 0 if visitor is None else visitor.accepted_steps,
                    "host_reads": 0 if visitor is None else visitor.reading.num_host_reads,
                    **self._blocks.counters,
                    "findings": self._store.num_findings(),
                    "truncated_findings": self._store.truncated(),
                }
            ),
            finalized_reason=reason,
        )

    def _say_what_never_ran(self, store: FindingStore, watch: Watch | None, *, disabled: bool) -> None:
        visitor, site = (None, None) if watch is None else (watch.visitor, watch.site)
        why = f"never_ran: {environment.DISABLED} is set" if disabled else why_never(site, visitor)
        for check in self._checks:
            if not check.has_run:
                store.add_unavailable(check.name, why)
        for name in never_before_write(self._checks, visitor):
            store.add_unavailable(name, UNSEEN_STEP)
        if self._clip_norm is not None and not any(check.name == "grad_magnitude" for check in self._checks):
            store.add_unavailable(
                "grad_magnitude",
                "clipping_censors: magnitudes are known before clipping only; register the check",
            )
        for reason in missed_backwards(site):
            store.add_unavailable("backwards", reason)
        if watch is not None:
            num_forwards = watch.attempts.clock.num_forwards
            for name, reason in without_attempt(num_forwards, watch.visitor.accepted_steps):
                store.add_unavailable(name, reason)

    def _ledgers(self, store: FindingStore) -> dict[str, object]:
        facts: dict[str, list[object]] = {}
        for check in self._checks:
            with guarded(check.name, store.add_unavailable):
                if (found := check.facts()) is not None:
                    facts.setdefault(check.name, []).append(found)
        return {
            **facts,
            "scale": self._ledger.snapshot(),
            "clip": self._clip.snapshot(),
            "watchdog": self._watchdog.snapshot(),
        }


def _frozen_map(values: Mapping[str, object]) -> Mapping[str, object]:
    made = frozen(values)
    assert isinstance(made, Mapping)
    return made
