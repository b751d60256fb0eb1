"""Whether a stage of a pipeline runs the current forward, and what for.

A stage of ``torch.distributed.pipelining`` calls its module once a micro-batch, and its schedule reduces
gradients by itself after the last backward: what DDP and sharding say of themselves meanwhile tells nothing.
Before its first step a stage also runs its module once to learn the shapes of what it puts out, with real
tensors that are no data. Nothing but the stack tells of either. In a program that never imported pipelining
both questions cost nothing.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["STAGE", "is_pipelined", "learns_shapes"]

STAGE = "torch.distributed.pipelining.stage"
"""The module of stages, which is there in programs with pipelines."""

_LEARNING = ("metadata_inference", "shape_inference")
"""Parts of the names of the functions that learn shapes, by the version of torch."""


def is_pipelined() -> bool:
    """Returns whether a stage of a pipeline runs the current forward (training thread, hot path)."""
    return STAGE in sys.modules and next(_functions_of_stage(), None) is not None


def learns_shapes() -> str:
    """Returns what runs the current forward for the shapes of its outputs alone (training thread, hot path).

    Returns:
        A name for it, ``""`` where the forward is one of the program's.
    """
    if STAGE not in sys.modules:
        return ""
    for name in _functions_of_stage():
        if any(part in name for part in _LEARNING):
            return "torch.distributed.pipelining's inference of shapes"
    return ""


def _functions_of_stage() -> Iterator[str]:
    """Yields the names of a stage's functions on the stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - nothing else tells
    while frame is not None:
        if frame.f_globals.get("__name__") == STAGE:
            yield frame.f_code.co_name
        frame = frame.f_back
