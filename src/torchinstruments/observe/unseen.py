"""What of a model is not measured, and is told.

At attach that is what cannot be, later what compiling hides, at the end what was not.
"""

from collections.abc import Iterable, Mapping

from torch import nn

from torchinstruments.observe.bypass import Bypass
from torchinstruments.observe.direct import replicated
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.layers import COMPILED, ObservedLayers

__all__ = [
    "CHECKPOINTED",
    "TRACING",
    "report_out_of_reach",
    "tell_compiled_late",
    "tell_displaced",
    "tell_unseen",
]

TRACING = "tracing"
"""What forwards that were only traced are counted under, among the errors."""

CHECKPOINTED = "checkpointed"
"""What forwards inside reentrant activation checkpointing are counted under, among the errors."""


def report_out_of_reach(
    model: nn.Module,
    layers: ObservedLayers,
    selector_errors: Iterable[tuple[str, BaseException]],
    faults: Faults,
) -> None:
    """Reports what cannot be observed of a model that was just attached (training thread, at attach).

    Args:
        model: The model.
        layers: Those that were selected.
        selector_errors: Name of a layer and exception, for each call of a selector that raised.
        faults: Takes it.
    """
    for layer, error in selector_errors:
        faults.report("selector", layer, error)
    layers.report_out_of_reach()
    if replicated(model):
        faults.notice(
            "forward",
            "",
            "torch.nn.DataParallel runs copies of the model on several devices, in threads of their own, "
            "whose layers are not measured; use DistributedDataParallel, with a rank a device",
        )


def tell_compiled_late(faults: Faults, found: nn.Module | None) -> None:
    """Tells that the model was compiled after it was attached (compiling thread).

    Args:
        faults: Takes it.
        found: Where its calls are seen from now on; None where they are not.
    """
    faults.notice(
        COMPILED,
        "",
        "the model was compiled after the observer was attached: "
        + (
            f"from the next forward on it is observed where its {type(found).__name__} is called; "
            f"attach after compiling to miss none"
            if found is not None
            else "it is called inside compiled code, where nothing can be measured; attach to what "
            "torch.compile returns"
        ),
    )


def tell_displaced(faults: Faults, outcome: str) -> None:
    """Tells once that the model was compiled in place of what saw its calls (training thread).

    Args:
        faults: Takes it.
        outcome: What has become of that.
    """
    faults.notice(
        COMPILED,
        "",
        f"the model was compiled in place (Module.compile) while it was observed, so that forwards were "
        f"not seen: {outcome}; attach after the last compile to miss none",
        kind="compiled again",
    )


def tell_unseen(traced: Mapping[str, int], num_checkpointed: int, bypass: Bypass, faults: Faults) -> None:
    """Tells of calls that are not in any count of forwards (training thread, at the end).

    Args:
        traced: Forwards by what traced them.
        num_checkpointed: Root forwards inside reentrant activation checkpointing.
        bypass: Counted calls of parts.
        faults: Takes it.
    """
    for kind, number in traced.items():
        forwards = "forward" if number == 1 else "forwards"
        sentence = f"{number} {forwards} under {kind} {'was' if number == 1 else 'were'} not observed"
        faults.notice(TRACING, "", sentence, is_worth_a_warning=False, times=number)
    if num_checkpointed:
        number = "1 forward" if num_checkpointed == 1 else f"{num_checkpointed} forwards"
        sentence = (
            f"{number} of the model ran as a whole inside reentrant activation checkpointing, where "
            f"gradients are off: they open no attempt at a step, and their gradients are not measured; give "
            f"use_reentrant=False"
        )
        faults.notice(CHECKPOINTED, "", sentence, times=num_checkpointed)
    sentence = bypass.sentence()
    if sentence:
        faults.notice("bypassed", "", sentence)
