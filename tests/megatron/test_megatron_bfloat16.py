"""Half-precision training stays near single precision: weights and gradients are also kept in float32."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from distributed import Place, ProcessPool
from engine_cases import Setup, engine, micro_batches, policy_loss
from tiny_models import Row, rows, save_model
from torch import Tensor

from megarl.megatron import OptimizerOptions, OutputOptions, OverlapOptions
from megarl.models import ParallelLayout

STEPS = 20


class Run(NamedTuple):
    """Log-probs before each fifth step and after the last, and the number formats of the states."""

    log_probs: list[Tensor]
    formats: set[tuple[str, torch.dtype]]


def run(place: Place, path: Path, setup: Setup, batch: list[Row]) -> Run:
    with engine(place, path, setup) as built:
        mine = micro_batches(batch, setup, built.runtime.coordinate.dp, setup.layout.dp)
        log_probs = []
        for step in range(STEPS + 1):
            if step % 5 == 0:
                outputs = built.forward(micro_batches(batch, setup))
                log_probs.append(torch.cat([output.log_probs for output in outputs or []] or [torch.empty(0)]))
            if step < STEPS:
                built.forward_backward(mine, policy_loss, OutputOptions(with_entropy=True))
                assert not built.optimizer_step().skipped
        formats = {("weight", param.dtype) for param in built.weights.parameters().values()}
        formats |= {("gradient", param.main_grad.dtype) for param in built.weights.parameters().values()}
        for part in built.optimizer.megatron.chained_optimizers:
            formats |= {("main weight", main.dtype) for group in part.param_groups for main in group["params"]}
        return Run(log_probs, formats)


def test_twenty_steps_do_not_drift(pool: ProcessPool, tmp_path: Path) -> None:
    # Each step changes a weight by less than half precision tells apart: without float32 weights nothing would move.
    save_model(tmp_path, "qwen2", initializer_range=0.05)
    exact = Setup(ParallelLayout(), optimizer=OptimizerOptions(lr=1e-4))
    half = exact._replace(
        layout=ParallelLayout(pp=2, dp=2),
        dtype=torch.bfloat16,
        overlap=OverlapOptions(grad_reduce=True, param_gather=True),
    )
    (single,) = pool.run(run, 1, tmp_path, exact, rows())
    results = pool.run(run, 4, tmp_path, half, rows())
    for result in results:
        assert result.formats == {
            ("weight", torch.bfloat16), ("gradient", torch.float32), ("main weight", torch.float32)
        }  # fmt: skip
    moved = (single.log_probs[-1] - single.log_probs[0]).abs().mean()
    for ours, theirs in zip(results[-1].log_probs, single.log_probs, strict=True):
        assert (ours - theirs).abs().mean() < 1e-2
    assert moved > 5e-2
