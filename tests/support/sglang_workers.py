"""Has Ray's workers find SGLang imported: a module for the fork server of the workers (see ``shared_servers.py``).

SGLang takes a replica's process 10 s of CPU time, and the fork server of its schedulers again. Here both are forks.
They lack SGLang's names in lists of processes. A run with a fork server of its own starts new interpreters, as users.
"""

from __future__ import annotations

import sys
from typing import Any

from megarl.rollout.sglang.forks import fork_this_process

from .sglang_imports import import_sglang


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
