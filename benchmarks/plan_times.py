"""Error of calibrated plans: ``megarl plan --calibrate`` on some runs, tested on layouts that it has not seen.

    python benchmarks/plan_times.py [--steps 5] [--hardware cpu] [KEY=VALUE ...]
    python benchmarks/plan_times.py --measure

Creates the quickstart's task with a larger untrained model, and runs a few steps of PPO in different layouts,
batch sizes and response lengths on two cores. The first runs calibrate; the table has measured and predicted seconds of
the others, and their ratio by phase. Seconds are medians over the steps after the first.

``--measure`` prints the values of a hardware file for this machine: matrix products, copies, and gloo's all-reduce
between two processes of one thread each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import benchmark_parser, parse_sizes
from quickstart import ROOT, machine, run

from megarl.ops.plan.command import MeasuredRun, fit, measured_run

ROUNDS = 7
DATA = {"train": "train", "val": "test"}
"""Data files of the task, by config key."""
ACTOR, CRITIC = "actor_rollout_ref.actor.megatron", "critic.megatron"


class Case(NamedTuple):
    """A run: its name in the table, prompts per step, maximum response length, and keys of its layout."""

    name: str
    prompts: int
    response: int
    layout: tuple[str, ...]

    def overrides(self) -> list[str]:
        """Return the keys of the run."""
        sizes = (f"data.train_batch_size={self.prompts}", f"data.max_response_length={self.response}")
        return [*sizes, f"actor_rollout_ref.actor.ppo_mini_batch_size={self.prompts // 2}", *self.layout]


CALIBRATED = (
    Case("actor TP2, critic DP2", 64, 16, ()),
    Case(
        "actor DP2, critic TP2",
        128,
        24,
        (f"{ACTOR}.tensor_model_parallel_size=1", f"{CRITIC}.tensor_model_parallel_size=2"),
    ),
)
TESTED = (
    Case(
        "actor PP2, critic DP2",
        64,
        32,
        (f"{ACTOR}.tensor_model_parallel_size=1", f"{ACTOR}.pipeline_model_parallel_size=2"),
    ),
    Case(
        "actor and critic DP2, full recomputation",
        128,
        16,
        (f"{ACTOR}.tensor_model_parallel_size=1", f"{ACTOR}.recompute_granularity=full"),
    ),
    Case(
        "actor and critic CP2",
        64,
        48,
        (f"{ACTOR}.tensor_model_parallel_size=1", f"{ACTOR}.context_parallel_size=2"),
    ),
)


def compare(steps: int, hardware: str, overrides: Sequence[str], cases: Sequence[Sequence[Case]]) -> None:
    """Run all cases, calibrate with the first group, and print measured and predicted seconds of the second."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = [sys.executable, "tools/make_arithmetic.py", "--out", str(folder), "--hidden", "256", "--layers", "4"]
        made = subprocess.run([*task, "--lessons", "256", "256"], cwd=ROOT, capture_output=True)
        if made.returncode:
            sys.exit(f"the task could not be made:\n{made.stderr.decode()}")
        data = [f"data.{kind}_files={folder / 'data' / file}.parquet" for kind, file in DATA.items()]
        own = [f"actor_rollout_ref.model.path={folder / 'model'}", *data, *overrides]
        groups: list[list[MeasuredRun]] = []
        for group in cases:
            groups.append([])
            for case in group:
                out = folder / f"run{len(groups)}_{len(groups[-1])}"
                run(steps, [*own, *case.overrides()], out)
                groups[-1].append(measured_run(out, hardware))
    calibrated, tested = groups
    calibration = fit(calibrated)
    efficiencies = calibration.hardware.efficiencies
    print(f"machine: {machine()}\n\n| phase | fraction of the peak speeds | {' | '.join(c.name for c in cases[1])} |")
    print("|---|---|" + "---|" * len(tested))
    rows = {phase: [_predicted(each, [phase], efficiencies) for each in tested] for phase in efficiencies}
    rows["sum of these"] = [_predicted(each, list(efficiencies), efficiencies) for each in tested]
    for phase, pairs in rows.items():
        share = f"{efficiencies[phase]:.2f}" if phase in efficiencies else ""
        cells = [f"{seconds:.2f} / {measured:.2f}, {seconds / measured - 1:+.0%}" for seconds, measured in pairs]
        print(f"| {phase} | {share} | {' | '.join(cells)} |")


def _predicted(each: MeasuredRun, phases: Sequence[str], efficiencies: Mapping[str, float]) -> tuple[float, float]:
    """Return predicted and measured seconds of some phases."""
    costs = {phase.phase: phase.cost.total for phase in each.plan.step.phases}
    predicted = sum(costs[phase] / efficiencies[phase] for phase in phases)
    return predicted, sum(each.seconds[phase] for phase in phases)


def measure() -> None:
    """Print this machine's values."""
    torch.set_num_threads(1)
    print(f"# {machine()}")
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.randn(1024, 1024).to(dtype)
        seconds = _best(lambda matrix=matrix: matrix @ matrix)
        print(f"peak.{str(dtype).removeprefix('torch.')}: {2 * 1024**3 / seconds / 1e12:.3f}  # TFLOP/s of a core")
    source, target = torch.randn(2**26), torch.empty(2**26)
    print(f"memory_bandwidth: {2 * 4 * 2**26 / _best(lambda: target.copy_(source)) / 1e9:.1f}  # GB/s of a core")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_collectives, (f"file://{folder}/store",), nprocs=2)


def _collectives(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    large, small = torch.randn(2**22), torch.randn(1)
    # an all-reduce of two ranks sends as many bytes as the tensor has
    bandwidth = 4 * 2**22 / _best(lambda: dist.all_reduce(large)) / 1e9
    latency = _best(lambda: dist.all_reduce(small)) * 1e6
    if rank == 0:
        print(f"links.intra_node: {bandwidth:.2f}  # GB/s")
        print(f"latency.collective_us: {latency:.0f}")
    dist.destroy_process_group()


def _best(action: Callable[[], object]) -> float:
    """Return the seconds of the fastest round; other processes only make rounds slower."""
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        action()
        taken.append(time.perf_counter() - started)
    return min(taken)


def main() -> None:
    """Compare or measure."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hardware", default="cpu", help="name or file, as for megarl plan")
    parser.add_argument("--measure", action="store_true", help="print this machine's values for a hardware file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parse_sizes(parser, steps=2)
    if args.measure:
        measure()
    else:
        small = tuple([case._replace(prompts=16, response=6) for case in group[:1]] for group in (CALIBRATED, TESTED))
        compare(args.steps, args.hardware, args.overrides, small if args.tiny else (CALIBRATED, TESTED))


if __name__ == "__main__":
    main()
