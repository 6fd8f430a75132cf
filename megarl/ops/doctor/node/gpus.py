"""Checks of GPUs: count, health, use, links and driver from ``nvidia-smi``, and compiled kernels.

As a program it prints the kernels of a new process as JSON: ``python -m megarl.ops.doctor.node.gpus DEVICE``.
Megatron's imports and a CUDA context then stay out of the doctor's process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from megarl.base.compilers import fusion_error
from megarl.base.errors import ModelError
from megarl.base.formatting import GIB, MIB
from megarl.base.nvidia_smi import Gpu, Inventory, parse_inventory, parse_links, run_nvidia_smi
from megarl.base.provenance import install_command
from megarl.cluster.availability import NO_GPU_REMEDY
from megarl.models import read_model_config
from megarl.ops.doctor.node.needs import Needs
from megarl.ops.doctor.node.results import CheckResult, Status, judged

IDLE_BYTES = 1024 * MIB  # upper limit of the memory that the driver takes on an idle GPU
LIMIT_S = 300.0


def check_gpus(needs: Needs) -> tuple[list[CheckResult], Inventory | None]:
    """Run all checks of GPUs; return the results and the inventory (None without GPUs)."""
    command = shutil.which("nvidia-smi")
    if command is None or needs.device == "cpu":
        if needs.device == "cuda":
            text = "no nvidia-smi here, and the run needs GPUs"
            return [CheckResult("GPUs", Status.FAIL, text, NO_GPU_REMEDY)], None
        reason = "not requested" if needs.device == "cpu" else "none (no nvidia-smi)"
        return [CheckResult("GPUs", Status.PASS, f"{reason}; computes on CPU")], None
    try:
        inventory = parse_inventory(run_nvidia_smi(command, "-q", "-x"))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        remedy = "the driver does not answer: look at `nvidia-smi` and `dmesg | grep -i xid`; reboot the node"
        return [CheckResult("GPUs", Status.FAIL, str(error), remedy)], None
    import torch

    results = [check_count(inventory, needs), *check_health(inventory), check_driver(inventory, torch.version.cuda)]
    if len(inventory.gpus) > 1:
        results.append(_check_topology(command, len(inventory.gpus)))
    return results, inventory


def check_count(inventory: Inventory, needs: Needs) -> CheckResult:
    """Check that the machine has as many GPUs as the run needs, all of one model."""
    names = sorted({gpu.name for gpu in inventory.gpus})
    observation = f"{len(inventory.gpus)} x {' and '.join(names)}" if names else "none"
    if not inventory.gpus or len(inventory.gpus) < (needs.devices or 1):
        remedy = "one may have fallen off the bus: `dmesg | grep -i xid`, reboot; or lower trainer.n_gpus_per_node"
        return CheckResult("GPUs", Status.FAIL, f"{observation}; the run needs {needs.devices or 1} per node", remedy)
    if len(names) > 1:
        remedy = "the slowest sets the pace: use nodes with GPUs of one model"
        return CheckResult("GPUs", Status.WARN, observation, remedy)
    return CheckResult("GPUs", Status.PASS, f"{observation}, {inventory.gpus[0].total_bytes / GIB:.0f} GiB each")


def check_health(inventory: Inventory) -> Iterator[CheckResult]:
    """Check memory errors, throttling, use by other processes, and modes."""
    numbered = list(enumerate(inventory.gpus))
    bad = [f"GPU {i}: {gpu.uncorrectable} uncorrectable errors" for i, gpu in numbered if gpu.uncorrectable]
    bad += [f"GPU {i}: row remapping {gpu.remapping}" for i, gpu in numbered if gpu.remapping == "failure"]
    pending = [f"GPU {i}: row remapping pending" for i, gpu in numbered if gpu.remapping == "pending"]
    remedy = "reset the GPU or reboot; if the error returns, replace the GPU (results may be wrong)" if bad else ""
    text = "; ".join(bad + pending) or "no uncorrectable error"
    yield judged("GPU memory", text, remedy or "reset the GPU when idle", warn=bool(pending), fail=bool(bad))
    hot = [
        f"GPU {i}: {', '.join(gpu.throttled)}" + ("" if gpu.celsius is None else f" at {gpu.celsius} C")
        for i, gpu in numbered
        if gpu.throttled
    ]
    remedy = "check cooling and power: the slowest GPU sets the pace of all"
    yield judged("GPU clocks", "; ".join(hot) or "not held down", remedy, warn=bool(hot))
    busy = [
        f"GPU {i}: {gpu.used_bytes / GIB:.1f} GiB" + (f" by {'; '.join(gpu.processes)}" if gpu.processes else "")
        for i, gpu in numbered
        if gpu.used_bytes > IDLE_BYTES
    ]
    remedy = "end the processes that use them, or wait; processes without a name are in other containers"
    yield judged("GPU memory used by others", "; ".join(busy) or "none", remedy, fail=bool(busy))
    yield _modes(numbered)


def _modes(numbered: Sequence[tuple[int, Gpu]]) -> CheckResult:
    divided = [f"GPU {i}: MIG is on" for i, gpu in numbered if gpu.mig]
    exclusive = [f"GPU {i}: only one process may use it" for i, gpu in numbered if gpu.exclusive]
    cold = [f"GPU {i}: persistence mode is off" for i, gpu in numbered if not gpu.persistent]
    remedies = [
        *(["nvidia-smi -mig 0"] if divided else []),
        *(["nvidia-smi -c DEFAULT, since roles share GPUs"] if exclusive else []),
        *(["nvidia-smi -pm 1, or run nvidia-persistenced"] if cold else []),
    ]
    text = "; ".join(divided + exclusive + cold) or "persistence mode on, shared, undivided"
    return judged("GPU modes", text, "; ".join(remedies), warn=bool(cold), fail=bool(divided or exclusive))


def check_driver(inventory: Inventory, torch_cuda: str | None) -> CheckResult:
    """Check that the driver supports torch's CUDA (None = a CPU build): the same major version suffices."""
    observation = f"driver {inventory.driver} (CUDA up to {inventory.cuda}), torch built for {torch_cuda or 'CPU only'}"
    if torch_cuda is None:
        remedy = "install a CUDA build of torch: the CPU build sees no GPU"
        return CheckResult("CUDA", Status.FAIL, observation, remedy)
    supported, required = (
        tuple(int(part) for part in text.split(".")[:2] if part.isdigit()) for text in (inventory.cuda, torch_cuda)
    )
    if supported[:1] < required[:1]:
        remedy = f"update the driver to one for CUDA {required[0]}, or install another torch"
        return CheckResult("CUDA", Status.FAIL, observation, remedy)
    if supported < required:
        remedy = "works, but kernels compiled at run time (Triton) may need a newer driver"
        return CheckResult("CUDA", Status.WARN, observation, remedy)
    return CheckResult("CUDA", Status.PASS, observation)


def check_links(links: Mapping[tuple[int, int], str]) -> CheckResult:
    """Check that all GPUs of a node are connected by NVLink."""
    kinds = sorted(set(links.values()))
    slow = {pair: link for pair, link in links.items() if not link.startswith("NV")}
    if not slow:
        return CheckResult("GPU links", Status.PASS, f"NVLink between all ({', '.join(kinds)})")
    pairs = ", ".join(f"{a}-{b} {link}" for (a, b), link in sorted(slow.items()) if a < b)
    remedy = (
        "tensor parallelism is slow without NVLink: keep tensor_model_parallel_size within GPUs that NVLink connects; "
        "on a machine with NVLink check `nvidia-smi nvlink -s` and the fabric manager"
    )
    return CheckResult("GPU links", Status.WARN, f"no NVLink: {pairs}", remedy)


def _check_topology(command: str, count: int) -> CheckResult:
    try:
        links = parse_links(run_nvidia_smi(command, "topo", "-m"))
        reason = "unknown" if len(links) < count * (count - 1) else ""
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"unknown: {error}"
    return (
        CheckResult("GPU links", Status.WARN, reason, "look at `nvidia-smi topo -m`") if reason else check_links(links)
    )


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
