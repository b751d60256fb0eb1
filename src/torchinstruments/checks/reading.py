"""Numbers that checks compute on devices and read together: at most one host read a device and visit.

A check adds 0-d tensors, or flat ones, and gets a column. Whoever visits a site fetches once for all checks;
the columns have their numbers from then on.
"""

from collections.abc import Sequence

import torch

__all__ = ["Column", "Reading"]


class Column:
    """Numbers that a check asked for.

    Args:
        num_values: How many there will be.
    """

    __slots__ = ("_values", "num_values")

    def __init__(self, num_values: int) -> None:
        self.num_values = num_values
        self._values: list[float] | None = None

    @property
    def values(self) -> list[float]:
        """The numbers, in the order of the tensors.

        Raises:
            RuntimeError: They were not fetched.
        """
        if self._values is None:
            raise RuntimeError("the numbers of this column were not fetched")
        return self._values

    def put(self, positions: Sequence[int], numbers: Sequence[float]) -> None:
        """Takes some of the numbers."""
        if self._values is None:
            self._values = [0.0] * self.num_values
        for position, number in zip(positions, numbers, strict=True):
            self._values[position] = number


class Reading:
    """Collects columns until they are fetched. Call all of it inside `isolated`."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Column, list[int], torch.Tensor]] = []
        self._empty: list[Column] = []
        self.num_host_reads = 0
        """How often numbers were copied to the host, one a device and fetch."""

    def add(self, tensors: Sequence[torch.Tensor]) -> Column:
        """Takes numbers that lie on devices; nothing is read (hot path).

        Args:
            tensors: Of one element each, real, of any dtypes and devices.
        """
        column = Column(len(tensors))
        if not tensors:
            self._empty.append(column)
            return column
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for position, tensor in enumerate(tensors):
            alike.setdefault((tensor.device, tensor.dtype), []).append(position)
        for positions in alike.values():
            stacked = torch.stack([tensors[position].reshape(()) for position in positions])
            self._waiting.append((column, positions, stacked))
        return column

    def fetch(self) -> None:
        """Copies everything that was added to the host: once a device (training thread, hot path)."""
        for column in self._empty:
            column.put((), ())
        self._empty.clear()
        waiting = self._waiting
        self._waiting = []
        by_device: dict[torch.device, list[tuple[Column, list[int], torch.Tensor]]] = {}
        for one in waiting:
            by_device.setdefault(one[2].device, []).append(one)
        for device, ones in by_device.items():
            dtype = torch.float32 if device.type == "mps" else torch.float64
            flat = torch.cat([stacked.to(dtype) for _, _, stacked in ones])
            numbers: list[float] = flat.tolist()
            self.num_host_reads += 1
            start = 0
            for column, positions, _ in ones:
                column.put(positions, numbers[start : start + len(positions)])
                start += len(positions)
