"""The section ``first_nonfinite`` of ``result.json``: on which rank and where NaN or infinity stood first.

Moments are ordered by generation, attempt, forward in the attempt, and phase: forward, backward before any
reduction, after it, at the optimizer's step. Once gradients are reduced every rank has the same NaN, so a
number from before names the rank where it was born, and one from after does not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchinstruments.merge.execution_order import ExecutionOrder, Key
from torchinstruments.merge.moments import FINITE, MomentTask, Wanted
from torchinstruments.merge.nonfinite_rows import Evidence, NonfiniteReading, Phase, PhaseEvidence, SampleSpan
from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.merge.tasks import RankTask
from torchinstruments.records import ModuleRecord
from torchinstruments.store.inventory import PartFile

__all__ = ["FirstNonfiniteFold"]

MAX_SHOWN = 16
"""Ranks of one moment whose first tensors are shown."""

NO_ROWS = "no_rows"
"""What is said of a rank that was expected and left nothing."""

_NO_STATISTIC = "no_statistic_tells"


@dataclass(frozen=True, slots=True)
class _First:
    """The first tensor of one rank in one phase."""

    rank: int
    moment: tuple[int, int, int]
    key: Key
    tensor: Evidence
    num_tensors: int


@dataclass(frozen=True, slots=True)
class _Source:
    """What a second look at a rank needs."""

    samples: tuple[PartFile, ...]
    history: tuple[SampleSpan, ...]
    reads_all: bool


@dataclass(slots=True)
class FirstNonfiniteFold:
    """Gathers the first evidence of all ranks, then what the others have of those moments."""

    _is_measured: bool = False
    _first: dict[Phase, list[_First]] = field(default_factory=dict)
    _sources: dict[int, _Source] = field(default_factory=dict)
    _asked: list[tuple[int, tuple[Phase, ...]]] = field(default_factory=list)
    _answers: dict[Phase, dict[str, list[int]]] = field(default_factory=dict)

    def add_rank(
        self,
        task: RankTask,
        reading: NonfiniteReading,
        modules: Mapping[str, ModuleRecord],
        unreadable: Iterable[tuple[int, str]],
    ) -> None:
        """Takes what was read of a rank; ranks come in ascending order.

        Args:
            task: The rank and its parts.
            reading: What its history says.
            modules: Its catalog.
            unreadable: Folder and path of the rank's parts that were left out.
        """
        self._is_measured = self._is_measured or reading.is_measured
        left_out = frozenset(unreadable)
        samples = tuple(
            one for one in task.parts.get("samples", ()) if (one.source, one.path) not in left_out
        )
        self._sources[task.rank] = _Source(samples, reading.spans, reading.has_unrecorded)
        order = ExecutionOrder(modules) if reading.first else None
        for one in reading.first:
            assert order is not None
            first = _first_of(task.rank, one, order)
            held = self._first.get(one.phase, [])
            if not held or first.moment <= held[0].moment:
                same = held if held and first.moment == held[0].moment else []
                self._first[one.phase] = [*same, first]

    def tasks(
        self, tasks: Sequence[RankTask], generation_ranks: Mapping[int, Sequence[int]]
    ) -> list[MomentTask]:
        """Returns the second looks at ranks, once all were added.

        Args:
            tasks: The ranks that were read.
            generation_ranks: Generation to the ranks that were expected or present in it; where a generation
                is not there, all ranks that were read count.
        """
        found: list[MomentTask] = []
        by_rank: dict[int, list[Phase]] = {}
        for phase in sorted(self._first):
            generation = self._first[phase][0].moment[0]
            there = {one.rank for one in self._first[phase]}
            for rank in sorted(generation_ranks.get(generation, [one.rank for one in tasks])):
                if rank in there:
                    continue
                if rank in self._sources:
                    by_rank.setdefault(rank, []).append(phase)
                else:
                    self._answers.setdefault(phase, {}).setdefault(NO_ROWS, []).append(rank)
        for task in tasks:
            asked = tuple(by_rank.get(task.rank, ()))
            if asked:
                source = self._sources[task.rank]
                self._asked.append((task.rank, asked))
                found.append(
                    MomentTask(
                        task.rank,
                        task.run_id,
                        task.sources,
                        source.samples,
                        source.history,
                        source.reads_all,
                        tuple(self._wanted(phase) for phase in asked),
                    )
                )
        return found

    def add_answers(self, answers: Iterable[tuple[str, ...]]) -> None:
        """Takes the answers, in the order of `tasks`."""
        for (rank, asked), found in zip(self._asked, answers, strict=True):
            for phase, answer in zip(asked, found, strict=True):
                self._answers.setdefault(phase, {}).setdefault(answer, []).append(rank)

    def record(self) -> dict[str, object]:
        """Returns the section, once all answers were added."""
        by_phase = {phase.text: self._moment(phase) for phase in Phase}
        places = sorted((found[0].moment, phase) for phase, found in self._first.items())
        return {
            "found": bool(places) if self._is_measured else None,
            "unavailable_reason": "" if self._is_measured else _NO_STATISTIC,
            "first": by_phase[places[0][1].text] if places else None,
            "by_phase": by_phase,
        }

    def _wanted(self, phase: Phase) -> Wanted:
        return Wanted(*self._first[phase][0].moment, self._ordered(phase)[0].tensor)

    def _ordered(self, phase: Phase) -> list[_First]:
        return sorted(self._first[phase], key=_by_tensor)

    def _moment(self, phase: Phase) -> dict[str, object] | None:
        if phase not in self._first:
            return None
        found = self._ordered(phase)
        generation, attempt, forward = found[0].moment
        answers = self._answers.get(phase, {})
        missing = {reason: ranks_text(answers[reason]) for reason in sorted(answers) if reason != FINITE}
        return {
            "phase": phase.text,
            "before_reduction": phase <= Phase.BACKWARD,
            "generation": generation,
            "attempt": None if attempt < 0 else attempt,
            "forward_in_attempt": None if attempt < 0 else forward,
            "forward_index": forward if attempt < 0 else None,
            **_tensor_record(found[0]),
            "ranks": ranks_text(one.rank for one in found),
            "num_ranks": len(found),
            "by_rank": [_tensor_record(one) for one in found[:MAX_SHOWN]],
            "ranks_left_out": max(0, len(found) - MAX_SHOWN),
            "ranks_finite": ranks_text(answers.get(FINITE, ())),
            "ranks_missing": missing,
        }


def _first_of(rank: int, found: PhaseEvidence, order: ExecutionOrder) -> _First:
    keys = [order.key(found.phase, one) for one in found.tensors]
    place = min(range(len(keys)), key=keys.__getitem__)
    return _First(rank, found.moment, keys[place], found.tensors[place], len(keys))


def _tensor_record(one: _First) -> dict[str, object]:
    tensor = one.tensor
    return {
        "rank": one.rank,
        "layer": tensor.layer,
        "call_index": tensor.call_index,
        "signal": tensor.signal,
        "stage": tensor.stage,
        "tensor_path": tensor.tensor_path,
        "backward_index": tensor.backward_index,
        "mode": tensor.mode,
        "grad_sync": tensor.grad_sync,
        "loss_scale": tensor.loss_scale,
        "nonfinite_fraction": tensor.nonfinite_fraction,
        "nonfinite_tensors": one.num_tensors,
    }


def _by_tensor(one: _First) -> tuple[Key, int]:
    return (one.key, one.rank)
