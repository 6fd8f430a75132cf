"""Has Ray's workers find SGLang imported: a module for the fork server of the workers (see ``shared_servers.py``).

SGLang takes a replica's process 10 s of CPU time, and the fork server of its schedulers again. Here both are forks. The
tests of ``tests/rollout`` start engines with interpreters of their own.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from megarl.rollout.sglang.forks import SERVER_MODULES, fork_this_process
from megarl.rollout.sglang.options import SGLangOptions, environment

FRONT_END = ("sglang", "sglang.srt.entrypoints.engine", "megarl.rollout.sglang.in_process")


def import_sglang() -> None:
    """Import it with the variables that it reads; a fork has those of its worker."""
    importlib.import_module("setproctitle").getproctitle()  # finds the command line before the environment changes
    os.environ |= environment(SGLangOptions())
    for name in (*FRONT_END, *SERVER_MODULES):
        importlib.import_module(name)


def fork_in_workers(server: Any) -> None:
    """Let each worker of a Ray node start the fork server of its schedulers before it has threads.

    Args:
        server: module ``megarl.cluster.fork_server`` that runs.
    """
    run_script = server._run_script

    def run(request: dict[str, Any], *arguments: Any) -> None:
        if server._RAYLET in request["env"]:
            fork_this_process()
        run_script(request, *arguments)

    server._run_script = run


import_sglang()
fork_in_workers(sys.modules["__main__"])
