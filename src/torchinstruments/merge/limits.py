"""Bounds of this process's memory, for what reads files that nobody vouches for.

The bound is on address space, the one that the kernel enforces at each allocation: what goes beyond it fails
there, and Arrow and NumPy turn that into an error. It is counted from what the process has when it is set.
"""

import resource
from pathlib import Path

__all__ = ["limit_memory"]

_PAGE_BYTES = resource.getpagesize()


def limit_memory(max_bytes: int) -> None:
    """Lets this process take so much more memory than it has, and no more (worker, as it begins).

    Args:
        max_bytes: Bytes of address space.
    """
    held = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (held + max_bytes, held + max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
