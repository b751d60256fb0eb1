"""Histograms as TensorBoard keeps them: right edges and counts, with one bucket below and one above.

A record has bins between its edges and counts what lies outside of them. TensorBoard has no such counts, so
what is below goes into a first bucket that ends just under the lowest edge, and what is above into a last one
that reaches to the maximum.
"""

import math
import sys
from dataclasses import dataclass

from torchinstruments.records import HistogramRecord

__all__ = ["Buckets", "histogram_buckets"]

_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Buckets:
    """One histogram in TensorBoard's terms.

    Attributes:
        minimum: Lowest finite entry.
        maximum: Highest finite entry.
        total: Sum of the finite entries.
        total_of_squares: Sum of their squares.
        limits: Right edges, two more than the record has bins.
        counts: Entries in each bucket.
    """

    minimum: float
    maximum: float
    total: float
    total_of_squares: float
    limits: tuple[float, ...]
    counts: tuple[int, ...]


def histogram_buckets(record: HistogramRecord) -> Buckets:
    """Returns a histogram that is available in TensorBoard's terms.

    Raises:
        ValueError: The record lacks something that a histogram consists of.
    """
    edges, minimum, maximum = record.edges, record.minimum, record.maximum
    total, total_of_squares = record.total, record.total_of_squares
    if minimum is None or maximum is None or total is None or total_of_squares is None:
        raise ValueError("the histogram has no minimum, maximum or sums")
    if len(edges) < 2 or len(edges) != len(record.counts) + 1:
        raise ValueError(f"the histogram has {len(edges)} edges for {len(record.counts)} bins")
    below = max(math.nextafter(edges[0], -math.inf), -_LARGEST)
    above = min(math.nextafter(edges[-1], math.inf), _LARGEST)
    return Buckets(
        minimum=minimum,
        maximum=maximum,
        total=total,
        total_of_squares=total_of_squares,
        limits=(below, *edges[1:], max(maximum, above)),
        counts=(record.underflow, *record.counts, record.overflow),
    )
