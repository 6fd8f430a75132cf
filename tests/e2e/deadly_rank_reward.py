"""A reward function that kills an SGLang rank within a bucket of the weight sync after the first step."""

from __future__ import annotations

import gc
import threading
from typing import Any

import psutil

from megarl.base.processes import command_line, descendants
from megarl.cluster.calls import PendingCall
from megarl.cluster.worker_group import WorkerGroup

ROWS = 24
_calls = 0


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return a number that differs between responses."""
    global _calls
    _calls += 1
    if _calls == ROWS:
        kill_within_bucket()
    return float(sum(map(ord, solution_str)) % 7)


def kill_within_bucket() -> None:
    """Stop rank 1 before the next bucket of a weight sync, and kill it while the bucket is on its way."""
    submit_gather = WorkerGroup.submit_gather

    def import_and_kill(group: WorkerGroup, *args: Any, **options: Any) -> PendingCall:
        WorkerGroup.submit_gather = submit_gather
        victim = rank_1()
        victim.suspend()
        threading.Timer(3.0, victim.kill).start()
        return submit_gather(group, *args, **options)

    WorkerGroup.submit_gather = import_and_kill


def rank_1() -> psutil.Process:
    """SGLang's second scheduler of this run, which may have joined a running cluster.

    Forks of a warm run lack SGLang's names; their fork server starts the schedulers first, in the order of the ranks.
    """
    groups = [item for item in gc.get_objects() if isinstance(item, WorkerGroup) and item.role.startswith("rollout")]
    hosts = [psutil.Process(info.pid) for group in groups for info in group.processes.values()]
    family = [process for host in hosts for process in descendants(host)]
    named = [process for process in family if "sglang::scheduler_TP1" in command_line(process)]
    forks = [process for process in family if process.ppid() not in [host.pid for host in hosts]]
    return named[0] if named else sorted(forks, key=lambda fork: fork.pid)[1]
