"""A local Ray has only the processes that a run needs."""

from __future__ import annotations

import os

import psutil
import ray
from ray._private import node, parameter, ray_constants

from megarl.cluster import RaySession


def test_local_ray_is_lean_and_leaves_ray_and_the_environment_as_they_were() -> None:
    def state() -> tuple[object, ...]:
        return node.Node, parameter.RayParams, ray_constants.ENABLE_RAY_CLUSTER

    before, variables = state(), dict(os.environ)
    with RaySession(num_cpus=1):
        commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
        assert any("gcs_server" in command for command in commands)
        for absent in ("dashboard/dashboard.py", "monitor.py", "log_monitor.py"):
            assert not any(absent in command for command in commands), absent
        assert ray.util.get_node_ip_address() == "127.0.0.1"
        assert state() == before
        changed = {name for name in os.environ if os.environ[name] != variables.get(name)}
        assert not {name for name in changed if name.startswith("MEGARL") or "WINDOWS" in name}
