"""Rank policies."""

import numpy as np
import pytest

from torchinstruments.config import RankPolicy
from torchinstruments.errors import ConfigurationError
from torchinstruments.ranks.policy import parse_policy
from torchinstruments.records import Identity


def _identity(rank, local_rank=0, world_size=8):
    return Identity(rank=rank, world_size=world_size, local_rank=local_rank, host="h", process="0a0a0a0a")


def _observing(policy, world_size=8, ranks_per_host=4):
    return [
        rank
        for rank in range(world_size)
        if policy.observes(_identity(rank, rank % ranks_per_host, world_size))
    ]


def _even_ranks(who):
    return who.rank % 2 == 0


def _failing(who):
    raise KeyError(who.rank)


@pytest.mark.parametrize(
    ("value", "name", "ranks", "alone"),
    [
        ("all", "all", list(range(8)), False),
        (RankPolicy.ALL, "all", list(range(8)), False),
        ("rank0", "rank0", [0], True),
        ("node", "node", [0, 4], False),
        ([3, 0, 3], "ranks:0,3", [0, 3], False),
        ((0,), "ranks:0", [0], False),
        ({5}, "ranks:5", [5], False),
        (range(2), "ranks:0,1", [0, 1], False),
        (np.array([1, 7]), "ranks:1,7", [1, 7], False),
        (_even_ranks, "callable:_even_ranks", [0, 2, 4, 6], False),
    ],
)
def test_a_policy_names_itself_and_chooses_ranks(value, name, ranks, alone):
    """Every form that is allowed."""
    policy = parse_policy(value)
    assert policy.name == name
    assert _observing(policy) == ranks
    assert policy.alone is alone
    assert policy.chooses_one == (len(ranks) == 1)
    assert policy.first_rank == (None if policy.chosen_by is not None else ranks[0])


@pytest.mark.parametrize(
    "value", ["some", "", 0, True, None, [], [True], [-1], ["0"], [0.5], {"0": 1}, b"all", 1.5]
)
def test_anything_else_is_refused_with_its_value_and_what_is_allowed(value):
    """A bool is an int for Python and a mistake for us."""
    with pytest.raises(ConfigurationError, match="rank_policy=") as caught:
        parse_policy(value)
    assert "\n" not in str(caught.value)


def test_a_rank_beyond_the_world_is_refused_once_the_world_is_known():
    """It can never observe, and a silent nothing would look like a crash."""
    policy = parse_policy([0, 8])
    policy.validate(9)
    with pytest.raises(ConfigurationError, match=r"rank 8.*WORLD_SIZE=8.*0 to 7"):
        policy.validate(8)


def test_a_rank_that_is_not_listed_does_not_observe_and_raises_nothing():
    """Other ranks of a short list go on."""
    assert _observing(parse_policy([7]), world_size=2) == []


def test_a_callable_that_raises_is_reported_with_its_rank_and_error():
    """At attach, where the user can see it."""
    with pytest.raises(ConfigurationError, match=r"callable:_failing.*KeyError.*rank 3"):
        parse_policy(_failing).observes(_identity(3))


def test_an_object_that_is_callable_is_named_by_its_class():
    """A partial or an instance has no name of its own."""

    class _Chosen:
        def __call__(self, who):
            return who.rank == 1

    policy = parse_policy(_Chosen())
    assert policy.name.startswith("callable:")
    assert policy.name.endswith("_Chosen")
    assert _observing(policy) == [1]
