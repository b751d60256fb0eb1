"""Which way is taken on a machine."""

from collections.abc import Callable, Iterator

import pytest
import torch

from torchinstruments.statistics import ways
from torchinstruments.statistics.ordered import OrderedEntries, sort_entries
from torchinstruments.statistics.ways import prefers_selection


@pytest.fixture(autouse=True)
def untried() -> Iterator[None]:
    """A machine on which nothing was tried, before and afterwards."""
    ways._crossover.cache_clear()
    yield
    ways._crossover.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, sort_s: float, select_s: float) -> list[int]:
    """Lets both ways take these times; the list grows with each trial."""
    tried: list[int] = []

    def took(form: Callable[[torch.Tensor], OrderedEntries], tensor: torch.Tensor) -> float:
        tried.append(tensor.numel())
        return sort_s if form is sort_entries else select_s

    monkeypatch.setattr(ways, "_least_seconds", took)
    return tried


@pytest.mark.parametrize(
    ("sort_s", "select_s", "first"), [(3.0, 1.0, 8192), (1.0, 1.0, 65_536), (1.0, 2.0, 16 * 65_536)]
)
def test_the_lead_at_one_size_says_from_which_size_to_select(
    sort_s: float, select_s: float, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sort that is twice as fast keeps its lead up to sixteen times the size."""
    pretend(monkeypatch, sort_s, select_s)
    assert prefers_selection(first)
    assert not prefers_selection(first - 1)


def test_a_machine_is_tried_once_and_only_for_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors ask for no trial, large ones for one of each way."""
    tried = pretend(monkeypatch, 2.0, 1.0)
    assert not prefers_selection(8191)
    assert tried == []
    assert prefers_selection(10**6)
    assert prefers_selection(10**7)
    assert len(tried) == 2


def test_a_real_trial_gives_a_size() -> None:
    """Both ways run, and the program's random numbers stay as they were."""
    state = torch.get_rng_state()
    assert 0 < ways._crossover() < float("inf")
    assert torch.equal(torch.get_rng_state(), state)
