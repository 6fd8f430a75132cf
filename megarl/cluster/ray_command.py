"""Ray's command line for a node of a launched cluster, without imports and processes that no job uses.

As a program (``python -m megarl.cluster.ray_command start ...``) an agent runs it on its node. Ray Serve and Ray
Jobs, whose imports take seconds of each node's start, are hidden; Ray goes on without them if they cannot be imported.
A cluster of fixed size needs no autoscaler, drivers read no workers' output from a log monitor, and nobody connects to
a client server: each would cost the node a process of one to two seconds of CPU time.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.cluster import fork_client

HIDDEN = ("ray.serve", "ray.dashboard.modules.job.cli")
"""Packages that ``ray start`` imports and does not use."""


def node_parameters(arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return parameters of a node that ``ray start`` does not offer or sets by itself.

    Args:
        arguments: of ``ray start``; the launcher counts slots (``--num-cpus``) only for a job on CPUs.
        environ: may name a fork server, see :mod:`~megarl.cluster.fork_server`; workers on CPUs are its forks.
    """
    parameters: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False, "ray_client_server_port": None}
    is_on_cpu = any(argument.startswith("--num-cpus=") for argument in arguments)
    if is_on_cpu and Path(environ.get(fork_client.ADDRESS, "")).is_absolute():
        parameters["setup_worker_path"] = fork_client.__file__
    return parameters


def parameters_with(settings: Mapping[str, Any]) -> type:
    """Return Ray's class of node parameters with settings that ``ray start`` and ``ray.init`` do not offer."""
    from ray._private import parameter

    class NodeParameters(parameter.RayParams):
        """Parameters of the node that this process starts."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.update(**settings)

    return NodeParameters


def main() -> None:
    """Run Ray's command line with the arguments of this process."""
    for name in HIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]  # an import then raises ModuleNotFoundError
    from ray._private import parameter

    parameter.RayParams = parameters_with(node_parameters(sys.argv, os.environ))
    runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
