"""Check of the GPU's kernels: Transformer Engine's, and fusions that torch compiles at run time.

As a program it prints the observations of a new process as JSON: ``python -m megarl.ops.doctor.node.kernels DEVICE``.
Megatron's imports and a CUDA context then stay out of the doctor's process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from megarl.base.compilers import fusion_error
from megarl.base.errors import ModelError
from megarl.base.provenance import install_command
from megarl.models import read_model_config
from megarl.ops.doctor.node.needs import Needs
from megarl.ops.doctor.node.results import CheckResult, Status

LIMIT_S = 300.0


class KernelFacts(NamedTuple):
    """Observations of a process that computes on the device."""

    usable: bool  # whether Megatron-Core can use Transformer Engine
    import_error: str  # Transformer Engine's; empty if it is not installed or imports
    fusion_error: str  # error of a kernel compiled by torch; empty if that works


def check_kernels(needs: Needs, gpus: int) -> list[CheckResult]:
    """Check the kernels of a machine with GPUs; no results for a run on CPU."""
    if not gpus or needs.device == "cpu":
        return []
    try:
        facts = observe("cuda")
    except RuntimeError as error:
        return [CheckResult("kernels", Status.FAIL, str(error), "`python -c 'import megarl.megatron'` shows the error")]
    return [transformer_engine_result(facts, has_experts(needs.models)), fusion_result(facts)]


def transformer_engine_result(facts: KernelFacts, with_experts: bool) -> CheckResult:
    """Turn the observations about Transformer Engine into a result, for a run with or without experts."""
    name, remedy = "Transformer Engine", f"install a build for this torch and CUDA: {install_command('gpu')}"
    if facts.import_error:
        text = f"cannot be imported, torch's layers replace it: {facts.import_error}"
        return CheckResult(name, Status.WARN, text, remedy)
    if facts.usable:
        return CheckResult(name, Status.PASS, "importable")
    if with_experts:
        text = "not installed: a rank computes the experts of its layers one after the other, which is slow"
        return CheckResult(name, Status.WARN, text, remedy)
    return CheckResult(name, Status.PASS, "not installed: torch's layers replace it")


def fusion_result(facts: KernelFacts) -> CheckResult:
    """Turn the observation about compiled kernels into a result."""
    if not facts.fusion_error:
        return CheckResult("compiled kernels", Status.PASS, "torch compiles fused kernels")
    text = f"torch cannot compile, fused operations run one by one: {facts.fusion_error}"
    return CheckResult("compiled kernels", Status.WARN, text, "install gcc, g++ and Python's headers (python3-dev)")


def has_experts(models: Sequence[str]) -> bool:
    """Return whether any model folder has a mixture of experts; unreadable folders are the subject of another check."""
    for path in models:
        try:
            if read_model_config(path).experts is not None:
                return True
        except (ModelError, OSError):
            continue
    return False


def observe(device: str) -> KernelFacts:
    """Observe the kernels in a new process, with empty caches of compiled kernels.

    Raises:
        RuntimeError: the process failed; with the last line of its output.
    """
    with tempfile.TemporaryDirectory() as caches:
        names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        environment = {**os.environ, **{name: f"{caches}/{name}" for name in names}}
        command = [sys.executable, "-m", __name__, device]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the process did not end within {LIMIT_S:.0f} s") from error
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return KernelFacts(*json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str]) -> None:
    """Observe the kernels in this process and print them as JSON."""
    (device,) = arguments
    engine = import_module("megarl.megatron.runtime.versions")  # imports Megatron-Core
    facts = KernelFacts(engine.has_transformer_engine(), engine.transformer_engine_error(), fusion_error(device))
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:])
