"""Two Ray nodes on this machine, for tests of jobs over several nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Self

NODES = """
import contextlib, pathlib, sys, tempfile
from ray.cluster_utils import Cluster
from megarl.cluster.local_ray import light_programs
memory = {"object_store_memory": 80 * 2**20}
stack = contextlib.ExitStack()
folder = stack.enter_context(tempfile.TemporaryDirectory())
stack.enter_context(light_programs(pathlib.Path(folder)))  # workers are forks
checks = {"_system_config": {"health_check_period_ms": 1000}}
head = {"num_cpus": int(sys.argv[1]), "include_dashboard": False, **checks, **memory}
cluster = Cluster(initialize_head=True, head_node_args=head)
node = cluster.add_node(num_cpus=1, **memory)
print("address", cluster.address, flush=True)
for line in sys.stdin:
    if line.strip() == "remove":
        cluster.remove_node(node, allow_graceful=False)
    else:
        node = cluster.add_node(num_cpus=1, **memory)
    print("done", flush=True)
cluster.shutdown()
stack.close()
"""


class TwoNodes:
    """Two Ray nodes on this machine, in a process of their own: Ray may end the process of a cluster that is lost.

    Args:
        head_cpus: CPU slots of the first node; the second one has one.
        shared_server: environment with the server whose forks are the workers.

    Attributes:
        environment: environment of a job that joins them.
    """

    def __init__(self, head_cpus: int, shared_server: Mapping[str, str]) -> None:
        command, pipe, env = (
            [sys.executable, "-c", NODES, str(head_cpus)],
            subprocess.PIPE,
            {**os.environ, **shared_server},
        )
        self._process = subprocess.Popen(
            command, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self.environment = {"RAY_ADDRESS": self._answer("address").split()[1]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End all nodes."""
        self._process.communicate(timeout=180)

    def send(self, change: str) -> None:
        """Remove the second node, or add it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{change}\n")
        self._process.stdin.flush()
        self._answer("done")

    def _answer(self, start: str) -> str:
        """Return the next line with this start; Ray prints others."""
        assert self._process.stdout is not None
        return next(line for line in self._process.stdout if line.startswith(start))
