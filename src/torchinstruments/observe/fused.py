"""Modules that torch may run as one fused operation, which a hook anywhere inside would keep it from.

``nn.TransformerEncoderLayer`` looks for hooks on itself and on every module inside it. Where it finds one, it
runs its parts one by one instead, and what comes out differs in the last bits. So nothing in such a module
gets a hook: what is selected there is seen through the slot of its call (`observe.slots`). In training, and
wherever gradients are recorded, torch runs the parts themselves, and they are measured as ever. A call that
was fused ran none of them, and their rows say so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torchinstruments.observe.selection import Layer

__all__ = ["FusedRegion", "fused_regions", "may_be_fused"]


@dataclass(frozen=True, slots=True, eq=False)
class FusedRegion:
    """One module that may run fused.

    Attributes:
        module: The module.
        inside: Selected layers below it.
        own: The layer that it is itself, where it was selected and is not the attached model.
        is_root: Whether it is the attached model.
    """

    module: nn.Module
    inside: tuple[Layer, ...]
    own: Layer | None
    is_root: bool

    @property
    def hookless(self) -> tuple[Layer, ...]:
        """The layers that must not have hooks."""
        return self.inside if self.own is None else (*self.inside, self.own)


def may_be_fused(module: nn.Module) -> bool:
    """Returns whether torch looks for hooks before it runs a module."""
    return isinstance(module, nn.TransformerEncoderLayer) and not isinstance(module, torch.jit.ScriptModule)


def fused_regions(root: nn.Module, layers: Sequence[Layer]) -> tuple[FusedRegion, ...]:
    """Returns the modules of a model that may run fused and that hold selected layers.

    Args:
        root: The attached model.
        layers: What `select_layers` returned for it.
    """
    regions = []
    for module in root.modules():
        if not may_be_fused(module):
            continue
        ids = frozenset(map(id, module.modules()))
        here = [layer for layer in layers if id(layer.watched) in ids and layer.takes_hooks]
        inside = tuple([layer for layer in here if layer.watched is not module])
        own = next((layer for layer in here if layer.watched is module and not layer.is_root), None)
        if inside or own is not None:
            regions.append(FusedRegion(module, inside, own, is_root=module is root))
    return tuple(regions)
