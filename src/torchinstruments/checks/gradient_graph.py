"""Which outputs of a model were made from which, by the graph that its backward goes through."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MAX_VISITED", "users_of"]

MAX_VISITED = 2_000_000
"""Steps from node to node after which the search is given up."""


def users_of(nodes: Sequence[object]) -> Mapping[int, frozenset[int]] | None:
    """Returns which watched nodes use the output of each directly, with no watched one between.

    Args:
        nodes: ``grad_fn`` of each output. The graph leads from a node to those that its inputs came from.

    Returns:
        By the id of a node, the ids of those that use it; None where the graph is too large to tell.
    """
    watched = {id(node) for node in nodes}
    users: dict[int, set[int]] = {}
    num_visited = 0
    for node in {id(node): node for node in nodes}.values():
        seen: set[int] = set()
        waiting = _inputs_of(node)
        # What is looked at stays alive meanwhile, or an id could be met again for another node.
        alive: list[Any] = []
        while waiting:
            found = waiting.pop()
            if id(found) in seen:
                continue
            num_visited += 1
            if num_visited > MAX_VISITED:
                return None
            seen.add(id(found))
            alive.append(found)
            if id(found) in watched:
                users.setdefault(id(found), set()).add(id(node))
            else:
                waiting.extend(_inputs_of(found))
    return {key: frozenset(found) for key, found in users.items()}


def _inputs_of(node: Any) -> list[Any]:
    """Returns the nodes whose outputs a node was given."""
    return [found for found, _ in getattr(node, "next_functions", ()) if found is not None]
