"""The local sandbox: runs a generated Python program in Linux namespaces with resource limits."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megarl.base.processes import child_pids, open_files, resident_bytes
from megarl.rewards.calling import InfrastructureFailure
from megarl.rewards.sandbox.jail import HOME
from megarl.rewards.sandbox.system_calls import system_call_filter

FINISHED, TIMEOUT, OUTPUT_LIMIT, MEMORY_LIMIT = "finished", "timeout", "output_limit", "memory_limit"
_JAIL = Path(__file__).with_name("jail.py")
_START_S = 30.0
"""Seconds to set up the sandbox on a loaded machine, beyond the limit of the program."""
_MEMORY_CHECK_S = 0.02
_MIB = 2**20
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
_PROBE = """
import ctypes, json, os, resource, socket

def line(name):
    try:
        with open("/proc/self/status") as file:
            return next((text.split()[1] for text in file if text.startswith(name + ":")), None)
    except OSError:
        return None

def writable(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True

def system_v_memory():
    libc, private, create = ctypes.CDLL(None), 0, 0o1600
    calls = libc.shmget(private, 4096, create), libc.msgget(private, create), libc.semget(private, 1, create)
    return max(calls) >= 0

def filters_system_calls():
    # of this sandbox: a filter of the container around it allows a process to be traced
    libc = ctypes.CDLL(None)
    return libc.prctl(21, 0, 0, 0, 0) == 2 and libc.ptrace(0, 0, None, None) == -1

def hosts():
    return [name for _, name in socket.if_nameindex() if name != "lo"]

print(json.dumps({
    "user without privileges": os.geteuid() == 65534 and line("CapEff") in (None, "0" * 16),
    "no network": not hosts(),
    "read-only files": not writable("/probe") and not writable("/usr/probe"),
    "own process ids": os.getppid() == 1,
    "memory and process limits": resource.RLIM_INFINITY not in (
        resource.getrlimit(resource.RLIMIT_AS)[1], resource.getrlimit(resource.RLIMIT_NPROC)[1]
    ),
    "no new privileges": line("NoNewPrivs") == "1",
    "no System V memory": not system_v_memory(),
    "seccomp filter": filters_system_calls(),
}))
"""
"""A program that reports its own confinement."""


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of one program.

    Attributes:
        timeout_s: wall seconds of the program, and CPU seconds of each process.
        memory_mb: resident memory of all processes together, and address space of each, in MiB.
        max_processes: concurrent processes and threads.
        disk_mb: files, kept in memory, in MiB.
        output_mb: standard output and error together, in MiB.
    """

    timeout_s: float = 10.0
    memory_mb: int = 1024
    max_processes: int = 16
    disk_mb: int = 16
    max_open_files: int = 64
    output_mb: int = 8


class Execution(NamedTuple):
    """Result of a program.

    Attributes:
        status: ``finished``, ``timeout``, ``output_limit`` or ``memory_limit``.
        exit_code: exit code, negative for a signal; None unless the program finished.
    """

    status: str
    exit_code: int | None
    stdout: str
    stderr: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the program finished with exit code 0."""
        return self.status == FINISHED and self.exit_code == 0


class LocalSandbox:
    """Runs Python programs, each in a new sandbox.

    Args:
        allow_unfiltered: run programs without a filter of system calls where there is none.
    """

    def __init__(self, limits: SandboxLimits | None = None, allow_unfiltered: bool = False) -> None:
        self.limits = limits or SandboxLimits()
        self.allow_unfiltered = allow_unfiltered

    def run(self, source: str, stdin: str = "") -> Execution:
        """Run a program.

        Raises:
            InfrastructureFailure: this machine does not allow sandboxes, or has no filter of system calls.
        """
        if (problem := system_call_filter().problem) and not self.allow_unfiltered:
            raise InfrastructureFailure(
                f"no sandbox on this machine: no seccomp filter: {problem}; or use reward.sandbox.url, or "
                "run programs unfiltered with reward.sandbox.allow_unfiltered=true"
            )
        with tempfile.TemporaryDirectory(prefix="megarl-sandbox-") as root:
            spec = json.dumps(self._spec(root, source, stdin)).encode()
            status_r, status_w = os.pipe()
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_JAIL), str(status_w)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[status_w],
                    start_new_session=True,
                    env={},
                )
            finally:
                os.close(status_w)
            try:
                output = _communicate(process, spec, self.limits)
            finally:
                if process.poll() is None:
                    process.kill()  # its children die with it
                    process.wait()
                with os.fdopen(status_r, "rb") as file:
                    report = file.readline()
        return _execution(json.loads(report) if report else {}, output)

    def _spec(self, root: str, source: str, stdin: str) -> dict[str, object]:
        limits = self.limits
        return {
            "root": root,
            "source": source,
            "stdin": stdin,
            "wall_s": limits.timeout_s,
            "disk_mb": limits.disk_mb,
            "visible": visible_paths(),
            "filter": base64.b64encode(system_call_filter().program).decode(),
            "argv": [sys.executable, "-I", "-X", "utf8", f"{HOME}/main.py"],
            "env": {"PATH": "/usr/bin:/bin", "HOME": HOME, "TMPDIR": HOME, "OMP_NUM_THREADS": "1"},
            "rlimits": {
                "RLIMIT_CPU": max(1, round(limits.timeout_s + 0.5)),
                "RLIMIT_AS": limits.memory_mb * _MIB,
                "RLIMIT_FSIZE": limits.disk_mb * _MIB,
                "RLIMIT_NOFILE": limits.max_open_files,
                "RLIMIT_NPROC": limits.max_processes,
                "RLIMIT_CORE": 0,
            },
        }


class _Output(NamedTuple):
    stdout: bytes
    stderr: bytes
    stopped: str | None  # reason why reading stopped before the end of the program


def _communicate(process: subprocess.Popen[bytes], stdin: bytes, limits: SandboxLimits) -> _Output:
    """Send the input of a process and read its output, within the limits of output, memory and seconds."""
    assert process.stdin and process.stdout and process.stderr
    deadline = time.monotonic() + limits.timeout_s + _START_S
    parts = {"stdout": bytearray(), "stderr": bytearray()}
    try:
        process.stdin.write(stdin)  # the launcher reads all of it first
        process.stdin.close()
    except BrokenPipeError:
        pass
    with selectors.DefaultSelector() as selector, process.stdout, process.stderr:
        selector.register(process.stdout, selectors.EVENT_READ, "stdout")
        selector.register(process.stderr, selectors.EVENT_READ, "stderr")
        stopped = None
        next_check = time.monotonic() + _MEMORY_CHECK_S
        while selector.get_map() and stopped is None:
            for ready, _ in selector.select(_MEMORY_CHECK_S):
                chunk = os.read(ready.fd, 65536)
                parts[ready.data] += chunk
                if not chunk:
                    selector.unregister(ready.fileobj)
            now = time.monotonic()
            if sum(map(len, parts.values())) > limits.output_mb * _MIB:
                stopped = OUTPUT_LIMIT
            elif now > deadline:
                stopped = TIMEOUT
            elif now > next_check:
                stopped = MEMORY_LIMIT if _exceeds_memory(process.pid, limits.memory_mb * _MIB) else None
                next_check = now + _MEMORY_CHECK_S
    if stopped is None:
        process.wait()
    return _Output(bytes(parts["stdout"]), bytes(parts["stderr"]), stopped)


def _exceeds_memory(launcher: int, limit: int, own_processes: int = 3) -> bool:
    """Return whether a program with all its processes has more resident bytes than a limit.

    Pages that processes share after a fork count once. Files in anonymous memory (``memfd``) count while they are open.

    Args:
        launcher: process id of the sandbox's launcher.
        own_processes: processes of the launcher, each the only child of the one before; they do not count.
    """
    tree = [launcher]
    for pid in tree:  # grows by the descendants; orphans belong to process 1 of their namespace
        tree += child_pids(pid)
    pids = tree[own_processes:]
    files = _anonymous_files(pids)
    if files + sum(map(resident_bytes, pids)) <= limit:  # an upper bound, much cheaper to read
        return False
    return files + sum(map(_proportional, pids)) > limit


def _anonymous_files(pids: list[int]) -> int:
    """Return the bytes of the processes' open memory files, each file once."""
    sizes: dict[int, int] = {}
    for pid in pids:
        for path, target in open_files(pid):
            if target.startswith("/memfd:"):
                with contextlib.suppress(OSError):  # closed since it was listed
                    status = Path(path).stat()
                    sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _proportional(pid: int) -> int:
    """Return the resident bytes of a process, with shared pages divided among their users (PSS)."""
    try:
        match = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
    except OSError:  # another user's process, or it has ended
        match = None
    return int(match[1]) * 1024 if match else resident_bytes(pid)


def _execution(report: dict[str, object], output: _Output) -> Execution:
    if "refused" in report and output.stopped is None:  # a launcher stopped while it starts also reports an error
        raise InfrastructureFailure(f"no sandbox on this machine: {report['refused']}; use reward.sandbox.url")
    stdout, stderr = (text.decode(errors="replace") for text in output[:2])
    status = output.stopped or (TIMEOUT if report.get("timeout") else FINISHED)
    code = report.get("exit_code")
    if status == FINISHED and not isinstance(code, int):
        raise InfrastructureFailure(f"the sandbox ended without a report: {stderr[-300:]!r}")
    if status == FINISHED and code == -signal.SIGXCPU:
        status = TIMEOUT
    return Execution(status, code if status == FINISHED and isinstance(code, int) else None, stdout, stderr[-2000:])


@cache
def visible_paths() -> Sequence[str]:
    """List the paths that a sandboxed program can read: system programs and libraries, and Python's."""
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
    python = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)]
    extra = [path for path in dict.fromkeys(python) if not path.startswith("/usr/")]
    return [*system, *(path for path in extra if not any(path.startswith(f"{parent}/") for parent in extra))]


@cache
def isolation_problem(allow_unfiltered: bool = False) -> str | None:
    """Return the reason why this machine allows no sandbox, or None; tested once per process."""
    try:
        execution = LocalSandbox(SandboxLimits(timeout_s=20), allow_unfiltered).run("print(6 * 7)")
    except InfrastructureFailure as error:
        return str(error)
    return None if execution.stdout == "42\n" else f"a program does not run in the sandbox: {execution.stderr}"


class Protection(NamedTuple):
    """One protection of the sandbox on this machine.

    Attributes:
        active: whether a program in the sandbox observes it.
        remedy: the reason why it is not active, and what to do; empty if unknown.
    """

    name: str
    active: bool
    remedy: str = ""


def protections() -> list[Protection]:
    """Return the protections of the sandbox on this machine, as a program in it observes them.

    Raises:
        InfrastructureFailure: this machine does not allow sandboxes.
    """
    execution = LocalSandbox(SandboxLimits(timeout_s=20), allow_unfiltered=True).run(_PROBE)
    if not execution.succeeded:
        raise InfrastructureFailure(f"a program does not run in the sandbox: {execution.stderr}")
    remedies = {"seccomp filter": system_call_filter().problem or ""}
    observed: dict[str, bool] = json.loads(execution.stdout)
    return [Protection(name, active, "" if active else remedies.get(name, "")) for name, active in observed.items()]
