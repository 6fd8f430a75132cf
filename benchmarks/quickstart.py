"""Tokens per second of the quickstart's training loop: a few PPO steps, with the name of the machine.

    python benchmarks/quickstart.py [--steps 10] [KEY=VALUE ...]

Runs `megarl train --config-name quickstart` without validation, checkpoint or export. The task and the
warmed-up model of `bash launch/quickstart.sh` must exist. Prints medians over the steps after the first, which also
allocates memory.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from machine import benchmark_parser, parse_sizes, processor

from megarl.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[1]
PHASES = (
    *("gen", "reward", "old_log_prob", "ref", "values", "adv"),
    *("update_critic", "update_actor", "update_weights", "step"),
)


def machine() -> str:
    """Return processor, cores and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    return f"{processor()}, {cores} cores, {platform.system()} {platform.release()}, load {load:.1f} at start"


def run(steps: int, overrides: Sequence[str], folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each step of a short run."""
    command = [
        sys.executable, "-m", "megarl", "train", "--config-name", "quickstart",
        f"trainer.total_training_steps={steps}", "trainer.test_freq=-1", "trainer.val_before_train=false",
        "trainer.save_freq=-1", "trainer.hf_export_dir=null", f"hydra.run.dir={folder}", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the run failed:\n{done.stdout}\n{done.stderr}")
    return read_metrics(folder / "metrics.jsonl")


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parse_sizes(parser, steps=2)
    print(f"machine: {machine()}")
    with tempfile.TemporaryDirectory() as folder:
        rows = run(args.steps, args.overrides, Path(folder))[1:]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows if name in row)

    print(f"{len(rows)} steps of {median('perf/total_num_tokens'):.0f} tokens (prompts and responses)\n")
    print(f"{'rollout':<12}{median('perf/rollout_tokens_per_s'):>10,.0f} generated tokens/s")
    print(f"{'update':<12}{median('perf/update_tokens_per_s'):>10,.0f} tokens/s through actor and critic")
    print(f"{'whole step':<12}{median('perf/total_num_tokens') / median('timing_s/step'):>10,.0f} tokens/s\n")
    for phase in PHASES:
        if any(f"timing_s/{phase}" in row for row in rows):
            print(f"  {phase:<16}{median(f'timing_s/{phase}'):>8.3f} s")


if __name__ == "__main__":
    main()
