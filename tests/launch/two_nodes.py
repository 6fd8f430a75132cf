"""A driver for a cluster of two nodes: a worker group over both, which sums a number by gloo.

Usage: python two_nodes.py FOLDER [lose]. It adds what it saw to FOLDER/seen.json, a line per run. With ``lose``
it waits in a call, the first time it is run, until that fails.
"""

import json
import os
import sys
from pathlib import Path

from megarl.cluster import RaySession, ResourcePool, WorkerGroup
from megarl.errors import WorkerError
from megarl.models import ParallelLayout

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
    with (folder / "seen.json").open("a") as file:
        file.write(json.dumps(seen) + "\n")
    print("the driver is at work", flush=True)
    if "lose" in sys.argv and first:
        try:
            sleeper.sleep(600)
        except WorkerError as error:
            print(f"driver: {error}", file=sys.stderr)
            sys.exit(1)
