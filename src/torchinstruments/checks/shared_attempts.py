"""The attempts of an observer, for a session of checks on the same model: one clock, one ledger, one folder.

What the observer was told of optimizers and of the loss scale holds for the session too.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from torchinstruments.observe.observer import Observer, observer_of
from torchinstruments.observe.probe import RootProbe
from torchinstruments.ranks.loss_scale import ScalerWatch
from torchinstruments.ranks.optimizers import OptimizerWatch
from torchinstruments.records import ChecksRecord, ClosedAttempt

__all__ = ["SharedAttempts", "shared_attempts"]

_ordinals: "weakref.WeakKeyDictionary[RootProbe, itertools.count[int]]" = weakref.WeakKeyDictionary()


class SharedAttempts:
    """The attempts of an observed model.

    Args:
        observer: Observes the model.
        probe: Its probe.
        optimizers: Its watch of optimizers.
        scale: Its watch of scalers.
        on_skipped: Told of steps that a scaler skipped.
        on_closed: Takes attempts that ended.
        on_end: Told that the observer is about to close.
    """

    def __init__(
        self,
        observer: Observer,
        probe: RootProbe,
        optimizers: OptimizerWatch,
        scale: ScalerWatch,
        *,
        on_skipped: Callable[[Optimizer], None],
        on_closed: Callable[[Sequence[ClosedAttempt]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._feed = probe.attempts
        self.clock = self._feed.clock
        self.optimizers = optimizers
        self.scale = scale
        self.counts_backwards = False
        self._observer = observer
        self._probe = probe
        self._on_skipped = on_skipped
        self._on_closed = on_closed
        self._on_end = on_end
        self._in_block: list[ClosedAttempt] | None = None
        self._older: frozenset[tuple[int, int, int]] = frozenset()
        self._is_attached = False
        self._session = next(_ordinals.setdefault(probe, itertools.count()))

    def attach(self) -> None:
        """Begins to be told (training thread)."""
        if not self._is_attached:
            self._is_attached = True
            # Steps of the open attempt that came before are told with it, and are none of the session's.
            self._older = frozenset(map(_key, self.clock.untold()))
            self._feed.tap(self)
            self.optimizers.on_skipped = (*self.optimizers.on_skipped, self._on_skipped)

    def detach(self) -> None:
        """Is told of the open attempt as it is, and of no other. Idempotent (training thread)."""
        if self._is_attached:
            self._feed.untap(self)
            self.attempts_closed(self.clock.untold())
            self._is_attached = False
            told = self.optimizers.on_skipped
            self.optimizers.on_skipped = tuple([one for one in told if one is not self._on_skipped])

    def keep(self, report: bytes) -> None:
        """Leaves a report for the observer's folder (training thread)."""
        self._probe.session.put_checks(ChecksRecord(self._session, report))

    def keep_durably(self, report: bytes, timeout_s: float) -> bool:
        """Leaves a report, and waits until it is durable; False where it is not in time (training thread)."""
        self.keep(report)
        return self._observer.flush(timeout_s)

    def backward_began(self) -> None:
        """Takes nothing: the observer counts forwards (autograd thread, hot path)."""

    def boundary_entered(self, global_step: int | None, micro_batches: int | None) -> bool:
        """Takes that the program says where an attempt begins; False inside another one (training thread)."""
        is_entered = self._probe.step_entered(self, global_step, micro_batches)
        if is_entered:
            self._in_block = []
        return is_entered

    def boundary_left(self, *, failed: bool) -> Sequence[ClosedAttempt]:
        """Takes that it is over, and returns its records (training thread, hot path)."""
        self._probe.step_left(failed=failed)
        closed, self._in_block = self._in_block, None
        return closed or ()

    def attempts_closed(self, closed: Sequence[ClosedAttempt]) -> None:
        """Takes attempts that ended (training thread, hot path)."""
        mine = [one for one in closed if _key(one) not in self._older] if self._older else closed
        if self._in_block is not None:
            self._in_block.extend(mine)
        self._on_closed(mine)

    def observation_ended(self) -> None:
        """Takes that the observer is about to close (training thread)."""
        self._on_end()


def _key(closed: ClosedAttempt) -> tuple[int, int, int]:
    record = closed.record
    return record.attempt, record.optimizer, record.optimizer_attempt


def shared_attempts(
    model: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    *,
    on_skipped: Callable[[Optimizer], None],
    on_closed: Callable[[Sequence[ClosedAttempt]], None],
    on_end: Callable[[], None],
) -> SharedAttempts | None:
    """Returns the attempts of a model's observer, or None where there is none that sees the same steps.

    Args:
        model: The model.
        optimizers: Those that a session is to look at; None for all of the model.
        on_skipped: As `SharedAttempts` takes it.
        on_closed: As above.
        on_end: As above.
    """
    observer = observer_of(model)
    probe = None if observer is None else observer.probe
    if observer is None or probe is None or not probe.is_armed:
        return None
    watches = [one for one in probe.companions if isinstance(one, OptimizerWatch)]
    scales = [one for one in probe.companions if isinstance(one, ScalerWatch)]
    if len(watches) != 1 or len(scales) != 1:
        return None
    if any(watches[0].known(optimizer) is None for optimizer in optimizers or ()):
        return None
    return SharedAttempts(
        observer, probe, watches[0], scales[0], on_skipped=on_skipped, on_closed=on_closed, on_end=on_end
    )
