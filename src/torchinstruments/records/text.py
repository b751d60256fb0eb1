"""Texts of the program's as every table and document can hold them."""

__all__ = [
    "error_text",
    "storable",
]


def storable(text: str) -> str:
    """Returns a text as every table and document can hold it: lone surrogates become their escapes.

    File names that are not UTF-8 bring them. It is for wherever a text of the program's comes in (any
    thread, hot path).
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException, max_characters: int = 500) -> str:
    """Returns the message of an exception on one line and storable; it never raises (any thread)."""
    try:
        return storable(" ".join(str(error).split())[:max_characters])
    except Exception:  # noqa: BLE001 - an exception whose text fails is still one that is counted
        return "(its message could not be read)"
