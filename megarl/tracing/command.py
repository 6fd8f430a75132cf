"""``megarl timeline PATH``: what a run's timeline says, in a few lines."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import ConfigError
from megarl.tracing.summary import summarize
from megarl.tracing.trace_file import read_trace


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code: 0, or 2 where there is no timeline."""
    parser = argparse.ArgumentParser(prog="megarl timeline", description="What a run's timeline says, in a few lines.")
    parser.add_argument("path", type=Path, help="a run's folder, or a trace file")
    parser.add_argument(
        "--out", type=Path, help="also write the events there as one complete file, compressed where it ends in .gz"
    )
    options = parser.parse_args(argv)
    try:
        events = read_trace(options.path)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(summarize(events).render())
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        opened = gzip.open if options.out.suffix == ".gz" else open
        with opened(options.out, "wt", encoding="utf-8") as file:
            lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
            file.write(f"[\n{lines}\n]\n")
    return 0
