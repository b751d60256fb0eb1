"""How the time of a window divides into gap, forward, backward and optimizer: no moment is in two of them.

``forward`` sums root forwards; ``backward`` runs from the end of a forward to the end of its backward where
that was observed, else to the next forward or step; a step's own time leaves out what a closure's forwards
and observed backwards took; ``gap`` runs from the end of the last window's last step, or of the evaluation
after it, to the first forward.

Moments are seconds of one monotonic clock. What runs in another thread at the same time as something else
counts once, and some of it not at all.
"""

from torchinstruments.ranks.stepping import RunningStep
from torchinstruments.ranks.window import Span, Window, keep_span

__all__ = ["PhaseTimer"]


class PhaseTimer:
    """Turns the moments of events into a window's phases. Pure, and part of a `ranks.clock.StepClock`.

    ``running`` is everywhere the outermost step that runs, whose time no forward or backward inside it is.

    Args:
        keeps_spans: Whether phases keep their moments, for a device that measures them again.
    """

    def __init__(self, *, keeps_spans: bool) -> None:
        self.keeps_spans = keeps_spans
        """Whether windows and steps are to keep the moments of their phases."""
        self._forward_began_s: float | None = None
        self.waits_since_s: float | None = None
        """Since when a backward seems to run whose end nobody has seen yet; None where none does."""
        self._stepped_in_backward = False
        self._last_event_s = 0.0
        self.last_end_s: float | None = None
        """When the last window was over; None before the first one was."""
        self._other_step_s: float | None = None

    @property
    def last_event_s(self) -> float:
        """The moment of the last event (any thread)."""
        return self._last_event_s

    @property
    def is_busy(self) -> bool:
        """Whether a forward, or the backward after it, seems to run (any thread)."""
        return self._forward_began_s is not None or self.waits_since_s is not None

    @property
    def is_in_backward(self) -> bool:
        """Whether the last step was inside a backward, which seems to go on (any thread)."""
        return self._stepped_in_backward

    def gap(self, begin_s: float) -> Span | None:
        """Returns the gap before a window; None before the first one (training thread, hot path)."""
        return None if self.last_end_s is None else (self.last_end_s, begin_s)

    def other_model_stepped(self, now_s: float) -> None:
        """Takes that an optimizer of another model has stepped (training or autograd thread, hot path)."""
        self._other_step_s = now_s

    def is_shared(self, window: Window) -> bool:
        """Whether another model was trained since the window's gap began (training thread, hot path)."""
        return (
            window.gap is not None and self._other_step_s is not None and self._other_step_s >= window.gap[0]
        )

    def passed(self, now_s: float) -> None:
        """Takes a moment before which the next backward cannot have begun (training thread, hot path)."""
        self._last_event_s = now_s
        self._stepped_in_backward = False

    def boundary_entered(self, now_s: float) -> None:
        """Takes that the program opens a window, in which nothing runs yet (training thread, hot path)."""
        self.passed(now_s)
        # A forward that runs outside any window, in another thread, is in the gap before this one.
        self._forward_began_s = None

    def forward_began(self, now_s: float) -> None:
        """Takes the begin of a root forward (training thread, hot path)."""
        self._last_event_s = now_s
        self._forward_began_s = now_s
        self._stepped_in_backward = False

    def forward_ended(
        self, now_s: float, window: Window | None, running: RunningStep | None, *, awaits_backward: bool
    ) -> bool:
        """Takes the end of a root forward; returns whether one had begun (training thread, hot path)."""
        began_s, self._forward_began_s = self._forward_began_s, None
        self._last_event_s = now_s
        if window is not None:
            if began_s is not None:
                if now_s > began_s:
                    window.forward_s += now_s - began_s
                if self.keeps_spans:
                    keep_span(window.forward_spans, began_s, now_s)
                if running is not None:
                    _add_inner(running, began_s, now_s)
            if awaits_backward:
                self.waits_since_s = now_s
            if window.end_s is not None:
                # An evaluation after the step is no part of the gap before the next window.
                window.end_s = now_s
        return began_s is not None

    def backward_ended(self, now_s: float, window: Window, running: RunningStep | None) -> None:
        """Takes the end of a backward (training or autograd thread, hot path)."""
        if self._forward_began_s is not None:
            # One inside a forward is that forward's time.
            return
        if self.waits_since_s is None:
            # A further backward, of another outstanding forward or of a kept graph.
            self.waits_since_s = self._last_event_s
        self.settle_backward(now_s, window, running)
        self._last_event_s = now_s
        self._stepped_in_backward = False
        if window.end_s is not None:
            # An optimizer that steps inside the backward ends before it.
            window.end_s = now_s

    def settle_backward(self, now_s: float, window: Window | None, running: RunningStep | None) -> None:
        """Ends a backward whose own end nobody saw (training thread, hot path)."""
        since_s, self.waits_since_s = self.waits_since_s, None
        if since_s is not None and window is not None:
            if now_s > since_s:
                window.backward_s += now_s - since_s
            if self.keeps_spans:
                keep_span(window.backward_spans, since_s, now_s)
            if running is not None:
                _add_inner(running, since_s, now_s)
            # A block that ends here has its gap behind what counts as backward.
            self._last_event_s = now_s
            if window.end_s is not None:
                window.end_s = now_s

    def step_began(self, now_s: float, window: Window | None, *, in_backward: bool) -> None:
        """Takes the begin of an outermost step (training or autograd thread, hot path)."""
        if in_backward and self._stepped_in_backward and not self.is_busy:
            # Between two optimizers that step inside one backward there is nothing but that backward, unless
            # a forward runs beside it.
            self.waits_since_s = self._last_event_s
        if self.waits_since_s is not None:
            self.settle_backward(now_s, window, None)
        if self._forward_began_s is not None:
            # A forward runs in another thread: what of it lies beside the step is the step's time.
            if window is not None:
                window.forward_s += max(0.0, now_s - self._forward_began_s)
                keep_span(window.forward_spans, self._forward_began_s, now_s)
            self._forward_began_s = now_s
        self._last_event_s = now_s

    def step_ended(self, now_s: float, window: Window | None, *, in_backward: bool) -> None:
        """Takes the end of a step that ran (training or autograd thread, hot path)."""
        # A closure's backward that nobody saw cannot be told from the step itself.
        self.waits_since_s = None
        self._stepped_in_backward = in_backward
        # From here on as `stepped`.
        self._last_event_s = now_s
        if self._forward_began_s is not None:
            self._forward_began_s = now_s
        if window is not None:
            window.end_s = now_s
            if self._other_step_s is not None and not window.is_shared:
                window.is_shared = self.is_shared(window)

    def stepped(self, now_s: float, window: Window | None) -> None:
        """Takes when what stands for a step was over (training or autograd thread, hot path)."""
        self._last_event_s = now_s
        if self._forward_began_s is not None:
            self._forward_began_s = now_s
        if window is not None:
            window.end_s = now_s
            if self._other_step_s is not None and not window.is_shared:
                window.is_shared = self.is_shared(window)

    def window_closed(self, window: Window) -> None:
        """Takes that a window is over (training thread, hot path)."""
        self.last_end_s = window.end_s if window.end_s is not None else self._last_event_s
        self._forward_began_s = None
        self.waits_since_s = None
        self._stepped_in_backward = False


def _add_inner(running: RunningStep, begin_s: float, end_s: float) -> None:
    """Takes what ran inside a step and is none of its time."""
    running.inner_s += max(0.0, end_s - begin_s)
    keep_span(running.inner_spans, begin_s, end_s)
