"""Which modules are observed, and by what names.

A model is walked once at attach. Wrappers (`observe.wrappers`) are not layers: they leave no segment in a
name, and what they wrap is the layer. A layer is nevertheless watched at its outermost wrapper, where there
is one: outside activation checkpointing, where its output still belongs to the graph, and outside compiled
code, where hooks still run.

A module reached under several names is one layer; the first name is its own, the others are aliases.

Of layers inside a compiled region nothing can be measured. So the region itself, where it holds one that was
chosen, is a layer too, in the place that its boundary has in the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.compiled import NOTHING_COMPILED, CompiledParts
from torchinstruments.observe.flat_parameters import (
    FlatPart,
    flat_parts,
    is_flattened,
    modules_of_unknown_size,
)
from torchinstruments.observe.wrappers import core_of, wrapped_child
from torchinstruments.records import ModuleRecord, storable

__all__ = ["Layer", "Selector", "leaf_modules", "select_layers"]

Selector: TypeAlias = Callable[[str, nn.Module], bool]
"""Says of a name and a module whether it is observed; called once a module at attach, and again where the
model's modules were replaced."""

MAX_VISITS = 200_000
"""Places of a model that are looked at; more come only from modules shared in many ways."""

_MAX_ALIASES = 64

_PARAMETRIZATIONS = "parametrizations"
"""The name that torch gives to what makes the parameters of a module."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One selected module.

    Attributes:
        index: Position in the catalog.
        name: Name without wrapper segments; ``""`` is the attached model.
        module: The module itself.
        watched: Where its output is taken: the module or its outermost wrapper.
        aliases: Its further names.
        is_root: Whether it is the attached model, whose calls the permanent hooks see.
        is_compiled: Whether it lies inside compiled code, where it is not expected to be seen.
        takes_hooks: Whether it can be hooked at all; a scripted module cannot.
        flat_parts: What of its own parameters was put into a flat one; None where nothing in the attached
            model tells.
    """

    index: int
    name: str
    module: nn.Module
    watched: nn.Module
    aliases: tuple[str, ...] = ()
    is_root: bool = False
    is_compiled: bool = False
    takes_hooks: bool = True
    flat_parts: tuple[FlatPart, ...] | None = ()

    @property
    def is_lazy(self) -> bool:
        """Whether parameters of its own still wait for their first input to know their shapes."""
        return any(is_lazy(parameter) for parameter in self.module.parameters(recurse=False))

    def record(self, *, execution_order: int | None = None, fired: int = 0) -> ModuleRecord:
        """Returns the layer's row of the catalog."""
        own = [parameter for parameter in self.module.parameters(recurse=False) if not is_lazy(parameter)]
        sizes = [
            (parameter.numel(), parameter.requires_grad) for parameter in own if not is_flattened(parameter)
        ]
        sizes += [(part.num_entries, part.requires_grad) for part in self.flat_parts or ()]
        is_known = self.flat_parts is not None
        return ModuleRecord(
            layer=self.name,
            type=type(self.module).__name__,
            aliases=self.aliases,
            parameter_count=sum([size for size, _ in sizes]) if is_known else None,
            trainable_parameter_count=sum([size for size, is_trained in sizes if is_trained])
            if is_known
            else None,
            execution_order=execution_order,
            expected=self.takes_hooks and not self.is_compiled,
            fired=fired,
        )


def leaf_modules() -> Selector:
    """Returns the default selector: every module without children.

    What `torch.nn.utils.parametrize` puts below a module, as its ``spectral_norm`` does, makes a weight and
    no activation: it is no child here, and not chosen itself. So such a convolution is chosen as it would be
    without.

    Example:
        >>> from torch import nn
        >>> from torchinstruments import leaf_modules
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
        >>> [name for name, module in model.named_modules() if leaf_modules()(name, module)]
        ['0', '1.0']
    """
    return _is_leaf


def _is_leaf(name: str, module: nn.Module) -> bool:
    """Returns whether the module has no children, and lies in no parametrization."""
    if _PARAMETRIZATIONS in name.split("."):
        return False
    own = _PARAMETRIZATIONS if is_parametrized(module) else ""
    return all(child == own for child, _ in module.named_children())


def select_layers(
    root: nn.Module,
    selector: Selector,
    on_error: Callable[[str, BaseException], None],
    parts: CompiledParts = NOTHING_COMPILED,
) -> tuple[Layer, ...]:
    """Returns the layers that the selector chose, in the order of the model.

    Args:
        root: The model that is attached, wrapped or not.
        selector: Called once a module with its name and itself; one that raises is not selected.
        on_error: Told the name of such a module, and the exception.
        parts: What is compiled of it and observed at the boundary.

    Raises:
        ConfigurationError: The selector cannot be called, or selected nothing.
    """
    if not callable(selector):
        raise ConfigurationError(
            f"selector={selector!r} cannot be called; give a callable from name and module to bool, "
            f"such as leaf_modules()"
        )
    places = _places_by_module(root)
    core = core_of(root)
    flat, unknown = flat_parts(root), modules_of_unknown_size(root)
    chosen: set[int] = set()
    for place in places:
        try:
            if selector(place.name, place.module):
                chosen.add(id(place.module))
        except Exception as error:  # noqa: BLE001 - the user's code: the module is left out, the rest goes on
            on_error(place.name, error)
    layers: list[Layer] = []
    for place in places:
        module = place.module
        watched = root if module is core else place.watched()
        if id(module) not in chosen and not _is_boundary(parts, watched, module, chosen):
            continue
        layers.append(
            Layer(
                index=len(layers),
                name=place.name,
                module=module,
                watched=watched,
                aliases=tuple(place.aliases[:_MAX_ALIASES]),
                is_root=module is core,
                is_compiled=parts.hides(watched),
                takes_hooks=not isinstance(watched, torch.jit.ScriptModule),
                flat_parts=None if id(module) in unknown else flat.get(id(module), ()),
            )
        )
    if not layers:
        raise ConfigurationError(
            f"selector={selector!r} selected none of the model's {len(places)} modules, "
            f"so nothing would be measured; "
            f"give a selector that returns True for at least one of their names, such as "
            f"{[place.name for place in places[:3]]}, or leaf_modules()"
        )
    return tuple(layers)


def _is_boundary(parts: CompiledParts, watched: nn.Module, module: nn.Module, chosen: set[int]) -> bool:
    """Returns whether a compiled region with a chosen module in it ends at a place."""
    return parts.bounds(watched, module) and any(id(part) in chosen for part in module.modules())


@dataclass(slots=True)
class _Places:
    """One module and everywhere it was found.

    Attributes:
        module: The module, no wrapper.
        name: Its name.
        full_name: The same with wrapper segments.
        outermost: For each place, what stands there: the module or its outermost wrapper.
        aliases: Names of its further places.
    """

    module: nn.Module
    name: str
    full_name: str
    outermost: list[nn.Module]
    aliases: list[str] = field(default_factory=list)

    def watched(self) -> nn.Module:
        """Returns the outermost wrapper if it is the same in all places, else the module itself."""
        first = self.outermost[0]
        return first if all(place is first for place in self.outermost) else self.module


def _places_by_module(root: nn.Module) -> list[_Places]:
    """Returns every module that is no wrapper, in the order of the model, with distinct names."""
    by_module: dict[int, _Places] = {}
    for name, full_name, outermost, module in _walk(root):
        known = by_module.get(id(module))
        if known is None:
            by_module[id(module)] = _Places(module, name, full_name, [outermost])
        else:
            known.outermost.append(outermost)
            if name != known.name and name not in known.aliases:
                known.aliases.append(name)
    taken: set[str] = set()
    for places in by_module.values():
        places.name = _free(places.name, places.full_name, taken)
        taken.add(places.name)
    return list(by_module.values())


def _free(name: str, full_name: str, taken: set[str]) -> str:
    """Returns the name if it is free, else the full one, else that with a number."""
    if name not in taken:
        return name
    candidate, ordinal = full_name, 2
    while candidate in taken:
        candidate = f"{full_name}#{ordinal}"
        ordinal += 1
    return candidate


def _walk(root: nn.Module) -> Iterator[tuple[str, str, nn.Module, nn.Module]]:
    """Yields each place of the model: name, full name, what stands there, and what that wraps in the end.

    Depth first, in the order of children. A module that contains itself is not entered again.
    """
    num_visits = 0
    waiting: list[tuple[str, str, nn.Module, frozenset[int]]] = [("", "", root, frozenset())]
    while waiting and num_visits < MAX_VISITS:
        num_visits += 1
        name, full_name, outermost, above = waiting.pop()
        module, inner_full_name = outermost, full_name
        extra: list[tuple[str, str, nn.Module, frozenset[int]]] = []
        passed = {id(module)}
        while (child_name := wrapped_child(module)) is not None:
            inner = module._modules[child_name]  # noqa: SLF001 - children by name
            if inner is None or id(inner) in passed:
                break
            below = above | passed
            extra.extend(
                (_join(name, other), _join(inner_full_name, other), sibling, below)
                for other, sibling in module.named_children()
                if other != child_name
            )
            module, inner_full_name = inner, _join(inner_full_name, child_name)
            passed.add(id(module))
        yield name, inner_full_name, outermost, module
        if above & passed:
            continue
        below = above | passed
        children = [
            (_join(name, child_name), _join(inner_full_name, child_name), child, below)
            for child_name, child in module._modules.items()  # noqa: SLF001 - named_children leaves out repeated ones
            if child is not None
        ]
        waiting.extend(reversed(children + extra))


def _join(prefix: str, name: str) -> str:
    """Returns a dotted name."""
    return f"{prefix}.{storable(name)}" if prefix else storable(name)
