"""Hooks on some modules of a model, from `place` to `remove`, where they change nothing of a call.

As an observer does it: a module inside compiled code gets none, for it would be compiled with the code; a
module that torch may run fused is seen through the slot of its call; a scripted module cannot be seen. What
cannot be seen is listed with its reason.
"""

import fnmatch
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import nn

from torchinstruments.observe.compiled import CompiledParts, compiled_parts
from torchinstruments.observe.fused import FusedRegion, fused_regions, may_be_fused
from torchinstruments.observe.hooks import LayerHook, take_out
from torchinstruments.observe.selection import Layer, select_layers
from torchinstruments.observe.slots import CallSlot, LayerSlot, RegionSlot
from torchinstruments.records import Reason

__all__ = ["LayerWatch", "matches"]


class _Receiver(Protocol):
    """Who is told of the calls."""

    num_too_deep: int
    """Hooks that the stack had no room for."""

    def receive(self, layer: Layer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Takes the arguments of a call seen through a slot; it never raises (training thread, hot path)."""
        ...

    def observe(self, layer: Layer, output: object) -> None:
        """Takes an output; it never raises (training thread, hot path)."""
        ...

    def num_calls(self, region: FusedRegion) -> int:
        """Returns how many calls were seen inside a region so far (training thread, hot path)."""
        ...

    def region_ended(self, region: FusedRegion, num_calls_before: int) -> None:
        """Takes the end of a region's call; it never raises (training thread, hot path)."""
        ...


class LayerWatch:
    """The hooks of one watch.

    Args:
        root: The model, wrapped or not.
        wants: Says of a layer whether it is watched.
        receiver: Told of the calls that this thread makes.
    """

    def __init__(self, root: nn.Module, wants: Callable[[Layer], bool], receiver: _Receiver) -> None:
        self._receiver = receiver
        self._hooks: list[tuple[nn.Module, LayerHook]] = []
        self._slots: list[CallSlot] = []
        self.parts: CompiledParts = compiled_parts(root)
        """What is compiled of the model."""
        self.all: tuple[Layer, ...] = select_layers(root, _every_module, _tell_nobody, self.parts)
        """Every module of it, wrappers left out."""
        self.chosen: tuple[Layer, ...] = tuple([layer for layer in self.all if wants(layer)])
        """Those that are wanted, whether they can be seen or not."""
        self.unseen: dict[str, str] = {}
        """Why a wanted one cannot be seen, by its name."""
        self._regions = fused_regions(root, self.chosen)

    def place(self) -> None:
        """Puts the hooks in place (training thread). `remove` takes out what was placed, also of a part."""
        thread = threading.get_ident()
        hookless = frozenset(layer.index for region in self._regions for layer in region.hookless)
        own = frozenset(region.own.index for region in self._regions if region.own is not None)
        for layer in self.chosen:
            if not layer.takes_hooks:
                self.unseen[layer.name] = Reason.SCRIPTED_MODULE.value
            elif self.parts.hides(layer.watched):
                self.unseen[layer.name] = Reason.INSIDE_COMPILED.value
            elif layer.index in own:
                continue
            elif (
                layer.index in hookless
                or id(layer.watched) in self.parts.inside
                or may_be_fused(layer.watched)
            ):
                self._install(LayerSlot(layer.watched, self._receiver, thread, layer))
            else:
                hook = LayerHook(self._receiver, layer, thread)
                # Noted before it is placed, so that an interrupt leaves nothing that is not known.
                self._hooks.append((layer.watched, hook))
                layer.watched.register_forward_hook(hook)
        for region in self._regions:
            if id(region.module) not in self.parts.inside:
                self._install(RegionSlot(region, self._receiver, thread))

    def remove(self) -> None:
        """Takes everything out again. Idempotent (training thread)."""
        for watched, hook in self._hooks:
            take_out(watched, hook)
        for slot in reversed(self._slots):
            slot.remove()
        self._hooks.clear()
        self._slots.clear()

    def _install(self, slot: CallSlot) -> None:
        self._slots.append(slot)
        slot.install()


def matches(pattern: str, layer: Layer) -> bool:
    """Returns whether a name, or a pattern with ``*``, ``?`` or ``[...]``, stands for a layer."""
    names: Sequence[str] = (layer.name, *layer.aliases)
    return any(pattern == name or fnmatch.fnmatchcase(name, pattern) for name in names)


def _every_module(_name: str, _module: nn.Module) -> bool:
    return True


def _tell_nobody(_name: str, _error: BaseException) -> None:
    """The selector here cannot raise."""
