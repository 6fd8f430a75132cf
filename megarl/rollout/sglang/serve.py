"""Runs an SGLang server for an engine: ``python -m megarl.rollout.sglang.serve`` with its job, in JSON, as input.

It equals ``python -m sglang.launch_server``, but takes the arguments as values and ends with its parent process. The
API key is among them; on a command line every user of the machine could read it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from megarl.base.child_process import die_with_parent
from megarl.base.ports import bypass_proxies
from megarl.rollout.sglang.options import RankRendezvous, SGLangOptions, needs_shim, server_args


def main() -> None:
    """Serve until the process is ended."""
    job = json.loads(sys.stdin.buffer.read())
    die_with_parent(os.getppid())
    options = SGLangOptions(**job["options"])
    bypass_proxies(options.host)  # the server calls itself
    rendezvous = RankRendezvous(options)
    os.environ.update(rendezvous.variables)
    arguments = server_args(job["folder"], job["max_model_len"], options) | rendezvous.arguments
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    if needs_shim(options):
        importlib.import_module("megarl.rollout.sglang.forks").fork_this_process()
    # A warm-up would generate without weights.
    arguments |= {"host": options.host, "port": options.port, "api_key": options.api_key, "skip_server_warmup": True}
    launch_server(ServerArgs(**arguments))


if __name__ == "__main__":
    main()
