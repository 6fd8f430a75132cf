"""``megarl doctor --nodes`` on two raylets of this machine: checks of each node and between nodes."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
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


def test_checks_of_each_node_and_between_nodes():
    process = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    *nodes, between = json.loads(process.stdout.splitlines()[-1])["nodes"]
    assert len(nodes) == 2 and nodes[0]["host"] != nodes[1]["host"] and nodes[0]["facts"] == nodes[1]["facts"]
    checks = {check["check"]: check for check in between["checks"]}
    assert between["host"] == "between nodes" and checks["same everywhere"]["status"] == "pass"
    assert checks["clocks"]["status"] == "pass"  # the same machine
    assert checks["all-reduce (gloo)"]["observation"].startswith("2 ranks on 2 nodes: ")
