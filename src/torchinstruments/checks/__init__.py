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
    from torchinstruments.checks.grad_audit import GradHealth, grad_health
    from torchinstruments.checks.grad_rows import GradHealthRow
    from torchinstruments.checks.health_findings import HealthFinding
    from torchinstruments.checks.param_audit import param_health
    from torchinstruments.checks.param_rows import ParamHealth, ParamHealthRow
    from torchinstruments.checks.probes.liveness import LivenessFacts, LivenessProbe
    from torchinstruments.checks.probes.ranges import RangeFacts, RangeProbe
    from torchinstruments.checks.probes.selectors import func, module
    from torchinstruments.checks.probes.sinks import OutlierDim, SinkFacts, SinkHead, SinkProbe
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
    "param_health": "checks.param_audit",
    "ParamHealth": "checks.param_rows",
    "ParamHealthRow": "checks.param_rows",
    "grad_health": "checks.grad_audit",
    "GradHealth": "checks.grad_audit",
    "GradHealthRow": "checks.grad_rows",
    "HealthFinding": "checks.health_findings",
    "func": "checks.probes.selectors",
    "module": "checks.probes.selectors",
    "RangeProbe": "checks.probes.ranges",
    "RangeFacts": "checks.probes.ranges",
    "LivenessProbe": "checks.probes.liveness",
    "LivenessFacts": "checks.probes.liveness",
    "SinkProbe": "checks.probes.sinks",
    "SinkFacts": "checks.probes.sinks",
    "SinkHead": "checks.probes.sinks",
    "OutlierDim": "checks.probes.sinks",
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
    "param_health",
    "ParamHealth",
    "ParamHealthRow",
    "grad_health",
    "GradHealth",
    "GradHealthRow",
    "HealthFinding",
    "func",
    "module",
    "RangeProbe",
    "RangeFacts",
    "LivenessProbe",
    "LivenessFacts",
    "SinkProbe",
    "SinkFacts",
    "SinkHead",
    "OutlierDim",
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
