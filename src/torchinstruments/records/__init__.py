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
from torchinstruments.records.columns import (
    Description,
    KeptFrames,
    Measurement,
    MeasurementColumns,
    MeasurementFrame,
    Shapes,
    as_columns,
)
from torchinstruments.records.outbox import ChecksRecord, Counters, ErrorRecord, Outbox
from torchinstruments.records.runs import Claim, GenerationRecord, Identity, Member, RunRecord
from torchinstruments.records.samples import (
    DeferredSample,
    HistogramRecord,
    ModuleRecord,
    Position,
    Sample,
)
from torchinstruments.records.text import error_text, storable

__all__ = [
    "Absent",
    "Amendment",
    "AttemptRecord",
    "ChecksRecord",
    "Claim",
    "ClosedAttempt",
    "Counters",
    "DeferredFingerprints",
    "DeferredSample",
    "Description",
    "ErrorRecord",
    "Evidence",
    "Execution",
    "FingerprintRecord",
    "GenerationRecord",
    "GradSync",
    "HistogramRecord",
    "Identity",
    "KeptFrames",
    "Measurement",
    "MeasurementColumns",
    "MeasurementFrame",
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
    "Shapes",
    "Signal",
    "Stage",
    "StepProvenance",
    "as_columns",
    "error_text",
    "storable",
]
