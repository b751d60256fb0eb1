"""Keeps what fails inside a check from whoever called it, and says so in the report."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import error_text

__all__ = ["guarded", "internal_error"]


def internal_error(error: BaseException) -> str:
    """Returns the reason under which an exception of this package's own stands in a report."""
    return f"internal_error: {type(error).__name__}: {error_text(error)}"


class guarded(AbstractContextManager["guarded"]):  # noqa: N801 - reads as what it surrounds
    """A context that lets no exception out but what the caller is to be told of a wrong argument.

    Args:
        name: Of the check.
        unavailable: Takes the name and the reason.
    """

    def __init__(self, name: str, unavailable: Callable[[str, str], None]) -> None:
        self._name = name
        self._unavailable = unavailable
        self.has_failed = False
        """Whether there was one."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Keeps an exception in."""
        if not isinstance(error, Exception) or isinstance(error, ConfigurationError):
            return False
        self.has_failed = True
        self._unavailable(self._name, internal_error(error))
        return True
