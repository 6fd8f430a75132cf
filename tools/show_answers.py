"""Show how many answers of a run's first and last validation are right, and some of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SHOWN = 3


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="trainer.validation_data_dir of the run")
    files = sorted(parser.parse_args().folder.glob("*.jsonl"), key=lambda file: int(file.stem))
    for file in (files[0], files[-1]):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        print(f"\nstep {file.stem}: {sum(row['score'] == 1 for row in rows)} of {len(rows)} answers are right")
        for row in rows[:SHOWN]:
            print(f"  {' '.join(row['output'].split())}    expected: {row['gts']}")


if __name__ == "__main__":
    main()
