"""The driver's share of a weight sync: its calls for a bucket, with one process for all training ranks and engines.

    python benchmarks/sync_calls.py --gpus 128 512

The plans are those of ``reshard_plan.py``. The training ranks pack the messages of a bucket, and the engines import
them. There is a Ray object for each training rank, or each node, and each engine that exchange something. The processes
answer without weights. Seconds are CPU seconds of the driver with its Ray threads. ``by rank``: the driver calls each
training rank. ``by node``: it calls a process on each node. ``bare`` are the same calls without objects, the limit.
``all pairs`` would be the objects if each training rank returned one for each rollout rank.
"""

from __future__ import annotations

import os
import statistics
import time

os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Mapping, Sequence
from typing import Any

from data_plane import NODE, OneProcessGroup
from machine import benchmark_parser, parse_sizes, processor
from reshard_plan import CASES, LARGEST, Case, plan_of, print_table, weight_map_of

from megarl.cluster.fork_server import fork_server
from megarl.cluster.resources import PlacedPool, ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup
from megarl.models import ParallelLayout
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb


class NullWorker:
    """Packs and imports nothing."""

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place

    @verb(Dispatch.ALL)
    def export_bucket(self, index: int) -> dict[int, Any]:
        """Return no message."""
        return {}

    @verb(Dispatch.ALL)
    def import_bucket(self, index: int, messages: Sequence[Any]) -> None:
        """Receive nothing."""


def seconds_of(
    actor: WorkerGroup, rollout: WorkerGroup, routes: Sequence[Mapping[int, Sequence[int]]], width: int
) -> float:
    """Return the driver's CPU seconds for a bucket, the median of several."""
    seconds = []
    for index, receivers in enumerate(routes):
        started = time.process_time()
        packed = actor.submit_scatter("export_bucket", receivers, width, index)
        rollout.submit_gather("import_bucket", packed, index).result()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def row(case: Case, pool: PlacedPool, buckets: int) -> list[str]:
    """Return one line of the table."""
    plan, tp = plan_of(case, weight_map_of(case)), min(case.train.tp, NODE)
    started = time.process_time()
    routes = plan.receivers
    planning = time.process_time() - started
    middle = max(0, (len(routes) - buckets) // 2)
    measured = routes[middle : middle + buckets]
    actor, rollout = (OneProcessGroup(role, NullWorker, {}, ParallelLayout(), pool) for role in ("actor", "rollout"))
    rollout.stand_for(case.rollout.replicas, 1, by_node=False)
    seconds = []
    for by_node in (False, True):
        actor.stand_for(case.train.world_size, tp, by_node)
        bare = [{}] * len(measured)
        seconds += [seconds_of(actor, rollout, some, case.rollout.tp) for some in (bare, measured)]
    for group in (actor, rollout):
        group.shutdown()
    objects = statistics.mean(sum(map(len, receivers.values())) for receivers in routes)
    of_nodes = statistics.mean(
        len({(rank // NODE, place) for rank, places in receivers.items() for place in places}) for receivers in routes
    )
    return [
        case.model,
        f"{case.train.world_size} -> {case.rollout.replicas} x {case.rollout.tp}",
        "apart" if case.apart else "same",
        str(len(routes)),
        f"{case.train.world_size * case.rollout.world_size:,}",
        f"{objects:,.0f}",
        f"{of_nodes:,.0f}",
        f"{planning:.2f}",
        *(f"{value:.3f}" for value in seconds),
        f"{seconds[1] * len(routes):.1f}",
        f"{seconds[3] * len(routes):.1f}",
    ]


def main() -> None:
    """Print the table."""
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[128, 512], help="only cases with so many training ranks"
    )
    parser.add_argument("--buckets", type=int, default=5, help="buckets of a sync that are measured")
    args = parse_sizes(parser, gpus=[16], buckets=1)
    cases = [*(case._replace(apart=apart) for case in CASES for apart in (False, True)), LARGEST]
    head = ["model", "ranks -> engines", "GPUs", "buckets", "all pairs", "by rank", "by node", "routes s"]
    head += ["by rank, bare", "by rank", "by node, bare", "by node", "sync by rank", "sync by node"]
    with fork_server(), RaySession(num_cpus=2) as session:
        pool = session.place([ResourcePool("main", "cpu", [1])])["main"]
        rows = [row(case, pool, args.buckets) for case in cases if case.train.world_size in args.gpus]
    print(f"{processor()}; objects and the driver's CPU seconds of one bucket, and of all buckets of a sync\n")
    print_table(head, rows)


if __name__ == "__main__":
    main()
