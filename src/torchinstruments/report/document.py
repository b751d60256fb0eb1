"""Typed readers of the documents that the command line prints: what has another type is a fault of ours."""

from collections.abc import Mapping, Sequence

__all__ = ["Record", "as_integer", "as_list", "as_number", "as_record", "as_records"]

Record = Mapping[str, object]
"""A JSON object."""


def as_record(value: object) -> Record:
    """Returns a JSON object."""
    assert isinstance(value, Mapping)
    return value


def as_list(value: object) -> Sequence[object]:
    """Returns a JSON array."""
    assert isinstance(value, Sequence)
    return value


def as_records(value: object) -> list[Record]:
    """Returns an array of JSON objects."""
    return [as_record(one) for one in as_list(value)]


def as_integer(value: object) -> int:
    """Returns a JSON number without a fraction."""
    assert isinstance(value, int)
    return value


def as_number(value: object) -> float:
    """Returns a JSON number."""
    assert isinstance(value, (int, float))
    return float(value)
