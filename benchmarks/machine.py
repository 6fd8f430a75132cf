"""Name of the benchmark machine."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Return the name of the processor, if the system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
