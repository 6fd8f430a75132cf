"""Compilers that torch calls at run time: for fused kernels (``torch.compile``), and for extensions in C++."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def fusion_error(device: str) -> str:
    """Compile and run a small kernel with ``torch.compile``; return the error's first line, empty if it works.

    A GPU needs Triton, which calls a C compiler with Python's headers; a CPU needs a C++ compiler.
    """
    import torch

    def kernel(inputs: Tensor) -> Tensor:
        return torch.nn.functional.silu(inputs) * 2

    try:
        torch.compile(kernel)(torch.ones(64, device=device))
    except Exception as error:  # of many types: torch wraps those of compilers
        return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ""


def missing_extension_tools() -> list[str]:
    """Name the tools that building a C++ extension at run time needs and this machine lacks."""
    compiler = os.environ.get("CXX", "c++")
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    present = {
        compiler: shutil.which(compiler) is not None,
        "ninja": shutil.which("ninja") is not None,
        "Python.h": headers.is_file(),
    }
    return [tool for tool, is_present in present.items() if not is_present]
