"""Frozen settings that users give, validated where they are made."""

from dataclasses import dataclass
from enum import Enum, StrEnum

from torchinstruments.errors import ConfigurationError

__all__ = ["MAX_ROWS", "UNSET", "CompiledMode", "ErrorPolicy", "HistoryConfig", "RankPolicy", "Unset"]


class Unset(Enum):
    """Type of the default that stands for "not given", so that an explicit value that conflicts is seen."""

    UNSET = "unset"

    def __repr__(self) -> str:
        """Returns ``UNSET``, as it reads in signatures."""
        return "UNSET"


UNSET = Unset.UNSET
"""Not given, which is not the same as None."""

MAX_ROWS = 10**12
"""What the numbers of a `HistoryConfig` may be at most."""


class ErrorPolicy(StrEnum):
    """What happens to an error while collecting. It is counted and kept in the manifest in every case."""

    WARN = "warn"
    """One warning a kind; training goes on."""

    IGNORE = "ignore"
    """No warning; training goes on."""

    RAISE = "raise"
    """The error surfaces at the next root forward, or at close."""


class RankPolicy(StrEnum):
    """Which ranks observe, by name."""

    ALL = "all"
    """Every rank, each in its own folder."""

    RANK0 = "rank0"
    """Rank 0 alone, in the run's folder itself."""

    NODE = "node"
    """Local rank 0 of each host."""


class CompiledMode(StrEnum):
    """What is observed of a compiled model."""

    BOUNDARY = "boundary"
    """Each compiled region as a whole, from outside."""

    FORCE_EAGER = "force_eager"
    """Every layer, on sampled forwards that run as the model is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """How the history is buffered and summarised.

    Attributes:
        buffer_rows: Rows of history after which they become durable; 30 s at the latest in any case.
        window: Samples in each of the two adjacent windows of a series summary.

    Raises:
        ConfigurationError: One of them is not a whole number from 1 to `MAX_ROWS`.
    """

    buffer_rows: int = 8192
    window: int = 20

    def __post_init__(self) -> None:
        """Refuses what is not a positive whole number."""
        for name in ("buffer_rows", "window"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"HistoryConfig({name}={value!r}) is not possible; give a whole number of at least 1"
                )
            if value > MAX_ROWS:
                raise ConfigurationError(
                    f"HistoryConfig({name}={value!r}) is not possible; give a whole number of at most "
                    f"{MAX_ROWS:,}, more than any run has"
                )
