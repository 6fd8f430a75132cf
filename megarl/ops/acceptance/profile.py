"""Profiles of an update, a log-prob pass and generation: tables of kernels by time, to be read without the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from megarl.ops.acceptance.bench import Bench
from megarl.ops.acceptance.engines import generation
from megarl.ops.acceptance.results import Result, Verdict
from megarl.ops.acceptance.speed import first_passes

ROWS, NAME_WIDTH = 45, 90  # rows of a table, and characters of a kernel's name
GENERATED_TOKENS = 32


def run(bench: Bench) -> None:
    """Profile the passes of the first size of the stage ``speed``, and the embedded engine."""

    def measure(name: str) -> Result:
        with first_passes(bench) as passes:
            return _profile(bench, name, passes[name])

    for name in ("update", "log_probs"):
        bench.check(name, partial(measure, name))
    bench.check("generation", lambda: _profile(bench, "generation", generation(bench, GENERATED_TOKENS)))


def _profile(bench: Bench, name: str, action: Callable[[], object]) -> Result:
    """Profile the second run of an action, and write ``profile_<name>.txt``."""
    is_cuda = bench.device.type == "cuda"
    kinds = torch.profiler.ProfilerActivity
    action()
    bench.synchronize()
    started = time.perf_counter()
    with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if is_cuda else [])]) as profiler:
        action()
        bench.synchronize()
    wall = time.perf_counter() - started
    events = profiler.key_averages()
    key = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    kernels = [event for event in events if not is_cuda or event.device_type is torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda event: -getattr(event, key))
    busy = sum(getattr(event, key) for event in kernels) / 1e6
    table = events.table(sort_by=key, row_limit=ROWS, max_name_column_width=NAME_WIDTH)
    file = bench.folder / f"profile_{name}.txt"
    file.write_text(f"{wall:.3f} s, kernels {busy:.3f} s\n{table}\n", encoding="utf-8")
    first = ", ".join(f"{event.key[:40]} {getattr(event, key) / 1e6:.3g} s" for event in kernels[:3])
    return Result("", Verdict.INFO, wall, "s", note=f"kernels {busy:.3g} s: {first}; {file.name}")
