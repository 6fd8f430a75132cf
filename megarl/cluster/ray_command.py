"""Ray's command line for a node of a launched cluster, without imports and processes that no job uses.

As a program (``python -m megarl.cluster.ray_command start ...``) an agent runs it on its node. Ray Serve and Ray Jobs,
whose imports take each node's start 1.2 seconds of CPU time, are hidden, and so is grpc's package: without it Ray
starts no client server, which nobody connects to. Ray goes on without packages that cannot be imported. Workers of a
node on CPUs are forks, if its environment names a fork server.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
from pathlib import Path

from megarl.base.files import private_folder
from megarl.cluster import ray_programs
from megarl.cluster.local_ray import light_programs

HIDDEN = ("ray.serve", "ray.dashboard.modules.job.cli", "grpc")
"""Packages that ``ray start`` imports and does not use."""


def main() -> None:
    """Run Ray's command line with the arguments of this process."""
    for name in HIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]  # an import then raises ModuleNotFoundError
    server = Path(os.environ.get(ray_programs.ADDRESS, ""))
    is_on_cpu = any(argument.startswith("--num-cpus=") for argument in sys.argv)  # see ``ray_start`` of the launcher
    with contextlib.ExitStack() as stack:
        if is_on_cpu and server.is_absolute():  # a fork must not inherit the state of CUDA
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-python-", dir=private_folder()))
            stack.enter_context(light_programs(Path(folder)))
        runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
