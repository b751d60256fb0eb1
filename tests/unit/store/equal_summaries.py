"""Whether summaries that were made in two ways are one and the same."""

import dataclasses
from typing import Any

import numpy as np

__all__ = ["same"]


def same(left: Any, right: Any) -> bool:
    """Whether two summaries are equal to the bit; NaN is itself."""
    if dataclasses.is_dataclass(left):
        return all(
            same(getattr(left, field.name), getattr(right, field.name)) for field in dataclasses.fields(left)
        )
    if isinstance(left, np.ndarray):
        if left.dtype != np.float64:
            return np.array_equal(left, right)
        # The sign of a zero counts as well.
        both = np.array_equal(left, right, equal_nan=True)
        return both and np.array_equal(np.signbit(left), np.signbit(right))
    return bool(left == right)
