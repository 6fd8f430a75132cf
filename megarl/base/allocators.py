"""Memory allocators of the C library and of torch on CUDA: their settings and caches."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables of the allocator's settings: the older name, and the one of torch 2.9 and later."""
_EXPANDABLE = "expandable_segments"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST = 2**31 - 1


def without_expandable_segments(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of the allocator's variables that enable or disable expandable segments, without that setting."""
    changed = {}
    for name in ALLOCATOR_VARIABLES:
        settings = [part for part in variables.get(name, "").split(",") if part]
        kept = [part for part in settings if part.split(":")[0].strip() != _EXPANDABLE]
        if kept != settings:
            changed[name] = ",".join(kept)
    return changed


@contextlib.contextmanager
def ipc_memory() -> Iterator[None]:
    """Make torch allocate memory that other processes can open through CUDA IPC, within the context.

    Expandable segments are shared by file descriptors, for which a container may lack the rights. The scope ends their
    use for new blocks, and restores the settings of the environment.
    """
    changed = without_expandable_segments(os.environ)
    if not changed:
        yield
        return
    before = ",".join(os.environ[name] for name in changed)
    _set_allocator(",".join(filter(None, [*changed.values(), f"{_EXPANDABLE}:False"])))
    try:
        yield
    finally:
        _set_allocator(before)


def return_cached_memory() -> None:
    """Return unused memory of torch's allocator to the driver, for the other processes of the GPU."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _set_allocator(settings: str) -> None:
    import torch

    # The first name is of torch 2.9 and later.
    for name in ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings"):
        if hasattr(torch._C, name):
            getattr(torch._C, name)(settings)
            return


def keep_freed_memory(largest: int = 32 * 2**20) -> bool:
    """Keep freed tensors' memory, up to ``largest`` bytes each, in the process (glibc's ``mallopt``).

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
