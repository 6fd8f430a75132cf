"""Driver that joins a cluster; it prints the process of its worker, then ends or is killed."""

import contextlib
import os
import sys

from megarl.base.errors import ResourceError
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup
from megarl.models.layout import ParallelLayout

session = RaySession()
try:
    session.__enter__()
except ResourceError as error:
    sys.exit(f"refused: {error}")
with contextlib.ExitStack() as stack:
    stack.push(session)
    pool = session.place([ResourcePool("main", "cpu", [1])])["main"]
    group = WorkerGroup("guest", "tests.cluster.light_workers.Sleeper", {}, ParallelLayout(), pool)
    print("pid", *group.pid(), flush=True)
    session.last_words("ended in step 3", {sys.argv[1]: "summary"})
    if "killed" in sys.argv:
        os.kill(os.getpid(), 9)
