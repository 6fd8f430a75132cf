"""System calls that a program of the local sandbox may not make: a seccomp filter, which libseccomp compiles."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from itertools import chain
from typing import NamedTuple

from megarl.base.provenance import install_command

_DENIED = {
    "mounts": (
        "mount",
        "umount",
        "umount2",
        "pivot_root",
        "chroot",
        "move_mount",
        "open_tree",
        "open_tree_attr",
        "fsopen",
        "fsconfig",
        "fsmount",
        "fspick",
        "mount_setattr",
    ),
    "namespaces": ("unshare", "setns"),
    "other processes": ("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp"),
    "large interfaces of the kernel": (
        "bpf",
        "perf_event_open",
        "userfaultfd",
        "io_uring_setup",
        "io_uring_enter",
        "io_uring_register",
    ),
    "keys": ("add_key", "request_key", "keyctl"),
    "memory outside of address spaces": ("memfd_secret", "shmget", "msgget", "semget", "ipc", "mq_open"),
    "code of the kernel": ("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load"),
    "files": (
        "name_to_handle_at",
        "open_by_handle_at",
        "fanotify_init",
        "quotactl",
        "quotactl_fd",
        "lookup_dcookie",
        "nfsservctl",
    ),
    "machine": ("swapon", "swapoff", "reboot", "acct", "syslog", "vhangup", "iopl", "ioperm", "modify_ldt", "uselib"),
    "clock and names": (
        "settimeofday",
        "clock_settime",
        "clock_adjtime",
        "adjtimex",
        "stime",
        "sethostname",
        "setdomainname",
    ),
}
"""Calls that fail with EPERM, by topic."""

_NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""Flags of ``clone`` that create a namespace: mount, cgroup, UTS, IPC, user, PID, network."""
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


class SystemCallFilter(NamedTuple):
    """A seccomp filter.

    Attributes:
        program: its instructions for the kernel (BPF); empty without a filter.
        problem: the reason why there is no filter, else None.
    """

    program: bytes
    problem: str | None = None


def _kernel_has_filters() -> bool:
    """Whether the kernel knows the request for a filter: it then reads the program, here from address 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() in (errno.EFAULT, errno.EACCES)


@cache
def system_call_filter() -> SystemCallFilter:
    """Compile the seccomp filter of the sandbox, once per process.

    Denied calls fail with EPERM. ``clone3`` fails with ENOSYS, since a filter cannot read its flags; libraries then use
    ``clone``. A call by another architecture's numbers, such as 32-bit ones, kills the program.
    """
    if not _kernel_has_filters():
        return SystemCallFilter(b"", "this kernel has no seccomp filters")
    try:
        import pyseccomp as seccomp  # raises RuntimeError without libseccomp
    except (ImportError, RuntimeError) as error:
        return SystemCallFilter(b"", f"install libseccomp2, and pyseccomp by {install_command('code')} ({error})")
    try:
        rules = seccomp.SyscallFilter(seccomp.ALLOW)
        rules.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.KILL_PROCESS)
        denied = seccomp.ERRNO(errno.EPERM)
        for name in chain.from_iterable(_DENIED.values()):
            number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
            if number >= 0:  # negative: this architecture, or this release of libseccomp, has no such call
                rules.add_rule(denied, number)
        for flag in _NAMESPACES:
            rules.add_rule(denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
        rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
        with os.fdopen(os.memfd_create("seccomp"), "w+b") as file:
            rules.export_bpf(file)
            file.seek(0)
            return SystemCallFilter(file.read())
    except OSError as error:  # libseccomp is too old for an action or a call
        return SystemCallFilter(b"", f"libseccomp cannot compile the filter ({error})")
