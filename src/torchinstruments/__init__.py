"""Telemetry for PyTorch training jobs that run on many ranks.

::

    from torchinstruments import inject_observer, remove_observer

    inject_observer(model, output_dir="stats")   # after DDP(model), on every rank
    try:
        train(model)
    finally:
        remove_observer(model)

Importing the package imports neither torch nor Polars: a name is loaded when it is first used, so that the
offline side never pays for torch and a training process never loads Polars.
"""

import importlib
from typing import TYPE_CHECKING

from torchinstruments._version import __version__

if TYPE_CHECKING:
    from torchinstruments import checks, merge, records, report, store, testing
    from torchinstruments.api import has_observer, inject_observer, remove_observer
    from torchinstruments.config import ErrorPolicy, HistoryConfig, RankPolicy
    from torchinstruments.errors import (
        CheckLifecycleError,
        CheckViolationError,
        ConfigurationError,
        ObserverAlreadyAttachedError,
        RunFormatError,
        StorageDeniedError,
        StorageError,
        StorageNotFoundError,
        StorageUnreachableError,
        TorchInstrumentsError,
        WorkerLostError,
    )
    from torchinstruments.merge.engine import MergeResult, merge_run
    from torchinstruments.observe.observer import Observer
    from torchinstruments.observe.sampling import (
        AlwaysSampler,
        EveryNForwardsSampler,
        EveryNStepsSampler,
        SamplingEvent,
        SamplingPolicy,
        TimedSampler,
    )
    from torchinstruments.observe.selection import leaf_modules
    from torchinstruments.sinks.composite import CompositeSink
    from torchinstruments.sinks.destination import DirectorySink
    from torchinstruments.sinks.metric_logger import MetricLogger, MetricLoggerSink
    from torchinstruments.sinks.sink import Sink
    from torchinstruments.sinks.snapshots import SnapshotSink
    from torchinstruments.sinks.tensorboard import TensorBoardLogger, TensorBoardSink
    from torchinstruments.statistics.histograms import HistogramRange, HistogramReducer, histogram
    from torchinstruments.statistics.reducers import (
        Reducer,
        combine,
        default_reducers,
        finite_fraction,
        max_abs,
        mean,
        rms,
        std,
    )
    from torchinstruments.store.run import Run, open_run

_HOMES = {
    "inject_observer": "api",
    "remove_observer": "api",
    "has_observer": "api",
    "Observer": "observe.observer",
    "open_run": "store.run",
    "Run": "store.run",
    "merge_run": "merge.engine",
    "MergeResult": "merge.engine",
    "HistoryConfig": "config",
    "ErrorPolicy": "config",
    "RankPolicy": "config",
    "TimedSampler": "observe.sampling",
    "EveryNForwardsSampler": "observe.sampling",
    "EveryNStepsSampler": "observe.sampling",
    "AlwaysSampler": "observe.sampling",
    "SamplingPolicy": "observe.sampling",
    "SamplingEvent": "observe.sampling",
    "leaf_modules": "observe.selection",
    "Reducer": "statistics.reducers",
    "default_reducers": "statistics.reducers",
    "combine": "statistics.reducers",
    "mean": "statistics.reducers",
    "std": "statistics.reducers",
    "rms": "statistics.reducers",
    "max_abs": "statistics.reducers",
    "finite_fraction": "statistics.reducers",
    "histogram": "statistics.histograms",
    "HistogramReducer": "statistics.histograms",
    "HistogramRange": "statistics.histograms",
    "Sink": "sinks.sink",
    "DirectorySink": "sinks.destination",
    "TensorBoardSink": "sinks.tensorboard",
    "TensorBoardLogger": "sinks.tensorboard",
    "MetricLoggerSink": "sinks.metric_logger",
    "MetricLogger": "sinks.metric_logger",
    "SnapshotSink": "sinks.snapshots",
    "CompositeSink": "sinks.composite",
    "CheckLifecycleError": "errors",
    "CheckViolationError": "errors",
    "TorchInstrumentsError": "errors",
    "WorkerLostError": "errors",
    "ConfigurationError": "errors",
    "ObserverAlreadyAttachedError": "errors",
    "StorageError": "errors",
    "StorageDeniedError": "errors",
    "StorageNotFoundError": "errors",
    "StorageUnreachableError": "errors",
    "RunFormatError": "errors",
}
_MODULES = ("records", "checks", "merge", "report", "store", "testing")

__all__ = [
    "inject_observer",
    "remove_observer",
    "has_observer",
    "Observer",
    "open_run",
    "Run",
    "merge_run",
    "MergeResult",
    "HistoryConfig",
    "ErrorPolicy",
    "RankPolicy",
    "TimedSampler",
    "EveryNForwardsSampler",
    "EveryNStepsSampler",
    "AlwaysSampler",
    "SamplingPolicy",
    "SamplingEvent",
    "leaf_modules",
    "Reducer",
    "default_reducers",
    "combine",
    "mean",
    "std",
    "rms",
    "max_abs",
    "finite_fraction",
    "histogram",
    "HistogramReducer",
    "HistogramRange",
    "Sink",
    "DirectorySink",
    "TensorBoardSink",
    "TensorBoardLogger",
    "MetricLoggerSink",
    "MetricLogger",
    "SnapshotSink",
    "CompositeSink",
    "CheckLifecycleError",
    "CheckViolationError",
    "TorchInstrumentsError",
    "WorkerLostError",
    "ConfigurationError",
    "ObserverAlreadyAttachedError",
    "StorageError",
    "StorageDeniedError",
    "StorageNotFoundError",
    "StorageUnreachableError",
    "RunFormatError",
    "records",
    "checks",
    "merge",
    "report",
    "store",
    "testing",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Loads a public name from its room at first use."""
    home = _HOMES.get(name)
    if home is not None:
        value: object = getattr(importlib.import_module(f"torchinstruments.{home}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"torchinstruments.{name}")
    else:
        raise AttributeError(f"module 'torchinstruments' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted(__all__)
