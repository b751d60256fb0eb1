"""What a merge gives back, and the document that it leaves behind."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchinstruments.merge.rank_sets import ranks_text
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
        result: ``merged/result.json`` as it was written: ``schema_version``, ``run``, ``coverage``,
            ``generations``, ``ranks``, ``steps``, ``replicas``, ``first_nonfinite``, ``findings``,
            ``own_work``, ``layers``.
        url: Folder that holds ``result.json`` and its tables, without secrets.
        complete: Whether nothing that was expected is missing, and nothing was set aside.
    """

    result: Mapping[str, object]
    url: str
    complete: bool
    _storage: Storage = field(repr=False, compare=False)

    def __repr__(self) -> str:
        """Returns one line; the result itself may have millions."""
        coverage = self.result.get("coverage")
        present = coverage.get("present_ranks", []) if isinstance(coverage, Mapping) else []
        state = "complete" if self.complete else "not complete"
        return f"MergeResult({self.url!r}, ranks={ranks_text(present)!r}, {state})"

    def summary(self) -> "pl.DataFrame":
        """Returns ``summary.parquet``: one row a rank and series, by rank, then by series.

        Raises:
            StorageError: The store refused or did not answer.
            FileNotFoundError: Somebody took the file away.
        """
        import polars as pl

        return pl.read_parquet(io.BytesIO(self._storage.read(SUMMARY_FILE)))
