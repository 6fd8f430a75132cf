"""Checks of a machine: memory, process limits, cores, names, ports, services, and storage."""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import shutil
import socket
import tempfile
import time
from pathlib import Path

import psutil

from megarl.base.errors import ConfigError
from megarl.base.files import WRITABLE, nearest_folder, write_error
from megarl.base.formatting import GIB, MIB
from megarl.base.packages import require_sglang
from megarl.ops.doctor.node.needs import Needs
from megarl.ops.doctor.node.results import CheckResult, Status, judged
from megarl.rewards.calling import InfrastructureFailure
from megarl.rewards.sandbox import protections
from megarl.tracking import check_trackers

FEWEST_FILES, ENOUGH_FILES = 1024, 8192
"""Open files per process. Below the first number Ray fails with a few processes; below the second Ray warns."""
ENOUGH_PROCESSES = 4096
SHARED_MEMORY = "/dev/shm"

_CGROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of version 2 and 1
_CGROUP_USED = ("memory.current", "memory/memory.usage_in_bytes")
SAMPLE_BYTES = 64 * MIB
SLOW_BYTES_PER_S = 100e6
LONG_SAVE_S = 600.0
_ROOM = (
    "free space, set another folder by trainer.default_local_dir, or keep fewer (trainer.max_actor_ckpt_to_keep; in a "
    "supervised job trainer.max_ckpt_to_keep)"
)


def check_memory(needs: Needs) -> CheckResult:
    """Check free host memory, within the limit of the control group."""
    free = psutil.virtual_memory().available
    limit = free_cgroup_bytes()
    scope = ""
    if limit is not None and limit < free:
        free, scope = limit, " within the limit of the control group (container)"
    observation = f"{free / GIB:.1f} GiB free{scope}; needs about {needs.host_bytes / GIB:.1f} GiB"
    remedy = (
        "free memory, raise the container's limit, use more nodes, or offload less (param_offload, optimizer_offload)"
    )
    return judged("memory", observation, remedy, warn=free < needs.host_bytes, fail=free < needs.host_bytes / 2)


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
    if total >= needed:
        remedy = f"other processes hold it: look in {folder} for files of dead runs, and remove them"
    return judged("shared memory", observation, remedy, fail=free < needed)


def check_open_files(needs: Needs) -> CheckResult:
    """Check the limit of open files and sockets per process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    observation = f"{_limit_text(soft)} per process (at most {_limit_text(hard)})"
    few = soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES
    remedy = "`ulimit -n 65536` in the shell that starts Ray"
    if hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES:
        remedy = "raise nofile in /etc/security/limits.conf (a service: LimitNOFILE=65536), then " + remedy
    return judged("open files", observation, remedy, warn=few, fail=few and soft < FEWEST_FILES)


def check_processes(needs: Needs) -> CheckResult:
    """Check the limit of processes and threads per user."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    few = soft != resource.RLIM_INFINITY and soft < ENOUGH_PROCESSES
    remedy = "`ulimit -u 65536`, or raise nproc in /etc/security/limits.conf; Ray and torch start hundreds of threads"
    return judged("processes", f"{_limit_text(soft)} per user", remedy, warn=few)


def check_locked_memory(needs: Needs, infiniband: str = "/sys/class/infiniband") -> list[CheckResult]:
    """Check the limit of locked memory, needed to register buffers with InfiniBand; no result without InfiniBand."""
    if not Path(infiniband).is_dir() or not os.listdir(infiniband):
        return []
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = soft != resource.RLIM_INFINITY
    remedy = "`ulimit -l unlimited` (limits.conf: memlock unlimited; a container: --ulimit memlock=-1)"
    observation = f"{_limit_text(soft)} bytes; NCCL over InfiniBand needs more" if limited else "unlimited"
    return [judged("locked memory", observation, remedy, warn=limited)]


def check_cores(needs: Needs) -> CheckResult:
    """Check that this process may use at least one core per device."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    observation = f"{cores} usable" + ("" if needs.devices is None else f" for {needs.devices} devices")
    remedy = "request more cores from the scheduler (--cpus-per-task), or lower trainer.n_gpus_per_node"
    return judged("cores", observation, remedy, warn=needs.devices is not None and cores < needs.devices)


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
    observation = f"cannot be resolved: {', '.join(missing)}" if missing else f"{len(needs.peers)} resolve"
    remedy = "repair DNS, or list all nodes in /etc/hosts"
    return [judged("names of other nodes", observation, remedy, fail=bool(missing))]


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
        remedy = f"end the process that holds it, or choose another port than {port}"
        observation = f"{port} is {f'held by {holder}' if holder else 'free'}"
        results.append(judged("port", observation, remedy, fail=holder is not None))
    held = [(port, holder) for port in needs.watched_ports if port not in needs.ports and (holder := port_holder(port))]
    if needs.watched_ports:
        observation = "; ".join(f"{port} is held by {holder}" for port, holder in held)
        observation = observation or f"{', '.join(map(str, needs.watched_ports))} are free"
        remedy = "a Ray cluster runs here already: join it (RAY_ADDRESS), or give the new one other ports"
        results.append(judged("Ray's ports", observation, remedy, warn=bool(held)))
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
    remedy = "only for the reward function code: see the message, or set reward.sandbox.allow_unfiltered=true"
    return judged("code sandbox", text, remedy, warn="seccomp filter" not in active)


def check_checkpoint_room(needs: Needs) -> list[CheckResult]:
    """Check that the checkpoint folder is writable and has space for two checkpoints, old and new."""
    name, folder = "checkpoint folder", needs.checkpoint_dir
    if folder is None:
        return []
    if problem := write_error(Path(folder)):
        return [CheckResult(name, Status.FAIL, f"{folder}: {problem}", f"{WRITABLE}: trainer.default_local_dir")]
    free = shutil.disk_usage(nearest_folder(Path(folder))).free
    observation = f"{free / GIB:.1f} GiB free at {folder}"
    if needs.checkpoint_bytes is None:
        return [judged(name, observation, _ROOM, warn=free <= GIB)]
    needed = 2 * needs.checkpoint_bytes
    observation += f"; a checkpoint has about {needs.checkpoint_bytes / GIB:.2f} GiB, and two exist for a while"
    return [judged(name, observation, _ROOM, warn=free < needed, fail=free < needs.checkpoint_bytes)]


def check_disk_speed(needs: Needs) -> list[CheckResult]:
    """Measure the disk of the checkpoint folder with a file of 64 MiB: write, flush, read."""
    if needs.quick:
        return []
    name, folder = "disk speed", Path(needs.checkpoint_dir or ".")
    try:
        written, read = disk_speed(nearest_folder(folder))
    except OSError as error:
        return [CheckResult(name, Status.FAIL, f"{folder}: {error.strerror or error}", _ROOM)]
    observation = f"{written / 1e6:.0f} MB/s written, {read / 1e6:.0f} MB/s read at {folder}"
    remedy = "save to a local or parallel file system (trainer.default_local_dir), or less often (trainer.save_freq)"
    slow = written < SLOW_BYTES_PER_S
    if needs.checkpoint_bytes is not None:
        seconds = needs.checkpoint_bytes / needs.trainer_nodes / written
        slow = seconds > LONG_SAVE_S
        observation += f"; a node's part of a checkpoint takes about {seconds:.0f} s"
    return [judged(name, observation, remedy, warn=slow)]


def disk_speed(folder: Path) -> tuple[float, float]:
    """Return the write and read speeds of a temporary file, in bytes/s; the page cache is dropped before the read.

    Raises:
        OSError: the file cannot be written, for example on a full disk.
    """
    block = os.urandom(MIB)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".megarl-doctor-") as file:
        begin = time.perf_counter()
        for _ in range(SAMPLE_BYTES // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while file.read(MIB):
            pass
        read = time.perf_counter()
    return SAMPLE_BYTES / (written - begin), SAMPLE_BYTES / (read - written)


def check_folders(needs: Needs) -> list[CheckResult]:
    """Check that model folders, data files and the Hugging Face cache are readable on this node."""
    results = [_readable("model", Path(path)) for path in needs.models]
    results += [_readable("data", Path(path)) for path in needs.readable]
    return [*results, *_hugging_face_cache()]


def _readable(kind: str, path: Path) -> CheckResult:
    problem = _path_problem(path)
    if problem is None and kind == "model" and not (path / "config.json").is_file():
        problem = f"{path}: has no config.json"
    remedy = "put it on a file system that all nodes mount at this path, readable for this user"
    return judged(kind, problem or f"{path} can be read", remedy, fail=problem is not None)


def _path_problem(path: Path) -> str | None:
    """Describe why a file, or a file in a folder, cannot be read; None if all can."""
    try:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if not file.is_dir():
                with file.open("rb") as opened:
                    opened.read(1)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"
    return None


def _hugging_face_cache() -> list[CheckResult]:
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    try:
        if not cache.exists() and "HF_HOME" not in os.environ:
            return []
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            os.listdir(cache)
    except OSError as error:
        problem, remedy = f"{cache}: {error.strerror or error}", "set HF_HOME to a folder that this user may write to"
        return [CheckResult("Hugging Face cache", Status.WARN, problem, remedy)]
    return [CheckResult("Hugging Face cache", Status.PASS, f"{cache} can be read and written")]
