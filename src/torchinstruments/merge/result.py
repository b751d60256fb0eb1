"""What a merge gives back, and the document that it leaves behind."""

import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from torchinstruments.merge.answers import (
    CheckFinding,
    Coverage,
    Divergence,
    FirstNonfinite,
    ModeSplit,
    OwnWork,
    StepDisagreement,
    WidestSeries,
    answer,
    answers,
)
from torchinstruments.merge.comparison import COMPARISON_FILE
from torchinstruments.merge.digest import digest_html, digest_lines
from torchinstruments.merge.overview import OVERVIEW_FILE
from torchinstruments.merge.rank_sets import ranks_text
from torchinstruments.merge.steps import STEPS_FILE
from torchinstruments.merge.timeline import TIMELINE_FILE
from torchinstruments.store.storage import Storage

if TYPE_CHECKING:
    import polars as pl

__all__ = ["RESULT_FILE", "RESULT_SCHEMA_VERSION", "SUMMARY_FILE", "MergeResult"]

RESULT_FILE = "result.json"
SUMMARY_FILE = "summary.parquet"

RESULT_SCHEMA_VERSION = 1
"""Version of ``merged/result.json`` and of the files beside it."""


@dataclass(frozen=True, slots=True)
class MergeResult:
    """One answer from the folders of many ranks.

    Attributes:
        result: ``merged/result.json`` as it was written: ``schema_version``, ``run``, ``files``,
            ``coverage``, ``generations``, ``ranks``, ``steps``, ``replicas``, ``first_nonfinite``,
            ``findings``, ``own_work``, ``comparison``, ``layers``.
        url: Folder that holds ``result.json`` and its tables, without secrets.
        complete: Whether nothing that was expected is missing, and nothing was set aside.
        storage: That folder, opened.
    """

    result: Mapping[str, object]
    url: str
    complete: bool
    storage: Storage = field(repr=False, compare=False)

    def __repr__(self) -> str:
        """Returns five lines: which ranks, what is missing, same steps, first nonfinite, widest.

        A sixth one says so where ranks ran the same forward in different modes.
        """
        return "\n".join([self._title(), *(f"  {name}: {text}" for name, text in digest_lines(self.result))])

    def _repr_html_(self) -> str:
        """Returns the same as a table, and the widest series, for notebooks; all text is escaped."""
        return digest_html(self._title(), self.result)

    def _title(self) -> str:
        state = "complete" if self.complete else "not complete"
        return f"MergeResult({self.url!r}, ranks={ranks_text(self.coverage.present_ranks)!r}, {state})"

    def to_dict(self) -> dict[str, object]:
        """Returns a copy of `result` that is the caller's own."""
        return copy.deepcopy(dict(self.result))

    @property
    def coverage(self) -> Coverage:
        """What was expected, and what was there."""
        return msgspec.convert(self.result["coverage"], Coverage)

    @property
    def same_steps(self) -> bool | None:
        """Whether no two ranks disagree on an attempt; None where no attempt is there of two ranks."""
        return answer(self.result["steps"], "same_steps", bool)

    @property
    def step_disagreements(self) -> tuple[StepDisagreement, ...]:
        """The first hundred attempts on which ranks disagree; `steps` has all."""
        return answers(self.result["steps"], "disagreements", StepDisagreement)

    @property
    def forwards_in_different_modes(self) -> int:
        """How many forwards some ranks ran in ``train`` and others in ``eval``: these are not compared."""
        return answer(self.result["comparison"], "forwards_in_different_modes", int) or 0

    @property
    def first_mode_split(self) -> ModeSplit | None:
        """The first of these forwards, with the ranks in each mode; None where there is none."""
        return answer(self.result["comparison"], "first_in_different_modes", ModeSplit)

    @property
    def replicas_equal(self) -> bool | None:
        """Whether ranks that have to hold the same parameters do; None where nothing could be judged."""
        return answer(self.result["replicas"], "equal", bool)

    @property
    def first_divergence(self) -> Divergence | None:
        """The first attempt and tensor in which replicas differ."""
        return answer(self.result["replicas"], "first_divergence", Divergence)

    @property
    def first_nonfinite(self) -> FirstNonfinite | None:
        """The first moment at which NaN or infinity stood anywhere; None where none was found."""
        return answer(self.result["first_nonfinite"], "first", FirstNonfinite)

    @property
    def check_findings(self) -> tuple[CheckFinding, ...]:
        """What training checks found, one a severity, code and check, gravest first; at most a hundred."""
        return answers(self.result["findings"], "by_code", CheckFinding)

    @property
    def own_work(self) -> tuple[OwnWork, ...]:
        """Which ranks are late by their own work, generation by generation."""
        return answers(self.result["own_work"], "generations", OwnWork)

    @property
    def widest(self) -> tuple[WidestSeries, ...]:
        """The series in which a rank is furthest from the others, at most twenty, the widest first."""
        return answers(self.result["comparison"], "widest", WidestSeries)

    def summary(self) -> "pl.DataFrame":
        """Returns ``summary.parquet``: one row a rank and series, by rank, then by series.

        Raises:
            StorageError: The store refused or did not answer.
            FileNotFoundError: Somebody took the file away.
        """
        return self._table(SUMMARY_FILE)

    def comparison(self) -> "pl.DataFrame":
        """Returns ``comparison.parquet``: one row a series and forward that two ranks have a value of.

        It grows with the run. Of a large one, scan the file at `url` instead.

        Raises:
            StorageError: The store refused or did not answer.
            FileNotFoundError: Somebody took the file away.
        """
        return self._table(COMPARISON_FILE)

    def overview(self) -> "pl.DataFrame":
        """Returns ``overview.parquet``: how values lie over ranks at the forwards chosen for pictures.

        Raises:
            StorageError: The store refused or did not answer.
            FileNotFoundError: The merge was one of an earlier release, or somebody took the file away.
        """
        return self._table(OVERVIEW_FILE)

    def timeline(self) -> "pl.DataFrame":
        """Returns ``timeline.parquet``: samples, steps and loss scale of each rank, stretch by stretch.

        Raises:
            StorageError: The store refused or did not answer.
            FileNotFoundError: The merge was one of an earlier release, or somebody took the file away.
        """
        return self._table(TIMELINE_FILE)

    def steps(self) -> "pl.DataFrame":
        """Returns ``steps.parquet``: what ranks disagree in, attempt by attempt, one row a value.

        Raises:
            StorageError: The store refused or did not answer.
            FileNotFoundError: Somebody took the file away.
        """
        return self._table(STEPS_FILE)

    def _table(self, name: str) -> "pl.DataFrame":
        import polars as pl

        return pl.read_parquet(io.BytesIO(self.storage.read(name)))
