"""All checks of one machine, one after the other."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable

from megarl.doctor.node import system
from megarl.doctor.node.collective import check_all_reduce
from megarl.doctor.node.finding import Finding, NodeReport, Status
from megarl.doctor.node.gpus import Inventory, check_gpus
from megarl.doctor.node.needs import Needs
from megarl.doctor.node.network import check_hostname, check_peers, check_ports
from megarl.doctor.node.storage import check_checkpoint_room, check_disk_speed, check_folders
from megarl.doctor.node.versions import check_versions, installed

CHECKS: tuple[Callable[[Needs], Finding | list[Finding]], ...] = (
    check_versions,
    system.check_cores,
    system.check_memory,
    system.check_shared_memory,
    system.check_open_files,
    system.check_processes,
    system.check_locked_memory,
    check_hostname,
    check_peers,
    check_ports,
    check_folders,
    check_checkpoint_room,
    check_disk_speed,
)


def examine(needs: Needs) -> NodeReport:
    """Does all checks on this machine. A check that breaks is a failure and keeps none of the others from running."""
    findings: list[Finding] = []
    for check in CHECKS:
        findings += _guarded(check, needs)
    gpus, there = _gpus(needs)
    count = len(there.gpus) if there else 0
    findings += [*gpus, *_guarded(lambda asked: check_all_reduce(asked, count), needs)]
    return NodeReport(socket.gethostname(), findings, _facts(there))


def _guarded(check: Callable[[Needs], Finding | list[Finding]], needs: Needs) -> list[Finding]:
    try:
        found = check(needs)
    except Exception as error:  # of a check itself, whatever it is
        return [_broken(getattr(check, "__name__", "check"), error)]
    return found if isinstance(found, list) else [found]


def _gpus(needs: Needs) -> tuple[list[Finding], Inventory | None]:
    try:
        return check_gpus(needs)
    except Exception as error:  # such as a torch that cannot be imported
        return [_broken("check_gpus", error)], None


def _broken(name: str, error: Exception) -> Finding:
    what = name.removeprefix("check_").replace("_", " ")
    return Finding(what, Status.FAIL, f"the check itself failed: {type(error).__name__}: {error}", "see the message")


def _facts(there: Inventory | None) -> dict[str, str]:
    facts = {**installed(), "kernel": platform.release(), "architecture": platform.machine()}
    if there is not None:
        names = ", ".join(sorted({gpu.name for gpu in there.gpus}))
        facts |= {"driver": there.driver, "CUDA": there.cuda, "GPUs": f"{len(there.gpus)} x {names}", "NCCL": _nccl()}
    return facts


def _nccl() -> str:
    import torch

    if torch.version.cuda is None:
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))
