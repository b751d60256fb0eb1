"""When the tensors of a forward and its backward come into being, by the order of the calls of layers."""

from collections.abc import Mapping

from torchinstruments.merge.nonfinite_rows import Evidence, Phase
from torchinstruments.records import ModuleRecord, Signal

__all__ = ["ExecutionOrder", "Key"]

Key = tuple[int, int, int, int, int, int, str, str]
"""Sorts the tensors of one phase; see `ExecutionOrder.key`."""


class ExecutionOrder:
    """The order of the layers of one rank.

    A layer ends after the layers inside it, whose names begin with its own. Layers that were never called in
    a sampled forward, or that no catalog lists, come after all others.

    Args:
        modules: The catalog, in its order.
    """

    def __init__(self, modules: Mapping[str, ModuleRecord]) -> None:
        last = max((one.execution_order or 0 for one in modules.values()), default=0)
        self._unknown = last + 1 + len(modules)
        self._begin: dict[str, int] = {}
        for place, (layer, module) in enumerate(modules.items()):
            order = module.execution_order
            self._begin[layer] = last + 1 + place if order is None else order
        self._end = dict(self._begin)
        for layer, begin in self._begin.items():
            for outer in _around(layer):
                if outer in self._end:
                    self._end[outer] = max(self._end[outer], begin)

    def key(self, phase: Phase, one: Evidence) -> Key:
        """Returns what sorts a tensor among those of its phase.

        In the forward: parameters, which are read when it begins, then inputs and outputs as layers begin and
        end. In the backward the other way round, the gradient of an output before those of the layer's
        parameters. After a reduction all are there at once, in the order of the forward.
        """
        begin, end = (times.get(one.layer, self._unknown) for times in (self._begin, self._end))
        depth = one.layer.count(".") + 1 if one.layer else 0
        rest = (one.layer, one.tensor_path)
        if phase is Phase.BACKWARD:
            is_parameter = one.signal == Signal.PARAMETER_GRADIENT
            return (one.backward_index, -end, depth, -one.call_index, int(is_parameter), 0, *rest)
        if phase is Phase.FORWARD:
            is_later = one.signal != Signal.PARAMETER
            is_output = one.signal == Signal.OUTPUT
            time = end if is_output else begin
            return (int(is_later), time, int(is_output), -depth if is_output else 0, one.call_index, 0, *rest)
        return (one.backward_index, begin, 0, 0, one.call_index, 0, *rest)


def _around(layer: str) -> list[str]:
    """Returns the names of the layers around a layer."""
    if not layer:
        return []
    segments = layer.split(".")
    return ["", *(".".join(segments[:size]) for size in range(1, len(segments)))]
