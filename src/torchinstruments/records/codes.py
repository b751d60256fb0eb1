"""Every code that a table can hold, each once."""

from dataclasses import dataclass
from enum import StrEnum

from torchinstruments.records.text import error_text, storable

__all__ = [
    "Absent",
    "Evidence",
    "Execution",
    "GradSync",
    "Outcome",
    "Reason",
    "SampleState",
    "ScaleProvenance",
    "Scope",
    "Signal",
    "Stage",
    "StepProvenance",
]


class Signal(StrEnum):
    """What was measured of a layer."""

    OUTPUT = "output"
    OUTPUT_GRADIENT = "output_gradient"
    INPUT = "input"
    PARAMETER = "parameter"
    PARAMETER_GRADIENT = "parameter_gradient"


class Stage(StrEnum):
    """At which moment of an attempt a parameter's gradient was measured; other signals have no stage.

    Attributes:
        LOCAL_ACCUMULATED: After a backward had added to it and before any reduction between ranks.
        REDUCED: After the end of the backward, and so of the reduction that belongs to it.
        APPLIED: As the optimizer's step found it.
    """

    NONE = ""
    LOCAL_ACCUMULATED = "local_accumulated"
    REDUCED = "reduced"
    APPLIED = "applied"


class Scope(StrEnum):
    """What a number covers."""

    LOCAL = "local"
    LOCAL_SHARD = "local_shard"
    LOCAL_OF_DTENSOR = "local_of_dtensor"
    UNKNOWN = "unknown"


class Execution(StrEnum):
    """How the program ran that was measured."""

    EAGER = "eager"
    INSIDE_COMPILED = "inside_compiled"
    FORCED_EAGER = "forced_eager"


class StepProvenance(StrEnum):
    """How the attempt of a forward is known."""

    EXPLICIT = "explicit"
    INFERRED = "inferred"
    NONE = "none"


class GradSync(StrEnum):
    """Whether the gradients of a forward were, or will be, synchronised between ranks."""

    SYNCED = "synced"
    LOCAL = "local"
    REDUCED_ONLY = "reduced_only"
    MIXED = "mixed"
    PIPELINED = "pipelined"
    NOT_DISTRIBUTED = "not_distributed"
    UNKNOWN = "unknown"


class ScaleProvenance(StrEnum):
    """How the loss scale beside a number is known."""

    UNSCALED = "unscaled"
    GRADSCALER = "gradscaler"
    EXPLICIT = "explicit"
    NONE_SEEN = "none_seen"
    UNKNOWN = "unknown"


class SampleState(StrEnum):
    """How far a sample came."""

    FORWARD_COMPLETE = "forward_complete"
    BACKWARD_OBSERVED = "backward_observed"
    MISSED = "missed"
    FAILED = "failed"


class Outcome(StrEnum):
    """What became of an attempt at an optimizer step."""

    APPLIED = "applied"
    SKIPPED = "skipped"
    ABANDONED = "abandoned"
    UNKNOWN = "unknown"


class Evidence(StrEnum):
    """What an outcome rests on."""

    OPTIMIZER_HOOK = "optimizer_hook"
    FOUND_INF = "found_inf"
    SCALE_BACKOFF = "scale_backoff"
    EXPLICIT = "explicit"
    NONE = "none"


class Reason(StrEnum):
    """Why a value is missing. A detail may follow after a colon: ``reducer_error: ValueError: ...``."""

    EMPTY = "empty"
    NO_FINITE_ENTRIES = "no_finite_entries"
    OVERFLOW = "overflow"
    NONFINITE_RESULT = "nonfinite_result"
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    UNSUPPORTED_LAYOUT = "unsupported_layout"
    META_TENSOR = "meta_tensor"
    PARTIAL_PLACEMENT = "partial_placement"
    ASYNC_COLLECTIVE = "async_collective"
    NO_GRADIENT = "no_gradient"
    NO_TENSOR_OUTPUT = "no_tensor_output"
    NO_TENSOR_INPUT = "no_tensor_input"
    REENTRANT_CHECKPOINT = "reentrant_checkpoint"
    INSIDE_COMPILED = "inside_compiled"
    INSIDE_FUSED = "inside_fused"
    SCRIPTED_MODULE = "scripted_module"
    UNREADABLE_OUTPUT = "unreadable_output"
    UNREADABLE_INPUT = "unreadable_input"
    UNINITIALISED = "uninitialised"
    NOT_SYNCHRONISED = "not_synchronised"
    SHARDED = "sharded"
    STEP_SKIPPED = "step_skipped"
    SEVERAL_EVALUATIONS = "several_evaluations"
    GRAPH_CAPTURE = "graph_capture"
    OVER_DEVICE_BUDGET = "over_device_budget"
    REDUCER_ERROR = "reducer_error"

    def with_detail(self, detail: str) -> str:
        """Returns the code with a detail behind it, on one line, storable, at most 200 characters long."""
        return storable(f"{self.value}: {' '.join(detail.split())}"[:200])

    def with_error(self, error: BaseException) -> str:
        """Returns the code with an exception behind it; it never raises."""
        return self.with_detail(f"{type(error).__name__}: {error_text(error)}")


@dataclass(frozen=True, slots=True)
class Absent:
    """A value that could not be had, instead of a scalar.

    Attributes:
        reason: A `Reason`, or one with a detail after a colon.
    """

    reason: str
