"""Compare the metrics of two runs step by step; exit with 1 if a difference exceeds a limit.

    python tools/compare_runs.py outputs/one outputs/other [--within 1e-5]

Each argument is a run's folder, ``outputs/<experiment_name>`` for its latest run, or a folder with a
``metrics.jsonl``. Metrics of time are skipped. Differences are relative to the larger value, or absolute if both are
below 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

CLOCK = ("timing_", "perf/", "weight_sync/", "checkpoint/", "rollout/", "global_seqlen/", "tracking/")
"""Prefixes of metrics that depend on time or on the division of work."""


def metrics_file(folder: Path) -> Path:
    """Return the metrics file of the run, or of the latest run below the folder."""
    file = folder / "metrics.jsonl"
    files = [file] if file.is_file() else sorted(folder.glob("*/metrics.jsonl"))
    if not files:
        sys.exit(f"{folder}: no metrics.jsonl here or in a subfolder; trainer.logger must contain jsonl")
    return files[-1]


def read(file: Path) -> dict[int, dict[str, float]]:
    """Return metrics by step, without metrics of time."""
    rows: dict[int, dict[str, float]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        metrics = {name: value for name, value in row.items() if name != "step" and not name.startswith(CLOCK)}
        rows.setdefault(int(row["step"]), {}).update(metrics)
    return rows


def distance(first: float | None, second: float | None) -> float:
    """Return the relative difference, or the absolute one if both values are below 1; infinite if one is missing."""
    if first is None or second is None:
        return 0.0 if first is second else float("inf")
    if first == second or (first != first and second != second):
        return 0.0
    relative = abs(first - second) / max(abs(first), abs(second), 1.0)
    return relative if relative == relative else float("inf")


def main() -> int:
    """Compare the two runs of the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path)
    parser.add_argument("--within", type=float, default=1e-5, help="maximum difference that counts as equal")
    args = parser.parse_args()

    first, second = (read(metrics_file(folder)) for folder in args.runs)
    steps = sorted(first.keys() & second.keys())
    if not steps:
        sys.exit(f"the runs have no common step: {sorted(first)} and {sorted(second)}")
    compared, worst, different = 0, (0.0, "none"), []
    for step in steps:
        for name in sorted(first[step].keys() | second[step].keys()):
            values = first[step].get(name), second[step].get(name)
            difference, compared = distance(*values), compared + 1
            worst = max(worst, (difference, f"{name} in step {step}"))
            if difference > args.within:
                different.append(f"step {step}  {name:<40} {values[0]!s:>22} {values[1]!s:>22}")
    print("\n".join(different))
    print(
        f"{compared} numbers of {len(steps)} steps; "
        f"largest difference {worst[0]:.1e} ({worst[1]}), limit {args.within:g}"
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
