"""From a histogram of this package to one of TensorBoard."""

import math
import sys
from dataclasses import replace

import pytest

from torchinstruments.sinks.buckets import histogram_buckets
from unit.sinks.deliveries import histogram_record, missing_record


def test_what_lies_outside_gets_a_bucket_on_each_side() -> None:
    """The first ends just under the lowest edge, the last reaches to the maximum."""
    buckets = histogram_buckets(histogram_record())
    assert buckets.limits == (math.nextafter(0.0, -math.inf), 1.0, 2.0, 9.0)
    assert buckets.counts == (1, 1, 2, 1)
    assert (buckets.minimum, buckets.maximum, buckets.total, buckets.total_of_squares) == (
        -3.0,
        9.0,
        10.0,
        96.5,
    )


def test_the_last_limit_lies_above_the_edges_where_nothing_does() -> None:
    """Limits ascend strictly, as TensorBoard's reader needs it."""
    record = replace(histogram_record(), maximum=2.0, overflow=0)
    limits = histogram_buckets(record).limits
    assert limits[-1] == math.nextafter(2.0, math.inf)
    assert list(limits) == sorted(set(limits))


def test_edges_at_the_end_of_the_numbers_stay_finite() -> None:
    """An infinite limit could not be drawn."""
    largest = sys.float_info.max
    record = replace(histogram_record(edges=(-largest, 0.0, largest)), minimum=-largest, maximum=largest)
    assert all(math.isfinite(limit) for limit in histogram_buckets(record).limits)


@pytest.mark.parametrize(
    "record",
    [
        missing_record(),
        replace(histogram_record(), edges=(0.0, 1.0)),
        replace(histogram_record(), total=None),
    ],
)
def test_a_record_that_lacks_something_is_refused(record) -> None:
    """Nothing is made up."""
    with pytest.raises(ValueError, match="the histogram has"):
        histogram_buckets(record)
