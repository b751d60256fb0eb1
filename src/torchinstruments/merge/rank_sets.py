"""Sets of ranks as short text, ``0-7,12``: on the command line, and where long lists would stand often."""

from collections.abc import Iterable

from torchinstruments.errors import ConfigurationError

__all__ = ["MAX_RANKS", "parse_ranks", "ranks_text"]

_MAX_SPAN_CHARACTERS = 100

MAX_RANKS = 1_000_000
"""A world larger than this is a mistake."""


def ranks_text(ranks: Iterable[int]) -> str:
    """Returns ranks as text: sorted, each once, neighbours joined, ``0-7,12``; ``""`` for none."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def parse_ranks(text: str) -> frozenset[int]:
    """Returns the ranks that a text like ``0-7,12`` names.

    Raises:
        ConfigurationError: It is not of that form, or names none.
    """
    ranks: set[int] = set()
    for span in text.split(","):
        low, dash, high = (part.strip() for part in span.partition("-"))
        if not low.isdecimal() or (dash and not high.isdecimal()) or len(span) > _MAX_SPAN_CHARACTERS:
            raise ConfigurationError(_complaint(text))
        first, last = int(low), int(high) if dash else int(low)
        if last < first or last - first > MAX_RANKS:
            raise ConfigurationError(_complaint(text))
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def _complaint(text: str) -> str:
    return f"ranks {text!r} cannot be read; give ranks and ranges with commas between them, like 0-7,12"
