"""Fixtures of the tests of the observing room."""

import pytest
import torch

from unit.observe.memory import MemorySession


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test begins with the same random state."""
    torch.manual_seed(0)


@pytest.fixture
def session() -> MemorySession:
    """A session in memory."""
    return MemorySession()
