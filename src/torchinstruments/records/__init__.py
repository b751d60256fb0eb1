"""The messages between rooms: frozen, slotted, free of torch.

Data takes one way: hooks measure tensors on the device, one copy brings the scalars to the host, the
writer thread resolves them into a `Sample`, sinks consume it. What is here is what both sides of that way,
and the offline side, agree upon. Every code that a table can hold stands here once.
"""

from torchinstruments.records.attempts import (
    Amendment,
    AttemptRecord,
    ClosedAttempt,
    DeferredFingerprints,
    FingerprintRecord,
)
from torchinstruments.records.codes import (
    Absent,
    Evidence,
    Execution,
    GradSync,
    Outcome,
    Reason,
    SampleState,
    ScaleProvenance,
    Scope,
    Signal,
    Stage,
    StepProvenance,
)
from torchinstruments.records.outbox import Counters, ErrorRecord, Outbox
from torchinstruments.records.runs import Claim, GenerationRecord, Identity, Member, RunRecord
from torchinstruments.records.samples import (
    DeferredSample,
    HistogramRecord,
    Measurement,
    ModuleRecord,
    Position,
    Sample,
)
from torchinstruments.records.text import error_text, storable

__all__ = [
    "Absent",
    "Amendment",
    "AttemptRecord",
    "Claim",
    "ClosedAttempt",
    "Counters",
    "DeferredFingerprints",
    "DeferredSample",
    "ErrorRecord",
    "Evidence",
    "Execution",
    "FingerprintRecord",
    "GenerationRecord",
    "GradSync",
    "HistogramRecord",
    "Identity",
    "Measurement",
    "Member",
    "ModuleRecord",
    "Outbox",
    "Outcome",
    "Position",
    "Reason",
    "RunRecord",
    "Sample",
    "SampleState",
    "ScaleProvenance",
    "Scope",
    "Signal",
    "Stage",
    "StepProvenance",
    "error_text",
    "storable",
]
