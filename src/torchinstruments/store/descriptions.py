"""What the rows of one measurement have in common, and why some of them have no value, as arrays.

All rows of a tensor share a *description* (layer, call, signal, path, metric names, ...), which is looked up
once a measurement; everything else is a gather by NumPy.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.records import Description, Reason
from torchinstruments.store.columns import integers, text_column
from torchinstruments.store.texts import encodable_texts

__all__ = ["Descriptions", "Reasons", "interned"]

_Key = TypeVar("_Key")
_Integers = npt.NDArray[np.int64]
_Codes = npt.NDArray[np.int32]

_SORT_FIELDS = ("layer_index", "call_index", "signal", "stage", "tensor_path", "backward_index")
_TEXT_FIELDS = ("signal", "stage", "tensor_path", "layer", "mode", "scope", "replica_key", "execution")
_TEXT_FIELDS += ("dtype", "device")


class Descriptions:
    """The distinct descriptions of a table, as arrays to gather from.

    Args:
        keys: The descriptions.

    Attributes:
        sort_rank: Rank by the inner order of a part without sample and metric; equal where that is.
        num_metrics: Metrics of each description.
        first_metric: Where those of each begin in `metric_order` and `metric_codes`.
        metric_order: For each description its metrics' positions, in the order of their names.
        metric_codes: For each description its metrics in that order, as indices into `metric_names`.
        metric_names: Distinct names.
        call_index: Call index of each description.
        backward_index: Traversal of each description.
        grad_enabled: Whether gradients were enabled, of each description.
    """

    def __init__(self, keys: Sequence[Description]) -> None:
        columns = zip(*keys, strict=True) if keys else ((),) * len(Description._fields)
        self._fields: dict[str, tuple[Any, ...]] = dict(zip(Description._fields, columns, strict=True))
        for name in _TEXT_FIELDS:
            self._fields[name] = encodable_texts(self._fields[name])
        sort_keys = list(zip(*[self._fields[name] for name in _SORT_FIELDS], strict=True))
        ranks = {key: rank for rank, key in enumerate(sorted(set(sort_keys)))}
        self.sort_rank = integers([ranks[key] for key in sort_keys])
        self.call_index = np.array(self._fields["call_index"], np.int32)
        self.backward_index = np.array(self._fields["backward_index"], np.int32)
        self.grad_enabled = np.array(self._fields["grad_enabled"], np.bool_)
        given: tuple[tuple[str, ...], ...] = self._fields["metrics"]
        cleaned = {names: encodable_texts(names) for names in set(given)}
        metrics = tuple([cleaned[names] for names in given])
        self.num_metrics = integers([len(names) for names in metrics])
        self.first_metric = np.cumsum(self.num_metrics) - self.num_metrics
        orders = {names: sorted(range(len(names)), key=names.__getitem__) for names in set(metrics)}
        self.metric_order = integers(chain.from_iterable(orders[names] for names in metrics))
        codes = {name: code for code, name in enumerate(sorted({n for names in orders for n in names}))}
        self.metric_names = list(codes)
        self.metric_codes = integers(
            codes[names[slot]] for names in metrics for slot in orders[names]
        ).astype(np.int32)

    def text(self, name: str, descriptions: _Codes) -> pa.Array:
        """Returns one text field of the given descriptions as a dictionary."""
        return text_column(self._fields[name], descriptions)


class Reasons:
    """Why some values of a table are missing, as codes.

    Args:
        given: Reasons by the place of the value.
        count: How many values there are.

    Attributes:
        texts: Distinct reasons.
        codes: The reason of each value, as an index into `texts`.
        none: Index of the empty text.
        nonfinite: Index of the reason for a value that came without one.
    """

    def __init__(self, given: Mapping[int, str], count: int) -> None:
        codes: dict[str, int] = {"": 0, Reason.NONFINITE_RESULT.value: 1}
        self.none, self.nonfinite = 0, 1
        texts = encodable_texts(given.values())
        self.codes: _Codes = np.zeros(count, np.int32)
        self.codes[[*given]] = [codes.setdefault(reason, len(codes)) for reason in texts]
        self.texts = list(codes)


def interned(keys: Iterable[_Key], count: int) -> tuple[list[_Key], _Codes]:
    """Returns the distinct keys in the order of first sight, and for each key its place among them."""
    codes: dict[_Key, int] = {}
    indices = np.fromiter((codes.setdefault(key, len(codes)) for key in keys), np.int32, count)
    return list(codes), indices
