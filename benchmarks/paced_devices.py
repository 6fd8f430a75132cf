"""User module (``model.external_lib``) that gives the devices of a run a speed, so that two cores can stand for GPUs.

A decode step of an engine, and a pass of a trained or frozen role, take at least a given time: the process sleeps for
the rest, and computes the same results. The cores are then idle most of the time, and measured times show how a run
schedules its devices. ``BENCHMARK_PACE`` has the seconds of a decode step, and the device-seconds of training per
token; a quarter of the latter is a pass without gradients, as for log-probs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from megarl.megatron.engine.schedule_runner import ScheduleRunner
from megarl.rollout.embedded.generation import ContinuousBatcher

PACE = "BENCHMARK_PACE"
FORWARD_SHARE = 0.25

DECODE_S, TOKEN_S = map(float, os.environ[PACE].split(","))
advance, run = ContinuousBatcher.advance, ScheduleRunner.run


def paced(function: Callable[[], Any], seconds: float) -> Any:
    """Call a function, and return its result after some seconds at the earliest."""
    end = time.perf_counter() + seconds
    result = function()
    time.sleep(max(0.0, end - time.perf_counter()))
    return result


def paced_step(batcher: ContinuousBatcher) -> Any:
    """Decode one step."""
    return paced(lambda: advance(batcher), DECODE_S)


def paced_pass(runner: ScheduleRunner, micro_batches: Sequence[Any], *args: Any, **options: Any) -> Any:
    """Run a pass over micro-batches."""
    tokens = sum(len(micro_batch.tokens) for micro_batch in micro_batches)
    share = FORWARD_SHARE if options["forward_only"] else 1 - FORWARD_SHARE
    return paced(lambda: run(runner, micro_batches, *args, **options), share * tokens * TOKEN_S)


ContinuousBatcher.advance = paced_step  # type: ignore[method-assign]
ScheduleRunner.run = paced_pass  # type: ignore[method-assign]
