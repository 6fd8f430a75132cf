"""Compares the metrics of two runs step by step: exits with 1 where they differ by more than a limit.

    python tools/compare_runs.py outputs/one outputs/other [--within 1e-5]

Each argument is a run's folder, ``outputs/<experiment_name>`` for its latest, or one with a ``metrics.jsonl``. What the
clock says is left out. The distance of two numbers is relative to the larger, or absolute where both are below 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

CLOCK = ("timing_", "perf/", "weight_sync/", "checkpoint/", "rollout/", "global_seqlen/", "tracking/")
"""Begins the names of metrics that depend on time, or on how work was divided."""


def metrics_file(folder: Path) -> Path:
    """The file of the run, or of the latest run below the folder."""
    own = folder / "metrics.jsonl"
    found = [own] if own.is_file() else sorted(folder.glob("*/metrics.jsonl"))
    if not found:
        sys.exit(f"{folder}: there is no metrics.jsonl here or one folder below; trainer.logger must have jsonl")
    return found[-1]


def read(file: Path) -> dict[int, dict[str, float]]:
    """Metrics by step, without the clock's."""
    rows: dict[int, dict[str, float]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        kept = {name: value for name, value in row.items() if name != "step" and not name.startswith(CLOCK)}
        rows.setdefault(int(row["step"]), {}).update(kept)
    return rows


def distance(one: float | None, other: float | None) -> float:
    """Relative to the larger of the two, absolute where both are below 1; infinite where one is not there."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if one == other or (one != one and other != other):
        return 0.0
    far = abs(one - other) / max(abs(one), abs(other), 1.0)
    return far if far == far else float("inf")


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path)
    parser.add_argument("--within", type=float, default=1e-5, help="largest distance that counts as equal")
    args = parser.parse_args()

    one, other = (read(metrics_file(folder)) for folder in args.runs)
    steps = sorted(one.keys() & other.keys())
    if not steps:
        sys.exit(f"no step is in both: {sorted(one)} and {sorted(other)}")
    compared, worst, apart = 0, (0.0, "none"), []
    for step in steps:
        for name in sorted(one[step].keys() | other[step].keys()):
            values = one[step].get(name), other[step].get(name)
            far, compared = distance(*values), compared + 1
            worst = max(worst, (far, f"{name} in step {step}"))
            if far > args.within:
                apart.append(f"step {step}  {name:<40} {values[0]!s:>22} {values[1]!s:>22}")
    print("\n".join(apart))
    print(
        f"{compared} numbers of {len(steps)} steps; largest distance {worst[0]:.1e} ({worst[1]}), limit {args.within:g}"
    )
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
