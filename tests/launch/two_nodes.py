"""A driver for a cluster of two nodes: a worker group over both, which sums a number by gloo.

Usage: python two_nodes.py FOLDER [lose | hang]. It adds what it saw to FOLDER/seen.json, a line per run. With ``lose``
it waits in a call, the first time it is run, until that fails. With ``hang`` a worker on the node that is not the
driver's hangs, and the watchdog ends what the driver does.
"""

import json
import os
import sys
from pathlib import Path

import ray

from megarl.cluster import RaySession, ResourcePool, WorkerGroup, stacks
from megarl.config.tracing import WatchdogConfig
from megarl.errors import StallError, WorkerError
from megarl.models import ParallelLayout
from megarl.tracing import PHASE, TracingOptions, span, watch_process
from megarl.trainer.watchdog import Watchdog


def node_of(pids):
    """Run by a task on their node."""
    return [ray.util.get_node_ip_address(), list(pids)]


def hang(pool):
    """The driver's node, the processes of the group that hung, where each was looked at, clocks, and the error."""
    here, options = ray.util.get_node_ip_address(), TracingOptions(watched=True)
    watch_process(options)
    pool.processes.options = options
    actor = WorkerGroup("actor", "tests.cluster.hanging_workers:Hanging", {}, ParallelLayout(dp=2), pool)
    actor.update(1)
    members = [member for member in pool.processes.members() if member.role == "actor"]
    (far,) = [member.rank for member in members if member.host != here]
    told = {"driver": here, "members": members, "far": far, "looked": stacks._on_nodes(members, node_of)}
    told["offsets"] = pool.processes.offsets()
    keys = WatchdogConfig(timeout_s=None, phases={"update_actor": 5}, action="end")
    try:
        with Watchdog(keys, folder, pool.processes, print), span("update_actor", PHASE):
            actor.update(1, far, "user code")
    except StallError as error:
        told["stall"] = str(error)
    return told


folder, first = Path(sys.argv[1]), not Path(sys.argv[1], "seen.json").exists()
with RaySession() as session:
    pool = session.place([ResourcePool("nodes", "cpu", [1, 1])])["nodes"]
    summer = WorkerGroup("summer", "tests.cluster.plain_workers:Summer", {}, ParallelLayout(tp=2), pool)
    sleeper = WorkerGroup("sleeper", "tests.cluster.light_workers:Sleeper", {}, ParallelLayout(dp=2), pool)
    seen = {
        "address": os.environ["RAY_ADDRESS"],
        "token": os.environ["RAY_AUTH_TOKEN_PATH"],
        "total": summer.total(1),
        "hosts": [card.host for card in summer._cards],
        "pids": sleeper.pid(),
        "given": os.environ.get("MEGARL_TEST"),
    }
    if "hang" in sys.argv:
        seen["hang"] = hang(pool)
    with (folder / "seen.json").open("a") as file:
        file.write(json.dumps(seen) + "\n")
    print("the driver is at work", flush=True)
    if "lose" in sys.argv and first:
        try:
            sleeper.sleep(600)
        except WorkerError as error:
            print(f"driver: {error}", file=sys.stderr)
            sys.exit(1)
