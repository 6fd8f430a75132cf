"""Processes: resource pools, worker groups, and dispatch of a call to all ranks of a role.

The only room that imports Ray. It reads the dispatch marks on worker verbs and knows nothing of role logic. A worker
process imports :mod:`megarl.cluster.worker_process` only, and must set its environment before anything imports torch.
"""

import os
import sys

if "ray" not in sys.modules:
    # Ray's library ends this process when the named one is gone; it reads the variable when it is imported. Without
    # it, a driver whose parent is process 1, as in a container, takes the raylet for its parent: when the raylet dies,
    # Ray ends the driver at once and without a word.
    os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))
