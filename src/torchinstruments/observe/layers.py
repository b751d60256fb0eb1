"""The selected layers of one model while it is observed, with their catalog.

A program may exchange parts of its model after attach: a new head, adapters, a checkpoint wrapper around each
block. Layers hold modules, so the new ones would be run unseen. Each sampled forward therefore compares who
is whose child with what was there before, by identity and without a call into the model, and selects anew
where that has changed. A layer keeps its index as long as its name stays; what is new comes after all others,
so that the order of rows in earlier files stays the order of later ones. The same is done where parts of the
model have been compiled since.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.catalog import Catalog
from torchinstruments.observe.compiled import NOTHING_COMPILED, CompiledParts
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.fused import fused_regions
from torchinstruments.observe.selection import Layer, Selector, select_layers
from torchinstruments.records import Reason

__all__ = ["COMPILED", "MAX_SELECTIONS", "ObservedLayers", "Structure"]

COMPILED = "compiled"
"""What is told of compiled code is counted under, among the errors."""

MAX_SELECTIONS = 100
"""Changes of a model after which layers are selected anew; further ones are only reported."""


class Structure:
    """Who was whose child in a model. Holds no module.

    Args:
        root: The attached model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._children = tuple([(weakref.ref(module), _child_ids(module)) for module in root.modules()])

    def has_changed(self) -> bool:
        """Returns whether any module has other children than it had (training thread, hot path)."""
        for reference, ids in self._children:
            module = reference()
            if module is None or _child_ids(module) != ids:
                return True
        return False


class ObservedLayers:
    """The layers of one observer.

    Args:
        model: The attached model; not kept.
        layers: What `select_layers` returned for it.
        selector: Asked again where the model changed; None only reports changes.
        faults: Takes errors.
        parts: What is compiled of the model and observed at the boundary.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        selector: Selector | None,
        faults: Faults,
        parts: CompiledParts = NOTHING_COMPILED,
    ) -> None:
        self.current = tuple(layers)
        """Those that are there now."""
        self.regions = fused_regions(model, self.current)
        """Where they must not have hooks."""
        self.catalog = Catalog(self.current)
        """All that ever were."""
        self._selector = selector
        self._faults = faults
        self._structure: Structure | None = Structure(model)
        self._parts = parts
        self._num_selections = 0

    @property
    def root(self) -> Layer | None:
        """The layer that is the attached model itself, if it was selected."""
        return next((layer for layer in self.current if layer.is_root), None)

    def refresh(
        self, model: nn.Module, parts: CompiledParts = NOTHING_COMPILED, *, is_told: bool = False
    ) -> bool:
        """Selects anew where the model has changed (training thread, hot path).

        Args:
            model: The attached model, or the wrapper around it that is called.
            parts: What is compiled of it and observed at the boundary.
            is_told: Whether the user knows of it already.

        Returns:
            Whether the catalog is another now.
        """
        if self._structure is None:
            return False
        was_compiled = parts != self._parts
        if not was_compiled and not self._structure.has_changed():
            return False
        self._parts = parts
        if self._selector is None or self._num_selections >= MAX_SELECTIONS:
            self._structure = None
            self._faults.notice(
                "selector", "", "modules of the model were replaced; the new ones are not observed"
            )
            return False
        self._num_selections += 1
        self._structure = Structure(model)
        try:
            fresh = select_layers(model, self._selector, self._selector_failed, parts)
        except ConfigurationError as error:
            self._faults.report("selector", "", error)
            return False
        before = {layer.name: layer for layer in self.current}
        self.current = self._with_old_indices(fresh)
        self.regions = fused_regions(model, self.current)
        if not is_told:
            self._tell_change(before, was_compiled=was_compiled)
        self.catalog.renew(self.current)
        self.report_out_of_reach()
        return True

    def report_out_of_reach(self) -> None:
        """Reports what cannot be observed of the model."""
        for layer in self.current:
            if not layer.takes_hooks:
                self._faults.notice(
                    Reason.SCRIPTED_MODULE.value,
                    layer.name,
                    f"the layer {layer.name!r} is a scripted module, which takes no hooks: its rows have no "
                    f"values and say scripted_module; select modules around it",
                )

    def _tell_change(self, before: Mapping[str, Layer], *, was_compiled: bool) -> None:
        """Tells what has become of the layers."""
        known = {layer.name for layer in self.current}
        replaced = sum(
            layer.name in before and before[layer.name].module is not layer.module for layer in self.current
        )
        hidden = {layer.name for layer in self.current if layer.is_compiled}
        if was_compiled and not hidden <= {name for name, layer in before.items() if layer.is_compiled}:
            self._faults.notice(
                COMPILED,
                "",
                f"parts of the model were compiled after the observer was attached: {len(hidden)} of the "
                f"selected layers are inside compiled code, where nothing can be measured, and each compiled "
                f"region is observed as a whole",
            )
        elif replaced or known != before.keys() or not was_compiled:
            self._faults.notice(
                "selector",
                "",
                f"modules of the model were replaced: of the selected layers {replaced} are others, "
                f"{len(known - before.keys())} are new and {len(before.keys() - known)} are gone; "
                f"the ones that are there now are observed",
            )

    def _with_old_indices(self, fresh: Sequence[Layer]) -> tuple[Layer, ...]:
        """Gives layers the indices that their names have in the catalog, and new ones the next."""
        places = self.catalog.places()
        layers = []
        for layer in fresh:
            index = places.setdefault(layer.name, len(places))
            layers.append(replace(layer, index=index))
        return tuple(layers)

    def _selector_failed(self, layer: str, error: BaseException) -> None:
        self._faults.report("selector", layer, error)


def _child_ids(module: nn.Module) -> tuple[int, ...]:
    """Returns the ids of a module's children, by place."""
    if isinstance(module, torch.jit.ScriptModule):
        return ()
    return (*map(id, module._modules.values()),)  # noqa: SLF001 - children() leaves out repeated ones
