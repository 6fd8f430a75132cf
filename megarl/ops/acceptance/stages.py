"""Acceptance stages in their order, and the process that runs one of them."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.ops.acceptance.results import Result, Verdict, read_report

if TYPE_CHECKING:
    from megarl.ops.acceptance.bench import Bench


class Stage(NamedTuple):
    """A stage of the acceptance."""

    module: str  # has run(bench); imported in the stage's process
    doc: str  # description for the command's help
    seconds: float  # share of a budget; on an H100 its most valuable checks take about as long
    is_timed: bool = True  # whether it measures times, which another stage on the device would lengthen
    hides: str | None = None  # package that the stage's process does not import although it is installed


_PARITY = "megarl.ops.acceptance.parity"
STAGES = {
    "parity": Stage(_PARITY, "log-probs, gradients and a step of every family against transformers", 150, False),
    "jobs": Stage(
        "megarl.ops.acceptance.jobs", "colocated GRPO and PPO jobs: learning curve, kill and resume", 170, False
    ),
    "parity_torch": Stage(
        _PARITY, "parity with torch's layers in place of Transformer Engine's", 150, False, "transformer_engine"
    ),
    "speed": Stage("megarl.ops.acceptance.speed", "update and log-prob passes: MFU, peak memory against the plan", 80),
    "engines": Stage("megarl.ops.acceptance.engines", "tokens per second of the engines; SGLang's contract tests", 60),
    "sync": Stage("megarl.ops.acceptance.sync", "weight sync between two processes: bit equality, GB/s", 45),
    "offload": Stage(
        "megarl.ops.acceptance.offload", "offload, onload and the optimizer step in GB/s, memory snapshot", 50
    ),
}
"""Stages, the most valuable first; those that measure no times run side by side before the others."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage in this child process of the command; returns 0, or 1 if a check failed.

    A SIGTERM raises, so that the stage ends its own processes.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--scale", choices=("tiny", "full"), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--checks")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    stage = STAGES[options.stage]
    hidden = stage.hides is not None and importlib.util.find_spec(stage.hides) is not None
    if hidden:
        sys.modules[str(stage.hides)] = None  # type: ignore[assignment]  # an import then raises ModuleNotFoundError
    from megarl.ops.acceptance.bench import Bench

    report = read_report(options.folder, options.stage, options.scale)
    bench = Bench(report, options.folder, options.device, _show, options.checks)
    if stage.hides is not None and not hidden:
        bench.check("stage", lambda: Result("", Verdict.INFO, note=f"{stage.hides} is not installed: nothing to add"))
    elif module := _import(stage.module, bench):
        gc.freeze()  # each engine ends with a collection, which would visit the objects of all imported modules
        module.run(bench)
    bench.finish()
    return 1 if bench.report.count(Verdict.FAIL) else 0


def _import(name: str, bench: Bench) -> Any:
    """Import a stage; a missing package is a result, and the module then None."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        text = str(error)
        bench.check("packages", lambda: Result("", Verdict.MISSING, note=text))
        return None


def _show(result: Result) -> None:
    target = f" ({result.target})" if result.target else ""
    note = f"  {result.note}" if result.note else ""
    print(f"  {result.outcome.value:<8}{result.check}: {result.number}{target}{note}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
