"""Checks of one machine: whether it has everything that a run needs. Imports neither Ray nor, if avoidable, torch.

A check is a function of :class:`Needs` that returns results; :func:`check_node` calls all of them.
:mod:`megarl.ops.doctor.node.results` compares several machines, and :mod:`megarl.ops.doctor.cluster` runs the checks on
every node of a cluster.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable
from functools import partial

from megarl.base.nvidia_smi import Inventory
from megarl.ops.doctor.node import system
from megarl.ops.doctor.node.collective import check_all_reduce
from megarl.ops.doctor.node.gpus import check_gpus, check_kernels
from megarl.ops.doctor.node.needs import Needs, needs_of
from megarl.ops.doctor.node.results import CheckResult, NodeReport, Status
from megarl.ops.doctor.node.system import (
    check_checkpoint_room,
    check_disk_speed,
    check_engine_package,
    check_folders,
    check_logins,
    check_sandbox,
)
from megarl.ops.doctor.node.versions import check_versions, package_versions

__all__ = ["CHECKS", "CheckResult", "Needs", "NodeReport", "Status", "check_node", "needs_of"]

CHECKS: tuple[Callable[[Needs], CheckResult | list[CheckResult]], ...] = (
    check_versions,
    check_engine_package,
    check_logins,
    check_sandbox,
    system.check_cores,
    system.check_memory,
    system.check_shared_memory,
    system.check_open_files,
    system.check_processes,
    system.check_locked_memory,
    system.check_hostname,
    system.check_peers,
    system.check_ports,
    check_folders,
    check_checkpoint_room,
    check_disk_speed,
)


def check_node(needs: Needs) -> NodeReport:
    """Run all checks on this machine. An exception in a check is a failed result; the other checks still run."""
    results: list[CheckResult] = []
    for check in CHECKS:
        results += _run_check(check, needs)
    gpu_results, inventory = _gpus(needs)
    count = len(inventory.gpus) if inventory else 0
    results += gpu_results
    for check_of_gpus in (check_kernels, check_all_reduce):
        results += _run_check(partial(check_of_gpus, gpus=count), needs)
    return NodeReport(socket.gethostname(), results, _facts(inventory), count)


def _run_check(check: Callable[[Needs], CheckResult | list[CheckResult]], needs: Needs) -> list[CheckResult]:
    try:
        result = check(needs)
    except Exception as error:  # any error of the check itself
        function = check.func if isinstance(check, partial) else check
        return [_check_error(getattr(function, "__name__", "check"), error)]
    return result if isinstance(result, list) else [result]


def _gpus(needs: Needs) -> tuple[list[CheckResult], Inventory | None]:
    try:
        return check_gpus(needs)
    except Exception as error:  # such as an ImportError of torch
        return [_check_error("check_gpus", error)], None


def _check_error(function: str, error: Exception) -> CheckResult:
    name = function.removeprefix("check_").replace("_", " ")
    return CheckResult(
        name, Status.FAIL, f"the check itself failed: {type(error).__name__}: {error}", "see the message"
    )


def _facts(inventory: Inventory | None) -> dict[str, str]:
    facts = {**package_versions(), "kernel": platform.release(), "architecture": platform.machine()}
    if inventory is not None:
        import torch

        names = ", ".join(sorted({gpu.name for gpu in inventory.gpus}))
        nccl = "none" if torch.version.cuda is None else ".".join(map(str, torch.cuda.nccl.version()))
        facts |= {"driver": inventory.driver, "CUDA": inventory.cuda}
        facts |= {"GPUs": f"{len(inventory.gpus)} x {names}", "NCCL": nccl}
    return facts
