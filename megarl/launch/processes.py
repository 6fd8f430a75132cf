"""Processes that end with the one that started them, and only those."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ROUNDS = 5


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends (Linux).

    So whatever a descendant leaves behind is still found by :func:`end_descendants`, and nobody else's process ever is.
    """
    prctl = _prctl()
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with pipes for its output.

    It gets SIGTERM when this process dies, however that happens (Linux), and no Ctrl-C of a terminal. To be called
    from the main thread: the kernel watches the thread.

    Raises:
        OSError: it cannot be started.
    """
    prctl, parent = _prctl(), os.getpid()

    def die_with_parent() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it died in between
                os._exit(1)

    return subprocess.Popen(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def end_descendants(grace_s: float) -> list[str]:
    """End every process that descends from this one: SIGTERM, and after ``grace_s`` seconds SIGKILL.

    Returns:
        What could not be ended, as ``pid name``.
    """
    alive = _descendants()
    _signal(alive, signal.SIGTERM)
    psutil.wait_procs(alive, timeout=grace_s)
    for _ in range(_ROUNDS):  # those that are ending may start others
        alive = _descendants()
        if not alive:
            return []
        _signal(alive, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=grace_s)
    return [f"{process.pid} {_name(process)}" for process in _descendants()]


def _descendants() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [process for process in found if _status(process) != psutil.STATUS_ZOMBIE]


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


def _prctl() -> Callable[[int, int], int] | None:
    if sys.platform != "linux":
        return None
    call: Callable[[int, int], int] = ctypes.CDLL(None, use_errno=True).prctl
    return call
