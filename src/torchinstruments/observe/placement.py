"""What stands in the selected layers for as long as one sampled forward runs.

What is placed is noted before, for an interrupt may come in between, and taken out again where another thread
has ended the forward meanwhile.
"""

from torch import nn

from torchinstruments.observe.direct import ForwardOverride
from torchinstruments.observe.hooks import LayerHook, LayerPreHook, take_out
from torchinstruments.observe.slots import CallSlot

__all__ = ["Placement"]


class Placement:
    """Hooks on layers, slots of those that must not have hooks, and overrides for direct forwards."""

    def __init__(self) -> None:
        self._hooks: dict[LayerHook | LayerPreHook, nn.Module] = {}
        self._slots: dict[CallSlot | ForwardOverride, None] = {}
        self._is_over = False

    def hook(self, module: nn.Module, pre_hook: LayerPreHook | None, hook: LayerHook) -> None:
        """Puts hooks behind those that a module has (training thread, hot path).

        Args:
            module: Which one.
            pre_hook: Takes its inputs; None where they are not asked for.
            hook: Takes its outputs.
        """
        if pre_hook is not None:
            self._hooks[pre_hook] = module
            module.register_forward_pre_hook(pre_hook, with_kwargs=True)
            if self._is_over:
                take_out(module, pre_hook)
        self._hooks[hook] = module
        module.register_forward_hook(hook)
        if self._is_over:
            take_out(module, hook)

    def install(self, slot: CallSlot) -> None:
        """Puts a slot into its module (training thread, hot path)."""
        self._slots[slot] = None
        slot.install()
        if self._is_over:
            slot.remove()

    def override(self, override: ForwardOverride) -> None:
        """Puts an override into its module, for direct forwards (training thread, hot path)."""
        self._slots[override] = None
        override.install(clean_copies=False)
        if self._is_over:
            override.remove()

    def remove(self) -> None:
        """Takes everything out again (any thread).

        Nothing is forgotten before it was removed: after an interrupt this can be called again.
        """
        self._is_over = True
        hooks, slots = self._hooks, self._slots
        while hooks or slots:
            for hook, module in list(hooks.items()):
                take_out(module, hook)
                hooks.pop(hook, None)
            for slot in reversed(list(slots)):
                slot.remove()
                slots.pop(slot, None)
