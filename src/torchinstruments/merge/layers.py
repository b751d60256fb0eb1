"""The section ``layers`` of ``result.json``: what each rank measured, and which ranks lie lowest and highest.

Ranks are folded in ascending order, so that ties go to the lowest rank and the same input gives the same
bytes. Nothing here is a mean over ranks: an extremum over ranks names the rank that holds it.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.records import ModuleRecord
from torchinstruments.store.entries import entries, number
from torchinstruments.store.row_blocks import LATEST_COLUMNS
from torchinstruments.store.series import SeriesKey
from torchinstruments.store.summaries import SeriesSummaries

__all__ = ["SUMMARY_FILE", "LayerFold"]

SUMMARY_FILE = "summary.parquet"

_TensorKey = tuple[str, int, str, str, str]

_MAX_HELD = 8
"""Kinds of ranks, with other series or other texts, that the next rank is compared with."""

_TEXT_NAMES = {"shape": "latest_shape"}

_NOT_COMPARED: Mapping[str, object] = {"compared_cells": 0, "cells_where_mad_is_zero": 0, "furthest": None}
"""Said of a series that no two ranks have a value of at one forward."""


class _Extreme:
    """The lowest value over ranks of each series, or the highest."""

    def __init__(self, sign: float) -> None:
        self._sign = sign
        self._value: npt.NDArray[np.float64] = np.zeros(0)
        self._rank: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._sample_id: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def reserve(self, size: int) -> None:
        more = size - len(self._value)
        self._value = np.concatenate([self._value, np.full(more, np.nan)])
        self._rank = np.concatenate([self._rank, np.zeros(more, np.int64)])
        self._sample_id = np.concatenate([self._sample_id, np.zeros(more, np.int64)])

    def add(
        self,
        series: npt.NDArray[np.int64],
        rank: int,
        values: npt.NDArray[np.float64],
        sample_ids: npt.NDArray[np.int64],
    ) -> None:
        held = self._value[series]
        better = ~np.isnan(values) & (np.isnan(held) | (self._sign * values < self._sign * held))
        chosen = series[better]
        self._value[chosen] = values[better]
        self._sample_id[chosen] = sample_ids[better]
        self._rank[chosen] = rank

    def ranks(self) -> npt.NDArray[np.int64]:
        return self._rank[~np.isnan(self._value)]

    def record(self, series: int) -> dict[str, object] | None:
        value = number(float(self._value[series]))
        if value is None:
            return None
        return {"rank": int(self._rank[series]), "value": value, "sample_id": int(self._sample_id[series])}


class _Tensor:
    """What is known of a tensor beside its numbers, over ranks.

    Args:
        place: Its number among all tensors.
    """

    def __init__(self, place: int) -> None:
        self.place = place
        self.statistics: list[int] = []

    def record(
        self, texts: Mapping[str, "_Texts"], lowest: float | None, highest: float | None
    ) -> dict[str, object]:
        found: dict[str, object] = {}
        differs: dict[str, object] = {}
        for name, of_tensors in texts.items():
            by_text = of_tensors.of_tensor(self.place)
            shown = _TEXT_NAMES.get(name, name)
            found[shown] = next(iter(by_text)) if len(by_text) == 1 else None
            if len(by_text) > 1:
                differs[shown] = {text: ranks_text(by_text[text]) for text in sorted(by_text)}
        found["loss_scale"] = None if lowest is None else {"lowest": lowest, "highest": highest}
        if differs:
            found["ranks_differ_in"] = differs
        return found


class _Texts:
    """A text of each tensor, over ranks; most ranks have the same ones."""

    def __init__(self) -> None:
        self._found: list[tuple[npt.NDArray[np.int64], list[str], list[int]]] = []
        self._by_tensor: dict[int, dict[str, list[int]]] = {}

    def add(self, rank: int, tensors: npt.NDArray[np.int64], texts: list[str]) -> None:
        for held_tensors, held, ranks in self._found[-_MAX_HELD:]:
            if held_tensors is tensors and held == texts:
                ranks.append(rank)
                return
        self._found.append((tensors, texts, [rank]))

    def of_tensor(self, tensor: int) -> dict[str, list[int]]:
        """Returns each text with its ranks; to be asked once all ranks were added."""
        for tensors, texts, ranks in self._found:
            for one, text in zip(tensors.tolist(), texts, strict=True):
                self._by_tensor.setdefault(one, {}).setdefault(text, []).extend(ranks)
        self._found.clear()
        return self._by_tensor[tensor]


class _Series:
    """The series of a rank; most ranks have the same ones.

    Args:
        keys: Their keys, ascending, so that the statistics of a tensor lie together.
        numbers: Their numbers among those of all ranks.
        tensor_of: The number of the tensor of each.
    """

    def __init__(
        self,
        keys: tuple[SeriesKey, ...],
        numbers: npt.NDArray[np.int64],
        tensor_of: npt.NDArray[np.int64],
    ) -> None:
        self.keys, self.numbers = keys, numbers
        self.layers = {key.layer for key in keys}
        self._starts = np.flatnonzero(np.append(True, tensor_of[1:] != tensor_of[:-1]))
        self._lengths = np.diff(np.append(self._starts, len(tensor_of)))
        self.tensors = tensor_of[self._starts]

    def newest(self, sample_id: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns for each tensor which of its series has the highest sample; of equal ones the first."""
        highest = np.repeat(np.maximum.reduceat(sample_id, self._starts), self._lengths)
        places = np.where(sample_id == highest, np.arange(len(sample_id)), len(sample_id))
        return np.minimum.reduceat(places, self._starts)


class LayerFold:
    """Gathers the summaries and catalogs of all ranks.

    Args:
        metrics: Statistics in the order in which they are listed; others follow by name.
        inline: Whether each rank's own summary stands in the section; else it stands in ``summary.parquet``.
    """

    def __init__(self, metrics: Sequence[str], *, inline: bool) -> None:
        self._metric_order = {name: place for place, name in enumerate(metrics)}
        self._inline = inline
        self._numbers: dict[SeriesKey, int] = {}
        self._tensors: dict[_TensorKey, _Tensor] = {}
        self._texts = {name: _Texts() for name in LATEST_COLUMNS}
        self._scale_lowest: npt.NDArray[np.float64] = np.zeros(0)
        self._scale_highest: npt.NDArray[np.float64] = np.zeros(0)
        self._modules: dict[str, ModuleRecord] = {}
        self._aliases: dict[str, list[str]] = {}
        self._layer_ranks: dict[str, set[int]] = {}
        self._shown: list[tuple[int, SeriesSummaries, npt.NDArray[np.int64]]] = []
        self._entries: dict[int, dict[str, dict[str, object]]] = {}
        self._num_ranks: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._series: deque[_Series] = deque(maxlen=_MAX_HELD)
        self._compared: Mapping[SeriesKey, Mapping[str, object]] = {}
        self._combined: Mapping[SeriesKey, Mapping[str, object]] = {}
        self._lowest, self._highest = _Extreme(1.0), _Extreme(-1.0)
        self._latest_lowest, self._latest_highest = _Extreme(1.0), _Extreme(-1.0)

    def add_modules(self, rank: int, modules: Iterable[ModuleRecord]) -> None:
        """Takes the catalog of a rank; the first record of a layer gives its type."""
        for module in modules:
            self._modules.setdefault(module.layer, module)
            self._layer_ranks.setdefault(module.layer, set()).add(rank)
            aliases = self._aliases.setdefault(module.layer, [])
            aliases += [alias for alias in module.aliases if alias not in aliases]

    def add_rank(self, rank: int, summaries: SeriesSummaries) -> None:
        """Takes the summaries of a rank; ranks come in ascending order."""
        if len(summaries) == 0:
            return
        own = self._series_of(summaries.keys)
        series = own.numbers
        self._num_ranks[series] += 1
        low, high, latest = summaries.minimum, summaries.maximum, summaries.latest
        self._lowest.add(series, rank, low.value, low.sample_id)
        self._highest.add(series, rank, high.value, high.sample_id)
        self._latest_lowest.add(series, rank, latest.value, latest.sample_id)
        self._latest_highest.add(series, rank, latest.value, latest.sample_id)
        self._add_tensors(rank, summaries, own)
        if self._inline:
            self._shown.append((rank, summaries, series))

    @property
    def num_series(self) -> int:
        """Series of all ranks."""
        return len(self._numbers)

    @property
    def series_by_metric(self) -> dict[str, int]:
        """Statistic to the number of its series."""
        return dict(Counter(key.metric for key in self._numbers))

    def extreme_ranks(self) -> list[int]:
        """Returns the ranks that hold an extremum of any series, those that hold most of them first."""
        held = (
            one.ranks() for one in (self._lowest, self._highest, self._latest_lowest, self._latest_highest)
        )
        ranks, counts = np.unique(np.concatenate(list(held)), return_counts=True)
        return ranks[np.lexsort((ranks, -counts))].tolist()

    def records(
        self,
        compared: Mapping[SeriesKey, Mapping[str, object]],
        combined: Mapping[SeriesKey, Mapping[str, object]],
    ) -> list[dict[str, object]]:
        """Returns a record of every layer: in catalog order, then those that no catalog lists.

        Args:
            compared: What the comparison says of each series, see `ComparisonFold.of_series`.
            combined: Numbers of whole tensors, see `ComparisonFold.combined`.
        """
        self._compared, self._combined = compared, combined
        for rank, summaries, series in self._shown:
            own = entries(summaries, range(len(summaries)))
            for number_of, one in zip(series.tolist(), own, strict=True):
                self._entries.setdefault(number_of, {})[str(rank)] = one
        by_layer: dict[str, list[tuple[_TensorKey, _Tensor]]] = {}
        for key in sorted(self._tensors):
            by_layer.setdefault(key[0], []).append((key, self._tensors[key]))
        keys = list(self._numbers)
        listed = [*self._modules, *(layer for layer in by_layer if layer not in self._modules)]
        return [self._layer_record(layer, by_layer.get(layer, []), keys) for layer in listed]

    def _layer_record(
        self, layer: str, tensors: list[tuple[_TensorKey, _Tensor]], keys: list[SeriesKey]
    ) -> dict[str, object]:
        module = self._modules.get(layer)
        return {
            "layer": layer,
            "type": module.type if module else None,
            "aliases": self._aliases.get(layer, []),
            "ranks": ranks_text(self._layer_ranks.get(layer, ())),
            "tensors": [
                {
                    "call_index": key[1],
                    "signal": key[2],
                    "stage": key[3],
                    "tensor_path": key[4],
                    **tensor.record(
                        self._texts,
                        number(float(self._scale_lowest[tensor.place])),
                        number(float(self._scale_highest[tensor.place])),
                    ),
                    "statistics": [self._statistic(one, keys[one]) for one in self._ordered(tensor, keys)],
                }
                for key, tensor in tensors
            ],
        }

    def _ordered(self, tensor: _Tensor, keys: list[SeriesKey]) -> list[int]:
        last = len(self._metric_order)
        ranked = sorted(
            (self._metric_order.get(keys[one].metric, last), keys[one].metric, one)
            for one in tensor.statistics
        )
        return [one for _, _, one in ranked]

    def _statistic(self, one: int, key: SeriesKey) -> dict[str, object]:
        record: dict[str, object] = {"metric": key.metric}
        if self._inline:
            record["ranks"] = self._entries[one]
        else:
            record["ranks_in"] = SUMMARY_FILE
        record["across_ranks"] = {
            "ranks": int(self._num_ranks[one]),
            "lowest": self._lowest.record(one),
            "highest": self._highest.record(one),
            "latest": {
                "lowest": self._latest_lowest.record(one),
                "highest": self._latest_highest.record(one),
            },
            **self._compared.get(key, _NOT_COMPARED),
        }
        record["combined"] = self._combined.get(key)
        return record

    def _series_of(self, keys: tuple[SeriesKey, ...]) -> _Series:
        for held in self._series:
            if held.keys == keys:
                return held
        numbers = np.array([self._number_of(key) for key in keys], np.int64)
        tensor_of = np.array([self._tensors[key[:5]].place for key in keys], np.int64)
        self._reserve(len(self._numbers))
        more = np.full(len(self._tensors) - len(self._scale_lowest), np.nan)
        self._scale_lowest = np.append(self._scale_lowest, more)
        self._scale_highest = np.append(self._scale_highest, more)
        self._series.append(_Series(keys, numbers, tensor_of))
        return self._series[-1]

    def _number_of(self, key: SeriesKey) -> int:
        one = self._numbers.get(key)
        if one is None:
            one = self._numbers[key] = len(self._numbers)
            self._tensors.setdefault(key[:5], _Tensor(len(self._tensors))).statistics.append(one)
        return one

    def _add_tensors(self, rank: int, summaries: SeriesSummaries, own: _Series) -> None:
        newest = own.newest(summaries.latest.sample_id)
        for layer in own.layers:
            self._layer_ranks.setdefault(layer, set()).add(rank)
        places = newest.tolist()
        for name, texts in self._texts.items():
            found = summaries.latest_texts[name]
            texts.add(rank, own.tensors, [found[place] for place in places])
        lowest, highest = summaries.loss_scale_lowest[newest], summaries.loss_scale_highest[newest]
        self._scale_lowest[own.tensors] = np.fmin(self._scale_lowest[own.tensors], lowest)
        self._scale_highest[own.tensors] = np.fmax(self._scale_highest[own.tensors], highest)

    def _reserve(self, size: int) -> None:
        if size <= len(self._num_ranks):
            return
        size = max(size, 2 * len(self._num_ranks))
        self._num_ranks = np.concatenate([self._num_ranks, np.zeros(size - len(self._num_ranks), np.int64)])
        for extreme in (self._lowest, self._highest, self._latest_lowest, self._latest_highest):
            extreme.reserve(size)
