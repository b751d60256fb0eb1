"""The names under which values reach loggers and TensorBoard.

``<prefix>/modules/<layer>/call_<i>/<tensor path>``, the root as ``@root``, and ``/backward_<i>`` behind it
for every later traversal of the graph, which must not run into the series of the first. Parameters have no
calls: ``<prefix>/modules/<layer>/parameters/<name>``, and of their gradients
``<prefix>/modules/<layer>/parameter_gradients/<name>/<stage>``. Segments are percent-quoted, so that a slash
in a layer's name makes no folder.
"""

from functools import lru_cache
from urllib.parse import quote

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Signal

__all__ = ["DEFAULT_PREFIX", "checked_prefix", "quoted", "tensor_tag"]

DEFAULT_PREFIX = "torchinstruments"

_ROOT = "@root"
_WITHOUT_CALLS = (Signal.PARAMETER, Signal.PARAMETER_GRADIENT)


def checked_prefix(prefix: object) -> str:
    """Returns a prefix without blanks and slashes around it.

    Raises:
        ConfigurationError: It is no text, or nothing is left of it.
    """
    stripped = prefix.strip().strip("/").strip() if isinstance(prefix, str) else ""
    if not stripped:
        raise ConfigurationError(
            f"prefix={prefix!r} is not possible; give a text such as {DEFAULT_PREFIX!r}, under which the "
            f"values stand apart from those of the training itself"
        )
    return stripped


@lru_cache(maxsize=8192)
def quoted(segment: str) -> str:
    """Returns a segment with everything percent-quoted but letters, digits and ``._-~``."""
    return quote(segment, safe="", errors="backslashreplace")


def tensor_tag(
    prefix: str,
    layer: str,
    call_index: int,
    tensor_path: str,
    backward_index: int,
    signal: Signal = Signal.OUTPUT,
    stage: str = "",
) -> str:
    """Returns what the names of all values of one tensor begin with.

    Args:
        prefix: As `checked_prefix` returns it.
        layer: As in `ModuleRecord`; ``""`` is the root.
        call_index: Ordinal of the layer's call in its forward.
        tensor_path: As in `Measurement`.
        backward_index: As in `Measurement`.
        signal: As in `Measurement`.
        stage: As in `Measurement`.
    """
    where = _ROOT if layer == "" else quoted(layer)
    traversal = f"/backward_{backward_index}" if backward_index else ""
    group = f"{signal.value}s" if signal in _WITHOUT_CALLS else f"call_{call_index}"
    moment = f"/{stage}" if stage else ""
    return f"{prefix}/modules/{where}/{group}/{quoted(tensor_path)}{moment}{traversal}"
