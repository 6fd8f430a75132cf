"""The stages of gpu_check reach their end on a CUDA device; their numbers mean nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"


def stage(folder: Path, name: str, **environment: str) -> dict[str, dict[str, Any]]:
    """Rows of a stage's report."""
    command = [sys.executable, "-m", "megarl.ops.acceptance.stages", name, "--folder", str(folder)]
    variables = {name: value for name, value in os.environ.items() if name != CACHE} | environment
    run = subprocess.run(
        [*command, "--scale", "tiny", "--device", "cuda"], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert run.returncode in (0, 1), run.stderr
    report = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert report["is_complete"]
    return {row["check"]: row for row in report["results"]}


@pytest.mark.parametrize("name", ["speed", "offload", "fp8"])
def test_stage_reaches_its_end(tmp_path: Path, name: str) -> None:
    """All but generation, which waits for a kernel to end a sequence, profiles, and comparisons of numbers."""
    rows = stage(tmp_path, name, **{CACHE: "1"})
    assert rows
    raised = {check: row["note"] for check, row in rows.items() if re.match(r"\w*(Error|Exception)\b", row["note"])}
    assert raised == {}


def test_weights_are_synchronized_between_two_processes_by_cuda_ipc(tmp_path: Path) -> None:
    """Handles are of torch's cache, whose memory is not zero: values differ where a kernel would have copied."""
    rows = stage(tmp_path, "sync")
    assert (rows["transport"]["outcome"], rows["transport"]["note"]) == ("ok", "cuda_ipc")
    assert rows["speed"]["value"] > 0
