"""Which layers are in focus: those whose tensors get histograms too.

A histogram says more than nine numbers and costs more, on storage above all, so it is for a few layers. The
choice is made once, at attach, so that a layer that is not in focus pays nothing.
"""

from collections.abc import Callable, Sequence

from torchinstruments.errors import ConfigurationError
from torchinstruments.observe.selection import Layer, Selector

__all__ = ["select_focus"]


def select_focus(
    layers: Sequence[Layer],
    histogram_selector: Selector | None,
    max_histogram_modules: int,
    on_error: Callable[[str, BaseException], None],
) -> frozenset[int]:
    """Returns the indices of the layers in focus: the first ones in the order of the model.

    Args:
        layers: What `select_layers` returned.
        histogram_selector: Called once a layer with its name and module; None takes any that can be measured.
        max_histogram_modules: Layers in focus at most, at least 1.
        on_error: Told the name of a layer for which the selector raised, and the exception; that layer is not
            in focus.

    Raises:
        ConfigurationError: The selector cannot be called or matched no layer, or the maximum is no whole
            number of at least 1.
    """
    if (
        isinstance(max_histogram_modules, bool)
        or not isinstance(max_histogram_modules, int)
        or max_histogram_modules < 1
    ):
        raise ConfigurationError(
            f"max_histogram_modules={max_histogram_modules!r} is not possible; "
            f"give a whole number of at least 1"
        )
    if histogram_selector is None:
        chosen = [layer.index for layer in layers if layer.takes_hooks and not layer.is_compiled]
        return frozenset(chosen[:max_histogram_modules])
    if not callable(histogram_selector):
        raise ConfigurationError(
            f"histogram_selector={histogram_selector!r} cannot be called; "
            f"give a callable from name and module to bool"
        )
    chosen = []
    for layer in layers:
        try:
            if histogram_selector(layer.name, layer.module):
                chosen.append(layer.index)
        except Exception as error:  # noqa: BLE001 - the user's code: the layer is left out, the rest goes on
            on_error(layer.name, error)
    if not chosen:
        raise ConfigurationError(
            f"histogram_selector={histogram_selector!r} matched none of the {len(layers)} observed modules; "
            f"give one that returns True for at least one of their names, such as "
            f"{[layer.name for layer in layers[:3]]}, or leave it out"
        )
    return frozenset(chosen[:max_histogram_modules])
