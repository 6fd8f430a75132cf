from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from engine_cases import Setup, engine, micro_batches, policy_loss
from family_cases import MODELS
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from tiny_models import rows, save_model

from megarl.algorithms import LearningRateSchedule, learning_rate
from megarl.megatron import OptimizerOptions, OutputOptions, StepResult
from megarl.megatron.engine.faults import SkipReport
from megarl.megatron.engine.optimizer import check_steps, set_steps, state_shards, use_fused_kernels
from megarl.models import ParallelLayout


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "WSD linear", "WSD cosine", "WSD exponential"])
def test_learning_rates_equal_megatron(style):
    """Step by step after the warm-up; during it one step ahead, since Megatron's first step has a rate of zero."""
    decay_style, _, wsd_style = style.partition(" ")
    ours = LearningRateSchedule(
        lr=3.0,
        min_lr=0.5,
        decay_style=decay_style.lower(),
        warmup_steps=4,
        total_steps=20,
        wsd_decay_steps=7,
        wsd_decay_style=wsd_style or "linear",
    )
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]), 0.0, 3.0, 0.5, 4, 20, decay_style, 0.0, 0.0, 1, "constant",
        wsd_decay_steps=7, lr_wsd_decay_style=wsd_style or None,
    )  # fmt: skip
    expected = []
    for step in range(24):
        theirs.num_steps = step
        expected.append(theirs.get_lr({}))
    mine = [learning_rate(step, ours) for step in range(24)]
    assert mine[:4] == pytest.approx(expected[1:5])
    assert mine[4:] == pytest.approx(expected[4:])


def decayed(place, path, setup):
    """Weight decay and learning rate of each of Adam's groups after a step, by parameter."""
    with engine(place, path, setup) as built:
        built.forward_backward(micro_batches(rows(), setup), policy_loss, OutputOptions(with_entropy=True))
        built.optimizer_step()
        assert built.optimizer is not None
        groups = {}
        for part in built.optimizer.megatron.chained_optimizers:
            for group in part.param_groups:
                for held in group["params"]:
                    groups[held.untyped_storage()._cdata, held.storage_offset()] = (group["weight_decay"], group["lr"])
        result = {}
        for name, param in built.weights.parameters().items():
            if not param.requires_grad:  # the correction of a router's choice
                continue
            key = (param.untyped_storage()._cdata, param.storage_offset())
            result[name] = (*groups[key], param.dim() > 1)
        assert len(result) == len(groups)
        return result


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "deepseek_v3"])
def test_weight_decay_applies_to_matrices_only(pool, tmp_path, family):
    """Includes biases of queries, norms of queries and keys, routers, experts and latent attention."""
    save_model(tmp_path, **MODELS.get(family, {"family": family}))
    options = OptimizerOptions(lr=1e-3, weight_decay=0.25, use_distributed_optimizer=family != "qwen2")
    (groups,) = pool.run(decayed, 1, tmp_path, Setup(ParallelLayout(), optimizer=options))
    for name, (decay, lr, is_matrix) in groups.items():
        assert decay == (0.25 if is_matrix else 0.0) and lr == 1e-3, name
        assert is_matrix == (not name.endswith("bias") and "norm" not in name), name
    kinds = {"qwen2": "linear_qkv.bias", "qwen3": "q_layernorm.weight", "deepseek_v3": "router.weight"}
    assert any(name.endswith(kinds[family]) for name in groups)


class Faulty(NamedTuple):
    """One rank's results of three optimizer steps; the second was skipped."""

    results: list[StepResult]
    changed: list[bool]
    next_lr: float
    report: SkipReport


def steps_with_a_fault(place, path, setup, fault, param):
    """Three optimizer steps; in the second, the last rank has a non-finite loss or gradient."""

    def faulty(outputs, micro_batch):
        loss, metrics = policy_loss(outputs, micro_batch)
        if fault == "loss":
            return loss * torch.inf, metrics
        # A finite loss whose gradient is 0 * inf, in the micro-batch's first row.
        first = outputs.log_probs[: micro_batch.response_lengths[0]]
        return loss + (first * 0.0).abs().sqrt().sum(), metrics

    with engine(place, path, setup) as built:
        where, layout = built.runtime.coordinate, setup.layout
        mine = micro_batches(rows(), setup, where.dp, layout.dp)
        results, changed = [], []
        for step in range(3):
            bad = step == 1 and where.dp == layout.dp - 1
            in_loss = bad and fault != "parameter"
            built.forward_backward(mine, faulty if in_loss else policy_loss, OutputOptions(with_entropy=True))
            if step == 1 and fault == "parameter" and place.rank == place.world_size - 1:
                built.weights.parameters()[param].main_grad.view(-1)[-1] = torch.nan
            before = built.weights.to_host()
            results.append(built.optimizer_step())
            if results[-1].skipped:
                report = built.explain_skip(lambda number, row: f"{where.dp}/{number}/{row}")
            changed.append(any((before[name] != now).any() for name, now in built.weights.named().items()))
        return Faulty(results, changed, built.optimizer.next_lr, report)


EXPERT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
FAULTS = [
    # A loss or a gradient of an output is bad on one data-parallel rank.
    (ParallelLayout(dp=2), "llama", "loss", ""),
    (ParallelLayout(pp=2, dp=2), "llama", "gradient", ""),
    (ParallelLayout(cp=2), "llama", "gradient", ""),
    # The gradient of one parameter is bad on the last rank, which alone holds that part of it.
    (ParallelLayout(tp=2), "llama", "parameter", "decoder.layers.0.mlp.linear_fc1.weight"),
    (ParallelLayout(pp=2), "llama", "parameter", "decoder.layers.1.mlp.linear_fc2.weight"),
    (ParallelLayout(dp=2, ep=2), "qwen3_moe", "parameter", EXPERT),
]


@pytest.mark.parametrize(("layout", "family", "fault", "param"), FAULTS)
def test_nonfinite_loss_on_one_rank_skips_the_step_on_all(pool, tmp_path, layout, family, fault, param):
    save_model(tmp_path, **MODELS.get(family, {"family": family}))
    setup = Setup(layout, optimizer=OptimizerOptions(lr=1e-3, warmup_steps=8))
    answers = pool.run(steps_with_a_fault, layout.world_size, tmp_path, setup, fault, param)
    for answer in answers:
        assert [result.skipped for result in answer.results] == [False, True, False]
        assert answer.changed == [True, False, True]
        assert not math.isfinite(answer.results[1].grad_norm)
        assert math.isfinite(answer.results[2].grad_norm)
        # The skipped step used up no learning rate.
        assert [result.lr * 8e3 for result in answer.results] == pytest.approx([1, 2, 2])
        assert answer.next_lr * 8e3 == pytest.approx(3)
        assert answer.report == answers[0].report
    report = answers[0].report
    if fault == "parameter":
        assert not report.samples
        assert (report.parameter, report.ranks, report.parameters) == (param, (layout.world_size - 1,), 1)
    else:
        assert report.parameter == "output_layer.weight" and report.parameters > 10
        # Of the rows of the last data-parallel rank: all of them, or the first of each micro-batch.
        numbers = [sample.split("/") for sample in report.samples]
        assert {dp for dp, _, _ in numbers} == {str(layout.dp - 1)}
        assert ({row for _, _, row in numbers} == {"0"}) == (fault == "gradient")
        assert set(report.samples.values()) == {"gradient of its log-probs or values"}


def adam_steps(place, path, setup, fused):
    """Weights and moments after three steps, of which the state of the first was made for a checkpoint."""
    with engine(place, path, setup) as built:
        assert built.optimizer is not None
        if fused:
            for inner in built.optimizer.inner_optimizers():
                use_fused_kernels(inner)
        state_shards(built.optimizer, built.weights.parameters())
        mine = micro_batches(rows(), setup)
        for _ in range(3):
            built.forward_backward(mine, policy_loss, OutputOptions(with_entropy=True))
            built.optimizer_step()
        check_steps(built.optimizer)
        set_steps(built.optimizer, 3)
        shards = state_shards(built.optimizer, built.weights.parameters())
        moments = {f"{name}/{kind}": t.clone() for name, shard in shards.items() for kind, t in shard.tensors.items()}
        groups = [group for inner in built.optimizer.inner_optimizers() for group in inner.param_groups]
        assert {group["fused"] for group in groups} == {True if fused else None}
        return built.weights.to_host() | moments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_adam_equals_the_default_up_to_rounding(pool, tmp_path, dtype):
    """Torch's own fused kernels, here those of the CPU."""
    save_model(tmp_path, "llama")
    setup = Setup(ParallelLayout(), dtype=dtype, optimizer=OptimizerOptions(lr=1e-3, weight_decay=0.1))
    (plain,), (fused,) = (pool.run(adam_steps, 1, tmp_path, setup, kind) for kind in (False, True))
    assert plain.keys() == fused.keys() and len(plain) > 20
    for name, tensor in plain.items():
        torch.testing.assert_close(fused[name], tensor, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)


def test_fused_kernels_need_no_temporary_memory_of_a_moment():
    """The default, ``foreach``, allocates a list of square roots as large as one moment."""

    def largest_step_memory(fused):
        params = [torch.nn.Parameter(torch.ones(100_000)) for _ in range(4)]
        adam = torch.optim.AdamW(params, foreach=True)
        if fused:
            use_fused_kernels(adam)
        for param in params:
            param.grad = torch.ones_like(param)
        adam.step()
        with torch.profiler.profile(profile_memory=True) as profile:
            adam.step()
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())

    assert largest_step_memory(fused=True) < 1000 < 4 * 100_000 * 4 <= largest_step_memory(fused=False)
