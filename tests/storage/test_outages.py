"""Outages longer than a client's own patience: rows wait in the spool, and afterwards each is there once."""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from storage.spooling import (
    make_claim,
    make_identity,
    make_manifest,
    make_part,
    make_target,
    sample_ids,
    stored_manifest,
)
from storage.uploaders import WAIT_S, root, until
from torchinstruments import merge_run, open_run
from torchinstruments.config import HistoryConfig
from torchinstruments.store.filesystem import Storage, open_storage
from torchinstruments.store.locks import FileLock
from torchinstruments.store.spool import SpoolTarget
from torchinstruments.store.spool_folder import LOG, UPLOADER_LOCK
from torchinstruments.store.uploader import Uploader
from torchinstruments.store.writer import RankWriter
from torchinstruments.testing.fault_proxy import FaultProxy
from torchinstruments.testing.object_store import ObjectStore
from unit.store.material import forward, measurement, module, run_record

__all__ = ["root"]

REQUEST_TIMEOUT_S = 1.0
FAILED_ROUNDS = 2
FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "refuses": FaultProxy.down,
    "resets": FaultProxy.reset,
    "stalls": FaultProxy.stall,
    "slow_down": lambda proxy: proxy.status(503, "SlowDown"),
    "internal_error": lambda proxy: proxy.status(500, "InternalError"),
    "expired_token": lambda proxy: proxy.status(403, "ExpiredToken"),
    "loses_responses": lambda proxy: proxy.drop_response(method="PUT"),
    "cuts_bodies": lambda proxy: proxy.reset_body(100, method="PUT"),
    "slower_than_the_bound": lambda proxy: proxy.delay(3 * REQUEST_TIMEOUT_S),
    "slow": lambda proxy: proxy.delay(0.3),
}


def impatient(url: str, storage_options: Mapping[str, object] | None, *, timeout_s: float) -> Storage:
    """Opens a store as the uploader does, with a shorter bound of one request."""
    return open_storage(url, storage_options, timeout_s=min(timeout_s, REQUEST_TIMEOUT_S))


@dataclass
class Outage:
    """One store that fails in one way, and what writes to it."""

    url: str
    proxy: FaultProxy
    target: SpoolTarget
    uploader: Uploader
    thread: threading.Thread

    @property
    def log(self) -> str:
        """What the uploader had to say."""
        return (Path(self.target.path).parent / LOG).read_text()


def begin(seaweed: ObjectStore, proxy: FaultProxy, bucket: str, root: Path) -> Outage:
    """Starts an uploader with short bounds on a spool of its own, behind a proxy of its own."""
    options: dict[str, Any] = {
        **seaweed.storage_options,
        "client_kwargs": {"endpoint_url": proxy.url, "region_name": "us-east-1"},
    }
    url = f"s3://{bucket}/run"
    target = make_target(url, options, root)
    spool = Path(target.path).parent
    lock = FileLock.acquire(spool / UPLOADER_LOCK)
    assert lock is not None
    uploader = Uploader(spool, url, options, lock, open_remote=impatient)
    return Outage(url, proxy, target, uploader, threading.Thread(target=uploader.run, daemon=True))


def test_after_every_kind_of_outage_everything_is_there_once(seaweed: ObjectStore, root: Path) -> None:
    """Each store fails for several rounds of its uploader and is mended; all fail at the same time."""
    with ExitStack() as stack:
        outages: dict[str, Outage] = {}
        for name, fault in FAULTS.items():
            proxy = stack.enter_context(FaultProxy(seaweed.endpoint))
            bucket = seaweed.make_bucket(f"outage-{name.replace('_', '-')}")
            outages[name] = begin(seaweed, proxy, bucket, root / name)
            fault(proxy)
        for outage in outages.values():
            for first in range(0, 30, 10):
                outage.target.write_part("samples", 10, make_part(range(first, first + 10)))
                outage.target.write_part("history", 10, make_part(range(first, first + 10), "history"))
            outage.thread.start()
            outage.target.upload(0.0)
        failing = {name: outage for name, outage in outages.items() if name != "slow"}
        for name, outage in failing.items():
            assert until(lambda one=outage: one.uploader._backoff._failures >= FAILED_ROUNDS), name
            assert outage.target.state().last_error, name
            outage.target.write_part("samples", 10, make_part(range(30, 40)))
            assert outage.target.state().tables["samples"].rows_in_spool == 40, name
        assert outages["slow"].target.upload(WAIT_S)
        assert outages["slow"].target.state().last_error == ""
        outages["slow"].target.write_part("samples", 10, make_part(range(30, 40)))

        denied = outages["expired_token"]
        assert denied.log.count("ExpiredToken") == 1
        assert len(denied.proxy.log) <= 2 * denied.uploader._backoff._failures + 1

        for outage in outages.values():
            outage.proxy.clear()
            outage.proxy.down()  # resets what still stalls
            outage.proxy.up()
        for name, outage in outages.items():
            assert outage.target.upload(WAIT_S), name
            outage.target.write_document(
                "process-1a2b3c4d.json", make_manifest(outage.target, status="closed")
            )
            assert outage.target.finish(WAIT_S), name
            storage = open_storage(outage.url, seaweed.storage_options)
            assert sample_ids(storage) == list(range(40)), name
            assert sample_ids(storage, "history") == list(range(30)), name
            samples = stored_manifest(storage).tables["samples"]
            assert (samples.rows, samples.rows_in_spool, samples.rows_dropped) == (40, 0, 0), name
            outage.thread.join(WAIT_S)
            assert not outage.thread.is_alive(), name


def test_a_spool_that_is_full_drops_and_counts_and_takes_rows_again(
    seaweed: ObjectStore, bucket: str, root: Path, fault_proxy: FaultProxy
) -> None:
    """Beyond the bound rows are refused, never others removed; after the outage there is room again."""
    outage = begin(seaweed, fault_proxy, bucket, root)
    parts = [make_part(range(first, first + 10)) for first in range(0, 50, 10)]
    target = outage.target
    target._max_bytes = 3 * max(len(part) for part in parts) + 100
    fault_proxy.down()
    outage.thread.start()
    for part in parts[:3]:
        target.write_part("samples", 10, part)
    with pytest.raises(OSError, match="rows are dropped until the store takes what is there"):
        target.write_part("samples", 10, parts[3])
    assert target.state().tables["samples"].rows_in_spool == 30
    fault_proxy.up()
    assert target.upload(WAIT_S)
    target.write_part("samples", 10, parts[4])
    target.write_document("process-1a2b3c4d.json", make_manifest(target, status="closed"))
    assert target.finish(WAIT_S)
    storage = open_storage(outage.url, seaweed.storage_options)
    assert sample_ids(storage) == [*range(30), *range(40, 50)]


def test_two_launches_that_could_not_ask_are_both_kept_and_named(tmp_path: Path, root: Path) -> None:
    """Both are generation 0; every row of both arrives under its process, and the merge says so."""
    url = str(tmp_path / "run")
    processes = ("1a2b3c4d", "2b3c4d5e")
    targets = {}
    for process in processes:
        claim = make_claim(url, verified=False)
        target = targets[process] = make_target(url, None, root, process=process, claim=claim)
        lock = FileLock.acquire(Path(target.path).parent / UPLOADER_LOCK)
        writer = RankWriter(make_identity(0, process), claim, HistoryConfig(), target)
        writer.start(run_record(), [module(layer) for layer in range(2)])
        for ordinal in range(4):
            writer.add_sample(forward(ordinal, measurement(0), measurement(1)))
        assert not writer.close(0.0)  # the store does not answer: this uploader is held off
        if lock is not None:
            lock.release()
    spool = Path(targets[processes[0]].path).parent
    lock = FileLock.acquire(spool / UPLOADER_LOCK, timeout_s=WAIT_S)
    assert lock is not None
    assert Uploader(spool, url, None, lock, once=True).run() == 0

    history = open_run(url).history().collect()
    assert history.height == 2 * 4 * 2 * 3
    assert history.unique(["process", "sample_id", "layer", "metric"]).height == history.height
    assert set(history["generation"]) == {0}
    coverage: Any = merge_run(url).to_dict()["coverage"]
    assert coverage["overlapping_ranks"] == [
        {"rank": 0, "generation": 0, "processes": list(processes), "same_sample_ids": True}
    ]
    assert list(root.iterdir()) == []
