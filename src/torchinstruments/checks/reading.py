"""Numbers that checks compute on devices and read together: at most one host read a device and visit.

A check adds flat tensors, and gets a column. Whoever visits a site fetches once for all checks; the columns
have their numbers from then on.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Column", "Numbers", "Reading"]

Numbers = npt.NDArray[np.float64]


class Column:
    """Numbers that a check asked for.

    Args:
        num_values: How many there will be.
    """

    __slots__ = ("_numbers", "num_values")

    def __init__(self, num_values: int) -> None:
        self.num_values = num_values
        self._numbers: Numbers | None = None

    @property
    def numbers(self) -> Numbers:
        """The numbers, in the order of the tensors.

        Raises:
            RuntimeError: They were not fetched.
        """
        if self._numbers is None:
            raise RuntimeError("the numbers of this column were not fetched")
        return self._numbers

    @property
    def first(self) -> float:
        """The first number.

        Raises:
            RuntimeError: They were not fetched.
        """
        return float(self.numbers[0])

    def put(self, positions: Sequence[int], numbers: Numbers) -> None:
        """Takes all of the numbers, or some."""
        if len(positions) == self.num_values:
            # The positions of one of several groups are in order, and those of the only one are all.
            self._numbers = numbers
            return
        if self._numbers is None:
            self._numbers = np.zeros(self.num_values)
        self._numbers[positions] = numbers


class Reading:
    """Collects columns until they are fetched. Call all of it inside `isolated`."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Column, Sequence[int], torch.Tensor]] = []
        self.num_host_reads = 0
        """How often numbers were copied to the host, one a device and fetch."""

    def add(self, groups: Sequence[tuple[Sequence[int], torch.Tensor]]) -> Column:
        """Takes numbers that lie on devices; nothing is read (hot path).

        Args:
            groups: Positions in the column, and a flat tensor with a number for each. All positions together
                are ``range(n)``, in order within a group.
        """
        column = Column(sum(len(positions) for positions, _ in groups))
        if not groups:
            column.put((), np.zeros(0))
        self._waiting += [(column, positions, numbers) for positions, numbers in groups]
        return column

    def add_one(self, number: torch.Tensor) -> Column:
        """Takes one number, as it is at this point of its device's stream (hot path).

        Args:
            number: Of one element. It may change afterwards.
        """
        return self.add([((0,), number.detach().reshape(1).clone())])

    def fetch(self) -> None:
        """Copies everything that was added to the host: once a device (training thread, hot path)."""
        if not self._waiting:
            return
        waiting = self._waiting
        self._waiting = []
        by_device: dict[torch.device, list[tuple[Column, Sequence[int], torch.Tensor]]] = {}
        for one in waiting:
            by_device.setdefault(one[2].device, []).append(one)
        for device, ones in by_device.items():
            dtype = torch.float32 if device.type == "mps" else torch.float64
            flat = torch.cat([numbers.to(dtype) for _, _, numbers in ones])
            values = flat.cpu().double().numpy()
            self.num_host_reads += 1
            start = 0
            for column, positions, _ in ones:
                column.put(positions, values[start : start + len(positions)])
                start += len(positions)
