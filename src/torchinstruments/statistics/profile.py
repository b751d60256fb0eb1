"""The default reducer: nine statistics, exact over all finite entries, at any size and of any real dtype.

What "exact" means: minimum, maximum, the fractions and the entries between which a quartile lies are those of
the tensor, without sampling and without rounding. Mean and deviation are accumulated in float64 (float32 on
devices without it) around the median, and are right to the last few bits even for a small spread at a large
offset. The deviation is that of the population, quartiles interpolate linearly, and the fractions refer to
all entries of the tensor, those that are not finite included. Negative zero is a zero.

A thread that flushes denormal numbers (``torch.set_flush_denormal``) sees them as zeros here too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torchinstruments.records import Absent
from torchinstruments.statistics.contract import Packed
from torchinstruments.statistics.device import pack_profile
from torchinstruments.statistics.facts import PROFILE_METRICS, named_values
from torchinstruments.statistics.host import host_facts

__all__ = ["MAX_SCRATCH_BYTES", "PROFILE_METRICS", "ExactProfile"]

MAX_SCRATCH_BYTES = 256 * 2**20
"""Memory that the measuring of one tensor may take for the time that it lasts."""


@dataclass(frozen=True, slots=True)
class ExactProfile:
    """Measures mean, population std, min, max, p25, p50, p75, zero_fraction and nonfinite_fraction.

    An empty tensor has none of them (``empty``); one without a finite entry has the two fractions, and
    ``no_finite_entries`` for the rest.

    On the CPU, tensors are sorted or counted by NumPy in the calling thread. The peak of scratch is one copy
    (float16 and bfloat16 below 32,768 entries: one in float32); 8-bit and larger 16-bit tensors need about
    10 MB, and a tensor whose copy would exceed the bound is read several times instead, with about 50 MB.

    Attributes:
        max_scratch_bytes: Bound of that memory, on the host and on an accelerator.
    """

    max_scratch_bytes: int = MAX_SCRATCH_BYTES

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the nine statistics."""
        return PROFILE_METRICS

    def __call__(self, tensor: torch.Tensor, /) -> Mapping[str, float | Absent]:
        """Returns the nine statistics.

        On an accelerator this reads the result on the host and so waits for the device; an observer never
        calls it there, but `pack`.

        Args:
            tensor: Detached, strided, of a real dtype and any shape.
        """
        if tensor.device.type == "cpu":
            return named_values(host_facts(tensor, max_scratch_bytes=self.max_scratch_bytes))
        packed = self.pack(tensor)
        return packed.finish(packed.scalars.cpu().tolist())

    def pack(self, tensor: torch.Tensor, /) -> Packed:
        """Starts the nine statistics on the tensor's device, without a host read (training thread, hot path).

        Args:
            tensor: Detached, strided, of a real dtype and any shape.
        """
        return pack_profile(tensor, max_scratch_bytes=self.max_scratch_bytes)
