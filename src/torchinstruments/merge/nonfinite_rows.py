"""Where one rank first saw NaN or infinity: found while its history is read, then looked up in those parts.

A rank's samples are ordered by their ids, so the first pass keeps four of them: the lowest sample with
evidence in the forward, in the backward before any reduction, after it, and at the optimizer's step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchinstruments.merge.known_columns import DecodedRows
from torchinstruments.records import Reason, Signal, Stage
from torchinstruments.store.inventory import PartFile
from torchinstruments.store.row_blocks import floats, integers
from torchinstruments.store.series import codes_of, texts_of

__all__ = [
    "EVIDENCE_COLUMNS",
    "Evidence",
    "NonfiniteReading",
    "NonfiniteRows",
    "Phase",
    "PhaseEvidence",
    "SampleSpan",
    "evidence_rows",
    "fractions",
    "phases",
]

EVIDENCE_COLUMNS = (
    "generation",
    "sample_id",
    "attempt",
    "forward_in_attempt",
    "forward_index",
    "layer",
    "call_index",
    "signal",
    "stage",
    "tensor_path",
    "backward_index",
    "mode",
    "grad_sync",
    "loss_scale",
    "metric",
    "value",
    "unavailable_reason",
)

_TELLING_COLUMNS = ("metric", "unavailable_reason")
_NONFINITE, _FINITE = "nonfinite_fraction", "finite_fraction"
_NONE = Reason.NO_FINITE_ENTRIES.value

_Integers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


class Phase(IntEnum):
    """When in a forward and its backward a tensor was measured; the first two come before any reduction."""

    FORWARD = 0
    BACKWARD = 1
    REDUCED = 2
    APPLIED = 3

    @property
    def text(self) -> str:
        """As it stands in ``result.json``."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Evidence:
    """A tensor with entries that are not finite.

    Attributes:
        layer: Layer.
        call_index: Ordinal of its call.
        signal: `Signal`.
        stage: `Stage` of a parameter gradient.
        tensor_path: Which tensor of the layer.
        backward_index: Which traversal of the graph.
        mode: ``train`` or ``eval``.
        grad_sync: As in ``history``.
        loss_scale: As in ``history``; None where it is not known.
        nonfinite_fraction: Share of entries that are not finite.
    """

    layer: str
    call_index: int
    signal: str
    stage: str
    tensor_path: str
    backward_index: int
    mode: str
    grad_sync: str
    loss_scale: float | None
    nonfinite_fraction: float


@dataclass(frozen=True, slots=True)
class PhaseEvidence:
    """The first evidence of one rank in one phase.

    Attributes:
        phase: The phase.
        generation: Generation.
        attempt: Attempt; -1 where there is none.
        forward: Ordinal of the forward in its attempt; among all of the process where there is no attempt.
        tensors: All that show it in this forward and phase.
    """

    phase: Phase
    generation: int
    attempt: int
    forward: int
    tensors: tuple[Evidence, ...]

    @property
    def moment(self) -> tuple[int, int, int]:
        """What orders it among those of other ranks, without its phase."""
        return (self.generation, self.attempt, self.forward)


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """The samples that a part of ``history`` has rows of.

    Attributes:
        part: The part.
        first: Lowest sample id.
        last: Highest sample id.
    """

    part: PartFile
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class NonfiniteReading:
    """What the history of one rank says of values that are not finite.

    Attributes:
        is_measured: Whether any row could have told.
        first: The first evidence of each phase that has any.
        spans: The parts of ``history`` that were read.
        has_unrecorded: Whether some samples stand in ``history`` alone.
    """

    is_measured: bool
    first: tuple[PhaseEvidence, ...]
    spans: tuple[SampleSpan, ...]
    has_unrecorded: bool


class NonfiniteRows:
    """Gathers the lowest samples with evidence of one rank (worker)."""

    def __init__(self) -> None:
        self._is_measured = False
        self._lowest: dict[Phase, int] = {}
        self._parts: dict[Phase, list[PartFile]] = {}
        self._spans: list[SampleSpan] = []

    def seen(self, rows: DecodedRows) -> dict[Phase, int]:
        """Returns the lowest sample with evidence of each phase in rows of ``history``."""
        batch = rows.batch
        places, shares = _told(batch, rows.made(_TELLING_COLUMNS, _telling))
        self._is_measured = self._is_measured or not bool(np.isnan(shares).all())
        found = np.sort(places[shares > 0])
        if len(found) == 0:
            return {}
        phase, sample_id = phases(batch)[found], integers(batch, "sample_id")[found]
        return {one: int(sample_id[phase == one].min()) for one in Phase if bool((phase == one).any())}

    def add(self, part: PartFile, seen: Iterable[dict[Phase, int]], sample_ids: _Integers) -> None:
        """Takes what was seen in a part, and the samples that it has rows of."""
        if len(sample_ids):
            self._spans.append(SampleSpan(part, int(sample_ids.min()), int(sample_ids.max())))
        lowest: dict[Phase, int] = {}
        for one in seen:
            for phase, sample_id in one.items():
                lowest[phase] = min(lowest.get(phase, sample_id), sample_id)
        for phase, sample_id in lowest.items():
            held = self._lowest.get(phase)
            if held is None or sample_id < held:
                self._lowest[phase], self._parts[phase] = sample_id, [part]
            elif sample_id == held:
                self._parts[phase].append(part)

    def wanted(self) -> Iterator[tuple[Phase, int, list[PartFile]]]:
        """Yields each phase with evidence, its lowest sample and the parts that show it there."""
        for phase in sorted(self._lowest):
            yield phase, self._lowest[phase], self._parts[phase]

    def finish(self, first: Iterable[PhaseEvidence], *, has_unrecorded: bool) -> NonfiniteReading:
        """Returns what was found; `first` is what `evidence_rows` made of `wanted`."""
        return NonfiniteReading(self._is_measured, tuple(first), tuple(self._spans), has_unrecorded)


def fractions(batch: pa.RecordBatch) -> _Floats:
    """Returns the share of nonfinite entries that each row tells; NaN where it tells none (worker)."""
    found = np.full(batch.num_rows, np.nan)
    places, shares = _told(batch, _telling(batch))
    found[places] = shares
    return found


@dataclass(frozen=True, slots=True)
class _Telling:
    """Rows that may tell a share of nonfinite entries; most rows are of other metrics and not among them.

    Attributes:
        nonfinite: Rows that tell the share itself.
        finite: Rows that tell the rest.
        none: Rows whose reason says that no entry is finite.
    """

    nonfinite: _Integers
    finite: _Integers
    none: _Integers


def _telling(batch: pa.RecordBatch) -> _Telling:
    metric_of, metrics = codes_of(batch.column("metric"))
    reason_of, reasons = codes_of(batch.column("unavailable_reason"))
    is_none = np.array([_code(reason) == _NONE for reason in reasons], np.bool_)

    def of_metric(name: str) -> _Integers:
        if name not in metrics:
            return np.zeros(0, np.int64)
        return np.flatnonzero(metric_of == metrics.index(name))

    return _Telling(
        nonfinite=of_metric(_NONFINITE),
        finite=of_metric(_FINITE),
        none=np.flatnonzero(is_none[reason_of]) if bool(is_none.any()) else np.zeros(0, np.int64),
    )


def _told(batch: pa.RecordBatch, telling: _Telling) -> tuple[_Integers, _Floats]:
    """Returns the rows that may tell a share of nonfinite entries, and the shares.

    Of a row that stands there twice the last share counts.
    """
    value = floats(batch, "value")
    shares = (value[telling.nonfinite], 1.0 - value[telling.finite], np.ones(len(telling.none)))
    return np.concatenate([telling.nonfinite, telling.finite, telling.none]), np.concatenate(shares)


def phases(batch: pa.RecordBatch) -> _Integers:
    """Returns the `Phase` of each row (worker)."""
    signal_of, signals = texts_of(batch.column("signal"))
    stage_of, stages = texts_of(batch.column("stage"))
    of_signal = np.array([_SIGNALS.get(one, Phase.FORWARD) for one in signals], np.int64)
    of_stage = np.array([_STAGES.get(one, Phase.FORWARD) for one in stages], np.int64)
    return np.maximum(of_signal[signal_of], of_stage[stage_of])


def evidence_rows(phase: Phase, sample_id: int, batches: Iterable[pa.RecordBatch]) -> PhaseEvidence | None:
    """Returns the evidence of one sample and phase, from the parts that hold it (worker)."""
    tensors: dict[tuple[str, int, str, str, str, int, str], Evidence] = {}
    moment: tuple[int, int, int] | None = None
    for batch in batches:
        fraction = fractions(batch)
        found = (fraction > 0) & (integers(batch, "sample_id") == sample_id) & (phases(batch) == phase)
        if not bool(found.any()):
            continue
        places = np.flatnonzero(found)
        rows = batch.take(pa.array(places)).to_pylist()
        for row, share in zip(rows, fraction[places].tolist(), strict=True):
            attempt = -1 if row["attempt"] is None else row["attempt"]
            forward = row["forward_index"] if attempt < 0 else row["forward_in_attempt"]
            # Of two processes with this number the one that was further behind saw it first.
            at = (row["generation"], attempt, forward)
            if moment is None or at < moment:
                moment = at
                tensors.clear()
            if at != moment:
                continue
            one = Evidence(
                row["layer"],
                row["call_index"],
                row["signal"],
                row["stage"],
                row["tensor_path"],
                row["backward_index"],
                row["mode"],
                row["grad_sync"],
                row["loss_scale"],
                share,
            )
            key = (
                one.layer,
                one.call_index,
                one.signal,
                one.stage,
                one.tensor_path,
                one.backward_index,
                one.mode,
            )
            tensors.setdefault(key, one)
    return None if moment is None else PhaseEvidence(phase, *moment, tuple(tensors.values()))


def _code(reason: str) -> str:
    return reason.partition(":")[0]


_SIGNALS = {Signal.OUTPUT_GRADIENT.value: Phase.BACKWARD, Signal.PARAMETER_GRADIENT.value: Phase.BACKWARD}
_STAGES = {Stage.REDUCED.value: Phase.REDUCED, Stage.APPLIED.value: Phase.APPLIED}
