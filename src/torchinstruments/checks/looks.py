"""Makes what a visit shows to checks: where training stands, gradients, copies of parameters."""

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from torchinstruments.checks.accumulation import AccumulationSite
from torchinstruments.checks.attempts import Attempts
from torchinstruments.checks.check import BackwardLook, StepLook
from torchinstruments.checks.copies import Copies
from torchinstruments.checks.findings import GradientStage, Moment
from torchinstruments.checks.inventory import Inventory
from torchinstruments.checks.measures import is_distributed
from torchinstruments.checks.reading import Reading
from torchinstruments.records import GradSync, ScaleProvenance

__all__ = ["LookMaker"]

_MAX_OPTIMIZERS = 256


class LookMaker:
    """Makes the looks of one attached session.

    Args:
        inventory: What is watched.
        reading: Takes numbers.
        attempts: Counts attempts.
        site: Counts backwards.
        reduced_by_ddp: Positions of parameters whose gradients `DistributedDataParallel` reduces.
    """

    def __init__(
        self,
        inventory: Inventory,
        reading: Reading,
        attempts: Attempts,
        site: AccumulationSite,
        reduced_by_ddp: frozenset[int],
    ) -> None:
        self.attempts = attempts
        self.site = site
        self.accepted_steps = 0
        """Steps that were applied, as far as the host knew at once."""
        self._inventory = inventory
        self._reading = reading
        self._reduced_by_ddp = reduced_by_ddp
        self._owned: dict[int, tuple[tuple[int, ...], dict[int, int]]] = {}
        self._copies = Copies()
        self.has_copied = False
        """Whether the step that runs has been copied for."""

    def of_backward(self, fired: tuple[int, ...], early: Mapping[int, torch.Tensor]) -> BackwardLook:
        """Returns what a backward that ends has added to (autograd thread, hot path).

        Args:
            fired: Positions of the parameters whose gradients came, each once.
            early: Norms that were taken when their gradients came, by position.
        """
        entries, attempts = self._inventory.entries, self.attempts
        gradients = {
            index: gradient for index in fired if (gradient := entries[index].tensor.grad) is not None
        }
        scale, provenance = attempts.scale.current_scale(attempts.clock.num_forwards - 1)
        stage = GradientStage.PRE_CLIP_UNSCALED
        if provenance in {ScaleProvenance.GRADSCALER, ScaleProvenance.EXPLICIT}:
            stage = GradientStage.PRE_CLIP_SCALED
        elif provenance is ScaleProvenance.UNKNOWN:
            stage = GradientStage.PRE_CLIP_UNKNOWN
        return BackwardLook(
            moment=self.moment(None),
            fired=fired,
            gradients=gradients,
            reading=self._reading,
            stage=stage,
            scale_provenance=provenance,
            loss_scale=None if scale is None else self._reading.add_one(scale),
            grad_sync=self._grad_sync(gradients),
            early={index: norm for index, norm in early.items() if index in gradients},
        )

    def of_step(self, optimizer: Optimizer, evaluation: int) -> StepLook:
        """Returns a step that is about to write (training thread, hot path).

        Args:
            optimizer: Whose it is.
            evaluation: Which evaluation of a closure came before, from 0.
        """
        attempts, reading = self.attempts, self._reading
        scale, provenance = attempts.scale.scale_left(optimizer, attempts.clock.num_forwards - 1)
        known = attempts.optimizers.known(optimizer)
        found_inf: object = getattr(optimizer, "found_inf", None)
        return StepLook(
            optimizer=optimizer,
            moment=self.moment(None if known is None else attempts.clock.ordinal_of(known.key)),
            positions=self._positions(optimizer),
            reading=reading,
            inventory=self._inventory,
            scale_provenance=provenance,
            loss_scale=reading.add_one(scale) if isinstance(scale, torch.Tensor) else scale,
            found_inf=reading.add_one(found_inf) if isinstance(found_inf, torch.Tensor) else None,
            evaluation=evaluation,
        )

    def moment(self, optimizer: int | None) -> Moment:
        """Returns where training stands (any site).

        Args:
            optimizer: Ordinal of the one that steps; None where none does.
        """
        clock, is_step = self.attempts.clock, optimizer is not None
        return Moment(
            attempt=clock.attempt,
            micro_batch=None if is_step else clock.micro_batch,
            backward=None if is_step else self.site.num_backwards - 1,
            optimizer=optimizer,
            accepted_step=self.accepted_steps,
            global_step=clock.global_step,
            step_provenance=clock.step_provenance,
        )

    def copy_wanted(self, look: StepLook) -> None:
        """Copies the parameters that checks will compare with, into buffers that are kept (hot path).

        Where a closure is evaluated again, the optimizer may have moved them: what stood before the first
        evaluation is what the step began with.
        """
        if look.evaluation == 0 and look.wanted:
            entries = self._inventory.entries
            wanted = [index for index in look.positions if index in look.wanted]
            self._copies.take({index: entries[index].tensor for index in wanted})
            self.has_copied = True
        look.copies = self._copies if self.has_copied else None

    def step_began(self) -> None:
        """Takes that a step begins, of which nothing is copied yet (training thread, hot path)."""
        self.has_copied = False

    def forget(self) -> None:
        """Drops copies (training thread, at detach)."""
        self.has_copied = False
        self._copies.clear()
        self._owned.clear()

    def _grad_sync(self, gradients: Mapping[int, torch.Tensor]) -> GradSync:
        """Returns whether ranks have reduced the gradients of a backward that ends."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return GradSync.NOT_DISTRIBUTED
        if torch.distributed.get_world_size() == 1:
            return GradSync.NOT_DISTRIBUTED
        if not gradients:
            return GradSync.UNKNOWN
        if all(is_distributed(gradient) for gradient in gradients.values()):
            return GradSync.SYNCED
        # It writes what ranks have reduced after the end of the backward at which this looks.
        return GradSync.LOCAL if self._reduced_by_ddp.issuperset(gradients) else GradSync.UNKNOWN

    def _positions(self, optimizer: Optimizer) -> dict[int, int]:
        """Returns which tensors of the inventory an optimizer steps, and in which group each is."""
        groups = optimizer.param_groups
        signature = tuple([id(tensor) for group in groups for tensor in group["params"]])
        known = self._owned.get(id(optimizer))
        if known is not None and known[0] == signature:
            return known[1]
        positions: dict[int, int] = {}
        for number, group in enumerate(groups):
            for tensor in group["params"]:
                index = self._inventory.index_of(tensor)
                if index is not None:
                    positions.setdefault(index, number)
        if len(self._owned) >= _MAX_OPTIMIZERS:
            self._owned.clear()
        self._owned[id(optimizer)] = signature, positions
        return positions
