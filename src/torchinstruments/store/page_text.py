"""Text of programs, such as names of layers, as it may stand in a page of Markdown.

Such a text stays on its line, is cut, and is neither link, nor HTML, nor the end of what it stands in.
"""

import re
from collections.abc import Iterable, Sequence

import pyarrow as pa

__all__ = ["as_code", "as_plain", "bullets", "column_type", "names_text"]

_MAX_NAMES = 15
_MAX_NAME_BYTES = 64
_MARKUP = re.compile(r"[\\<\[\]|&]")


def as_plain(text: str, most_bytes: int = _MAX_NAME_BYTES) -> str:
    """Returns text for outside of a code span: cut, and neither link, nor HTML, nor cell of a table."""
    return _MARKUP.sub(r"\\\g<0>", _cut(text.replace("`", "'"), most_bytes))


def as_code(text: str, most_bytes: int = _MAX_NAME_BYTES) -> str:
    """Returns text as a code span that it cannot end."""
    return f"`{_cut(text.replace('`', chr(39)), most_bytes)}`"


def names_text(names: Sequence[str]) -> str:
    """Returns the first names as code, and how many more there are."""
    shown = ", ".join(as_code(name) for name in names[:_MAX_NAMES])
    more = len(names) - _MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def bullets(lines: Iterable[str]) -> str:
    """Returns a list of lines that may stand in a page."""
    return "".join(f"* {line}\n" for line in lines)


def column_type(field: pa.Field) -> str:
    """Returns the type of a column as pages name it; ``?`` where it may be null."""
    kind = _kind(field.type)
    return f"{kind} ?" if field.nullable else kind


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind):
        return "time, UTC"
    # Angle brackets would be markup.
    return f"list of {_kind(kind.value_type)}" if pa.types.is_list(kind) else str(kind)


def _cut(text: str, most_bytes: int) -> str:
    """Returns text on one line, cut, so that a page of any run stays small and its lists stay lists.

    What a terminal would obey stands there as Python escapes it.
    """
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)
    data = line.encode("utf-8", "replace")
    return line if len(data) <= most_bytes else data[: most_bytes - 3].decode("utf-8", "ignore") + "…"
