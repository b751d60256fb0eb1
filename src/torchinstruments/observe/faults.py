"""What becomes of an error while collecting: counted and kept always, and then as the error policy says.

Nothing here ever raises into training. ``error_policy="raise"`` only keeps the first error; the observer
raises it at the next root forward, where a program can be stopped without leaving a backward half done.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from torchinstruments.config import ErrorPolicy
from torchinstruments.records import ErrorRecord, error_text, storable
from torchinstruments.warning_place import warn_user

__all__ = ["Faults", "Tally", "too_deep"]

_MAX_KINDS = 100
_MAX_MESSAGE_CHARACTERS = 500
_LOGGER = logging.getLogger("torchinstruments")


def too_deep(number: int) -> RecursionError:
    """Returns the error that stands for hooks which the stack had no room for (any thread)."""
    times = "once" if number == 1 else f"{number} times"
    return RecursionError(f"the program's recursion left a hook no room on the stack {times}")


class Faults:
    """The errors of one observer.

    Args:
        policy: What happens besides counting.
        keep: Takes each error as a record; it must not raise.
    """

    def __init__(self, policy: ErrorPolicy, keep: Callable[[ErrorRecord], None]) -> None:
        self._policy = policy
        self.raises = policy is ErrorPolicy.RAISE
        """Whether errors are to be raised at the next root forward."""
        self._keep = keep
        self._counts: Counter[str] = Counter()
        self._warned: set[tuple[str, str]] = set()
        self._pending: BaseException | None = None
        # A signal handler may report while its thread is in here.
        self._lock = threading.RLock()

    @property
    def counts(self) -> Mapping[str, int]:
        """Errors by probe so far."""
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        """Errors so far."""
        with self._lock:
            return self._counts.total()

    def report(self, probe: str, layer: str, error: BaseException) -> None:
        """Takes an error (any thread, hot path); it never raises.

        Args:
            probe: What failed, as in `ErrorRecord`.
            layer: Name of the layer; ``""`` is the model itself.
            error: What was caught.
        """
        kind = (probe, type(error).__name__)
        text = error_text(error, _MAX_MESSAGE_CHARACTERS)
        with self._lock:
            self._counts[probe] += 1
            is_new = kind not in self._warned and len(self._warned) < _MAX_KINDS
            if is_new:
                self._warned.add(kind)
            if self._policy is ErrorPolicy.RAISE and self._pending is None:
                # Without its traceback: that would keep the activations of its frames alive.
                self._pending = error.with_traceback(None)
                self._pending.add_note(f"torchinstruments: {probe} failed in {layer or 'the model'}")
        self._hold(probe, layer, kind[1], text)
        if is_new and self._policy is ErrorPolicy.WARN:
            self.warn(
                f"{probe} failed in {layer or 'the model'}: {kind[1]}: {text}; "
                f"training goes on, and further errors of this kind are only counted"
            )

    def notice(
        self,
        probe: str,
        layer: str,
        sentence: str,
        *,
        is_worth_a_warning: bool = True,
        kind: str = "notice",
        times: int = 1,
    ) -> None:
        """Takes what is no error but has to be known: kept and counted, never raised (any thread).

        Args:
            probe: What it concerns, as in `ErrorRecord`.
            layer: Name of the layer; ``""`` is the model itself.
            sentence: A whole sentence for the user.
            is_worth_a_warning: Whether the user is warned with it; once for each probe and kind.
            kind: What it is about, where there is more than one thing to say of the probe.
            times: How often it happened, for the counts.
        """
        with self._lock:
            self._counts[probe] += times
            is_new = (probe, kind) not in self._warned
            self._warned.add((probe, kind))
        self._hold(probe, layer, RuntimeWarning.__name__, storable(sentence[:_MAX_MESSAGE_CHARACTERS]))
        if is_new and is_worth_a_warning:
            self.warn(sentence)

    def report_companion(self, probe: str, error: BaseException) -> None:
        """Takes an error of optimizer hooks or of the scaler watch; it never raises (any thread)."""
        self.report(probe, "", error)

    def notice_companion(self, probe: str, sentence: str) -> None:
        """Takes what the scaler watch has to say, as `notice`; it never raises (any thread)."""
        self.notice(probe, "", sentence)

    def disarm(self) -> None:
        """Makes it usable in a forked child, where the lock may be held for ever."""
        self._lock = threading.RLock()

    def warn(self, sentence: str) -> None:
        """Warns the user once; where warnings are errors it is logged instead, for training must go on."""
        if self._policy is ErrorPolicy.IGNORE:
            return
        message = f"torchinstruments: {sentence}"
        try:
            warn_user(message)
        except Exception:  # noqa: BLE001 - a filter turned it into an exception
            _LOGGER.warning(message)

    def take_pending(self) -> BaseException | None:
        """Returns the error that is to be raised, once (training thread, at a root forward or at close)."""
        if self._pending is None:
            return None
        with self._lock:
            error, self._pending = self._pending, None
        return error

    def _hold(self, probe: str, layer: str, kind: str, text: str) -> None:
        """Leaves a record with who keeps them."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            self._keep(ErrorRecord(probe=probe, module=layer, type=kind, message=text, at=at))
        except Exception:
            _LOGGER.debug("an error could not be kept", exc_info=True)


class Tally:
    """The errors of one delivery; a batch of scalars holds it, and so nothing larger.

    Args:
        faults: Takes each error too.
    """

    __slots__ = ("_faults", "errors", "layer")

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.layer = ""
        """The layer that is being measured."""
        self.errors = 0
        """Errors so far."""

    def fail(self, probe: str, error: BaseException) -> None:
        """Counts and reports an error; it never raises (any thread, hot path)."""
        self.errors += 1
        self._faults.report(probe, self.layer, error)
