"""The observer of one model: what `inject_observer` returns.

It is a handle: what is observed, and how, is the probe's business, and where it goes the session's. A handle
without a probe does nothing, and looks the same to a training script: it is what a rank gets that does not
observe. A copy or a pickle of an observer, as part of whatever holds it, is such a handle.
"""

import contextlib
from collections.abc import Generator

from torch import nn

from torchinstruments.errors import ObserverAlreadyAttachedError
from torchinstruments.observe import registry
from torchinstruments.observe.probe import RootProbe
from torchinstruments.observe.step_block import (
    MAX_GLOBAL_STEP,
    MAX_MICRO_BATCHES,
    StepBlock,
    checked_number,
)
from torchinstruments.records import Counters

__all__ = ["InertObserver", "Observer", "observer_of", "refuse_second"]


class Observer:
    """Observes one model, from `attach` to `close`.

    Args:
        probe: Measures the model; None where nothing is observed.
        url: Where the run lies, for an observer without a probe.
    """

    def __init__(self, probe: RootProbe | None, *, url: str = "") -> None:
        self._probe = probe
        self._url = url
        self._is_closed = False
        self._is_disarmed = False

    def __repr__(self) -> str:
        """Returns where the run lies, what was measured so far and whether it goes on."""
        if self._probe is None:
            return f"{type(self).__name__}({self._url!r}, observes nothing)"
        state = "observing" if self.observing else "closed" if self._is_closed else "not observing"
        counters = self.counters
        measured = f"{counters.samples} of {counters.forwards} forwards measured"
        return f"{type(self).__name__}({self.url!r}, {state}, {measured})"

    @property
    def probe(self) -> RootProbe | None:
        """What measures the model; None where nothing is observed. It is for the rooms of this package."""
        return self._probe

    @property
    def url(self) -> str:
        """Where the run lies, without secrets. It may lie beside the folder that was asked for."""
        return self._url if self._probe is None else self._probe.session.url

    @property
    def observing(self) -> bool:
        """Whether this process measures the model now."""
        return self._probe is not None and self._probe.is_armed

    @property
    def counters(self) -> Counters:
        """What telemetry did and cost in this process so far."""
        if self._probe is None:
            return Counters()
        return self._probe.session.counters(self._probe.counters())

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until everything observed so far is durable.

        Args:
            timeout_s: Seconds to wait at most; None leaves it to the run.

        Returns:
            Whether it is.
        """
        if self._probe is None or self._is_closed:
            return True
        self._probe.tell_catalog()
        return self._probe.session.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Detaches from the model and ends the run for this process.

        Closing again only waits for the same end. A sink may close too: it is answered with False, and the
        run ends after the sink's call.

        Args:
            timeout_s: Seconds to wait at most until everything is durable; None leaves it to the run.

        Returns:
            Whether everything became durable.

        Raises:
            Exception: With ``error_policy="raise"``, an error of collection that was not raised before.
        """
        if self._probe is None or self._is_disarmed:
            self._is_closed = True
            registry.strike(self)
            return True
        if self._is_closed:
            return self._probe.session.close(timeout_s)
        # First of all, so that an interrupt in here leaves an observer that can still be closed.
        self._probe.detach()
        self._is_closed = True
        registry.strike(self)
        self._probe.finish()
        is_durable = self._probe.session.close(timeout_s)
        self._probe.raise_pending()
        return is_durable

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Measures no forward inside the ``with`` block; they and their attempts are counted all the same."""
        if self._probe is None:
            yield
            return
        self._probe.pause(+1)
        try:
            yield
        finally:
            self._probe.pause(-1)

    def step(self, global_step: int | None = None, micro_batches: int | None = None) -> StepBlock:
        """Makes one attempt of everything inside the ``with`` block, in place of what optimizers tell.

        All forwards inside belong to it, those of an evaluation too, and their rows have the
        ``step_provenance`` ``explicit``; steps of the model's optimizers belong inside. An attempt that is
        open when the block begins ends there, and what comes after the block is grouped as without blocks. A
        block without a step ends ``abandoned`` with the evidence ``explicit``, also where an exception leaves
        it, which goes on untouched; where no optimizer of the model was ever seen and nothing was raised, it
        ends ``unknown``. A block inside another one is ignored. On a rank that does not observe it does
        nothing.

        What cannot be used is left out and noticed once, and training goes on: a number out of range, and an
        integer tensor too, since reading it would wait for its device.

        Args:
            global_step: The caller's number of this step, from 0; it stands in the rows of `steps`.
            micro_batches: How many forwards with gradients the caller means to run, from 1; it stands beside
                the number that was seen, and the first disagreement is noticed.

        Raises:
            ConfigurationError: With ``error_policy="raise"`` alone: a number cannot be used.
        """
        probe = self._probe
        if probe is None or self._is_closed:
            return StepBlock(None)
        return StepBlock(
            probe,
            checked_number(probe, "global_step", global_step, 0, MAX_GLOBAL_STEP),
            checked_number(probe, "micro_batches", micro_batches, 1, MAX_MICRO_BATCHES),
        )

    def attach(self, model: nn.Module) -> None:
        """Attaches to the model that the probe was made for; an observer without one only marks it.

        The mark makes a second observer fail on all ranks alike, on those that do not observe too.

        Raises:
            ObserverAlreadyAttachedError: The model, or the same in another wrapper, has an observer.
            ConfigurationError: The model takes no hooks.
        """
        refuse_second(model)
        if self._probe is not None:
            self._probe.attach()
            # The model's hooks hold the probe, and so the handle, for as long as they are there.
            self._probe.owner = self
        registry.enlist(model, self, keep=self._probe is None)

    def disarm(self) -> None:
        """Makes it do nothing for ever (in a forked child, before anything else runs there)."""
        self._is_closed = self._is_disarmed = True
        if self._probe is not None:
            self._probe.disarm()

    def __copy__(self) -> "Observer":
        return InertObserver(self.url)

    def __deepcopy__(self, memo: dict[int, object]) -> "Observer":
        return InertObserver(self.url)

    def __reduce__(self) -> tuple[type["InertObserver"], tuple[str]]:
        return InertObserver, (self.url,)


class InertObserver(Observer):
    """An observer that does nothing: of a rank that does not observe, of a disabled one, or a copy.

    Args:
        url: Where the run lies; ``""`` where this process has none.
    """

    def __init__(self, url: str = "") -> None:
        super().__init__(None, url=url)


def observer_of(model: nn.Module) -> Observer | None:
    """Returns the observer of a model or of any of its wrapped forms, an inert one too, or None."""
    found = registry.find(model)
    return found if isinstance(found, Observer) else None


def refuse_second(model: nn.Module) -> None:
    """Does nothing for a model that has no observer, neither itself nor in another wrapper.

    Raises:
        ObserverAlreadyAttachedError: It has one.
    """
    if registry.find(model) is not None:
        raise ObserverAlreadyAttachedError(
            f"this {type(model).__name__} has an observer already, itself or in another wrapper; "
            f"call remove_observer(model) first"
        )
