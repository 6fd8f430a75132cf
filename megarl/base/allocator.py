"""Settings of the C library's memory allocator."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST = 2**31 - 1


def keep_freed_memory(largest: int = 32 * 2**20) -> bool:
    """Keep the memory of freed tensors of up to ``largest`` bytes in the process (glibc's ``mallopt``).

    Tensors are allocated and freed with every micro-batch and phase; by default the system zeroes their pages each
    time. The process's resident memory stays near its peak.

    Args:
        largest: in bytes, below 2 GiB. Before version 2.33, glibc accepts at most the default.

    Returns:
        Whether the allocator accepts it; one that is not glibc's is left unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    accepted = [mallopt(_M_MMAP_THRESHOLD, largest), mallopt(_M_TRIM_THRESHOLD, _MOST)]
    return all(accepted)
