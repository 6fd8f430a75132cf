"""Times predicted by ``megarl plan`` for a small PPO on this CPU, against a run.

    python benchmarks/plan_times.py [--steps 6] [--hardware cpu] [KEY=VALUE ...]
    python benchmarks/plan_times.py --measure

Creates the quickstart's arithmetic task in a temporary folder and runs ``megarl train --config-name quickstart`` on its
untrained model, without validation, checkpoint or export, so that responses have maximum length. Measured times are
medians over the steps after the first. ``--measure`` prints the values of a hardware file for this machine: matrix
products, copies, and gloo's all-reduce between two processes of one thread each.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import benchmark_parser, parse_sizes
from quickstart import ROOT, machine, run

from megarl.config import TrainConfig
from megarl.config.compose import ConfigRequest, compose
from megarl.ops.plan.estimate import estimate
from megarl.ops.plan.hardware import read_hardware
from megarl.ops.plan.lengths import read_lengths

ROUNDS = 7


def compare(steps: int, hardware: str, overrides: Sequence[str]) -> None:
    """Run, plan with the lengths of the run, and print both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = subprocess.run(
            [sys.executable, "tools/make_arithmetic.py", "--out", str(folder / "task")], cwd=ROOT, capture_output=True
        )
        if task.returncode:
            sys.exit(f"the task could not be made:\n{task.stderr.decode()}")
        model = next(path.parent for path in (folder / "task").rglob("config.json"))
        own = [
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={folder / 'task' / 'data' / 'train.parquet'}",
            f"data.val_files={folder / 'task' / 'data' / 'test.parquet'}",
            *overrides,
        ]
        rows = run(steps, own, folder / "run")
        config = compose(ConfigRequest(TrainConfig, "quickstart", tuple(own)))
        limits = (config.data.max_prompt_length, config.data.max_response_length)
        lengths = read_lengths(str(folder / "run" / "metrics.jsonl"), *limits)
        step = estimate(config, read_hardware(hardware), lengths).step
    print(f"machine: {machine()}\nlengths: {lengths.describe()}\n")
    print("| phase | measured s | predicted s | predicted / measured |\n|---|---|---|---|")
    predicted = {phase.phase: phase.cost.seconds for phase in step.phases}
    predicted["sum of these"] = step.seconds
    measured = {phase: _median(rows[1:], f"timing_s/{phase}") for phase in predicted if phase != "sum of these"}
    measured["sum of these"] = sum(measured.values())
    for phase, seconds in predicted.items():
        print(f"| {phase} | {measured[phase]:.3f} | {seconds:.3f} | {seconds / measured[phase]:.2f} |")


def _median(rows: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


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
        print(f"links.intra_node: {bandwidth:.2f}  # GB/s, shares.collective is in it")
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
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hardware", default="cpu", help="name or file, as for megarl plan")
    parser.add_argument("--measure", action="store_true", help="print this machine's values for a hardware file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parse_sizes(parser, steps=2)
    if args.measure:
        measure()
    else:
        compare(args.steps, args.hardware, args.overrides)


if __name__ == "__main__":
    main()
