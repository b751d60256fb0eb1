"""What many tests share: real gloo ranks and real object stores, started once, when first asked for."""

import signal
from collections.abc import Iterator

import pytest

from fork_server import ForkServer
from storage.stores import bucket, fault_proxy, moto_store, proxied, seaweed
from torchinstruments.testing.ranks import RankPool

__all__ = [
    "bucket",
    "fault_proxy",
    "fork_server",
    "four_ranks",
    "moto_store",
    "proxied",
    "rank_pool",
    "seaweed",
    "three_ranks",
]


def pytest_sessionstart() -> None:
    """Lets Ctrl-C be seen, by the processes of tests too, where a shell's ``&`` has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Two ranks with an initialised process group."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    """Three ranks with an initialised process group."""
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four ranks with an initialised process group: the fewest of which a mesh has two axes."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """A process with torch loaded, which forks for each program that a test runs."""
    with ForkServer() as server:
        yield server
