"""Every error that this package raises, in one small tree.

::

    TorchInstrumentsError
    +-- ConfigurationError (ValueError)         an argument or variable that cannot work
    +-- ObserverAlreadyAttachedError            one model, two observers
    +-- StorageError (OSError)                  a store refused, or could not be reached
    |   +-- StorageDeniedError                  wrong or missing credentials, no permission
    |   +-- StorageNotFoundError                the bucket or parent folder does not exist
    |   +-- StorageUnreachableError             no answer in time, or an answer that may pass
    +-- RunFormatError (ValueError)             what lies there is not a run that this version reads
    +-- WorkerLostError (RuntimeError)          a worker of a merge died, as often as its task was tried
    +-- CheckLifecycleError (RuntimeError)      a session of checks that is attached twice
    +-- CheckViolationError (RuntimeError)      a check that was asked to raise found something

A message is one sentence: the value, what is allowed, and the way out.
"""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "CheckLifecycleError",
    "CheckViolationError",
    "ConfigurationError",
    "ObserverAlreadyAttachedError",
    "RunFormatError",
    "StorageDeniedError",
    "StorageError",
    "StorageNotFoundError",
    "StorageUnreachableError",
    "TorchInstrumentsError",
    "WorkerLostError",
]


class TorchInstrumentsError(Exception):
    """Root of the tree: catch this to catch everything that this package raises on purpose.

    Attributes:
        failures: Of a merge, the ranks that are known to have failed when it was given up, each with what
            failed; empty where an error is of no rank in particular.
    """

    failures: Mapping[int, str] = MappingProxyType({})


class ConfigurationError(TorchInstrumentsError, ValueError):
    """An argument or an environment variable that cannot work; the message names it and its value."""


class ObserverAlreadyAttachedError(TorchInstrumentsError, RuntimeError):
    """The model has an observer already; remove it first."""


class StorageError(TorchInstrumentsError, OSError):
    """A store refused a request, or could not be reached."""


class StorageDeniedError(StorageError):
    """The store knows who asks, or does not, and says no."""


class StorageNotFoundError(StorageError):
    """The bucket, or the folder that should hold the run, does not exist."""


class StorageUnreachableError(StorageError):
    """The store did not answer in time, or answered with a fault that may pass."""


class RunFormatError(TorchInstrumentsError, ValueError):
    """What lies at a URL is not a run, or one of a schema version that this release does not read."""


class WorkerLostError(TorchInstrumentsError, RuntimeError):
    """A thread, process or machine that did a part of a merge was lost, as often as that part was tried."""


class CheckLifecycleError(TorchInstrumentsError, RuntimeError):
    """A session of checks was attached while it is attached, or changed when that is too late."""


class CheckViolationError(TorchInstrumentsError, RuntimeError):
    """A check that was asked to raise found something.

    Attributes:
        fields: ``code``, ``finding``, ``names``, ``attempt``, ``accepted_step``, ``remedy`` and ``report``,
            as plain values.
    """

    fields: Mapping[str, object] = MappingProxyType({})
    """What was found, as plain values; ``code`` is stable."""
