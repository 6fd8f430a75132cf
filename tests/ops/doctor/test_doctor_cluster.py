"""``megarl doctor --nodes`` on two raylets of this machine: checks of each node and between nodes."""

import json
import os

from support.ray_nodes import TwoNodes


def test_checks_of_each_node_and_between_nodes(shared_server, drivers, tmp_path):
    output = tmp_path / "output.txt"
    with TwoNodes(1, shared_server) as cluster, output.open("wb") as file:
        address = cluster.environment["RAY_ADDRESS"]
        command = ["megarl", "doctor", "--nodes", "--quick", "--json", "--address", address]
        code = drivers.start(command, tmp_path, {**os.environ, **shared_server}, file.fileno()).wait(300)
    text = output.read_text(encoding="utf-8")
    assert code == 0, text
    (report,) = (line for line in text.splitlines() if line.startswith("{"))
    *nodes, between = json.loads(report)["nodes"]
    assert len(nodes) == 2 and nodes[0]["host"] != nodes[1]["host"] and nodes[0]["facts"] == nodes[1]["facts"]
    checks = {check["check"]: check for check in between["checks"]}
    assert between["host"] == "between nodes" and checks["same everywhere"]["status"] == "pass"
    assert checks["clocks"]["status"] == "pass"  # the same machine
    assert checks["all-reduce (gloo)"]["observation"].startswith("2 ranks on 2 nodes: ")
