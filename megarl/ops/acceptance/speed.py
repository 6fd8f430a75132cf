"""Speed and memory of an update and of a log-prob pass, compared with peak and plan."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from megarl.config import MegatronConfig
from megarl.megatron import MegatronEngine, MegatronOptions, OptimizerOptions, PackedMicroBatch
from megarl.megatron.layers.kernels import uses_transformer_engine
from megarl.models import ParallelLayout, parse_model_config
from megarl.ops.acceptance.bench import Bench, UnsupportedError, near_plan
from megarl.ops.acceptance.models import SHAPES, SingleRankEngine
from megarl.ops.acceptance.results import Result, Verdict
from megarl.ops.plan.flops import SequenceStats, model_flops
from megarl.ops.plan.job import PlannedPass, PlannedRole
from megarl.ops.plan.pass_activations import role_activations
from megarl.ops.plan.states import StateCounter

MFU_TARGET = 48.0  # percent of the dense bfloat16 peak, for an update with packed sequences
MEMORY_TOLERANCE = 0.15
USABLE = 0.85  # fraction of the device's memory that a case may need according to the plan
MICRO_BATCHES = 2


class Sizes(NamedTuple):
    """A model and the lengths of its micro-batches."""

    shape: str
    tokens: int
    prompt: int
    response: int

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch."""
        return self.tokens // (self.prompt + self.response)


FULL = [Sizes(shape, tokens, 512, 1536) for tokens in (16384, 32768) for shape in ("1.5B", "7B", "0.5B")]
TINY = [Sizes("tiny", 256, 16, 48)]


def run(bench: Bench) -> None:
    """Measure every size."""
    bench.check("matrix product", partial(_matrix_product, bench))
    for sizes in TINY if bench.is_tiny else FULL:
        case = _Case(sizes, bench)
        name = f"{sizes.shape}, {sizes.tokens:,} tokens"
        bench.check(f"{name}, update", case.update)
        bench.check(f"{name}, peak memory of the update", case.memory)
        bench.check(f"{name}, log-probs", case.log_probs)


def _matrix_product(bench: Bench) -> Result:
    """Measure a large bfloat16 product, the limit of every layer."""
    size = 256 if bench.is_tiny else 8192
    a, b = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * size**3 / bench.seconds(lambda: a @ b)
    peak, hardware = bench.peak_flops, bench.hardware
    note = f"{flops / peak:.0%} of {hardware.name}'s peak" if peak and hardware else "the device's peak is unknown"
    return Result("", Verdict.INFO, flops / 1e12, "TFLOP/s", note=note)


class _Figures(NamedTuple):
    update_s: float
    log_probs_s: float
    peak: int
    kernels: str


class _Case:
    """One size: measured once, at the first check that needs it."""

    def __init__(self, sizes: Sizes, bench: Bench) -> None:
        self.sizes, self.bench = sizes, bench
        self.dtype = torch.bfloat16

    def update(self) -> Result:
        """MFU of forward, backward and optimizer step; TFLOP/s if the device's peak is unknown."""
        value, unit, note = self._rate(self.figures.update_s, updates=True)
        target = None if self.bench.peak_flops is None else MFU_TARGET
        return self.bench.speed(value, target, unit, f"{note}; {self.figures.kernels}")

    def log_probs(self) -> Result:
        """MFU or TFLOP/s of a forward pass with log-probs."""
        value, unit, note = self._rate(self.figures.log_probs_s, updates=False)
        return Result("", Verdict.INFO, value, unit, note=note)

    def memory(self) -> Result:
        """Peak of torch's allocator compared with the plan."""
        if self.bench.device.type == "cpu":
            raise UnsupportedError("torch counts no memory on a CPU")
        return near_plan(self.figures.peak / 1e9, self._planned(self.fields) / 1e9, "GB", MEMORY_TOLERANCE)

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The shape with as many layers as the plan expects to fit."""
        fields = SHAPES[self.sizes.shape]
        room = USABLE * self.bench.memory_bytes
        for layers in range(fields["num_hidden_layers"], 1, -1):
            if self._planned({**fields, "num_hidden_layers": layers}) <= room:
                return {**fields, "num_hidden_layers": layers}
        raise UnsupportedError(f"two layers of {self.sizes.shape} need more than {room / 1e9:.0f} GB")

    @cached_property
    def figures(self) -> _Figures:
        bench = self.bench
        with self._engine() as engine:
            if bench.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            update_s = bench.seconds(partial(self._step, engine), repeats=3)
            peak = torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else 0
            log_probs_s = bench.seconds(lambda: engine.forward(self._micro_batches), repeats=3)
            return _Figures(update_s, log_probs_s, peak, engine.describe())

    def _engine(self) -> SingleRankEngine:
        options = MegatronOptions(dtype=self.dtype, optimizer=OptimizerOptions(lr=1e-6))
        return SingleRankEngine(self.fields, options, self.bench.device)

    def _step(self, engine: MegatronEngine) -> None:
        engine.forward_backward(self._micro_batches, _likelihood)
        engine.optimizer_step()

    @cached_property
    def _micro_batches(self) -> list[PackedMicroBatch]:
        sizes, vocabulary = self.sizes, self.fields["vocab_size"]
        generator = torch.Generator().manual_seed(0)
        lengths = [(sizes.prompt, sizes.response)] * sizes.rows
        rows = [
            tuple(torch.randint(0, vocabulary, (length,), generator=generator) for length in pair) for pair in lengths
        ]
        return [PackedMicroBatch.from_rows([(p, r) for p, r in rows])] * MICRO_BATCHES

    def _rate(self, seconds: float, *, updates: bool) -> tuple[float, str, str]:
        """Percent of the peak, or TFLOP/s without a known one; the unit; and the other figures in words."""
        sizes = self.sizes
        count = MICRO_BATCHES * sizes.rows
        role = self._role(self.fields)
        stats = SequenceStats.of(count, sizes.prompt, sizes.response, role.model)
        flops = model_flops(role, stats, updates=updates)
        teraflops, peak = flops / seconds / 1e12, self.bench.peak_flops
        layers = f"{self.fields['num_hidden_layers']} of {SHAPES[sizes.shape]['num_hidden_layers']} layers"
        note = f"{MICRO_BATCHES * sizes.tokens / seconds:,.0f} tokens/s, {teraflops:.3g} TFLOP/s, {layers}"
        return (teraflops, "TFLOP/s", note) if peak is None else (100e12 * teraflops / peak, "% MFU", note)

    def _role(self, fields: dict[str, Any]) -> PlannedRole:
        model = parse_model_config(fields)
        path = "actor_rollout_ref.actor.megatron"
        return PlannedRole("actor", path, model, ParallelLayout(), MegatronConfig(), False, True, ())

    def _planned(self, fields: dict[str, Any]) -> int:
        """Bytes of the plan: states and activations of an update."""
        role, sizes = self._role(fields), self.sizes
        outputs = sizes.rows * sizes.response
        longest = sizes.prompt + sizes.response
        planned = PlannedPass("update_actor", True, sizes.tokens, outputs, MICRO_BATCHES, 1, 0, longest=longest)
        fused = uses_transformer_engine(self.bench.device, self.dtype)
        return StateCounter(role).of(0).total + role_activations(role, planned, 0, fused=fused).total


def one_step(engine: MegatronEngine, fields: dict[str, Any], tokens: int = 64) -> None:
    """Run one update of a few tokens, which creates the optimizer's state."""
    row = torch.randint(0, fields["vocab_size"], (2, tokens), generator=torch.Generator().manual_seed(0))
    engine.forward_backward([PackedMicroBatch.from_rows([(row[0], row[1])])], _likelihood)
    engine.optimizer_step()


def _likelihood(outputs: Any, micro_batch: PackedMicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -outputs.log_probs.mean()
    return loss, {"loss": loss}
