"""The reducers that users choose from, what they are called, and whether a choice can work."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Absent
from torchinstruments.statistics.contract import Reducer, Scalar, known_metrics, reducer_name
from torchinstruments.statistics.fact_columns import FactColumns, ValueTable, moment_table
from torchinstruments.statistics.facts import EMPTY, MOMENT_METRICS, Facts, moment_numbers, moment_values
from torchinstruments.statistics.measuring import FactsReducer, look
from torchinstruments.statistics.profile import ExactProfile

__all__ = [
    "Reducer",
    "Scalar",
    "combine",
    "default_reducers",
    "finite_fraction",
    "max_abs",
    "mean",
    "metric_names",
    "rms",
    "std",
    "validate_reducers",
]


@dataclass(frozen=True, slots=True)
class MomentReducer(FactsReducer):
    """One statistic that needs no order of the entries; exact over all finite ones.

    Attributes:
        metric: One of ``mean``, ``std``, ``rms``, ``max_abs`` and ``finite_fraction``.
    """

    metric: str = "mean"

    @property
    @override
    def metrics(self) -> tuple[str, ...]:
        """The name of the statistic."""
        return (self.metric,)

    @property
    @override
    def is_ordered(self) -> bool:
        """Sums need no order."""
        return False

    @override
    def values(self, facts: Facts) -> Mapping[str, float | Absent]:
        """Returns the statistic by its name."""
        return {self.metric: moment_values(facts)[self.metric]}

    @override
    def numbers(self, facts: Facts) -> Sequence[float] | None:
        """Returns the statistic where it is not missing."""
        found = moment_numbers(facts)
        if found is None:
            return FactsReducer.numbers(self, facts)
        return (found[MOMENT_METRICS.index(self.metric)],)

    @override
    def table(self, columns: FactColumns) -> ValueTable:
        """Returns the statistic of many tensors."""
        return moment_table(columns).column(MOMENT_METRICS.index(self.metric))


@dataclass(frozen=True, slots=True)
class CombinedReducer:
    """Several reducers as one; `combine` makes it.

    Attributes:
        parts: Reducers, none of them a combined one, whose known metrics differ.
    """

    parts: tuple[Reducer, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names that are known beforehand."""
        return metric_names(self.parts)

    def __call__(self, tensor: torch.Tensor, /) -> Mapping[str, Scalar]:
        """Returns the scalars of all parts; those that can share one look at the tensor do.

        Raises:
            ValueError: Two parts return the same metric.
        """
        looking = [part for part in self.parts if isinstance(part, FactsReducer)]
        facts = _shared_facts(looking, tensor) if looking else EMPTY
        results: dict[str, Scalar] = {}
        for part in self.parts:
            scalars = part.values(facts) if isinstance(part, FactsReducer) else part(tensor)
            for metric, value in scalars.items():
                if metric in results:
                    raise ValueError(f"{reducer_name(part)} returned the duplicate metric {metric!r}")
                results[metric] = value
        return results


def mean() -> Reducer:
    """Returns a reducer for the mean of all finite entries, ``mean``."""
    return MomentReducer(metric="mean")


def std() -> Reducer:
    """Returns a reducer for the population standard deviation of all finite entries, ``std``."""
    return MomentReducer(metric="std")


def rms() -> Reducer:
    """Returns a reducer for the root of the mean square of all finite entries, ``rms``."""
    return MomentReducer(metric="rms")


def max_abs() -> Reducer:
    """Returns a reducer for the largest absolute value of all finite entries, ``max_abs``."""
    return MomentReducer(metric="max_abs")


def finite_fraction() -> Reducer:
    """Returns a reducer for the share of entries that are finite, ``finite_fraction``."""
    return MomentReducer(metric="finite_fraction")


def combine(*reducers: Reducer) -> CombinedReducer:
    """Returns several reducers as one that looks at each tensor once for all that can share a look.

    ::

        inject_observer(model, reducers=(combine(mean(), std(), rms(), max_abs(), finite_fraction()),))

    Example:
        >>> import torch
        >>> from torchinstruments import combine, finite_fraction, max_abs
        >>> dict(combine(max_abs(), finite_fraction())(torch.tensor([3.0, -4.0, float("nan"), 0.0])))
        {'max_abs': 4.0, 'finite_fraction': 0.75}

    Args:
        reducers: At least one. Combined ones are taken apart.

    Raises:
        ConfigurationError: None, something that cannot be called, or the same metric declared twice.
    """
    if not reducers:
        raise ConfigurationError("combine() of no reducers would measure nothing; give it at least one")
    return CombinedReducer(_checked(reducers, "combine()"))


def default_reducers() -> tuple[Reducer, ...]:
    """Returns the reducers of an observer that was given none: the exact profile of nine statistics."""
    return (ExactProfile(),)


def metric_names(reducers: Iterable[Reducer]) -> tuple[str, ...]:
    """Returns the metric names that are known beforehand, in the order of the reducers."""
    return tuple([name for reducer in reducers for name in known_metrics(reducer)])


def validate_reducers(reducers: Iterable[Reducer] | CombinedReducer) -> tuple[Reducer, ...]:
    """Returns the reducers as a tuple if they can work together.

    Args:
        reducers: Callables from a tensor to named scalars, or what `combine` returns. Combined reducers are
            taken apart: a batch isolates their parts from each other, and lets them share a look anyway.

    Raises:
        ConfigurationError: Not a collection, an empty one, something in it that cannot be called, or the same
            metric declared twice.
    """
    if isinstance(reducers, CombinedReducer):
        return reducers.parts
    if callable(reducers) or isinstance(reducers, str) or not isinstance(reducers, Iterable):
        raise ConfigurationError(
            f"reducers={reducers!r} is not a collection of reducers; give a tuple, such as (my_reducer,)"
        )
    given = tuple(reducers)
    if not given:
        raise ConfigurationError(
            "reducers is empty, so nothing would be measured; leave it out for the default ones, or give one"
        )
    return _checked(given, "reducers")


def _shared_facts(looking: Sequence[FactsReducer], tensor: torch.Tensor) -> Facts:
    """Returns the facts of a tensor for several reducers."""
    is_ordered = any(reducer.is_ordered for reducer in looking)
    max_scratch_bytes = min(reducer.max_scratch_bytes for reducer in looking)
    return look(tensor, is_ordered=is_ordered, max_scratch_bytes=max_scratch_bytes).facts


def _checked(reducers: tuple[Reducer, ...], where: str) -> tuple[Reducer, ...]:
    """Returns the reducers with combined ones taken apart.

    Raises:
        ConfigurationError: One cannot be called, or a metric is declared twice.
    """
    for reducer in reducers:
        if not callable(reducer):
            raise ConfigurationError(
                f"{where} holds {reducer!r}, which cannot be called; "
                f"give callables from a tensor to named scalars"
            )
    flat = tuple(
        [
            part
            for reducer in reducers
            for part in (reducer.parts if isinstance(reducer, CombinedReducer) else (reducer,))
        ]
    )
    owner: dict[str, str] = {}
    for reducer in flat:
        for metric in known_metrics(reducer):
            if metric in owner:
                raise ConfigurationError(
                    f"{where} would measure {metric!r} twice, in {owner[metric]} and in "
                    f"{reducer_name(reducer)}; leave one of them out or rename its metric"
                )
            owner[metric] = reducer_name(reducer)
    return flat
