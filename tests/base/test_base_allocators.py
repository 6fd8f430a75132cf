import os
import platform
import subprocess
import sys

import pytest
import torch

from megarl.base import allocators
from megarl.base.allocators import ipc_memory, return_cached_memory, without_expandable_segments

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


def test_other_settings_of_the_allocator_stay():
    changed = without_expandable_segments(
        {
            "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:True",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        }
    )
    assert changed == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "PYTORCH_ALLOC_CONF": ""}
    assert without_expandable_segments({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}) == {}


def test_memory_for_other_processes_is_allocated_without_expandable_segments(monkeypatch):
    """Torch takes no block of an expandable segment while the setting is off."""
    settings = []
    monkeypatch.setattr(allocators, "_set_allocator", settings.append)
    with ipc_memory():
        assert settings == []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
    with ipc_memory():
        assert settings == ["max_split_size_mb:512,expandable_segments:False"]
    assert settings[1:] == [os.environ["PYTORCH_ALLOC_CONF"]]


def test_cached_memory_is_returned_by_processes_that_use_a_gpu(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: calls.append("ipc_collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    return_cached_memory()
    assert calls == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return_cached_memory()
    assert calls == ["ipc_collect", "empty_cache"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_is_reused_without_page_faults():
    pages = int(subprocess.check_output([sys.executable, "-c", SCRIPT], text=True))
    assert pages < 1000  # all tensors together have 131,072
