"""Context parallelism: outputs of Hugging Face, gradients, metrics and steps of undivided sequences."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from engine_cases import Setup, assemble, engine, in_parts, micro_batches, policy_loss, value_loss
from tiny_models import TEMPERATURE, policy_reference, rows, save_model, value_reference
from torch import Tensor

from megarl.megatron import OptimizerOptions, OutputOptions, OverlapOptions, RecomputeOptions, StepResult
from megarl.megatron.layers.torch_layers import PackedAttention
from megarl.models import ParallelLayout

ADAM = OptimizerOptions(lr=1e-2, weight_decay=0.1, clip_grad=0.5, eps=1e-3)
# Every replica has whole gradients, which can be compared.
WHOLE = replace(ADAM, use_distributed_optimizer=False)
SETUPS = {
    # With one row per micro-batch, some have no response token on one of the ranks.
    "cp2_one_row": Setup(ParallelLayout(cp=2), rows_per_micro_batch=1, optimizer=WHOLE),
    "cp2tp2sp_full_recompute": Setup(
        ParallelLayout(cp=2, tp=2), sequence_parallel=True, recompute=RecomputeOptions(), optimizer=WHOLE
    ),
    "cp2pp2": Setup(ParallelLayout(cp=2, pp=2), optimizer=WHOLE),
    "cp2dp2_overlap": Setup(
        ParallelLayout(cp=2, dp=2),
        optimizer=ADAM,
        overlap=OverlapOptions(grad_reduce=True, param_gather=True, bucket_size=3000),
    ),
    "cp4_all_rows": Setup(ParallelLayout(cp=4), rows_per_micro_batch=8, optimizer=ADAM),
}
MODELS = {"policy": {"family": "qwen2", "tied": True}, "critic": {"family": "qwen3", "critic": True}}
CASES = [("policy", name) for name in SETUPS] + [("critic", "cp2tp2sp_full_recompute")]
BATCHES = [rows(1), rows(2)]


class Run(NamedTuple):
    """One rank's results of a forward pass and two optimizer steps."""

    outputs: tuple[Tensor, ...] | None
    computed: int  # tokens of the forward pass
    metrics: list[dict[str, float]]
    steps: list[StepResult]
    grads: list[dict[str, Tensor]]  # of each step, before clipping
    weights: dict[str, Tensor]


def run(place, path, setup):
    computed: list[int] = []
    with engine(place, path, setup) as built:
        attentions = [m for chunk in built.chunks for m in chunk.modules() if isinstance(m, PackedAttention)]
        hook = attentions[0].register_forward_pre_hook(lambda _, inputs: computed.append(len(inputs[0])))
        options = OutputOptions() if setup.value_head else OutputOptions(TEMPERATURE, with_entropy=True)
        answers = built.forward(micro_batches(BATCHES[0], setup), options)
        hook.remove()
        outputs = None
        if answers is not None:
            names = ("values",) if setup.value_head else ("log_probs", "entropy")
            outputs = tuple(torch.cat([getattr(answer, name) for answer in answers]) for name in names)
        metrics, steps, grads = [], [], []
        for batch in BATCHES:
            mine = micro_batches(batch, setup, built.runtime.coordinate.dp, setup.layout.dp)
            metrics.append(built.forward_backward(mine, value_loss if setup.value_head else policy_loss, options))
            grads.append({name: param.main_grad.clone() for name, param in built.weights.parameters().items()})
            steps.append(built.optimizer_step())
        return Run(outputs, sum(computed), metrics, steps, grads, built.weights.to_host())


class Reference(NamedTuple):
    """A model, Hugging Face's outputs of the first batch, and two steps of a single process."""

    path: Path
    outputs: list[tuple[Tensor, ...]]
    single: Run
    setup: Setup


@pytest.fixture(scope="module")
def references(pool, tmp_path_factory):
    built = {}
    for name, settings in MODELS.items():
        path, critic = tmp_path_factory.mktemp(name), name == "critic"
        model = save_model(path, **settings)
        with torch.no_grad():
            outputs = [(value_reference(model, r),) if critic else policy_reference(model, r) for r in BATCHES[0]]
        setup = Setup(ParallelLayout(), value_head=critic, optimizer=WHOLE)
        built[name] = Reference(path, outputs, pool.run(run, 1, path, setup)[0], setup)
    return built


@pytest.mark.parametrize(("model", "name"), CASES)
def test_context_parallel_outputs_equal_single_rank(pool, references, model, name):
    reference = references[model]
    setup = SETUPS[name]._replace(value_head=model == "critic")
    results = pool.run(run, setup.layout.world_size, reference.path, setup)
    for rank, result in enumerate(results):
        coordinate = setup.layout.coordinate(rank)
        if coordinate.pp == setup.layout.pp - 1:
            check_outputs(reference.outputs, result.outputs)
        assert result.metrics == results[0].metrics and result.steps == results[0].steps
    single = reference.single
    for ours, theirs in zip(results[0].metrics, single.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    for ours, theirs in zip(results[0].steps, single.steps, strict=True):
        assert tuple(ours) == pytest.approx(tuple(theirs), rel=1e-5)
    check_same(
        assembled(reference, setup, results, "weights"), assembled(reference, reference.setup, [single], "weights")
    )
    if not setup.optimizer.use_distributed_optimizer:
        for step in range(len(BATCHES)):
            check_same(
                assembled(reference, setup, results, "grads", step),
                assembled(reference, reference.setup, [single], "grads", step),
            )
    assert len({result.computed for result in results}) == 1
    assert results[0].computed * setup.layout.cp == computed_tokens(setup)


def test_one_rank_computes_no_padding_tokens(references):
    for reference in references.values():
        assert reference.single.computed == sum(len(row.prompt) + len(row.response) for row in BATCHES[0])


def computed_tokens(setup):
    """Tokens of a forward pass over the first batch: up to ``2 * cp - 1`` padding tokens per sequence."""
    unit, total = 2 * setup.layout.cp, 0
    filled = math.lcm(unit, setup.layout.cp * setup.layout.tp) if setup.sequence_parallel else unit
    for start in range(0, len(BATCHES[0]), setup.rows_per_micro_batch):
        group = BATCHES[0][start : start + setup.rows_per_micro_batch]
        padded = sum(math.ceil((len(row.prompt) + len(row.response)) / unit) * unit for row in group)
        total += math.ceil(padded / filled) * filled
    return total


def check_outputs(expected, outputs):
    assert outputs is not None
    for number, flat in enumerate(outputs):
        for ours, theirs in zip(in_parts(flat, BATCHES[0]), expected, strict=True):
            assert (ours - theirs[number]).abs().max() < 1e-5


def assembled(reference, setup, results, what, step=None):
    local = [getattr(result, what) if step is None else getattr(result, what)[step] for result in results]
    return assemble(reference.path, setup._replace(value_head=reference.setup.value_head), local)


def check_same(ours, theirs):
    scale = max(tensor.abs().max().item() for tensor in theirs.values())
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
