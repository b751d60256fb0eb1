"""Whether a backward of a sharded model reduces its gradients, read from the flags that decide it.

``fully_shard`` and `FullyShardedDataParallel` look at a flag of each of their groups of parameters when the
group's gradients are there, in the backward: ``set_requires_gradient_sync`` or ``no_sync`` around the forward
alone change nothing. Torch has setters for these flags and nothing that reads them, so that they are read
where torch itself keeps them. Where they lie elsewhere, the answer is `UNKNOWN`.
"""

import sys

from torch import nn

from torchinstruments.records import GradSync

__all__ = ["ShardedSync"]


class ShardedSync:
    """The sharded parts of one model, as they were found at one moment.

    Args:
        root: The attached model, wrapped or not. Its modules are walked once, and not at all in a program
            that never imported sharding.
    """

    __slots__ = ("_states", "_wrappers")

    def __init__(self, root: nn.Module) -> None:
        self._states: list[object] = []
        self._wrappers: list[nn.Module] = []
        sharding = sys.modules.get("torch.distributed.fsdp")
        sharded = getattr(sharding, "FSDPModule", None)
        wrapper = getattr(sharding, "FullyShardedDataParallel", None)
        if sharded is None or wrapper is None:
            return
        states: dict[int, object] = {}
        for module in root.modules():
            if isinstance(module, wrapper):
                self._wrappers.append(module)
            elif isinstance(module, sharded):
                # Modules that were sharded together share one.
                state = _state_of(module)
                states[id(state)] = state
        self._states = list(states.values())

    def __bool__(self) -> bool:
        """Whether anything is sharded, so that the backward decides (hot path)."""
        return bool(self._states or self._wrappers)

    def read(self) -> GradSync:
        """Returns what a backward that runs at this moment does (autograd thread, hot path).

        Returns:
            `SYNCED`, `LOCAL`, or `REDUCED_ONLY` where gradients are reduced among the shards of one replica
            and not between replicas; `MIXED` where the parts of the model differ; `UNKNOWN` where that cannot
            be read.
        """
        try:
            found = {_of_group(group) for state in self._states for group in _groups(state)}
            found.update(_of_wrapper(wrapper) for wrapper in self._wrappers)
        except (AttributeError, TypeError):
            return GradSync.UNKNOWN
        if len(found) > 1:
            return GradSync.MIXED
        return found.pop() if found else GradSync.UNKNOWN


def _state_of(module: nn.Module) -> object:
    """Returns the state of a module that ``fully_shard`` took; the module itself where it has none."""
    get_state = getattr(module, "_get_fsdp_state", None)
    return get_state() if callable(get_state) else module


def _groups(state: object) -> list[object]:
    """Returns the groups of parameters whose gradients are reduced together; none for a mere root."""
    return state._fsdp_param_groups  # noqa: SLF001 # pyrefly: ignore[missing-attribute]


def _of_group(group: object) -> GradSync:
    reduces: bool = group.reduce_grads  # pyrefly: ignore[missing-attribute]
    reduces_all: bool = group.all_reduce_grads  # pyrefly: ignore[missing-attribute]
    mesh = group.mesh_info  # pyrefly: ignore[missing-attribute]
    if not reduces:
        return GradSync.LOCAL
    if reduces_all or mesh.replicate_mesh_dim is None:
        return GradSync.SYNCED
    return GradSync.LOCAL if mesh.shard_mesh_dim is None else GradSync.REDUCED_ONLY


def _of_wrapper(wrapper: nn.Module) -> GradSync:
    synchronises: object = wrapper._sync_gradients  # noqa: SLF001
    return GradSync.SYNCED if synchronises else GradSync.LOCAL
