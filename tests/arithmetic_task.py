"""A small quickstart task, and configuration keys shared by its runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TOOL = Path(__file__).resolve().parents[1] / "tools" / "make_arithmetic.py"
RUN = {"trainer.experiment_name": "test", "trainer.n_gpus_per_node": 1, "trainer.device": "cpu"}
"""Overrides: one CPU device of this machine."""


def make_task(folder: Path, *options: str) -> Path:
    """Write model, tokenizer and data into a folder; return the folder.

    Args:
        folder: an existing folder.
        options: options of ``tools/make_arithmetic.py``.
    """
    command = [sys.executable, str(_TOOL), "--out", str(folder), "--hidden", "32", *options]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder
