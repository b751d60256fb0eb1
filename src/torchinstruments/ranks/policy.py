"""Which ranks observe: a name, a collection of ranks, or the user's own function of the identity."""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torchinstruments.config import RankPolicy
from torchinstruments.errors import ConfigurationError
from torchinstruments.records import Identity, storable

__all__ = ["Policy", "parse_policy"]

_ALLOWED = '"all", "rank0", "node", a collection of ranks such as [0, 3], or a callable of the identity'


@dataclass(frozen=True, slots=True)
class Policy:
    """A rank policy, parsed.

    Attributes:
        name: How ``run.json`` names it: ``all``, ``rank0``, ``node``, ``ranks:0,3`` or ``callable:<name>``.
        ranks: The listed ranks in order, where it lists some.
        chosen_by: The user's function, where it is one.
    """

    name: str
    ranks: tuple[int, ...] = ()
    chosen_by: Callable[[Identity], object] | None = None

    @property
    def alone(self) -> bool:
        """Whether rank 0 alone observes, and so uses the run's folder itself."""
        return self.name == RankPolicy.RANK0

    @property
    def chooses_one(self) -> bool:
        """Whether no more than one rank observes, whatever the world."""
        return self.alone or len(self.ranks) == 1

    @property
    def first_rank(self) -> int | None:
        """The lowest rank that observes; None where only the user's function knows."""
        if self.chosen_by is not None:
            return None
        return self.ranks[0] if self.ranks else 0

    def observes(self, identity: Identity) -> bool:
        """Returns whether this rank observes.

        Args:
            identity: The rank that asks.

        Raises:
            ConfigurationError: The user's function raised; its exception is the cause.
        """
        if self.chosen_by is not None:
            try:
                return bool(self.chosen_by(identity))
            except Exception as error:
                raise ConfigurationError(
                    f"rank_policy={self.name} raised {type(error).__name__}: {error} for rank "
                    f"{identity.rank}; it has to return a bool for every identity"
                ) from error
        if self.ranks:
            return identity.rank in self.ranks
        if self.name == RankPolicy.RANK0:
            return identity.rank == 0
        if self.name == RankPolicy.NODE:
            return identity.local_rank == 0
        return True

    def validate(self, world_size: int) -> None:
        """Refuses listed ranks that no process can have.

        Args:
            world_size: Ranks in the world.

        Raises:
            ConfigurationError: A listed rank is not in the world.
        """
        beyond = [rank for rank in self.ranks if rank >= world_size]
        if beyond:
            raise ConfigurationError(
                f"rank_policy lists rank {beyond[0]}, but with WORLD_SIZE={world_size} ranks are from 0 to "
                f"{world_size - 1}; list ranks of this world"
            )


def parse_policy(value: object) -> Policy:
    """Returns the policy that a user's ``rank_policy`` means.

    Args:
        value: A `RankPolicy` or its name, a collection of ranks, or a callable that takes an `Identity`.

    Raises:
        ConfigurationError: It is none of these.
    """
    if isinstance(value, str):
        try:
            return Policy(RankPolicy(value).value)
        except ValueError:
            raise ConfigurationError(f"rank_policy={value!r} is not known; give {_ALLOWED}") from None
    if callable(value):
        name = getattr(value, "__qualname__", None) or type(value).__qualname__
        return Policy(storable(f"callable:{name}"), chosen_by=value)
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray, Mapping)):
        return _of_ranks(value)
    raise ConfigurationError(f"rank_policy={value!r} is not possible; give {_ALLOWED}")


def _of_ranks(values: Iterable[object]) -> Policy:
    given = tuple(values)
    ranks: set[int] = set()
    for item in given:
        rank = _as_rank(item)
        if rank is None:
            raise ConfigurationError(
                f"rank_policy={list(given)!r} holds {item!r}, which is no rank; list whole numbers from 0"
            )
        ranks.add(rank)
    if not ranks:
        raise ConfigurationError(f"rank_policy={list(given)!r} lists no rank; give {_ALLOWED}")
    ordered = tuple(sorted(ranks))
    return Policy(f"ranks:{','.join(map(str, ordered))}", ranks=ordered)


def _as_rank(item: object) -> int | None:
    if isinstance(item, bool) or not hasattr(type(item), "__index__"):
        return None
    rank = operator.index(item)  # pyrefly: ignore[bad-argument-type]
    return rank if rank >= 0 else None
