"""Liveness of SGLang: detects a scheduler that hangs or is stopped while requests run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Sequence

import psutil

from megarl.base.processes import READ_ERRORS
from megarl.rollout.interface import RolloutError
from megarl.rollout.sglang.backend import RequestLoop, SGLangBackend

LONGEST_GAP_S = 2.0
"""A longer time between two checks counts as this: nobody looked at responses meanwhile."""


class SchedulerLiveness:
    """Asks SGLang's scheduler for a response while no request ends; sets :attr:`lost`, the reason, if it is silent."""

    def __init__(self, backend: SGLangBackend, loop: RequestLoop, timeout_s: float) -> None:
        self._backend, self._loop, self._timeout_s = backend, loop, timeout_s
        self.lost: str | None = None
        self._silent_s, self._checked = 0.0, time.monotonic()
        self._question: concurrent.futures.Future[None] | None = None

    def heard(self) -> None:
        """Record a response, or that no request runs."""
        self._silent_s, self._checked = 0.0, time.monotonic()

    def check(self) -> None:
        """Set :attr:`lost` after a long silence; call it every :data:`LONGEST_GAP_S` seconds while requests run."""
        now = time.monotonic()
        self._silent_s += min(now - self._checked, LONGEST_GAP_S)
        self._checked = now
        if self._question is not None and self._question.done():
            question, self._question = self._question, None
            with contextlib.suppress(RolloutError):  # a lost server is the backend's failure
                question.result()
                if not self._backend.stopped():
                    self.heard()
        if self._silent_s < self._timeout_s / 4:
            return
        if self._question is None:
            self._question = self._loop.start(self._backend.ask_scheduler())
        if self._silent_s >= self._timeout_s:
            stopped = self._backend.stopped()
            cause = f"; stopped: pid {', '.join(map(str, stopped))}" if stopped else ""
            self.lost = f"its scheduler has not responded for {self._silent_s:.0f} s (rollout.health.timeout_s){cause}"


class StoppedProcesses:
    """Finds processes that stay stopped during a control call, in which a busy scheduler may be silent."""

    def __init__(self, backend: SGLangBackend, timeout_s: float) -> None:
        self._backend, self._timeout_s = backend, timeout_s
        self._since: dict[int, float] = {}

    def failure(self) -> str | None:
        """Return the reason why the call will not end; None if no process is stopped for too long."""
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in self._backend.stopped()}
        lost = [pid for pid, since in self._since.items() if now - since >= self._timeout_s]
        if not lost:
            return None
        return (
            f"processes are stopped for {self._timeout_s:g} s (rollout.health.timeout_s): "
            f"pid {', '.join(map(str, lost))}"
        )


def stopped_processes(processes: Sequence[psutil.Process]) -> list[int]:
    """Return the pids of the processes that are stopped, as by SIGSTOP."""
    stopped = []
    for process in processes:
        with contextlib.suppress(*READ_ERRORS):
            if process.status() == psutil.STATUS_STOPPED:
                stopped.append(process.pid)
    return stopped
