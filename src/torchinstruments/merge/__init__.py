"""Offline: one answer from the folders of many ranks."""

from torchinstruments.merge.answers import (
    Alignment,
    CheckFinding,
    Coverage,
    Divergence,
    Ending,
    Extremum,
    FirstNonfinite,
    FirstSeen,
    HeldValue,
    LateRank,
    ModeSplit,
    OwnWork,
    SetAsideFile,
    StepDifference,
    StepDisagreement,
    WidestSeries,
)
from torchinstruments.merge.compare_runs import RunComparison, compare_runs
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.result import MergeResult

__all__ = [
    "Alignment",
    "CheckFinding",
    "Coverage",
    "Divergence",
    "Ending",
    "Extremum",
    "FirstNonfinite",
    "FirstSeen",
    "HeldValue",
    "LateRank",
    "ModeSplit",
    "MergeResult",
    "OwnWork",
    "RunComparison",
    "SetAsideFile",
    "StepDifference",
    "StepDisagreement",
    "WidestSeries",
    "compare_runs",
    "merge_run",
]
