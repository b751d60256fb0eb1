"""What one look at a tensor gives, whichever way it took: on the host, packed with others, or on a device."""

from typing import NamedTuple

from torchinstruments.statistics.bins import Binned
from torchinstruments.statistics.facts import Facts

__all__ = ["Measured"]


class Measured(NamedTuple):
    """What one look at a tensor gave.

    Attributes:
        facts: The facts.
        binned: For each histogram that was asked for; empty where there is no finite entry.
    """

    facts: Facts
    binned: tuple[Binned, ...] = ()
