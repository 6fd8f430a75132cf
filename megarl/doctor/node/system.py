"""Memory, shared memory, open files, processes, cores."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import psutil

from megarl.amounts import GIB, MIB
from megarl.doctor.node.finding import Finding, Status
from megarl.doctor.node.needs import Needs

FEWEST_FILES, ENOUGH_FILES = 1024, 8192
"""Below the first Ray breaks as soon as a few processes talk to each other; below the second it warns itself."""
ENOUGH_PROCESSES = 4096
SHARED_MEMORY = "/dev/shm"

_CGROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of version 2 and 1
_CGROUP_USED = ("memory.current", "memory/memory.usage_in_bytes")


def check_memory(needs: Needs) -> Finding:
    """Main memory that is free, within the limit of the control group."""
    free = psutil.virtual_memory().available
    limit = cgroup_room()
    where = ""
    if limit is not None and limit < free:
        free, where = limit, " within the limit of the control group (container)"
    found = f"{free / GIB:.1f} GiB free{where}; needs about {needs.host_bytes / GIB:.1f} GiB"
    if free >= needs.host_bytes:
        return Finding("memory", Status.PASS, found)
    remedy = (
        "free memory, raise the container's limit, use more nodes, or offload less (param_offload, optimizer_offload)"
    )
    return Finding("memory", Status.FAIL if free < needs.host_bytes / 2 else Status.WARN, found, remedy)


def cgroup_room(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the control group of this process may still take; None where it has no limit."""
    for limit, used in zip(_CGROUP_LIMITS, _CGROUP_USED, strict=True):
        try:
            most, now = (root / limit).read_text().strip(), int((root / used).read_text())
        except (OSError, ValueError):
            continue
        if most.isdigit() and int(most) < 1 << 60:  # version 1 writes a huge number for "no limit"
            return max(int(most) - now, 0)
    return None


def check_shared_memory(needs: Needs, folder: str = SHARED_MEMORY) -> Finding:
    """Room of the file system in memory, through which processes of a machine share objects and buffers."""
    wanted = needs.shared_memory_bytes
    remedy = (
        f"enlarge it: `mount -o remount,size={max(wanted // GIB + 1, 2)}G {folder}`; in a container --shm-size, in "
        "Kubernetes an emptyDir with medium: Memory; or lower sync.bucket_megabytes"
    )
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError as error:
        return Finding("shared memory", Status.FAIL, f"{folder}: {error.strerror}", remedy)
    found = f"{free / MIB:.0f} MiB of {total / MIB:.0f} MiB free in {folder}; needs {wanted / MIB:.0f} MiB"
    if free >= wanted:
        return Finding("shared memory", Status.PASS, found)
    if total >= wanted:
        remedy = f"others hold it: look into {folder} for what dead runs left, and remove that"
    return Finding("shared memory", Status.FAIL, found, remedy)


def check_open_files(needs: Needs) -> Finding:
    """Files and sockets that a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_count(soft)} per process (at most {_count(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return Finding("open files", Status.PASS, found)
    remedy = "`ulimit -n 65536` in the shell that starts Ray"
    if hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES:
        remedy = "raise nofile in /etc/security/limits.conf (a service: LimitNOFILE=65536), then " + remedy
    return Finding("open files", Status.FAIL if soft < FEWEST_FILES else Status.WARN, found, remedy)


def check_processes(needs: Needs) -> Finding:
    """Processes and threads that a user may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    found = f"{_count(soft)} per user"
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_PROCESSES:
        return Finding("processes", Status.PASS, found)
    remedy = "`ulimit -u 65536`, or raise nproc in /etc/security/limits.conf; Ray and torch start hundreds of threads"
    return Finding("processes", Status.WARN, found, remedy)


def check_locked_memory(needs: Needs, infiniband: str = "/sys/class/infiniband") -> list[Finding]:
    """Memory that may be locked, which InfiniBand registers; nothing where there is none."""
    if not os.path.isdir(infiniband) or not os.listdir(infiniband):
        return []
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return [Finding("locked memory", Status.PASS, "unlimited")]
    remedy = "`ulimit -l unlimited` (limits.conf: memlock unlimited; a container: --ulimit memlock=-1)"
    return [Finding("locked memory", Status.WARN, f"{_count(soft)} bytes; NCCL over InfiniBand needs more", remedy)]


def check_cores(needs: Needs) -> Finding:
    """Cores that this process may run on, one per device or more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{cores} usable" + ("" if needs.devices is None else f" for {needs.devices} devices")
    if needs.devices is None or cores >= needs.devices:
        return Finding("cores", Status.PASS, found)
    remedy = "ask the scheduler for more cores (--cpus-per-task), or lower trainer.n_gpus_per_node"
    return Finding("cores", Status.WARN, found, remedy)


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
