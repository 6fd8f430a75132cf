"""Freed tensors are reused without new pages from the system."""

import platform
import subprocess
import sys

import pytest

# In a process of its own: what the allocator was told cannot be taken back.
SCRIPT = """
import resource, torch
from megarl.base.allocators import keep_freed_memory

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        tensors = [torch.ones(16 * 2**20, dtype=torch.uint8) for _ in range(8)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert keep_freed_memory()
new_pages()
print(new_pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_is_reused_without_page_faults():
    pages = int(subprocess.check_output([sys.executable, "-c", SCRIPT], text=True))
    assert pages < 1000  # all tensors together have 131,072
