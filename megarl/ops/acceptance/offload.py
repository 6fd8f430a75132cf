"""Offload and onload of an actor through host memory, the optimizer step, and a snapshot of the allocator."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from megarl.megatron import MegatronOptions, OptimizerOptions
from megarl.megatron.engine.offload import GRAD, PARTS
from megarl.ops.acceptance.bench import Bench, UnsupportedError
from megarl.ops.acceptance.models import SHAPES, SingleRankEngine
from megarl.ops.acceptance.results import Result, Verdict
from megarl.ops.acceptance.speed import one_step
from megarl.ops.plan.step_costs import ADAM_BYTES

SHARE_OF_COPY = 0.7  # target of offload and onload, as a share of one large copy through pinned memory
SHARE_OF_BANDWIDTH = 0.5  # target of the optimizer step, as a share of the device's memory bandwidth
SNAPSHOT_EVENTS = 100_000


def run(bench: Bench) -> None:
    """Measure copies, the optimizer step, and write the snapshot."""
    case = _Case(bench)
    bench.check("pinned copy to the host", partial(case.plain, to_host=True))
    bench.check("pinned copy to the device", partial(case.plain, to_host=False))
    bench.check("offload", partial(case.moved, "offload"))
    bench.check("onload", partial(case.moved, "onload"))
    bench.check("bits after offload and onload", case.bits)
    bench.check("optimizer step", case.optimizer)
    bench.check("memory snapshot", case.snapshot)


class _Case:
    """An actor with all parts offloaded; measured once."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.fields = SHAPES["tiny" if bench.is_tiny else "1.5B"]

    def plain(self, to_host: bool) -> Result:
        """Rate of one copy between the device and pinned memory."""
        return Result("", Verdict.INFO, self._copy_rates[0 if to_host else 1], "GB/s")

    def moved(self, direction: str) -> Result:
        """Rate of an offload or onload of weights and optimizer state; gradients are emptied, not copied."""
        rates, nbytes = self._figures
        index = 0 if direction == "offload" else 1
        note = f"{nbytes / 1e9:.3g} GB, plain copy {self._copy_rates[index]:.3g} GB/s"
        return self.bench.speed(rates[index], SHARE_OF_COPY * self._copy_rates[index], "GB/s", note)

    def bits(self) -> Result:
        with self._engine() as engine:
            one_step(engine, self.fields)
            before = engine.weights.to_host()
            engine.offload_manager.offload()
            engine.offload_manager.onload(*PARTS)
            after = engine.weights.to_host()
        changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
        return Result("", Verdict.FAIL if changed else Verdict.OK, note=", ".join(changed[:3]) or "unchanged")

    def optimizer(self) -> Result:
        """Rate of an optimizer step compared with the device's memory bandwidth."""
        with self._engine() as engine:
            one_step(engine, self.fields)
            seconds = self.bench.seconds(engine.optimizer_step)
            elements = sum(param.numel() for param in engine.weights.parameters().values())
            rate = ADAM_BYTES * elements / seconds / 1e9
            hardware = self.bench.hardware
            target = None if hardware is None else SHARE_OF_BANDWIDTH * hardware.memory_bandwidth
            return self.bench.speed(rate, target, "GB/s", f"{seconds * 1e3:.3g} ms; {engine.describe()}")

    def snapshot(self) -> Result:
        """Write a snapshot of the allocator during a step, for pytorch.org/memory_viz."""
        if self.bench.device.type == "cpu":
            raise UnsupportedError("torch records no memory on a CPU")
        path = self.bench.folder / "memory_snapshot.pickle"
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        try:
            with self._engine() as engine:
                one_step(engine, self.fields)
                torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        return Result("", Verdict.OK, path.stat().st_size / 1e6, "MB", note=str(path))

    @cached_property
    def _copy_rates(self) -> tuple[float, float]:
        nbytes = 2**20 if self.bench.is_tiny else 2**30
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.bench.device.type == "cuda")
        data = torch.ones(nbytes, dtype=torch.uint8, device=self.bench.device)
        pairs: list[tuple[Tensor, Tensor]] = [(host, data), (data, host)]
        to_host, to_device = (
            nbytes / self.bench.seconds(partial(target.copy_, source, non_blocking=True)) / 1e9
            for target, source in pairs
        )
        return to_host, to_device

    @cached_property
    def _figures(self) -> tuple[tuple[float, float], int]:
        """GB/s of the second offload and onload, and the bytes they copy; the first allocates the host memory."""
        with self._engine() as engine:
            one_step(engine, self.fields)
            manager = engine.offload_manager
            for _ in range(2):
                nbytes = 0

                def offload() -> None:
                    nonlocal nbytes
                    nbytes = sum(size for part, size in manager.offload().items() if part != GRAD)

                manager.mark_changed(*PARTS)  # as an update does; an unchanged part is not copied
                seconds = self._timed(offload), self._timed(partial(manager.onload, *PARTS))
        to_host, to_device = (nbytes / taken / 1e9 for taken in seconds)
        return (to_host, to_device), nbytes

    def _timed(self, action: Callable[[], object]) -> float:
        self.bench.synchronize()
        started = time.perf_counter()
        action()
        self.bench.synchronize()
        return time.perf_counter() - started

    def _engine(self) -> SingleRankEngine:
        options = MegatronOptions(dtype=torch.bfloat16, optimizer=OptimizerOptions(lr=1e-6), offload=PARTS)
        return SingleRankEngine(self.fields, options, self.bench.device)
