"""Which parts of a model are compiled, and where such a part can be seen from outside.

A hook on a module inside compiled code would be compiled with it: it sees no values, and each time that it
comes or goes the code is compiled anew. What can be observed of a compiled region is its boundary. Where that
is, depends on how the region was made:

* ``torch.compile(module)`` returns a wrapper whose own hooks run outside;
* ``module.compile()`` leaves the module where it is; its hooks are inside, the slot of its call is outside
  (`observe.slots`);
* with a compiled ``forward``, an instance's or a class's, the module's own hooks are outside.

A compiled function that is no module's ``forward`` may call any module, or none. Where a module has such a
function, what is in it and was not called may be inside (`may_be_called_inside`).
"""

import sys
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING

from torch import nn

from torchinstruments.observe.stack import callers
from torchinstruments.observe.wrappers import (
    core_of,
    is_compiled_in_place,
    is_compiled_wrapper,
    is_forward_compiled,
)

if TYPE_CHECKING:
    from types import FrameType

__all__ = [
    "NOTHING_COMPILED",
    "CompiledParts",
    "compiled_parts",
    "may_be_called_inside",
    "outermost_call",
]


@dataclass(frozen=True, slots=True)
class CompiledParts:
    """The compiled parts of a model, by the ids of modules.

    Attributes:
        inside: Modules whose own hooks would be part of compiled code.
        in_place: Those among them that were compiled in place and lie in no other region: their calls can be
            seen from outside.
        around: Modules whose own hooks are outside while what is in them is inside.
    """

    inside: frozenset[int] = frozenset()
    in_place: frozenset[int] = frozenset()
    around: frozenset[int] = frozenset()

    def hides(self, module: nn.Module) -> bool:
        """Returns whether nothing of a module's calls can be seen (training thread, hot path)."""
        return id(module) in self.inside and id(module) not in self.in_place

    def bounds(self, watched: nn.Module, module: nn.Module) -> bool:
        """Returns whether a compiled region ends at a layer.

        Args:
            watched: Where the layer is watched: the module or its outermost wrapper.
            module: The layer's module.
        """
        return not self.hides(watched) and (id(module) in self.inside or id(module) in self.around)


NOTHING_COMPILED = CompiledParts()
"""What a model has that runs as it is written."""


def compiled_parts(root: nn.Module) -> CompiledParts:
    """Returns what is compiled of a model (training thread, at attach and at sampled forwards).

    It costs a look at each module, and nothing in a program that never imported the compiler.
    """
    if "torch._dynamo" not in sys.modules and not is_compiled_in_place(root):
        return NOTHING_COMPILED
    inside: set[int] = set()
    in_place: set[int] = set()
    enclosed: set[int] = set()
    around: set[int] = set()
    reached: set[tuple[int, bool]] = set()
    waiting = [(root, False)]
    while waiting:
        module, is_inside = waiting.pop()
        if (id(module), is_inside) in reached:
            continue
        reached.add((id(module), is_inside))
        if is_inside:
            enclosed.add(id(module))
        elif is_compiled_in_place(module):
            in_place.add(id(module))
            is_inside = True
        elif is_compiled_wrapper(module) or is_forward_compiled(module):
            around.add(id(module))
            waiting.extend((child, True) for child in module.children())
            continue
        if is_inside:
            inside.add(id(module))
        waiting.extend((child, is_inside) for child in module.children())
    if not inside and not around:
        return NOTHING_COMPILED
    return CompiledParts(frozenset(inside), frozenset(in_place - enclosed), frozenset(around - enclosed))


def may_be_called_inside(root: nn.Module) -> frozenset[int]:
    """Returns the ids of modules in or below one that has a compiled function beside its ``forward``.

    It costs a look at each module's attributes, and nothing in a program that never imported the compiler
    (training thread, at the end of sampled forwards that left layers out).
    """
    if "torch._dynamo" not in sys.modules:
        return frozenset()
    of_classes: dict[type, bool] = {}
    found: set[int] = set()
    for module in root.modules():
        kind = type(module)
        if kind not in of_classes:
            written = [vars(base) for base in kind.__mro__ if base is not object and base is not nn.Module]
            of_classes[kind] = any(
                _is_compiled_function(one) for own in written for one in list(own.values())
            )
        if id(module) in found:
            continue
        if of_classes[kind] or any(_is_compiled_function(one) for one in list(vars(module).values())):
            found.update(id(inner) for inner in module.modules())
    return frozenset(found)


def _is_compiled_function(value: object) -> bool:
    """Returns whether ``torch.compile(function)`` made an attribute."""
    return (
        isinstance(value, FunctionType | MethodType)
        and getattr(value, "_torchdynamo_orig_callable", None) is not None
        and not getattr(value, "_torchdynamo_disable", False)  # torch.compiler.disable leaves both
    )


def outermost_call(root: nn.Module) -> nn.Module | None:
    """Returns the outermost wrapper of a model, or the model, that the current thread is calling.

    Called while the model is being compiled (compiling thread).

    Args:
        root: The attached model.
    """
    core = core_of(root)
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - nothing else tells
    found = None
    for called in callers(frame):
        if core_of(called) is core:
            found = called
    return found
