"""Command line and machine of the benchmarks."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any


def processor() -> str:
    """Return the name of the processor, if the system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring as it is."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse_sizes(parser: argparse.ArgumentParser, **tiny: Any) -> argparse.Namespace:
    """Parse the command line, to which this adds ``--tiny``: it sets the options ``tiny``, so that a run takes seconds.

    The tests run every benchmark with ``--tiny``; its figures mean nothing.
    """
    parser.add_argument("--tiny", action="store_true", help="a check of the script in seconds: the smallest sizes")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(tiny)
    return args
