"""How this process's allocator treats what is freed."""

from __future__ import annotations

import ctypes

# Names and largest value as in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
_MOST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets the process keep the memory of freed tensors of up to 32 MiB instead of giving it back to the system.

    Activations come and go with every micro-batch; without this the system zeroes their pages each time anew. The
    process's resident memory stays near its peak.

    Returns:
        Whether the allocator, glibc's, took it; with another one nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    taken = [mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), mallopt(_M_TRIM_THRESHOLD, _MOST)]
    return all(taken)
