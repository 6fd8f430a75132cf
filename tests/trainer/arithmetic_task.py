"""The quickstart's task in small, and the part of a configuration that runs on it share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_arithmetic.py"
RUN = {"trainer.experiment_name": "test", "trainer.n_gpus_per_node": 1, "trainer.device": "cpu"}
"""One device of this machine."""


def make_task(folder: Path, *options: str) -> Path:
    """Writes model, tokenizer and data into the folder, which is returned.

    Args:
        folder: exists.
        options: of ``tools/make_arithmetic.py``.
    """
    command = [sys.executable, str(_TOOL), "--out", str(folder), "--hidden", "32", *options]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder
