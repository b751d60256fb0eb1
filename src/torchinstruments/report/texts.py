"""Texts as people read them: counts with their noun, and anybody's names without what moves a cursor."""

__all__ = ["count_text", "shown_text"]

_MAX_SHOWN_CHARACTERS = 1000


def shown_text(text: str, max_characters: int = _MAX_SHOWN_CHARACTERS) -> str:
    r"""Returns a text as a line can show it: control characters as ``\x1b``, a long one without middle."""
    if len(text) > max_characters:
        half = max_characters // 2
        text = f"{text[:half]}...{text[-half:]}"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def count_text(number: int, singular: str, plural: str = "") -> str:
    """Returns a count with its noun: ``1 file``, ``2,000 files``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
