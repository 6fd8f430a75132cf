"""The stages of gpu_check reach their end on a CUDA device; their numbers mean nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from megarl.ops.acceptance import parity
from megarl.ops.acceptance.bench import Bench
from megarl.ops.acceptance.results import read_report

ROOT = Path(__file__).parents[2]
CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"


def stage(folder, name, checks="", **environment):
    """Rows of a stage's report."""
    command = [sys.executable, "-m", "megarl.ops.acceptance.stages", name, "--folder", str(folder), "--checks", checks]
    variables = {name: value for name, value in os.environ.items() if name != CACHE} | environment
    run = subprocess.run(
        [*command, "--scale", "tiny", "--device", "cuda"], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert run.returncode in (0, 1), run.stderr
    report = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert report["is_complete"]
    return {row["check"]: row for row in report["results"]}


def raised(notes):
    return {check: note for check, note in notes.items() if re.match(r"\w*(Error|Exception)\b", note)}


@pytest.mark.parametrize("name", ["speed", "offload"])
def test_stage_reaches_its_end(tmp_path, name):
    rows = stage(tmp_path, name, **{CACHE: "1"})
    assert rows and raised({check: row["note"] for check, row in rows.items()}) == {}


def test_parity_reaches_its_end(tmp_path):
    """In this process, where experts get tokens. transformers may choose cuDNN's attention, which has no plans here."""
    bench = Bench(read_report(tmp_path, "parity", "tiny"), tmp_path, "cuda", print)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        parity.run(bench)
    notes = {result.check: result.note for result in bench.report.results}
    assert len(notes) > 100
    of_zeros = "ZeroDivisionError: float division by zero"  # the reference's gradients
    assert raised({check: note for check, note in notes.items() if note != of_zeros}) == {}


def test_weights_are_synchronized_between_two_processes_by_cuda_ipc(tmp_path):
    """Handles are of torch's cache, whose memory is not zero: values differ where a kernel would have copied."""
    rows = stage(tmp_path, "sync")
    assert (rows["transport"]["outcome"], rows["transport"]["note"]) == ("ok", "cuda_ipc")
    assert rows["speed"]["value"] > 0
