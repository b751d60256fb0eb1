"""What a program may say of its loss scale, checked."""

import math
from typing import TypeAlias

from torch.amp.grad_scaler import GradScaler

from torchinstruments.config import Unset
from torchinstruments.errors import ConfigurationError

__all__ = ["DeclaredScale", "declared_scale_of"]

DeclaredScale: TypeAlias = GradScaler | float | Unset | None
"""The scaler of the model, a fixed scale that the loop multiplies with itself, None for none, or not said."""


def declared_scale_of(scaler: object) -> DeclaredScale:
    """Returns what scales the loss.

    Raises:
        ConfigurationError: It is no gradient scaler, no positive number, and not None.
    """
    if scaler is None or isinstance(scaler, (Unset, GradScaler)):
        return scaler
    if isinstance(scaler, (int, float)) and not isinstance(scaler, bool):
        try:
            number = float(scaler)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and number > 0:
            return number
    raise ConfigurationError(
        f"scaler={scaler!r} is not possible; give the torch.amp.GradScaler of the training loop, None where "
        f"nothing scales the loss, a positive number that the loop multiplies it with, or leave it out"
    )
