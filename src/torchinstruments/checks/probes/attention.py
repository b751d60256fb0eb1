"""How much attention each key position gets from the queries that can see it, head by head.

The definition follows Gu et al., "When Attention Sink Emerges in Language Models" (arXiv:2410.10781): the
importance of a key is the mean of the probabilities that it gets over the queries from it on, and a head has
a sink where that exceeds a threshold. Three things are ours. Attention is causal where no query gives
anything to a later position, else every query sees every key. A query's attention to its own position does
not count, for a causal query that sees nothing else gives all to itself. And a key counts only where at least
half of the queries can see it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchinstruments.statistics.device import accumulation_dtype

__all__ = [
    "MIN_POSITIONS",
    "AttentionSums",
    "KeyAudience",
    "attention_sums",
    "audience_of",
    "unlike_attention",
]

MIN_POSITIONS = 4
"""Queries and keys below which nothing is scored."""

_SCRATCH_ENTRIES = 1 << 22
"""Probabilities that are looked at at a time."""


@dataclass(frozen=True, slots=True)
class AttentionSums:
    """Sums over the batch, on the device; float64 where it has that.

    Attributes:
        mass: (heads, keys): probabilities given to a key by queries at other positions.
        live: (queries): items of the batch in which the query gives anything to anything.
        later: 0-d: all that is given to positions later than the query's.
        furthest_from_one: 0-d: how far the probabilities of a query are from a sum of 1, at most; one that
            gives nothing is left out.
        lowest: 0-d: the lowest probability.
        num_nonfinite: 0-d: probabilities that are not finite.
    """

    mass: torch.Tensor
    live: torch.Tensor
    later: torch.Tensor
    furthest_from_one: torch.Tensor
    lowest: torch.Tensor
    num_nonfinite: torch.Tensor

    def plus(self, other: "AttentionSums") -> "AttentionSums":
        """Returns the sums over both (training thread, hot path)."""
        return AttentionSums(
            self.mass + other.mass,
            self.live + other.live,
            self.later + other.later,
            torch.maximum(self.furthest_from_one, other.furthest_from_one),
            torch.minimum(self.lowest, other.lowest),
            self.num_nonfinite + other.num_nonfinite,
        )


@dataclass(frozen=True, slots=True)
class KeyAudience:
    """Who can see the keys.

    Attributes:
        num_queries: Queries that give anything, over the batch.
        seen_by: For each key how many of these, at other positions, can see it.
        even_mass: For each key what it would get from them, were each to spread its attention evenly.
    """

    num_queries: float
    seen_by: tuple[float, ...]
    even_mass: tuple[float, ...]


def unlike_attention(tensor: torch.Tensor) -> str:
    """Returns why a tensor's shape is not that of attention probabilities, or ``""`` (hot path)."""
    if tensor.ndim != 4:
        return f"not_attention: {tensor.ndim} dimensions, not (batch, heads, queries, keys)"
    if not tensor.is_floating_point():
        return f"not_attention: values of {str(tensor.dtype).removeprefix('torch.')}"
    if min(tensor.shape[2:]) < MIN_POSITIONS:
        shown = "x".join(map(str, tensor.shape[2:]))
        return f"too_few_positions: {shown} queries and keys, at least {MIN_POSITIONS} of each"
    return ""


def attention_sums(tensor: torch.Tensor) -> AttentionSums:
    """Sums probabilities on their device, a block of queries at a time; nothing is read (hot path).

    Call it inside `isolated`.

    Args:
        tensor: (batch, heads, queries, keys). Where there are fewer queries than keys they are the last ones.
    """
    batch, heads, queries, keys = tensor.shape
    device, wide = tensor.device, accumulation_dtype(tensor.device)
    mass = torch.zeros((heads, keys), dtype=wide, device=device)
    live = torch.zeros(queries, dtype=wide, device=device)
    later = torch.zeros((), dtype=wide, device=device)
    furthest = torch.zeros((), dtype=wide, device=device)
    lowest = torch.zeros((), dtype=wide, device=device)
    num_nonfinite = torch.zeros((), dtype=torch.int64, device=device)
    num_rows = max(1, _SCRATCH_ENTRIES // (heads * keys))
    key_places = torch.arange(keys, device=device)
    for start in range(0, queries, num_rows):
        stop = min(start + num_rows, queries)
        query_places = torch.arange(start, stop, device=device).unsqueeze(1) + (keys - queries)
        is_other, is_later = query_places != key_places, query_places < key_places
        for item in range(batch):
            block = tensor[item, :, start:stop].to(torch.float64 if tensor.itemsize > 4 else torch.float32)
            num_nonfinite = num_nonfinite + torch.logical_not(torch.isfinite(block)).sum()
            lowest = torch.minimum(lowest, block.amin().to(wide))
            totals = block.sum(-1, dtype=wide)
            gives = totals > 0
            furthest = torch.maximum(furthest, ((totals - 1).abs() * gives).amax())
            live.narrow(0, start, stop - start).add_(gives.any(0))
            later = later + (block * is_later).sum(dtype=wide)
            mass = mass + (block * is_other).sum(1, dtype=wide)
    return AttentionSums(mass, live, later, furthest, lowest, num_nonfinite)


def audience_of(live: Sequence[float], num_keys: int, *, is_causal: bool) -> KeyAudience:
    """Returns who can see the keys.

    Args:
        live: For each query how many times it gave anything.
        num_keys: Keys.
        is_causal: Whether a query sees itself and what is before it alone; else it sees all.
    """
    offset = num_keys - len(live)
    seen_by, even_mass = [0.0] * num_keys, [0.0] * num_keys
    # Running sums over queries, from the last one to the first: a causal key is seen by all later queries.
    total = sum(live)
    total_even = total / num_keys
    running, running_even = 0.0, 0.0
    for key in reversed(range(num_keys)):
        query = key - offset
        own = live[query] if 0 <= query < len(live) else 0.0
        if is_causal:
            seen_by[key], even_mass[key] = running, running_even
            running += own
            running_even += own / (key + 1)
        else:
            seen_by[key], even_mass[key] = total - own, total_even - own / num_keys
    return KeyAudience(total, tuple(seen_by), tuple(even_mass))
