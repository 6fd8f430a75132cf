"""``megarl doctor --nodes`` on two real raylets of this machine: every node is examined, and what is between them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from ray.cluster_utils import Cluster
from megarl.cli import main

memory = {"object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **memory})
cluster.add_node(num_cpus=1, **memory)
try:
    sys.exit(main(["doctor", "--nodes", "--quick", "--json", "--address", cluster.address]))
finally:
    cluster.shutdown()
"""


def test_all_nodes_and_what_is_between_them() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *nodes, between = json.loads(done.stdout.splitlines()[-1])["nodes"]
    assert len(nodes) == 2 and nodes[0]["host"] != nodes[1]["host"] and nodes[0]["facts"] == nodes[1]["facts"]
    checks = {check["check"]: check for check in between["checks"]}
    assert between["host"] == "between nodes" and checks["same everywhere"]["status"] == "pass"
    assert checks["clocks"]["status"] == "pass"  # of one machine
    assert checks["all-reduce (gloo)"]["found"].startswith("2 ranks on 2 nodes: ")
