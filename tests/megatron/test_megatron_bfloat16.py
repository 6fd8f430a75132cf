"""Half-precision training stays near single precision: weights and gradients are also kept in float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from engine_cases import Setup, engine, micro_batches, policy_loss
from tiny_models import Row, rows, rows_of, save_model
from torch import Tensor

from megarl.megatron import OptimizerOptions, OutputOptions, OverlapOptions
from megarl.megatron.layers.torch_layers import rotate, rotation_table
from megarl.models import ParallelLayout, read_model_config
from megarl.models.rope import inverse_frequencies
from megarl.rollout import EngineOptions, Request, SamplingParams, create_engine
from megarl.rollout.embedded.decoder import RotaryTable

STEPS = 20


class Run(NamedTuple):
    """Log-probs before each fifth step and after the last, and the number formats of the states."""

    log_probs: list[Tensor]
    formats: set[tuple[str, torch.dtype]]


def run(place, path, setup, batch):
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


def test_twenty_steps_do_not_drift(pool, tmp_path):
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


def test_embedded_engine_rotates_as_the_trainer_bit_for_bit(tmp_path):
    save_model(tmp_path, "qwen2")
    config = read_model_config(tmp_path)
    heads, positions = torch.randn(64, 4, config.head_dim).bfloat16(), torch.arange(1000, 1064)
    table = RotaryTable(config, inverse_frequencies(config), 1.0, 1064, torch.device("cpu"))
    rotated = table.rotation(positions)(heads)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate(heads, *rotation_table(positions, inverse_frequencies(config))))


def log_probs_of_both(place, path, prompts):
    """Log-probs of samples by the embedded engine that generated them, and by the trainer."""
    rollout = create_engine("embedded", str(path), EngineOptions(dtype="bfloat16"))
    rollout.load_hf(str(path))
    requests = [Request(f"r{at}", ids.tolist(), SamplingParams(32, 1.0), at) for at, ids in enumerate(prompts)]
    done = rollout.generate(requests)
    empty = torch.zeros(32)
    batch = [
        Row(p, torch.tensor(d.token_ids), *[empty[: len(d.token_ids)]] * 2) for p, d in zip(prompts, done, strict=True)
    ]
    with engine(place, path, Setup(ParallelLayout(), dtype=torch.bfloat16)) as built:
        outputs = built.forward(micro_batches(batch, Setup(ParallelLayout())), OutputOptions())
    assert outputs is not None
    return torch.tensor([x for d in done for x in d.log_probs]), torch.cat([output.log_probs for output in outputs])


def test_embedded_engine_and_trainer_agree_in_half_precision_at_far_positions(pool, tmp_path):
    save_model(tmp_path, "qwen2", initializer_range=0.1, hidden_size=64, max_position_embeddings=2048)
    prompts = [row.prompt for row in rows_of([(600 + 40 * number, 1) for number in range(6)])]
    ((ours, theirs),) = pool.run(log_probs_of_both, 1, tmp_path, prompts)
    assert len(ours) == 192
    difference = (ours - theirs).abs()
    assert difference.mean() < 0.0075 and difference.max() < 0.04
