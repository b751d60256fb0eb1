"""Offline: one answer from the folders of many ranks."""

from torchinstruments.merge.engine import merge_run
from torchinstruments.merge.result import MergeResult

__all__ = ["MergeResult", "merge_run"]
