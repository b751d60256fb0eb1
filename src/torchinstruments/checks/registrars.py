"""The registrars of a session: which checks it runs, and with which settings."""

from collections.abc import Sequence

from torchinstruments.checks.change import ChangeCheck
from torchinstruments.checks.check import Check
from torchinstruments.checks.findings import Action, EvidenceKind
from torchinstruments.checks.frozen import FrozenCheck
from torchinstruments.checks.inventory import Inventory
from torchinstruments.checks.magnitude import MagnitudeCheck
from torchinstruments.checks.nonfinite_gradients import NonfiniteGradientCheck
from torchinstruments.checks.nonfinite_parameters import NonfiniteParameterCheck
from torchinstruments.checks.registration import (
    action_of,
    bounds_of,
    cadence_of,
    choice_of,
    flag_of,
    names_of,
    positive_of,
    window_of,
)
from torchinstruments.checks.sustained import WARN_WINDOW
from torchinstruments.checks.update_ratio import UpdateRatioCheck
from torchinstruments.errors import CheckLifecycleError, ConfigurationError

__all__ = ["Registrars"]


class Registrars:
    """The checks of a session; registering one again adds another of its kind.

    Args:
        inventory: What names stand for.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._checks: list[Check] = []

    @property
    def is_attached(self) -> bool:
        """Whether it is too late to register anything."""
        return False

    def register_change_check(
        self,
        *,
        within: Sequence[str] | None = None,
        window: tuple[int, int] = WARN_WINDOW,
        every: int = 1,
        action: str = "warn",
    ) -> None:
        """Watches whether parameters receive gradients: none, or exactly zero, in m of the last n steps.

        Args:
            within: Names, aliases or patterns with ``*``; None for every parameter.
            window: ``(m, n)``. A finding comes once, and again only after n steps with gradients.
            every: Applied steps of an optimizer between two observations.
            action: ``raise`` (after the write), ``warn`` or ``collect``.

        Raises:
            ConfigurationError: An argument is not possible, or a name is not the model's.
            CheckLifecycleError: The session is attached.
        """
        names = self._names("within", within)
        self._register(ChangeCheck(names, window_of(window), cadence_of(every), action_of(action)))

    def register_frozen_check(
        self, names: Sequence[str], *, evidence: str = "clone", every: int = 1, action: str = "raise"
    ) -> None:
        """Compares tensors that must not change with what they were at attach, after every step.

        Args:
            names: Names, aliases or patterns with ``*``, of parameters or buffers.
            evidence: ``clone`` keeps a copy; ``digest`` keeps 8 bytes a tensor and reads all of it.
            every: Steps between two comparisons.
            action: ``raise`` (after the write), ``warn`` or ``collect``.

        Raises:
            ConfigurationError: An argument is not possible, or a name is not the model's.
            CheckLifecycleError: The session is attached.
        """
        chosen = self._names("names", () if names is None else names)
        assert chosen is not None
        kind = EvidenceKind(choice_of("evidence", evidence, ["clone", "digest"]))
        self._register(FrozenCheck(chosen, kind, cadence_of(every), action_of(action)))

    def register_update_ratio_check(
        self,
        *,
        within: Sequence[str] | None = None,
        bounds: tuple[float | None, float | None] | None = None,
        every: int = 1,
        action: str = "collect",
    ) -> None:
        """Measures how far a step moves parameters against their size; the report has every value.

        Args:
            within: Names, aliases or patterns with ``*``; None for every parameter.
            bounds: What ``|after - before| / |before|`` may be, either side None; None judges nothing.
            every: Applied steps of an optimizer between two looks. The copies are kept in between.
            action: ``raise`` (after the write), ``warn`` (sustained) or ``collect``; the first two need
                bounds.

        Raises:
            ConfigurationError: An argument is not possible, or a name is not the model's.
            CheckLifecycleError: The session is attached.
        """
        names = self._names("within", within)
        band = bounds_of("bounds", bounds)
        chosen = action_of(action)
        if chosen is not Action.COLLECT and band in {None, (None, None)}:
            raise ConfigurationError(
                f"action={action!r} needs bounds=, without which nothing is judged; give bounds=(low, high), "
                f"either of which may be None, or leave the action out to have every ratio in the report"
            )
        self._register(UpdateRatioCheck(names, band, cadence_of(every), chosen))

    def register_magnitude_check(
        self,
        *,
        vanishing_threshold: float = 1e-7,
        exploding_threshold: float = 1e4,
        within: Sequence[str] | None = None,
        every: int = 1,
        action: str = "collect",
    ) -> None:
        """Judges L2 norms of gradients before clipping, in unscaled units, one parameter at a time.

        Args:
            vanishing_threshold: Below it a norm that is not zero vanishes.
            exploding_threshold: Above it a norm explodes.
            within: Names, aliases or patterns with ``*``; None for every parameter.
            every: Attempts between two looks.
            action: ``raise`` (before the write), ``warn`` (sustained) or ``collect``.

        Raises:
            ConfigurationError: An argument is not possible, or a name is not the model's.
            CheckLifecycleError: The session is attached.
        """
        names = self._names("within", within)
        low = positive_of("vanishing_threshold", vanishing_threshold)
        high = positive_of("exploding_threshold", exploding_threshold)
        if low >= high:
            raise ConfigurationError(
                f"vanishing_threshold={low!r} and exploding_threshold={high!r} are not possible together; "
                f"give a lower one for vanishing"
            )
        self._register(MagnitudeCheck(low, high, names, cadence_of(every), action_of(action)))

    def register_nonfinite_grad_check(self, *, action: str = "raise") -> None:
        """Looks for NaN and infinity in gradients: collects them where they arise, raises before the write.

        Args:
            action: What is done before a write: ``raise``, ``warn`` or ``collect``.

        Raises:
            ConfigurationError: The action is none of these.
            CheckLifecycleError: The session is attached.
        """
        self._register(NonfiniteGradientCheck(action_of(action)))

    def register_nonfinite_param_check(
        self, *, every: int = 1, include_buffers: bool = True, action: str = "raise"
    ) -> None:
        """Scans parameters and buffers for NaN and infinity, after the write.

        Args:
            every: Applied steps of an optimizer between two scans.
            include_buffers: Whether buffers are scanned too.
            action: What is done: ``raise``, ``warn`` or ``collect``.

        Raises:
            ConfigurationError: An argument is not possible.
            CheckLifecycleError: The session is attached.
        """
        buffers = flag_of("include_buffers", include_buffers)
        self._register(NonfiniteParameterCheck(cadence_of(every), action_of(action), include_buffers=buffers))

    def _names(self, argument: str, value: object) -> tuple[str, ...] | None:
        """Returns names that all stand for something in the model as it is now.

        Raises:
            ConfigurationError: One does not.
        """
        names = names_of(argument, value)
        if names is not None:
            self._inventory.resolve(names, argument)
        return names

    def _register(self, check: Check) -> None:
        """Takes a check that a registrar made.

        Raises:
            CheckLifecycleError: The session is attached.
        """
        if self.is_attached:
            raise CheckLifecycleError(f"register {check.name} before the session is attached")
        self._checks.append(check)
