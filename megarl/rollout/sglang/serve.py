"""Runs an SGLang server for an engine: ``python -m megarl.rollout.sglang.serve <JSON>``.

The same as ``python -m sglang.launch_server``, but the arguments come as values, and the server ends with the process
that started it.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys

from megarl.rollout.sglang.options import SGLangOptions
from megarl.rollout.sglang.server_args import server_args

_SET_SIGNAL_OF_PARENTS_DEATH = 1


def main() -> None:
    """Serves until it is ended."""
    order = json.loads(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL)
    options = SGLangOptions(**order["options"])
    arguments = server_args(order["folder"], order["max_model_len"], options)
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    # A warm-up would generate with weights that are not there yet.
    arguments |= {"host": options.host, "port": options.port, "skip_server_warmup": True}
    launch_server(ServerArgs(**arguments))


if __name__ == "__main__":
    main()
