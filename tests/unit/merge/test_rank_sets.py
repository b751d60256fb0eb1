"""Ranks as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchinstruments.errors import ConfigurationError
from torchinstruments.merge.rank_sets import parse_ranks, ranks_text


@given(st.sets(st.integers(0, 500), min_size=1))
def test_text_and_back(ranks: set[int]) -> None:
    """Any set of ranks survives its text."""
    assert parse_ranks(ranks_text(ranks)) == ranks


def test_neighbours_are_joined() -> None:
    """Neighbours become a range, in any order and however often they are given."""
    assert ranks_text([12, 3, 1, 2, 0, 3]) == "0-3,12"
    assert ranks_text([]) == ""


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "1-", "0-99999999999", "1.5"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    """Anything else is refused with the text and an example."""
    with pytest.raises(ConfigurationError, match="0-7,12"):
        parse_ranks(text)
