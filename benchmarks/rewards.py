"""Cost of scoring with a function in other processes: ``python benchmarks/rewards.py``.

One cheap function over a step's samples: called in this process, by the pool of a training run, and by the standard
library's executor with one task per sample. The executor has no time limits and does not survive a dead process.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from machine import benchmark_parser, parse_sizes

from megarl.rewards.calling import FunctionSpec, RewardTask
from megarl.rewards.pool import InDriverRunner, RewardJob, RewardPool
from megarl.rewards.rules import gsm8k

SPEC = FunctionSpec("gsm8k", {}, 30.0)


def call(task: RewardTask) -> dict[str, float | str | None]:
    return gsm8k(*task[:4])


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    work()
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        samples.append(time.perf_counter() - begin)
    return samples


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=15)
    options = parse_sizes(parser, samples=8, repeats=1)
    text = "We add both numbers and so get the sum of them. " * 40
    tasks = [RewardTask("openai/gsm8k", f"{text}\n#### {n}", str(n), {"index": n}) for n in range(options.samples)]
    jobs = [RewardJob(0, task) for task in tasks]
    traits = SPEC.load().traits
    rows = {"in this process": seconds(lambda: InDriverRunner([SPEC.load()]).run(jobs), options.repeats)}
    with RewardPool([SPEC], [traits], options.processes, preload=[0]) as pool:
        rows["pool of the runs"] = seconds(lambda: pool.run(jobs), options.repeats)
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as executor:
        rows["concurrent.futures"] = seconds(lambda: list(executor.map(call, tasks)), options.repeats)
    least = statistics.median(rows["in this process"])
    print(f"{options.samples} answers of {len(tasks[0].solution_str)} characters, {options.processes} processes")
    print(f"{'':20} {'median ms':>10} {'min ms':>8} {'max ms':>8} {'us/answer':>10} {'ratio':>6}")
    for name, found in rows.items():
        median = statistics.median(found)
        each, ratio = 1e6 * median / options.samples, median / least
        line = f"{1e3 * median:10.1f} {1e3 * min(found):8.1f} {1e3 * max(found):8.1f} {each:10.1f} {ratio:6.2f}"
        print(f"{name:20} {line}")


if __name__ == "__main__":
    main()
