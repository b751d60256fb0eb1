"""Names of layers, signals and forwards as they stand in pictures."""

import html
from collections.abc import Iterable, Mapping, Sequence

from torchinstruments.report.texts import shown_text

__all__ = ["forward_label", "label_text", "layer_label", "signal_label", "stretch_labels", "tensor_text"]

_MAX_LABEL_CHARACTERS = 120
_USUAL_PATHS = frozenset({"output", "output.0", "input", "input.0"})


def label_text(text: str) -> str:
    """Returns a text for plotly, which reads labels as markup: escaped, on one line, shortened."""
    return html.escape(shown_text(text, _MAX_LABEL_CHARACTERS), quote=False)


def layer_label(row: Mapping[str, object]) -> str:
    """Returns which tensor of which layer a row of ``overview.parquet`` is of, not escaped."""
    name = str(row["layer"]) or "(root)"
    if row["call_index"]:
        name += f" call {row['call_index']}"
    # An output and its gradient have one label, so that a chosen layer stays the chosen one.
    path = str(row["tensor_path"]).removeprefix("grad_")
    if path not in _USUAL_PATHS:
        name += f" {path}"
    return name if row["scope"] == "local" else f"{name} (part)"


def tensor_text(row: Mapping[str, object]) -> str:
    """Returns the label of a tensor always with its path, as in ``history``; not escaped."""
    name, path = layer_label(row), str(row["tensor_path"])
    return name if path in name.split() else f"{name} {path}"


def signal_label(row: Mapping[str, object]) -> str:
    """Returns which signal a row of ``overview.parquet`` is of, and when it was taken; not escaped."""
    name = f"{row['signal']} {row['stage']}".rstrip()
    if row["mode"] != "train":
        name += f", {row['mode']}"
    return f"{name}, traversal {row['backward_index']}" if row["backward_index"] else name


def forward_label(row: Mapping[str, object], *, names_generation: bool) -> str:
    """Returns where in the run a row of ``overview.parquet`` was measured."""
    parts = [f"generation {row['generation']}"] if names_generation else []
    if row["attempt"] is None:
        parts.append(f"forward {row['forward_index']}")
    else:
        parts.append(f"attempt {row['attempt']}")
        if row["forward_in_attempt"]:
            parts.append(f"forward {row['forward_in_attempt']}")
    return ", ".join(parts)


def stretch_labels(stretches: Iterable[Sequence[int]]) -> list[str]:
    """Returns the label of each stretch, of generation, first and last number; ``g1:`` is generation 1."""
    held = list(stretches)
    is_one = len({one[0] for one in held}) < 2
    return [
        ("" if is_one else f"g{generation}: ") + (f"{first}" if first == last else f"{first}-{last}")
        for generation, first, last in held
    ]
