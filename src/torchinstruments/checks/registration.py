"""Arguments of registrars, checked: a mistake is one sentence with the value and what is allowed."""

import math
from collections.abc import Sequence
from numbers import Integral, Real

from torchinstruments.checks.findings import Action
from torchinstruments.errors import ConfigurationError

__all__ = [
    "action_of",
    "bounds_of",
    "choice_of",
    "cadence_of",
    "flag_of",
    "names_of",
    "positive_of",
    "shown",
    "window_of",
]

_MAX_SHOWN = 80


def shown(value: object) -> str:
    """Returns what a caller gave, on one line that leaves room for the rest of a sentence."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - what cannot be shown is a wrong argument all the same
        return type(value).__name__
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def action_of(value: object) -> Action:
    """Returns what is done about a finding.

    Raises:
        ConfigurationError: It is no action.
    """
    return Action(choice_of("action", value, [action.value for action in Action]))


def choice_of(argument: str, value: object, allowed: Sequence[str]) -> str:
    """Returns one of some texts.

    Raises:
        ConfigurationError: It is none of them.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ConfigurationError(
            f"{argument}={shown(value)} is not known; give one of {', '.join(map(repr, allowed))}"
        )
    return value


def cadence_of(value: object, argument: str = "every") -> int:
    """Returns how many steps or backwards make a round.

    Raises:
        ConfigurationError: It is no integer of at least 1.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{argument}={shown(value)} is not possible; give an integer from 1")
    return int(value)


def flag_of(argument: str, value: object) -> bool:
    """Returns a flag.

    Raises:
        ConfigurationError: It is none.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{argument}={shown(value)} is not possible; give True or False")
    return value


def window_of(value: object) -> tuple[int, int]:
    """Returns how many of how many observations make a finding.

    Raises:
        ConfigurationError: It is no pair of integers ``1 <= m <= n``.
    """
    if isinstance(value, (tuple, list)) and len(value) == 2:
        m, n = value
        if all(isinstance(one, int) and not isinstance(one, bool) for one in (m, n)) and 1 <= m <= n:
            return m, n
    raise ConfigurationError(
        f"window={shown(value)} is not possible; give a pair (m, n) of integers with 1 <= m <= n: "
        f"a finding needs m bad ones of the last n steps"
    )


def bounds_of(argument: str, value: object) -> tuple[float | None, float | None] | None:
    """Returns a closed range of which either side may be open; None where there is none.

    A whole number stays one, for a float does not hold each of 64 bits.

    Raises:
        ConfigurationError: It is no such pair.
    """
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and len(value) == 2:
        low, high = value
        if all(one is None or _is_number(one) for one in (low, high)) and not (
            low is not None and high is not None and low > high
        ):
            return _exact(low), _exact(high)
    raise ConfigurationError(
        f"{argument}={shown(value)} is not possible; give a pair (low, high) of numbers with low <= high, "
        f"None for an open side"
    )


def positive_of(argument: str, value: object) -> float:
    """Returns a positive finite number.

    Raises:
        ConfigurationError: It is none.
    """
    if not _is_number(value) or not float(value) > 0:  # type: ignore[arg-type]
        raise ConfigurationError(f"{argument}={shown(value)} is not possible; give a positive number")
    return float(value)  # type: ignore[arg-type]


def names_of(argument: str, value: object, of: str = "parameters") -> tuple[str, ...] | None:
    """Returns names; None where all are meant.

    Args:
        argument: Whose they are, for the message.
        value: What the caller gave.
        of: What has them, ``parameters`` or ``modules``.

    Raises:
        ConfigurationError: They are no texts, or there are none.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return (value,)
    try:
        names = tuple(value)  # type: ignore[arg-type]
    except TypeError:
        names = ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"{argument}={shown(value)} is not possible; give names of {of} as in model.named_{of}(), "
            f"at least one"
        )
    return names


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float reaches
        return False


def _exact(value: Real | None) -> float | None:
    if value is None:
        return None
    return int(value) if isinstance(value, Integral) else float(value)
