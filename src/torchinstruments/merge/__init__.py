"""Offline: one answer from the folders of many ranks."""

from torchinstruments.merge.compare_runs import RunComparison, compare_runs
from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.result import MergeResult

__all__ = ["MergeResult", "RunComparison", "compare_runs", "merge_run"]
