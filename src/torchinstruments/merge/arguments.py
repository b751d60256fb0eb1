"""The arguments of `merge_run`, each checked by itself before anything is read."""

from collections.abc import Collection, Mapping
from numbers import Integral

from torchinstruments.errors import ConfigurationError
from torchinstruments.store.layout import MAX_RANK

__all__ = ["check_arguments", "ranks_asked_for"]


def check_arguments(*, inline_ranks: object, progress: object) -> None:
    """Refuses what cannot work.

    Raises:
        ConfigurationError: `inline_ranks` is no number of ranks, or `progress` cannot be called.
    """
    if not _is_number(inline_ranks):
        raise ConfigurationError(f"inline_ranks={inline_ranks!r} is not possible; give 0 or more, such as 16")
    if progress is not None and not callable(progress):
        raise ConfigurationError(
            f"progress={progress!r} cannot be called; give a function of the ranks done and of all, or None"
        )


def ranks_asked_for(ranks: object) -> frozenset[int] | None:
    """Returns the ranks that the caller wants merged, None for all.

    Raises:
        ConfigurationError: It is no collection of ranks, or an empty one.
    """
    if ranks is None:
        return None
    is_collection = isinstance(ranks, Collection) and not isinstance(ranks, (str, bytes, Mapping))
    if not is_collection or not all(_is_number(rank) for rank in ranks):
        raise ConfigurationError(
            f"ranks={ranks!r} is not possible; give a collection of numbers from 0 to {MAX_RANK}, such as "
            f"[0, 1], or None for all"
        )
    if not ranks:
        raise ConfigurationError(f"ranks={ranks!r} names no rank; give at least one, or None for all")
    return frozenset(int(rank) for rank in ranks)


def _is_number(value: object) -> bool:
    # NumPy's integers too; True and False are no ranks.
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) <= MAX_RANK
