"""Starts SGLang's processes on a CPU as forks of a process that has imported SGLang.

SGLang starts a scheduler per rank and a detokenizer as new interpreters, and each imports SGLang for 6 s of CPU time.
The shim for CPUs replaces them by forks of Python's fork server, of which each process with an engine has one. That of
SGLang's HTTP server is a fork itself. On a GPU nothing changes: forks share no CUDA state.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any

from megarl.base.child_process import die_with_parent
from megarl.rollout.sglang.options import load_shim

SERVER_MODULES = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)
"""Imported by the fork server; modules that a version of SGLang lacks are skipped."""

load_shim()  # a fork unpickles this module's class first, then a function of SGLang


class ForkedProcess(ForkServerProcess):
    """A process of SGLang: a fork with the environment variables that its parent has at the start."""

    def start(self) -> None:
        """Start the process; the first one of a process starts the fork server, too."""
        self._environment = dict(os.environ)
        multiprocessing.set_forkserver_preload([f"{__name__}_server"])
        super().start()

    def run(self) -> None:
        """Run the function of SGLang."""
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(self._environment)
        gc.enable()
        super().run()


class ForkingMultiprocessing(ModuleType):
    """The package ``multiprocessing`` with another class of processes, for SGLang's modules."""

    Process = ForkedProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)


def fork_this_process() -> None:
    """Start the fork server as a fork of this process, which has imported SGLang and has one thread."""
    resource_tracker.ensure_running()
    multiprocessing.set_forkserver_preload([f"{__name__}_server"])
    spawn, util.spawnv_passfds = util.spawnv_passfds, _fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Run the code of ``python -c CODE`` in a fork instead of a new interpreter; return its process id."""
    if pid := os.fork():
        return pid
    exec(args[-1], {})  # noqa: S102 -- the call of the fork server's main function
    os._exit(0)


def prepare_server() -> None:
    """Import SGLang in the fork server, which ends with its parent and forwards SGLang's signal of a failed fork."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGQUIT, lambda number, frame: os.kill(os.getppid(), number))
    gc.disable()
    logging.disable(logging.WARNING)  # SGLang's list of models that need a GPU
    for name in SERVER_MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    logging.disable(logging.NOTSET)
    with contextlib.suppress(ModuleNotFoundError):
        # It finds the command line, which forks overwrite with their names, by means of the first environment.
        importlib.import_module("setproctitle").getproctitle()
    gc.freeze()  # collections of the forks would copy the memory of all modules
