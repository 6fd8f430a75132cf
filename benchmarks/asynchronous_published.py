"""Simulates the modes of asynchronous training on 256 devices, next to published speed-ups.

    python benchmarks/asynchronous_published.py [--devices 256] [--mean 6000] [--longest 28000] [--sigma 1.0]

The simulation (megarl/ops/plan/asynchronous.py) has no hardware and no network: the rates below are round numbers for a
dense model of 7B in bfloat16 on one device per replica. It shows where the time goes and how it depends on the lengths,
not the speed of a machine. The published figures are the projects' claims, of other models, lengths and devices.
"""

from __future__ import annotations

from machine import benchmark_parser, parse_sizes

from megarl.base.formatting import table_lines
from megarl.ops.plan.asynchronous import (
    SimulatedBatch,
    SimulatedMode,
    SimulatedRates,
    SimulatedRun,
    best_split,
    simulate,
)
from megarl.ops.plan.lengths import Quantiles

RATES = SimulatedRates(
    decode_s=0.008,  # 15 GB of weights at 3 TB/s, and the engine's overhead
    sequence_s=1.2e-4,  # keys and values of 6,000 tokens at 57 kB each, at 3 TB/s
    slots=256,
    token_s=1.4e-4,  # 8 x 7e9 operations at 400 TFLOPS: update and old log-probs
    update_s=1.0,
    sync_s=4.0,
)
PUBLISHED = (
    ("verl fully async", "7B, 28k responses, 128 H20, 400 steps", "2.35x"),
    ("verl fully async", "7B, 28k responses, 128 H20, 100 steps", "2.67x"),
    ("verl fully async", "30B-A3B, 8k responses, 128 GPUs", "1.72x to 2.01x"),
    ("verl one step off", "7B, 8k responses, 2 nodes, Megatron", "1.40x"),
    ("AReaL", "1.5B, 16 nodes", "2.77x"),
    ("AReaL", "7B, 24 nodes", "2.27x"),
    ("ROLL Flash", "RLVR / agentic, same GPUs", "2.24x / 2.72x"),
    ("NeMo-RL", "235B, 256 GPUs", "1.35x"),
    ("NeMo-RL", "DeepSeek-V3, 512 GPUs", "1.73x"),
)
"""Project, setting, and its speed-up over its synchronous mode (the documents and papers of the projects)."""


def simulated(devices: int, batch: SimulatedBatch) -> list[SimulatedRun]:
    """Simulate every mode; the split of separate devices is the fastest of 15."""
    runs = [simulate(SimulatedMode("sync", devices, devices, shares_devices=True), RATES, batch)]
    apart = SimulatedMode("one step off", 1, 1, max_staleness=1, drains=True)
    runs.append(best_split(apart, devices, 1, RATES, batch))
    for staleness in (0.5, 1.0, 2.0, 4.0):
        mode = SimulatedMode("colocated", devices, devices, staleness, shares_devices=True)
        runs.append(simulate(mode, RATES, batch))
    for staleness in (0.5, 1.0, 2.0, 4.0):
        mode = SimulatedMode("disaggregated", 1, 1, staleness, sync_interval=4)
        runs.append(best_split(mode, devices, 1, RATES, batch))
    return runs


def main() -> None:
    """Print both tables."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--devices", type=int, default=256, help="devices of trainer and engines together")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per step, with 16 responses each")
    parser.add_argument("--mean", type=float, default=6000, help="mean length of the responses, in tokens")
    parser.add_argument("--longest", type=int, default=28000, help="longest response, in tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the logarithm of the length")
    args = parse_sizes(parser, devices=16, prompts=4, mean=100, longest=400)
    lengths = Quantiles.log_normal(args.mean, args.sigma, args.longest)
    runs = simulated(args.devices, SimulatedBatch(args.prompts, 16, lengths))
    print(f"{args.devices} devices, {args.prompts} x 16 responses of {lengths.describe()}")
    head = ("mode", "bound", "engines", "trainer", "step s", "speed-up", "engines idle", "trainer idle", "staleness")
    rows = [
        (
            run.mode.name,
            f"{run.mode.max_staleness:g}",
            str(run.mode.replicas),
            str(run.mode.trainers),
            f"{run.step_s:.0f}",
            f"{runs[0].step_s / run.step_s:.2f}x",
            f"{run.engine_idle:.0%}",
            f"{run.trainer_idle:.0%}",
            f"{run.mean_staleness:.2f}",
        )
        for run in runs
    ]
    print("\n".join(table_lines([head, *rows])))
    print("\npublished, over the synchronous mode of the same project")
    print("\n".join(table_lines([("project", "setting", "speed-up"), *PUBLISHED])))


if __name__ == "__main__":
    main()
