"""What a session could not look at, told when it reports: never in a step."""

import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from torchinstruments.checks.accumulation import AccumulationSite
from torchinstruments.checks.check import Check
from torchinstruments.checks.inventory import PARAMETER, Inventory
from torchinstruments.checks.visitor import SiteVisitor

__all__ = [
    "UNSEEN_STEP",
    "changed_parameters",
    "missed_backwards",
    "never_before_write",
    "why_never",
    "without_attempt",
]

_IN_COMPILED = "what torch.compile runs inside a compiled function is not seen"
UNSEEN_STEP = f"before_the_write_never_ran: no step of the session's optimizers was seen; {_IN_COMPILED}"
"""Why a check that has looked at backwards protects no weight."""


def changed_parameters(
    model: nn.Module | Mapping[str, torch.Tensor], inventory: Inventory, site: AccumulationSite | None
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields why parameters that were changed since the session was attached are not looked at, and names.

    Args:
        model: As it is now.
        inventory: What was there at attach.
        site: Knows which parameters have a hook; None where it was never attached.
    """
    if site is None:
        return
    by_name = {name: entry.tensor for entry in inventory.entries for name in (entry.name, *entry.aliases)}
    replaced: list[str] = []
    added: list[str] = []
    for entry in Inventory(model).entries:
        if entry.kind != PARAMETER or inventory.index_of(entry.tensor) is not None:
            continue
        before = by_name.get(entry.name)
        if before is None:
            added.append(entry.name)
        elif not _is_dtensor(before) or _is_dtensor(entry.tensor):
            # A sharded module that is left by an exception still holds whole tensors in place of its own.
            replaced.append(entry.name)
    thawed = [
        entry.name
        for entry in inventory.parameters
        if entry.tensor.requires_grad and entry.index in site.frozen_at_attach
    ]
    for reason, names in (
        ("replaced_after_attach: attach the session again to have the new ones looked at", replaced),
        ("added_after_attach: attach the session again to have them looked at", added),
        ("unfrozen_after_attach: looked at when an optimizer steps, and in no backward", thawed),
    ):
        if names:
            yield reason, tuple(names)


def why_never(site: AccumulationSite | None, visitor: SiteVisitor | None) -> str:
    """Returns why a check has never looked at anything, though its session was attached.

    Args:
        site: Counts backwards; None where it was never attached.
        visitor: Counts steps; None likewise.
    """
    if site is None or visitor is None:
        return "never_ran: the session was not attached"
    if visitor.accepted_steps == 0 and not visitor.num_visits["before_write"]:
        if site.num_backwards == 0:
            return f"never_ran: no backward was seen and no step of the session's optimizers; {_IN_COMPILED}"
        return f"never_ran: no step of the session's optimizers was seen; {_IN_COMPILED}"
    return "never_ran: nothing came that it looks at"


def never_before_write(checks: Sequence[Check], visitor: SiteVisitor | None) -> Sequence[str]:
    """Returns the names of checks that looked at backwards and never at what was about to be written.

    Args:
        checks: Of the session.
        visitor: Counts visits; None where the session was never attached.
    """
    if visitor is None or visitor.num_visits["before_write"] or not visitor.num_visits["backward_ended"]:
        return ()
    looks = [one for one in checks if one.has_run and type(one).before_write is not Check.before_write]
    return tuple(dict.fromkeys(one.name for one in looks))


def missed_backwards(site: AccumulationSite | None) -> Sequence[str]:
    """Returns what is to be said where the hook that was to tell of every backward may have missed some.

    Args:
        site: Counts backwards; None where the session was never attached.
    """
    number = 0 if site is None else site.lookout.num_missed
    if not number:
        return ()
    reason = (
        f"up_to_{number}_not_counted: autograd ran {number} times without reaching the parameter that every "
        f"backward had reached first until then; backwards of this model among them are in no count"
    )
    return [reason]


def without_attempt(num_forwards: int, num_accepted: int) -> Sequence[tuple[str, str]]:
    """Returns what is to be said where steps came and neither a forward nor a backward was seen.

    Args:
        num_forwards: What opens an attempt, as counted.
        num_accepted: Steps.
    """
    if num_forwards or not num_accepted:
        return ()
    return [("scale_ledger", f"no_attempts: steps were seen and no forward or backward; {_IN_COMPILED}")]


def _is_dtensor(tensor: torch.Tensor) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)
