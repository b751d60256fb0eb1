"""The selected layers of one model while it is observed, with their catalog.

A program may exchange parts of its model after attach: a new head, adapters, a checkpoint wrapper around each
block. Layers hold modules, so the new ones would be run unseen. Each sampled forward therefore compares who
is whose child with what was there before, by identity and without a call into the model, and selects anew
where that has changed. A layer keeps its index as long as its name stays; what is new comes after all others,
so that the order of rows in earlier files stays the order of later ones.
"""

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.catalog import Catalog
from torchinstruments.observe.faults import Faults
from torchinstruments.observe.fused import fused_regions
from torchinstruments.observe.selection import Layer, Selector, select_layers
from torchinstruments.observe.wrappers import is_compiled_in_place
from torchinstruments.records import Reason

__all__ = ["MAX_SELECTIONS", "ObservedLayers", "Structure"]

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
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], selector: Selector | None, faults: Faults
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
        self._num_selections = 0

    @property
    def root(self) -> Layer | None:
        """The layer that is the attached model itself, if it was selected."""
        return next((layer for layer in self.current if layer.is_root), None)

    def refresh(self, model: nn.Module) -> bool:
        """Selects anew where the model has changed (training thread, hot path).

        Returns:
            Whether the catalog is another now.
        """
        if self._structure is None or not self._structure.has_changed():
            return False
        if self._selector is None or self._num_selections >= MAX_SELECTIONS:
            self._structure = None
            self._faults.notice(
                "selector", "", "modules of the model were replaced; the new ones are not observed"
            )
            return False
        self._num_selections += 1
        self._structure = Structure(model)
        try:
            fresh = select_layers(model, self._selector, self._selector_failed)
        except ConfigurationError as error:
            self._faults.report("selector", "", error)
            return False
        before = {layer.name: layer for layer in self.current}
        self.current = self._with_old_indices(fresh)
        self.regions = fused_regions(model, self.current)
        known = {layer.name for layer in self.current}
        replaced = sum(
            layer.name in before and before[layer.name].module is not layer.module for layer in self.current
        )
        self._faults.notice(
            "selector",
            "",
            f"modules of the model were replaced: of the selected layers {replaced} are others, "
            f"{len(known - before.keys())} are new and {len(before.keys() - known)} are gone; "
            f"the ones that are there now are observed",
        )
        self.catalog.renew(self.current)
        self.report_out_of_reach(model)
        return True

    def report_out_of_reach(self, model: nn.Module) -> None:
        """Reports what cannot be observed of the model."""
        for layer in self.current:
            if not layer.takes_hooks:
                self._faults.notice(
                    Reason.SCRIPTED_MODULE.value,
                    layer.name,
                    f"the layer {layer.name!r} is a scripted module, which takes no hooks: its rows have no "
                    f"values and say scripted_module; select modules around it",
                )
        if is_compiled_in_place(model):
            self._faults.warn(
                "the model was compiled in place with Module.compile(), so that its forward cannot be seen; "
                "attach to torch.compile(model) instead, or compile its parts"
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
