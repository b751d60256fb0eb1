"""What a session costs: sizes of copies, and seconds measured here and now."""

import time
from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from torchinstruments.checks.accumulation import AccumulationSite
from torchinstruments.checks.measures import local_numel, norms, sort_out
from torchinstruments.checks.reading import Reading
from torchinstruments.statistics.isolation import functions_off, isolated, unintercepted

__all__ = ["hook_s", "num_bytes", "scan_s"]


class _Nobody:
    """Listens to a site that exists only to be timed."""

    def backward_began(self, *, is_counted: bool) -> None:
        """Takes nothing."""

    def backward_ended(self, fired: Sequence[int]) -> None:
        """Takes nothing."""

    def accumulated(self, index: int) -> None:
        """Takes nothing."""


def num_bytes(tensor: torch.Tensor) -> int:
    """Returns how many bytes a copy of what this rank has of a tensor takes; nothing is read."""
    with unintercepted():
        return 0 if is_lazy(tensor) else local_numel(tensor) * tensor.element_size()


def scan_s(tensors: Sequence[torch.Tensor]) -> float:
    """Returns the seconds that the norms of all tensors take, their fetching included."""
    started_s = time.perf_counter()
    with functions_off(), isolated("cpu"):
        ready, _ = sort_out(dict(enumerate(tensors)))
        reading = Reading()
        reading.add(norms(tuple(ready.values())))
        reading.fetch()
    return time.perf_counter() - started_s


def hook_s(num_calls: int = 1_000) -> float:
    """Returns the seconds that noting one gradient takes here now."""
    nobody = _Nobody()
    site = AccumulationSite(nobody, int, lambda _probe, _error: None)
    parameter = torch.empty(0, device="cpu")
    started_s = time.perf_counter()
    for _ in range(num_calls):
        site.hook(parameter)
    return (time.perf_counter() - started_s) / num_calls
