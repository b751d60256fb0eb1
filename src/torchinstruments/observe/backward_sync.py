"""Whether the gradients of one forward of a sharded model are synchronised, read in its backward.

Nothing that is there after the backward tells what it did, and the flags that decide may be others by then.
So the tensors that the model returns have a hook each, also in forwards that are not sampled, which reads the
flags when a backward begins to pass through them; sharding itself has a hook on each of them too. A backward
through none of them, of a loss that was computed inside the model, is seen in sampled forwards alone, and
stays `UNKNOWN` in the others.
"""

from collections.abc import Callable

import torch
from torch import nn

from torchinstruments.observe.engine import graph_task
from torchinstruments.observe.faults import too_deep
from torchinstruments.observe.hooks import GradientHook
from torchinstruments.observe.leaves import tensors_in
from torchinstruments.ranks.grad_sync import read_grad_sync
from torchinstruments.ranks.pipelining import is_pipelined
from torchinstruments.ranks.sharded_sync import ShardedSync
from torchinstruments.records import GradSync, Position

__all__ = ["BackwardSync", "SyncChange", "Synchronisation"]

SyncChange = Callable[[Position, GradSync, GradSync | None], None]
"""Told of a forward's position, of what its latest backward does, and of what the one before it did."""


class BackwardSync:
    """What the backwards of one forward do; it holds no tensor, and goes with the graph.

    Args:
        sharded: The sharded parts of the model.
        position: Of the forward.
        changed: Told where a backward does something else than the one before it; it must not raise.
        failed: Takes an exception.
    """

    __slots__ = ("_changed", "_failed", "_latest", "_position", "_sharded", "_task", "num_too_deep")

    def __init__(
        self,
        sharded: ShardedSync,
        position: Position,
        changed: SyncChange,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._sharded = sharded
        self._position = position
        self._changed = changed
        self._failed = failed
        self._latest: GradSync | None = None
        self._task = -1
        self.num_too_deep = 0
        """Hooks of it that the stack had no room for."""

    def watch(self, output: object) -> None:
        """Has backwards through what the model returned seen; it never raises (training thread, hot path).

        Args:
            output: As the program gets it.
        """
        try:
            for _, tensor in tensors_in(output).tensors:
                # A leaf outlives the graph, and what comes to it tells nothing of this forward.
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(GradientHook(self, 0))
        except Exception as error:  # noqa: BLE001 - a tensor of some kinds takes no hook
            self._failed(error)

    def arrived(self, number: int, gradient: torch.Tensor | None) -> None:  # noqa: ARG002 - the flags say it all
        """Takes that a backward has come to an output; it never raises (autograd thread, hot path)."""
        try:
            if self.num_too_deep:
                num_too_deep, self.num_too_deep = self.num_too_deep, 0
                self._failed(too_deep(num_too_deep))
            self.read()
        except Exception as error:  # noqa: BLE001 - nothing may leave a hook
            self._failed(error)

    def read(self) -> GradSync:
        """Returns what the backward that runs does, and tells of it once (autograd thread, hot path)."""
        task = graph_task()
        if self._latest is not None and task == self._task:
            return self._latest
        before, self._latest, self._task = self._latest, self._sharded.read(), task
        if self._latest is not before:
            self._changed(self._position, self._latest, before)
        return self._latest


class Synchronisation:
    """What becomes of the gradients of one model's forwards, wherever that is decided.

    Args:
        changed: Told of what a backward does, where it decides; it must not raise.
        failed: Takes an exception in a backward.
    """

    def __init__(self, changed: SyncChange, failed: Callable[[BaseException], None]) -> None:
        self._changed = changed
        self._failed = failed
        self._sharded: ShardedSync | None = None
        self._is_sharded = False

    def look_again(self, model: nn.Module) -> None:
        """Takes the sharded parts that the model has now (training thread, hot path of sampled forwards)."""
        self._sharded = ShardedSync(model)
        self._is_sharded = bool(self._sharded)

    def forward_started(
        self, module: nn.Module, position: Position, world_size: int
    ) -> tuple[GradSync, BackwardSync | None]:
        """Returns what a root forward's begin tells, and what reads the rest (training thread, hot path).

        Args:
            module: What was called.
            position: Of the forward.
            world_size: Ranks in the world.
        """
        if self._sharded is None:
            self.look_again(module)
        sharded = self._sharded
        grad_enabled = position.grad_enabled
        if grad_enabled and is_pipelined():
            return GradSync.PIPELINED, None
        if sharded is None or not self._is_sharded:
            return read_grad_sync(module, grad_enabled, world_size), None
        if not grad_enabled:
            return GradSync.LOCAL, None
        return GradSync.UNKNOWN, BackwardSync(sharded, position, self._changed, self._failed)
