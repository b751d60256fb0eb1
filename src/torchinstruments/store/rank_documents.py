"""What a process leaves for people beside its rows: ``result.json`` and ``index.md`` of its rank's folder.

Both are written at attach, with the catalog and zero counts, and once more by an orderly close. In between
the manifest tells the state, and parts the numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pyarrow as pa

from torchinstruments.records import (
    Claim,
    Counters,
    ErrorRecord,
    Identity,
    ModuleRecord,
    RunRecord,
    Sample,
    error_text,
)
from torchinstruments.store import layout
from torchinstruments.store.columns import Columns
from torchinstruments.store.index_page import Collected, encode_index
from torchinstruments.store.rank_result import encode_catalog, encode_result
from torchinstruments.store.running_summary import RunningSummary

__all__ = ["RankDocuments"]


class RankDocuments:
    """Makes both documents of one process (writer thread).

    Args:
        identity: Who the process is.
        claim: Its run and generation.
        window: Samples in each window of a summary.
    """

    def __init__(self, identity: Identity, claim: Claim, window: int) -> None:
        self._identity = identity
        self._claim = claim
        self._run: RunRecord | None = None
        self._summary = RunningSummary(window)
        self._forward_deliveries = 0
        self._backward_deliveries = 0
        self._trouble = ""

    def count(self, sample: Sample) -> None:
        """Counts one delivery of a sample."""
        if sample.backward_index is None:
            self._forward_deliveries += 1
        else:
            self._backward_deliveries += 1

    def add_rows(self, part: Columns | pa.Table) -> None:
        """Takes rows of ``history`` in the order of their part, as `RunningSummary.add`.

        Raises:
            Exception: They cannot be folded; there will be no summaries, and the page says why.
        """
        self._fold(lambda: self._summary.add(part))

    def fold_rest(self) -> None:
        """Folds the rows that were taken and wait.

        Raises:
            Exception: As `add_rows`.
        """
        self._fold(self._summary.fold_rest)

    def _fold(self, fold: Callable[[], None]) -> None:
        if self._trouble:
            return
        try:
            fold()
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"
            raise

    def at_attach(
        self, run: RunRecord, modules: Sequence[ModuleRecord], counters: Counters, written_at: str
    ) -> dict[str, bytes]:
        """Returns both documents as they are at attach, by base name."""
        self._run = run
        collected = self._collected(modules, counters, written_at)
        return {
            layout.RESULT_FILE: encode_catalog(modules),
            layout.INDEX_FILE: encode_index(self._identity, self._claim, run, collected),
        }

    def at_close(
        self,
        errors: Sequence[ErrorRecord],
        in_time: Callable[[], bool],
        modules: Sequence[ModuleRecord],
        counters: Counters,
        written_at: str,
    ) -> dict[str, bytes]:
        """Returns both documents as an orderly close leaves them, by base name; none before `at_attach`.

        Where there are no summaries, because of an error or for want of time, `in_time` being asked for that,
        the page says so and the catalog stands. It names the layers whose summaries alone cannot be written.
        """
        if self._run is None:
            return {}
        result = encode_catalog(modules)
        refused: list[ErrorRecord] = []

        def refuse(layer: str, error: Exception) -> None:
            refused.append(
                ErrorRecord("result", layer, type(error).__name__, error_text(error), at=written_at)
            )

        if not self._trouble:
            try:
                left_out = self._summary.rows_left_out
                result = encode_result(modules, self._summary.finish(), left_out, in_time, refuse)
            except TimeoutError as error:
                self._trouble = str(error)
        collected = self._collected(modules, counters, written_at)
        collected = replace(collected, is_closed=True, errors=(*errors, *refused))
        return {
            layout.RESULT_FILE: result,
            layout.INDEX_FILE: encode_index(self._identity, self._claim, self._run, collected),
        }

    def _collected(self, modules: Sequence[ModuleRecord], counters: Counters, written_at: str) -> Collected:
        return Collected(
            is_closed=False,
            written_at=written_at,
            counters=counters,
            forward_deliveries=self._forward_deliveries,
            backward_deliveries=self._backward_deliveries,
            modules=modules,
            errors=(),
            rows_left_out=sum(self._summary.rows_left_out.values()),
            max_series=self._summary.bound,
            trouble=self._trouble,
        )
