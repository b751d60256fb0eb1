"""Samples as strict JSON files, one a sample, for people and programs that read no Parquet.

::

    <output_dir>/
      run.json
      modules.json
      snapshots/000000.json

Where the world has several ranks, ``modules.json`` and ``snapshots/`` lie in the rank's own folder,
``rank-000/``. A snapshot is written as ``forward_complete``; a backward replaces the file in one step, and it
says ``backward_observed`` then. An optimizer's step that found gradients of parameters adds them in the same
way. The file is read back for that from the disk, so that nothing is kept in memory however long a backward
takes to come.
"""

import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from torchinstruments.errors import ConfigurationError
from torchinstruments.records import (
    AttemptRecord,
    Claim,
    ErrorRecord,
    FingerprintRecord,
    Identity,
    Measurement,
    ModuleRecord,
    RunRecord,
    Sample,
    SampleState,
    Signal,
    error_text,
)
from torchinstruments.store.filesystem import is_remote, redact
from torchinstruments.store.layout import rank_folder
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.urls import local_path

__all__ = ["SNAPSHOT_SCHEMA_VERSION", "SnapshotSink"]

SNAPSHOT_SCHEMA_VERSION = 1
"""Version of what these files hold."""

_RUN_FILE = "run.json"
_MODULES_FILE = "modules.json"
_MAX_ERRORS = 100
_ABSENT: Mapping[str, str] = {"status": "absent", "reason": "the error is not of one module"}


class SnapshotSink:
    """Writes each sample as one JSON file into a local folder (a `TelemetrySink`).

    The folder should be its own. One that holds something else, another run or the run's folder itself, is
    left alone: the snapshots go to ``run-<run id>`` in it, and `path` has the truth. A run that is started
    again under its id goes on in the same folder, with sample ids of its own.

    The ``errors`` of a snapshot are those that were noted since the one before; what comes after the last is
    added to it at the end.

    Args:
        output_dir: Path of the folder; it need not exist.

    Raises:
        ConfigurationError: It is no path, or a URL of something remote.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        if not isinstance(output_dir, (str, os.PathLike)) or not str(output_dir).strip():
            raise ConfigurationError(
                f"SnapshotSink({output_dir!r}) is not possible; give the path of a folder"
            )
        url = os.fspath(output_dir)
        if is_remote(url):
            raise ConfigurationError(
                f"SnapshotSink({redact(url)!r}) is not possible, since a file a sample does not suit an "
                f"object store; give the path of a local folder, and leave the store to output_dir"
            )
        self._output_dir = local_path(url)
        self._identity: Identity | None = None
        self._claim: Claim | None = None
        self._files = LocalStorage(self._output_dir)
        self._catalog: dict[str, object] | None = None
        self._errors: deque[dict[str, object]] = deque(maxlen=_MAX_ERRORS)
        self._errors_left_out = 0
        self._last_name: str | None = None

    def __repr__(self) -> str:
        return f"SnapshotSink({self._output_dir!r})"

    @property
    def path(self) -> str:
        """Folder in which the snapshots of this rank lie; final once the first sample was taken."""
        return self._files.url

    def place(self, identity: Identity, claim: Claim) -> None:
        """Takes which rank of which run this is (writer thread)."""
        self._identity = identity
        self._claim = claim

    def initialize(self, run: RunRecord, modules: Sequence[ModuleRecord]) -> None:
        """Writes ``run.json`` and ``modules.json`` (writer thread).

        Raises:
            OSError: They cannot be written.
        """
        home = self._claimed(run)
        folder = self._rank_folder(run)
        self._files = home.child(folder) if folder else home
        self._write_catalog(modules)

    def observe(self, sample: Sample) -> None:
        """Writes the sample's snapshot, or adds a backward to it (writer thread).

        Raises:
            OSError: It cannot be read or written.
            ValueError: The file that was there is no JSON, or a number is not finite.
            TypeError: The file that was there is no snapshot.
        """
        if sample.state is SampleState.MISSED:
            return
        first = 0 if self._claim is None else self._claim.first_sample_id
        sample_id = first + sample.ordinal
        name = f"snapshots/{sample_id:06d}.json"
        is_first = sample.backward_index is None and not sample.at_step
        snapshot = None if is_first else self._read(name)
        if snapshot is None:
            snapshot = _begun(sample, sample_id)
        _add(snapshot, sample)
        self._add_errors(snapshot)
        self._files.replace(name, _encoded(snapshot))
        self._last_name = name

    def attempts(self, records: Sequence[AttemptRecord]) -> None:
        """Does nothing: snapshots know no steps (writer thread)."""

    def fingerprints(self, records: Sequence[FingerprintRecord]) -> None:
        """Does nothing: snapshots are of layers (writer thread)."""

    def modules(self, modules: Sequence[ModuleRecord]) -> None:
        """Writes ``modules.json`` anew where a layer came or changed (writer thread).

        Raises:
            OSError: It cannot be written.
        """
        self._write_catalog(modules)

    def error(self, error: ErrorRecord) -> None:
        """Takes an error for the next snapshot (writer thread)."""
        if len(self._errors) == _MAX_ERRORS:
            self._errors_left_out += 1
        self._errors.append(
            {
                "timestamp": error.at or _iso(datetime.now(UTC)),
                "module": error.module or dict(_ABSENT),
                "probe": error.probe,
                "exception_type": error.type,
                "message": error.message,
            }
        )

    def tick(self) -> None:
        """Does nothing: nothing waits (writer thread)."""

    def flush(self) -> bool:
        """Returns True: every snapshot is durable when it is written (writer thread)."""
        return True

    def close(self) -> None:
        """Adds errors that came after the last snapshot to it (writer thread).

        Raises:
            OSError: It cannot be read or written.
        """
        name = self._last_name
        snapshot = self._read(name) if name is not None and self._errors else None
        if name is not None and snapshot is not None:
            self._add_errors(snapshot)
            self._files.replace(name, _encoded(snapshot))

    def finish(self, timeout_s: float, *, complete: bool) -> bool:  # noqa: ARG002 - part of the seam
        """Closes; nothing has to be carried further (writer thread)."""
        self.close()
        return True

    def _claimed(self, run: RunRecord) -> LocalStorage:
        """Returns the folder that holds this run's ``run.json``, written by this rank or another of it."""
        document = _encoded(_run_document(run))
        home = LocalStorage(self._output_dir)
        if home.create(_RUN_FILE, document) or _is_of(home.read(_RUN_FILE), run):
            return home
        beside = home.child(f"run-{run.run_id}")
        if not beside.create(_RUN_FILE, document) and not _is_of(beside.read(_RUN_FILE), run):
            raise FileExistsError(
                f"{beside.url} holds something else than snapshots of the run {run.run_id}; give "
                f"SnapshotSink another folder"
            )
        return beside

    def _rank_folder(self, run: RunRecord) -> str:
        identity = self._identity
        if identity is None:
            return ""
        only_one = identity.world_size == 1 and (self._claim is None or self._claim.alone)
        return rank_folder(
            identity.rank, alone=identity.rank == 0 and (only_one or run.rank_policy == "rank0")
        )

    def _write_catalog(self, modules: Sequence[ModuleRecord]) -> None:
        catalog: dict[str, object] = {
            one.layer: {
                "type": one.type,
                "aliases": list(one.aliases),
                "parameter_count": one.parameter_count,
                "trainable_parameter_count": one.trainable_parameter_count,
            }
            for one in modules
        }
        if catalog != self._catalog:
            self._files.replace(_MODULES_FILE, _encoded(catalog))
            self._catalog = catalog

    def _read(self, name: str) -> dict[str, Any] | None:
        """Returns a snapshot as it stands; None where its forward never came."""
        try:
            found = json.loads(self._files.read(name))
        except FileNotFoundError:
            return None
        if not isinstance(found, dict):
            raise TypeError(f"{self._files.url}/{name} is no snapshot")
        return found

    def _add_errors(self, snapshot: dict[str, Any]) -> None:
        snapshot["errors"].extend(self._errors)
        snapshot["errors_left_out"] += self._errors_left_out
        self._errors.clear()
        self._errors_left_out = 0


def _run_document(run: RunRecord) -> dict[str, object]:
    return {
        "schema_version": SNAPSHOT_SCHEMA_VERSION,
        "run_id": run.run_id,
        "created_at": _with_z(run.created_at),
        "torch_version": run.versions.get("torch", "unknown"),
        "observer_version": run.versions.get("torchinstruments", "unknown"),
        "sampling": dict(run.sampling),
        "world_size": run.world_size,
    }


def _is_of(document: bytes, run: RunRecord) -> bool:
    """Returns whether a ``run.json`` was written by this sink, on any rank of this run."""
    try:
        found = json.loads(document)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("run_id") == run.run_id and "observer_version" in found


def _begun(sample: Sample, sample_id: int) -> dict[str, Any]:
    position = sample.position
    return {
        "schema_version": SNAPSHOT_SCHEMA_VERSION,
        "snapshot_id": sample_id,
        "forward_index": position.forward_index,
        "attempt": position.attempt,
        "forward_in_attempt": position.forward_in_attempt,
        "micro_batch": position.micro_batch,
        "step_provenance": position.step_provenance.value,
        "timestamp": _iso(datetime.fromtimestamp(sample.started_at_us / 1e6, UTC)),
        "state": sample.state.value,
        "collection_duration_ms": 0.0,
        "modules": {},
        "errors": [],
        "errors_left_out": 0,
    }


def _add(snapshot: dict[str, Any], sample: Sample) -> None:
    """Adds one delivery of a sample to its snapshot."""
    if not sample.at_step:
        snapshot["state"] = sample.state.value
        snapshot["grad_sync"] = sample.grad_sync.value
        snapshot["loss_scale"] = sample.loss_scale
        snapshot["scale_provenance"] = sample.scale_provenance.value
    snapshot["collection_duration_ms"] += sample.collection_s * 1e3
    for one in sample.measurements:
        call = _call(snapshot["modules"].setdefault(one.layer, []), one.call_index)
        moment = f"/{one.stage}" if one.stage else ""
        traversal = f"/backward_{one.backward_index}" if one.backward_index else ""
        try:
            tensor = _tensor(one)
            json.dumps(tensor, allow_nan=False)
        except Exception as error:  # noqa: BLE001 - one tensor may not cost the others
            snapshot["errors"].append(
                {
                    "timestamp": _iso(datetime.now(UTC)),
                    "module": one.layer,
                    "probe": "snapshot",
                    "exception_type": type(error).__name__,
                    "message": error_text(error),
                }
            )
            continue
        if one.signal is Signal.PARAMETER_GRADIENT:
            # What a step finds may have been unscaled since the backward.
            tensor["loss_scale"] = sample.loss_scale
            tensor["scale_provenance"] = sample.scale_provenance.value
        call.setdefault(f"{one.signal.value}s", {})[f"{one.tensor_path}{moment}{traversal}"] = tensor


def _call(calls: list[dict[str, Any]], call_index: int) -> dict[str, Any]:
    for call in calls:
        if call["call_index"] == call_index:
            return call
    call: dict[str, Any] = {"call_index": call_index, "outputs": {}, "output_gradients": {}}
    calls.append(call)
    calls.sort(key=_call_index)
    return call


def _call_index(call: dict[str, Any]) -> int:
    return call["call_index"]


def _tensor(one: Measurement) -> dict[str, object]:
    scalars = list(zip(one.metrics, one.values, one.reasons, strict=True))
    return {
        "shape": list(one.shape),
        "dtype": one.dtype,
        "device": one.device,
        "numel": math.prod(one.shape),
        "mode": one.mode,
        "grad_enabled": one.grad_enabled,
        "scope": one.scope.value,
        "execution": one.execution.value,
        "stats": {metric: value for metric, value, _ in scalars if value is not None},
        "unavailable_stats": {metric: reason for metric, value, reason in scalars if value is None},
    }


def _encoded(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"


def _iso(moment: datetime) -> str:
    return _with_z(moment.isoformat())


def _with_z(text: str) -> str:
    return text.replace("+00:00", "Z")
