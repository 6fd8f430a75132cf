"""Driver for a cluster of two nodes, with a worker group over both.

Usage: python two_nodes.py FOLDER lose | hang. Each run appends a line to FOLDER/runs.json. With ``lose`` the first run
waits in a call of processes without torch until it fails. With ``hang`` the processes sum a number by gloo, then
the one on the remote node hangs, and the watchdog ends the phase.
"""

import json
import os
import sys
from pathlib import Path

import ray

from megarl.base.errors import StallError, WorkerError
from megarl.cluster import processes
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup
from megarl.config.schema.run import WatchdogConfig
from megarl.models import ParallelLayout
from megarl.tracing import PHASE, TracingOptions, span, watch_process
from megarl.trainer.records.watchdog import Watchdog


def node_of(pids):
    """Return the node's address and the processes; runs as a task on their node."""
    return [ray.util.get_node_ip_address(), list(pids)]


def hang(pool):
    """Sum a number and let a worker hang; return the sum, nodes, processes, clock offsets and the watchdog's error."""
    here, options = ray.util.get_node_ip_address(), TracingOptions(watched=True)
    watch_process(options)
    pool.processes.options = options
    actor = WorkerGroup("actor", "tests.cluster.hanging_workers:Hanging", {}, ParallelLayout(dp=2), pool)
    total = actor.total(1)
    members = [member for member in pool.processes.members() if member.role == "actor"]
    (far,) = [member.rank for member in members if member.host != here]
    report = {
        "total": total,
        "driver": here,
        "members": members,
        "far": far,
        "inspected": processes._on_nodes(members, node_of),
    }
    report["offsets"] = pool.processes.offsets()
    keys = WatchdogConfig(timeout_s=None, phases={"update_actor": 5}, action="end")
    try:
        with Watchdog(keys, folder, pool.processes, print), span("update_actor", PHASE):
            actor.update(1, far, "user code")
    except StallError as error:
        report["stall"] = str(error)
    return report


folder, first_run = Path(sys.argv[1]), not Path(sys.argv[1], "runs.json").exists()
with RaySession() as session:
    pool = session.place([ResourcePool("nodes", "cpu", [1, 1])])["nodes"]
    run = {
        "address": os.environ["RAY_ADDRESS"],
        "token": os.environ["RAY_AUTH_TOKEN_PATH"],
        "given": os.environ.get("MEGARL_TEST"),
    }
    if "hang" in sys.argv:
        run["hang"] = hang(pool)
    else:
        sleeper = WorkerGroup("sleeper", "tests.cluster.light_workers:Sleeper", {}, ParallelLayout(dp=2), pool)
        sleeper.pid()
    with (folder / "runs.json").open("a", encoding="utf-8") as file:
        file.write(json.dumps(run) + "\n")
    print("the driver is at work", flush=True)
    if "lose" in sys.argv and first_run:
        try:
            sleeper.sleep(600)
        except WorkerError as error:
            print(f"driver: {error}", file=sys.stderr)
            sys.exit(1)
