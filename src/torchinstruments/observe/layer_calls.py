"""The calls of layers in one sampled forward.

A call gets its ordinal when its output is seen, and where inputs are measured, when its input is: of a module
that calls itself the numbers differ by that.
"""

import torch

from torchinstruments.observe.observation import Call
from torchinstruments.observe.selection import Layer
from torchinstruments.observe.sharding import Sharding
from torchinstruments.records import Execution

__all__ = ["LayerCalls"]


class LayerCalls:
    """Numbers the calls of each layer (training thread, hot path).

    Args:
        execution: How what is measured runs.
        sharding: What of the model is spread over ranks.
        grad_enabled: Whether gradients were enabled as the forward began.
    """

    def __init__(self, execution: Execution, sharding: Sharding, *, grad_enabled: bool) -> None:
        self._execution = execution
        self._scopes = sharding.scopes
        self._grad_enabled = grad_enabled
        self.numbers: dict[int, int] = {}
        """Calls by index of the layer, those among them of which nothing could be seen."""
        self.fired: dict[int, None] = {}
        """Indices of the layers that were called, in the order of their first calls."""
        self._begun: dict[int, list[Call]] = {}

    def begin(self, layer: Layer) -> Call:
        """Returns the call of a layer whose input is seen; the innermost one ends first."""
        call = self.next(layer)
        self._begun.setdefault(layer.index, []).append(call)
        return call

    def end(self, layer: Layer) -> Call:
        """Returns the call of a layer whose output is seen."""
        begun = self._begun.get(layer.index)
        call = begun.pop() if begun else self.next(layer)
        self.fired[layer.index] = None
        return call

    def next(self, layer: Layer) -> Call:
        """Returns the next call of a layer."""
        calls = self.numbers
        call_index = calls.get(layer.index, 0)
        calls[layer.index] = call_index + 1
        return self.new(layer, call_index)

    def new(self, layer: Layer, call_index: int) -> Call:
        """Returns a call of a layer as it is now."""
        return Call(
            layer=layer,
            call_index=call_index,
            mode="train" if layer.module.training else "eval",
            grad_enabled=torch.is_grad_enabled(),
            execution=self._execution,
            plain_scope=self._scopes.of(layer.module),
        )

    def unseen(self, layer: Layer, execution: Execution) -> Call:
        """Returns the call of a layer to which belongs what is known without one."""
        # A frozen script has no mode, for it is that of evaluation for good.
        mode = "train" if getattr(layer.module, "training", False) else "eval"
        return Call(layer, 0, mode, self._grad_enabled, execution)
