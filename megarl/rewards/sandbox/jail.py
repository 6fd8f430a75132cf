"""The launcher script of the local sandbox: enters Linux namespaces, then runs the program.

``local.py`` starts it as ``python -I -S jail.py STATUS_FD``, with a JSON specification on standard input. It uses the
standard library only. There are four processes: this one maps user ids for its child; the child enters new namespaces;
its child, process 1 of the new PID namespace, builds the file system from read-only mounts; the last one drops all
privileges, applies the seccomp filter of ``system_calls.py`` and becomes the program. If one of the first three dies,
the others die with it.
"""

import base64
import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

HOME = "/sandbox"
NOBODY = 65534
_NEW_NS, _NEW_CGROUP, _NEW_UTS, _NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_INSTRUCTION_BYTES = 8
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read the specification, run the program, and write its exit status to the status descriptor."""
    status = int(sys.argv[1])
    os.set_inheritable(status, False)
    spec = json.load(sys.stdin)
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    entered_r, entered_w = os.pipe()
    mapped_r, mapped_w = os.pipe()
    child = os.fork()
    if child == 0:
        for end in (entered_r, mapped_w):
            os.close(end)
        _guarded(status, lambda: _enter(spec, status, entered_w, mapped_r))
    for end in (entered_w, mapped_r):
        os.close(end)
    if os.read(entered_r, 1):
        _guarded(status, lambda: _map_ids(child), returns=True)
        os.write(mapped_w, b"1")
    os.waitpid(child, 0)


def _guarded(status: int, work: Callable[[], None], returns: bool = False) -> None:
    """Do work that must succeed; on an error report it and exit."""
    try:
        work()
        if returns:
            return
        os._exit(0)
    except BaseException as error:
        _report(status, refused=f"{type(error).__name__}: {error}")
        os._exit(1)


def _report(status: int, **result: object) -> None:
    """Write a result as one line; the first line counts, since the end of a refused program is reported, too."""
    os.write(status, json.dumps(result).encode() + b"\n")


def _map_ids(child: int) -> None:
    """Map the users of the child's user namespace: nobody, and also root if this process is root."""
    root = os.geteuid() == 0
    if not root:
        _write(f"/proc/{child}/setgroups", "deny")
    for name, identity in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        lines = f"0 {identity} 1\n{NOBODY} {NOBODY} 1" if root else f"{NOBODY} {identity} 1"
        _write(f"/proc/{child}/{name}", lines)


def _enter(spec: dict[str, Any], status: int, entered: int, mapped: int) -> None:
    """Enter new namespaces; then start process 1 in them and wait for its end."""
    _call("unshare", _NEW_USER | _NEW_NS | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS | _NEW_CGROUP)
    os.write(entered, b"1")
    if not os.read(mapped, 1):
        os._exit(1)
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    first = os.fork()
    if first == 0:
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _guarded(status, lambda: _run_process_1(spec, status))
    os.waitpid(first, 0)


def _run_process_1(spec: dict[str, Any], status: int) -> None:
    """Be process 1 and start the program; when this process ends, the kernel kills all processes of the program."""
    _build_root(spec)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    stdin = os.memfd_create("stdin")
    with open(stdin, "wb", closefd=False) as file:
        file.write(spec["stdin"].encode(errors="surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    program = os.fork()
    if program == 0:
        _guarded(status, lambda: _exec_program(spec, stdin))
    deadline = time.monotonic() + spec["wall_s"]
    while (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait([signal.SIGCHLD], left)
        while True:  # orphans become children of process 1 too
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == program:
                _report(status, exit_code=os.waitstatus_to_exitcode(code))
                return
            if pid == 0:
                break
    _report(status, timeout=True)


def _build_root(spec: dict[str, Any]) -> None:
    """Build a read-only file system with the files a program needs and a small writable folder in memory."""
    root = spec["root"]
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("none", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    os.makedirs(root + "/tmp")
    size = f"mode=700,uid={NOBODY},gid={NOBODY},size={spec['disk_mb']}m,nr_inodes=1000"
    _mount("none", root + "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    os.symlink("/tmp", root + HOME)
    for path in spec["visible"]:  # after the folder in memory, since Python itself may be below it
        _bind_read_only(path, root + path)
    os.makedirs(root + "/dev")
    for name in ("null", "zero", "random", "urandom"):
        _bind_read_only(f"/dev/{name}", f"{root}/dev/{name}")
    with open(f"{root}/tmp/main.py", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(spec["source"])
    os.makedirs(root + "/proc")
    try:
        _mount("none", root + "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        _write(f"{root}/proc/sys/user/max_user_namespaces", "0")
        _forbid_system_v(root)
        _set_read_only(root + "/proc", 0)
    except OSError:
        pass  # a container hides it: the program has no /proc
    _set_read_only(root, 0)
    os.chdir(root)
    if _libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b".") != 0:
        raise _error("pivot_root")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir(HOME)


def _forbid_system_v(root: str) -> None:
    """Allow no System V segments, queues and semaphores in this namespace: they count as memory of no process.

    The filter denies their calls; this helps where there is none.
    """
    for name, value in (("shmmni", "0"), ("msgmni", "0"), ("sem", "0 0 0 0")):
        with contextlib.suppress(OSError):  # older kernels let only the machine's root change it
            _write(f"{root}/proc/sys/kernel/{name}", value)


def _bind_read_only(path: str, target: str) -> None:
    """Mount a path of the machine read-only at a target."""
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
        return
    if not os.path.exists(path) or os.path.ismount(target):
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "a", encoding="utf-8").close()
    _mount(path, target, None, _MS_BIND | _MS_REC)
    _set_read_only(target, _AT_RECURSIVE)


def _exec_program(spec: dict[str, Any], stdin: int) -> None:
    """Drop privileges, set the limits, and execute the program."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.geteuid() != NOBODY:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.dup2(stdin, 0)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for name, limit in spec["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    if spec["filter"]:  # empty where the kernel or a library is missing; an error here refuses the program
        _filter_system_calls(base64.b64decode(spec["filter"]))
    os.execve(spec["argv"][0], spec["argv"], spec["env"])


class _FilterProgram(ctypes.Structure):
    """``struct sock_fprog`` of ``linux/filter.h``: number of instructions, and their address."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def _filter_system_calls(program: bytes) -> None:
    """Apply a seccomp filter to this process and all that it starts; it cannot be removed."""
    header = _FilterProgram(len(program) // _INSTRUCTION_BYTES, program)
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0, label="seccomp filter")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    _call(
        "mount",
        *(x if x is None else x.encode() for x in (source, target, kind)),
        flags,
        data.encode() if data else None,
    )


def _set_read_only(path: str, flags: int) -> None:
    attributes = struct.pack("QQQQ", _MS_RDONLY | _MS_NOSUID, 0, 0, 0)
    arguments = (ctypes.c_int(_AT_FDCWD), path.encode(), ctypes.c_uint(flags), attributes, ctypes.c_size_t(32))
    if _libc.syscall(_SYS_MOUNT_SETATTR, *arguments) != 0:
        raise _error("mount_setattr")


def _call(name: str, *arguments: int | bytes | None, label: str = "") -> None:
    if getattr(_libc, name)(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)) != 0:
        raise _error(label or name)


def _error(name: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{name}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
