"""Fixtures with real and simulated object stores, for any test folder that imports them by name."""

import uuid
from collections.abc import Callable, Generator

import pytest
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from torchinstruments.testing.fault_proxy import FaultProxy
from torchinstruments.testing.object_store import ObjectStore, object_store

__all__ = ["bucket", "fault_proxy", "moto_store", "proxied", "seaweed"]


@pytest.fixture(scope="session")
def seaweed() -> Generator[ObjectStore]:
    """Runs SeaweedFS on loopback: a store that checks signatures and carries out conditional writes."""
    with object_store() as store:
        yield store


@pytest.fixture(scope="session")
def moto_store() -> Generator[ObjectStore]:
    """Runs moto's server in a thread: quick and strict about S3's answers, but it takes any credentials."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield ObjectStore(f"http://{host}:{port}", "testkey", "testsecret", 0)
    server.stop()


@pytest.fixture
def bucket(seaweed: ObjectStore) -> str:
    """Makes a new bucket in SeaweedFS and returns its name."""
    return seaweed.make_bucket(f"test-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def fault_proxy(seaweed: ObjectStore) -> Generator[FaultProxy]:
    """Puts a proxy that can break requests in front of SeaweedFS."""
    with FaultProxy(seaweed.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxied(seaweed: ObjectStore, fault_proxy: FaultProxy) -> Callable[..., dict[str, object]]:
    """Returns a function that gives storage options that lead through the proxy."""

    def options(**further: object) -> dict[str, object]:
        return {
            **seaweed.storage_options,
            "client_kwargs": {"endpoint_url": fault_proxy.url, "region_name": "us-east-1"},
            **further,
        }

    return options
