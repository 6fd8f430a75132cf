from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Place, ProcessPool
from engine_cases import Setup, engine, micro_batches, policy_loss
from tiny_models import rows, save_model
from torch import Tensor

from megarl.errors import ConfigError
from megarl.megatron import OptimizerOptions, PackedMicroBatch, PolicyOutputs, learning_rate
from megarl.models import ParallelLayout


def rates(options: OptimizerOptions, steps: int) -> list[float]:
    return [learning_rate(step, options) for step in range(steps)]


def test_warm_up_rises_linearly_then_stays() -> None:
    assert rates(OptimizerOptions(lr=4.0, warmup_steps=4), 6) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_linear_decay_ends_at_the_minimum_and_stays_there() -> None:
    options = OptimizerOptions(lr=5.0, min_lr=1.0, decay_style="linear", warmup_steps=1, total_steps=5)
    assert rates(options, 7) == pytest.approx([5.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0])


def test_cosine_decay_is_half_a_cosine() -> None:
    options = OptimizerOptions(lr=3.0, min_lr=1.0, decay_style="cosine", total_steps=4)
    expected = [1.0 + (math.cos(math.pi * step / 4) + 1.0) for step in range(5)]
    assert rates(options, 6) == pytest.approx([*expected, 1.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay_style": "cosin"}, "decay_style='cosin' must be one of constant, linear, cosine"),
        ({"decay_style": "linear", "total_steps": 3, "warmup_steps": 3}, "total_steps=3 must exceed warmup_steps=3"),
    ],
)
def test_impossible_schedules_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerOptions(**settings)


def steps_with_one_bad_rank(place: Place, path: Path, setup: Setup, fault: str) -> dict[str, Any]:
    """Three optimizer steps; in the second, data-parallel rank 1 has a loss or a gradient that is not finite."""

    def faulty(outputs: PolicyOutputs, micro_batch: PackedMicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = policy_loss(outputs, micro_batch)
        if fault == "loss":
            return loss * torch.inf, metrics
        # A finite loss whose gradient is 0 * inf.
        return loss + (outputs.log_probs * 0.0).abs().sqrt().sum(), metrics

    with engine(place, path, setup) as built:
        mine = micro_batches(rows(), setup, built.runtime.coordinate.dp, setup.layout.dp)
        results, snapshots = [], []
        for step in range(3):
            bad = step == 1 and built.runtime.coordinate.dp == 1
            built.forward_backward(mine, faulty if bad else policy_loss, with_entropy=True)
            before = built.weights_to_host()
            results.append(built.optimizer_step())
            snapshots.append(any((before[name] != now).any() for name, now in built.named_local_params().items()))
        return {"results": results, "changed": snapshots, "next_lr": built.learning_rate}


@pytest.mark.parametrize("fault", ["loss", "gradient"])
@pytest.mark.parametrize("layout", [ParallelLayout(dp=2), ParallelLayout(pp=2, dp=2)])
def test_a_fault_on_one_rank_skips_the_step_on_all(
    pool: ProcessPool, tmp_path: Path, layout: ParallelLayout, fault: str
) -> None:
    save_model(tmp_path, "llama")
    setup = Setup(layout, optimizer=OptimizerOptions(lr=1e-3, warmup_steps=8))
    for answer in pool.run(steps_with_one_bad_rank, layout.world_size, tmp_path, setup, fault):
        assert [result.skipped for result in answer["results"]] == [False, True, False]
        assert answer["changed"] == [True, False, True]
        assert not math.isfinite(answer["results"][1].grad_norm)
        assert math.isfinite(answer["results"][2].grad_norm)
        # The skipped step used up no learning rate.
        assert [result.lr * 8e3 for result in answer["results"]] == pytest.approx([1, 2, 2])
        assert answer["next_lr"] * 8e3 == pytest.approx(3)
