"""The reducers of an observer: the default ones, what they are called, and whether a choice can work."""

from collections.abc import Iterable

from torchinstruments.errors import ConfigurationError
from torchinstruments.statistics.contract import Reducer, Scalar, known_metrics, reducer_name
from torchinstruments.statistics.profile import ExactProfile

__all__ = ["Reducer", "Scalar", "default_reducers", "metric_names", "validate_reducers"]


def default_reducers() -> tuple[Reducer, ...]:
    """Returns the reducers of an observer that was given none: the exact profile of nine statistics."""
    return (ExactProfile(),)


def metric_names(reducers: Iterable[Reducer]) -> tuple[str, ...]:
    """Returns the metric names that are known beforehand, in the order of the reducers."""
    return tuple(name for reducer in reducers for name in known_metrics(reducer))


def validate_reducers(reducers: Iterable[Reducer]) -> tuple[Reducer, ...]:
    """Returns the reducers as a tuple if they can work together.

    Args:
        reducers: Callables from a tensor to named scalars.

    Raises:
        ConfigurationError: Not a collection, an empty one, something in it that cannot be called, or the same
            metric declared twice.
    """
    if callable(reducers) or isinstance(reducers, str) or not isinstance(reducers, Iterable):
        raise ConfigurationError(
            f"reducers={reducers!r} is not a collection of reducers; give a tuple, such as (my_reducer,)"
        )
    given = tuple(reducers)
    if not given:
        raise ConfigurationError(
            "reducers is empty, so nothing would be measured; leave it out for the default ones, or give one"
        )
    owner: dict[str, str] = {}
    for reducer in given:
        if not callable(reducer):
            raise ConfigurationError(
                f"reducers holds {reducer!r}, which cannot be called; "
                f"give callables from a tensor to named scalars"
            )
        for metric in known_metrics(reducer):
            if metric in owner:
                raise ConfigurationError(
                    f"reducers measure {metric!r} twice, in {owner[metric]} and in {reducer_name(reducer)}; "
                    f"leave one of them out or rename its metric"
                )
            owner[metric] = reducer_name(reducer)
    return given
