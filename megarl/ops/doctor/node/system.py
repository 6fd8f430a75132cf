"""Checks of the operating system (memory, process limits, cores, host names, ports) and of a run's services."""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import shutil
import socket
from pathlib import Path

import psutil

from megarl.base.errors import ConfigError
from megarl.base.formatting import GIB, MIB
from megarl.base.packages import require_sglang
from megarl.ops.doctor.node.needs import Needs
from megarl.ops.doctor.node.results import CheckResult, Status
from megarl.rewards.calling import InfrastructureFailure
from megarl.rewards.sandbox import protections
from megarl.tracking import check_trackers

FEWEST_FILES, ENOUGH_FILES = 1024, 8192
"""Open files per process. Below the first number Ray fails with a few processes; below the second Ray warns."""
ENOUGH_PROCESSES = 4096
SHARED_MEMORY = "/dev/shm"

_CGROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of version 2 and 1
_CGROUP_USED = ("memory.current", "memory/memory.usage_in_bytes")


def check_memory(needs: Needs) -> CheckResult:
    """Check free host memory, within the limit of the control group."""
    free = psutil.virtual_memory().available
    limit = free_cgroup_bytes()
    scope = ""
    if limit is not None and limit < free:
        free, scope = limit, " within the limit of the control group (container)"
    observation = f"{free / GIB:.1f} GiB free{scope}; needs about {needs.host_bytes / GIB:.1f} GiB"
    if free >= needs.host_bytes:
        return CheckResult("memory", Status.PASS, observation)
    remedy = (
        "free memory, raise the container's limit, use more nodes, or offload less (param_offload, optimizer_offload)"
    )
    return CheckResult("memory", Status.FAIL if free < needs.host_bytes / 2 else Status.WARN, observation, remedy)


def free_cgroup_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that the control group may still allocate; None without a limit."""
    for limit, used in zip(_CGROUP_LIMITS, _CGROUP_USED, strict=True):
        try:
            most = (root / limit).read_text(encoding="utf-8").strip()
            now = int((root / used).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if most.isdigit() and int(most) < 1 << 60:  # version 1 writes a huge number for "no limit"
            return max(int(most) - now, 0)
    return None


def check_shared_memory(needs: Needs, folder: str = SHARED_MEMORY) -> CheckResult:
    """Check the size of the shared-memory file system, used for Ray objects and transport buffers."""
    needed = needs.shared_memory_bytes
    remedy = (
        f"enlarge it: `mount -o remount,size={max(needed // GIB + 1, 2)}G {folder}`; in a container --shm-size, in "
        "Kubernetes an emptyDir with medium: Memory; or lower sync.bucket_megabytes"
    )
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError as error:
        return CheckResult("shared memory", Status.FAIL, f"{folder}: {error.strerror}", remedy)
    observation = f"{free / MIB:.0f} MiB of {total / MIB:.0f} MiB free in {folder}; needs {needed / MIB:.0f} MiB"
    if free >= needed:
        return CheckResult("shared memory", Status.PASS, observation)
    if total >= needed:
        remedy = f"other processes hold it: look in {folder} for files of dead runs, and remove them"
    return CheckResult("shared memory", Status.FAIL, observation, remedy)


def check_open_files(needs: Needs) -> CheckResult:
    """Check the limit of open files and sockets per process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    observation = f"{_limit_text(soft)} per process (at most {_limit_text(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return CheckResult("open files", Status.PASS, observation)
    remedy = "`ulimit -n 65536` in the shell that starts Ray"
    if hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES:
        remedy = "raise nofile in /etc/security/limits.conf (a service: LimitNOFILE=65536), then " + remedy
    return CheckResult("open files", Status.FAIL if soft < FEWEST_FILES else Status.WARN, observation, remedy)


def check_processes(needs: Needs) -> CheckResult:
    """Check the limit of processes and threads per user."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    observation = f"{_limit_text(soft)} per user"
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_PROCESSES:
        return CheckResult("processes", Status.PASS, observation)
    remedy = "`ulimit -u 65536`, or raise nproc in /etc/security/limits.conf; Ray and torch start hundreds of threads"
    return CheckResult("processes", Status.WARN, observation, remedy)


def check_locked_memory(needs: Needs, infiniband: str = "/sys/class/infiniband") -> list[CheckResult]:
    """Check the limit of locked memory, needed to register buffers with InfiniBand; no result without InfiniBand."""
    if not Path(infiniband).is_dir() or not os.listdir(infiniband):
        return []
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return [CheckResult("locked memory", Status.PASS, "unlimited")]
    remedy = "`ulimit -l unlimited` (limits.conf: memlock unlimited; a container: --ulimit memlock=-1)"
    observation = f"{_limit_text(soft)} bytes; NCCL over InfiniBand needs more"
    return [CheckResult("locked memory", Status.WARN, observation, remedy)]


def check_cores(needs: Needs) -> CheckResult:
    """Check that this process may use at least one core per device."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    observation = f"{cores} usable" + ("" if needs.devices is None else f" for {needs.devices} devices")
    if needs.devices is None or cores >= needs.devices:
        return CheckResult("cores", Status.PASS, observation)
    remedy = "request more cores from the scheduler (--cpus-per-task), or lower trainer.n_gpus_per_node"
    return CheckResult("cores", Status.WARN, observation, remedy)


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def check_hostname(needs: Needs) -> CheckResult:
    """Check that the host name of this machine resolves; with several nodes, to an address that others reach."""
    host = socket.gethostname()
    remedy = f"add `<address> {host}` to /etc/hosts, or repair DNS"
    try:
        addresses = resolve(host)
    except OSError as error:
        return CheckResult("hostname", Status.FAIL, f"{host} does not resolve ({error.strerror or error})", remedy)
    observation = f"{host} is {', '.join(addresses)}"
    if needs.nodes > 1 and all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return CheckResult("hostname", Status.WARN, f"{observation}: other nodes cannot reach that", remedy)
    return CheckResult("hostname", Status.PASS, observation)


def check_peers(needs: Needs) -> list[CheckResult]:
    """Check that the names of the other machines resolve here."""
    if not needs.peers:
        return []
    missing = []
    for peer in needs.peers:
        try:
            resolve(peer)
        except OSError as error:
            missing.append(f"{peer} ({error.strerror or error})")
    if missing:
        observation = f"cannot be resolved: {', '.join(missing)}"
        remedy = "repair DNS, or list all nodes in /etc/hosts"
        return [CheckResult("names of other nodes", Status.FAIL, observation, remedy)]
    return [CheckResult("names of other nodes", Status.PASS, f"{len(needs.peers)} resolve")]


def resolve(host: str) -> list[str]:
    """Return the addresses of a host name.

    Raises:
        OSError: the name does not resolve.
    """
    return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})


def check_ports(needs: Needs) -> list[CheckResult]:
    """Check that ports are free; name the process that holds a port if this user may see it."""
    results = []
    for port in needs.ports:
        holder = port_holder(port)
        remedy = f"end the process that holds it, or choose another port than {port}" if holder else ""
        observation = f"{port} is {f'held by {holder}' if holder else 'free'}"
        results.append(CheckResult("port", Status.FAIL if holder else Status.PASS, observation, remedy))
    held = [(port, holder) for port in needs.watched_ports if port not in needs.ports and (holder := port_holder(port))]
    if held:
        observation = "; ".join(f"{port} is held by {holder}" for port, holder in held)
        remedy = "a Ray cluster runs here already: join it (RAY_ADDRESS), or give the new one other ports"
        results.append(CheckResult("Ray's ports", Status.WARN, observation, remedy))
    elif needs.watched_ports:
        results.append(CheckResult("Ray's ports", Status.PASS, f"{', '.join(map(str, needs.watched_ports))} are free"))
    return results


def port_holder(port: int) -> str | None:
    """Describe the process that listens on a port; None if the port is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind(("", port))
            return None
        except OSError as error:
            if error.errno == errno.EACCES:
                return "the system, and only root may use it"
    try:
        for entry in psutil.net_connections("tcp"):
            if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN and entry.pid:
                return f"process {entry.pid} ({psutil.Process(entry.pid).name()})"
    except psutil.Error:
        pass
    return "a process of another user"


def check_engine_package(needs: Needs) -> list[CheckResult]:
    """Check that the package of the rollout engine is installed."""
    if needs.engine != "sglang":
        return []
    try:
        require_sglang()
    except ConfigError as error:
        return [CheckResult("rollout engine", Status.FAIL, str(error), "see the message")]
    return [CheckResult("rollout engine", Status.PASS, "sglang is installed")]


def check_logins(needs: Needs) -> list[CheckResult]:
    """Check the setup of each tracker, such as its package and login, without the network."""
    results = []
    for name in needs.trackers:
        try:
            check_trackers([name])
        except ConfigError as error:
            results.append(CheckResult(f"tracker {name}", Status.FAIL, str(error), "see the message"))
        else:
            results.append(CheckResult(f"tracker {name}", Status.PASS, "ready"))
    return results


def check_sandbox(needs: Needs) -> CheckResult:
    """Check that this machine can isolate generated programs, and list the active protections of the local sandbox."""
    try:
        observed = protections()
    except InfrastructureFailure as error:
        remedy = "only for the reward function code: allow user namespaces, or set reward.sandbox.url"
        return CheckResult("code sandbox", Status.WARN, str(error), remedy)
    active = [protection.name for protection in observed if protection.active]
    missing = [f"{p.name} ({p.remedy})" if p.remedy else p.name for p in observed if not p.active]
    text = ", ".join(active) + (f"; not active: {', '.join(missing)}" if missing else "")
    if "seccomp filter" not in active:
        remedy = "only for the reward function code: see the message, or set reward.sandbox.allow_unfiltered=true"
        return CheckResult("code sandbox", Status.WARN, text, remedy)
    return CheckResult("code sandbox", Status.PASS, text)
