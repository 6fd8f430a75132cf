"""The driver's share of a weight sync: its calls for a bucket, with one process for all training ranks and engines.

    python benchmarks/sync_calls.py --gpus 128 512

The plans are those of ``reshard_plan.py``. A bucket costs a call on each training rank, which packs its messages, a
call on each engine, and a Ray object for each training rank and engine that exchange something. The processes answer
without weights. ``CPU s`` are those of the driver with its Ray threads. ``bare`` are the same calls without objects,
the limit. ``all pairs`` would be the objects if each training rank returned one for each rollout rank.
"""

from __future__ import annotations

import os
import statistics
import time

os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Mapping, Sequence
from typing import Any

from machine import benchmark_parser, parse_sizes, processor
from reshard_plan import CASES, LARGEST, Case, plan_of, print_table, weight_map_of

from megarl.cluster.fork_server import fork_server
from megarl.cluster.resources import PlacedPool, ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup, wait_ready
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


class OneProcessGroup(WorkerGroup):
    """A group whose ranks all are one process."""

    def stand_for(self, ranks: int) -> None:
        """Let the process be all ranks."""
        wait_ready([self])
        self._actors, self._infos = (dict.fromkeys(range(ranks), of[0]) for of in (self._actors, self._infos))


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
    plan = plan_of(case, weight_map_of(case))
    started = time.process_time()
    routes = plan.receivers
    planning = time.process_time() - started
    groups = [OneProcessGroup(role, NullWorker, {}, ParallelLayout(), pool) for role in ("actor", "rollout")]
    for group, size in zip(groups, (case.train.world_size, case.rollout.replicas), strict=True):
        group.stand_for(size)
    middle = len(routes) // 2
    measured = routes[max(0, middle - buckets // 2) :][:buckets]
    full = seconds_of(*groups, measured, case.rollout.tp)
    bare = seconds_of(*groups, [{}] * len(measured), case.rollout.tp)
    for group in groups:
        group.shutdown()
    objects = statistics.mean(sum(map(len, receivers.values())) for receivers in routes)
    return [
        case.model,
        f"{case.train.world_size} -> {case.rollout.replicas} x {case.rollout.tp}",
        "apart" if case.apart else "same",
        str(len(routes)),
        f"{case.train.world_size * case.rollout.world_size:,}",
        f"{objects:,.0f}",
        f"{planning:.2f}",
        f"{bare:.2f}",
        f"{full:.2f}",
        f"{full * len(routes):.1f}",
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
    head = ["model", "ranks -> engines", "GPUs", "buckets", "all pairs", "objects", "routes s"]
    head += ["bare CPU s", "CPU s", "CPU s of a sync"]
    with fork_server(), RaySession(num_cpus=2) as session:
        pool = session.place([ResourcePool("main", "cpu", [1])])["main"]
        rows = [row(case, pool, args.buckets) for case in cases if case.train.world_size in args.gpus]
    print(f"{processor()}; objects and CPU seconds of one bucket\n")
    print_table(head, rows)


if __name__ == "__main__":
    main()
