"""Runs an SGLang server for an engine: ``python -m megarl.rollout.sglang.serve <JSON>``.

It equals ``python -m sglang.launch_server``, but takes the arguments as values and ends with its parent process.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys

from megarl.rollout.sglang.options import SGLangOptions, server_args

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the process is ended."""
    job = json.loads(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    options = SGLangOptions(**job["options"])
    arguments = server_args(job["folder"], job["max_model_len"], options)
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    # A warm-up would generate without weights.
    arguments |= {"host": options.host, "port": options.port, "skip_server_warmup": True}
    launch_server(ServerArgs(**arguments))


if __name__ == "__main__":
    main()
