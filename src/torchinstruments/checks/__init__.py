"""Training checks: what a step did to gradients and parameters, watched while training goes on.

::

    from torchinstruments.checks import ChecksSession

    session = ChecksSession(model, optimizer, scaler=None)
    session.register_nonfinite_grad_check()
    session.register_change_check()
    with session:
        train(model)
    print(session.report())

They work alone, without an observer and without a folder. Names are loaded when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchinstruments.checks.findings import (
        Action,
        Attribution,
        CheckWarning,
        Finding,
        GradientStage,
        Severity,
        Unavailable,
    )
    from torchinstruments.checks.report import CheckReport
    from torchinstruments.checks.session import ChecksSession
    from torchinstruments.errors import CheckLifecycleError, CheckViolationError

_HOMES = {
    "ChecksSession": "checks.session",
    "CheckReport": "checks.report",
    "Finding": "checks.findings",
    "Unavailable": "checks.findings",
    "Severity": "checks.findings",
    "Action": "checks.findings",
    "Attribution": "checks.findings",
    "GradientStage": "checks.findings",
    "CheckWarning": "checks.findings",
    "CheckViolationError": "errors",
    "CheckLifecycleError": "errors",
}

__all__ = [
    "ChecksSession",
    "CheckReport",
    "Finding",
    "Unavailable",
    "Severity",
    "Action",
    "Attribution",
    "GradientStage",
    "CheckWarning",
    "CheckViolationError",
    "CheckLifecycleError",
]


def __getattr__(name: str) -> object:
    """Loads a public name from its module at first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'torchinstruments.checks' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"torchinstruments.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted(__all__)
