"""Which ranks should have left something, by what the run and its generations say.

The rank policy tells it where it can be computed from a rank alone; what the leader heard of each member
adds to it and takes away from it. Where neither suffices, the answer says that it is not known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchinstruments.merge.rank_sets import MAX_RANKS
from torchinstruments.records import GenerationRecord, RunRecord

__all__ = ["Expectation", "expectations"]

_LISTED = "ranks:"
_MAX_DIGITS = 20
_MAX_EXPECTED = 2 * MAX_RANKS
"""Ranks of all generations together that are named by the policy alone; further ones are not known."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The ranks of one generation that should have left something.

    Attributes:
        generation: Its number.
        ranks: Those expected, ascending.
        is_known: False where ranks may be missing that nobody can name: the policy does not tell them, and
            the leader had not heard of all members.
    """

    generation: int
    ranks: tuple[int, ...]
    is_known: bool


def expectations(run: RunRecord, generations: Sequence[GenerationRecord]) -> tuple[Expectation, ...]:
    """Returns what each generation should have left; without any, what ``run.json`` says of the first one."""
    if not generations:
        by_policy = _policy_ranks(run.rank_policy, run.world_size, _MAX_EXPECTED)
        return (Expectation(0, tuple(sorted(by_policy or ())), by_policy is not None),)
    found: list[Expectation] = []
    room = _MAX_EXPECTED
    for generation in generations:
        found.append(_expectation(run, generation, room))
        room -= len(found[-1].ranks)
    return tuple(found)


def _expectation(run: RunRecord, generation: GenerationRecord, room: int) -> Expectation:
    by_policy = _policy_ranks(run.rank_policy, generation.world_size, room)
    observing = {member.rank for member in generation.members if member.observing}
    silent = {member.rank for member in generation.members if not member.observing}
    ranks = ((by_policy or set()) | observing) - silent
    # A list that says it is complete and names fewer ranks than there are is not.
    is_complete = generation.members_complete and len(observing | silent) >= generation.world_size
    return Expectation(generation.generation, tuple(sorted(ranks)), by_policy is not None or is_complete)


def _policy_ranks(policy: str, world_size: int, room: int) -> set[int] | None:
    """Returns the ranks that a policy names, or None where rank and world size do not tell.

    Args:
        policy: As in ``run.json``.
        world_size: Ranks of the generation.
        room: Ranks that may still be named.
    """
    if policy == "all":
        return set(range(world_size)) if world_size <= min(MAX_RANKS, room) else None
    if policy == "rank0":
        return {0}
    if policy.startswith(_LISTED):
        listed = policy.removeprefix(_LISTED).split(",")
        if len(listed) <= room and all(
            rank.strip().isdecimal() and len(rank) <= _MAX_DIGITS for rank in listed
        ):
            return {int(rank) for rank in listed if int(rank) < world_size}
    return None
