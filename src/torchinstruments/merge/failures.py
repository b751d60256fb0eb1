"""Errors of a merge that name the rank they happened with."""

from typing import TypeVar

from torchinstruments.errors import TorchInstrumentsError

__all__ = ["of_rank"]

_Error = TypeVar("_Error", bound=TorchInstrumentsError)


def of_rank(rank: int, error: _Error) -> _Error:
    """Returns an error, with the rank among its `failures` (any worker; it travels with the error)."""
    error.failures = {**error.failures, rank: str(error)}
    return error
