"""Memory of this process, as counters of the timeline."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megarl.tracing.tracer import TRACER, counter

_PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 2**20


def count_memory() -> None:
    """Host memory of this process, and what torch holds on its GPU, in MiB, from now on."""
    if not TRACER.recording:
        return
    values: dict[str, float] = {"host": resident_bytes() / MIB}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        values["device allocated"] = torch.cuda.memory_allocated() / MIB
        values["device reserved"] = torch.cuda.memory_reserved() / MIB
    counter("memory MiB", "", **{name: round(value, 1) for name, value in values.items()})


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return 0
