"""Whether a run has any value at all, and why not: for the one warning that says so at its close."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from torchinstruments.records import Reason, Sample

__all__ = ["Yield"]

_CODES = frozenset(reason.value for reason in Reason)
_WAYS_OUT: Mapping[str, str] = {
    Reason.INSIDE_COMPILED: (
        "nothing is seen inside a compiled region; give compiled='force_eager', or compile less of it"
    ),
    Reason.INSIDE_FUSED: "select the fused layer itself, or measure forwards with gradients",
    Reason.SCRIPTED_MODULE: "scripted modules take no hooks; select modules around them",
    Reason.NO_GRADIENT: "no backward reached what was selected; select layers that have gradients",
    Reason.EMPTY: "every tensor was empty",
    Reason.REDUCER_ERROR: "the errors in the manifest say what the reducers raised",
    Reason.META_TENSOR: "meta tensors have no entries; measure the model after it has its parameters",
}
_OTHER_CODE = "a reason of its own"


class Yield:
    """Looks at samples until one has a value (writer thread)."""

    def __init__(self) -> None:
        self._has_value = False
        self._reasons: Counter[str] = Counter()

    def add(self, sample: Sample) -> None:
        """Takes one delivery; costs nothing once there was a value (writer thread)."""
        if self._has_value:
            return
        columns = sample.columns
        if columns is not None and not np.isnan(columns.values).all():
            self._has_value = True
            return
        for one in sample.measurements:
            if any(value is not None for value in one.values):
                self._has_value = True
                return
            for reason in one.reasons:
                code = reason.partition(":")[0]
                self._reasons[code if code in _CODES else _OTHER_CODE] += 1

    def emptiness(self) -> str:
        """Returns why not one row has a value, as the second half of a sentence; ``""`` where one has.

        (Closing thread.)
        """
        # A copy, since the writer thread may go on where it was too slow for the close.
        reasons = dict(self._reasons)
        if self._has_value or not reasons:
            return ""
        count, code = max((count, code) for code, count in reasons.items())
        total = sum(reasons.values())
        way_out = _WAYS_OUT.get(code, "docs/what-is-seen.md says what is measured of a model")
        return f"{count} of {total} rows say {code!r}: {way_out}"
