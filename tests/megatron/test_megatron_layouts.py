"""Interleaved and uneven pipelines, recomputation and overlapped communication equal a single process."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine_cases import Setup, assemble, engine, in_parts, micro_batches, policy_loss, refusal
from support.release import of_release
from tiny_models import TEMPERATURE, policy_reference, rows, save_model
from torch import Tensor

from megarl.megatron import OptimizerOptions, OutputOptions, OverlapOptions, RecomputeOptions, StepResult
from megarl.models import ParallelLayout

ADAM = OptimizerOptions(lr=1e-2, weight_decay=0.1, clip_grad=0.5, eps=1e-3)
# Small buckets, so that a model of this size has several.
OVERLAP = OverlapOptions(grad_reduce=True, param_gather=True, bucket_size=3000)
SINGLE = Setup(ParallelLayout(), optimizer=ADAM)
SETUPS = {
    "pp2vpp3": Setup(ParallelLayout(pp=2, vpp=3)),
    "pp3vpp2": Setup(ParallelLayout(pp=3, vpp=2)),
    "pp2vpp3_overlapped_exchange": Setup(ParallelLayout(pp=2, vpp=3), transformer=(("overlap_p2p_comm", True),)),
    "pp2_kept_outputs_fused_dropout": Setup(
        ParallelLayout(pp=2), transformer=(("deallocate_pipeline_outputs", False), ("bias_dropout_fusion", True))
    ),
    "tp2pp2vpp4_ends_without_layers_full_recompute": Setup(
        ParallelLayout(tp=2, pp=2, vpp=4, embedding_as_layer=True, loss_as_layer=True),
        sequence_parallel=True,
        recompute=RecomputeOptions(),
    ),
    "pp2_uneven_selective_recompute": Setup(
        ParallelLayout(pp=2, first_stage_layers=4, last_stage_layers=2),
        recompute=RecomputeOptions("selective", modules=("core_attn", "mlp", "layernorm")),
    ),
    "pp2dp2vpp2_uneven_overlap": Setup(
        ParallelLayout(pp=2, dp=2, vpp=2, first_stage_layers=4, last_stage_layers=2), overlap=OVERLAP
    ),
    "tp2dp2_overlap_block_recompute": Setup(
        ParallelLayout(tp=2, dp=2), sequence_parallel=True, overlap=OVERLAP, recompute=RecomputeOptions(method="block")
    ),
    "dp2_gradient_overlap": Setup(
        ParallelLayout(dp=2),
        overlap=OverlapOptions(grad_reduce=True, bucket_size=3000),
        optimizer=replace(ADAM, use_distributed_optimizer=False),
    ),
}
MORE = ("pp3vpp2", "pp2vpp3", "dp2_gradient_overlap")
"""Other cases have their schedule and their overlap with more."""


class Run(NamedTuple):
    """One rank's outputs before and after two optimizer steps, and the changes."""

    before: Tensor | None
    metrics: list[dict[str, float]]
    steps: list[StepResult]
    grads: dict[str, Tensor]  # of the second step, before clipping; a shard only, with the distributed optimizer
    weights: dict[str, Tensor]
    after: Tensor | None


def run(place, path, setup, batches):
    """Outputs, two steps, outputs again."""
    with engine(place, path, setup) as built:

        def outputs():
            answers = built.forward(micro_batches(batches[0], setup), OutputOptions(temperature=TEMPERATURE))
            return None if answers is None else torch.cat([answer.log_probs for answer in answers])

        before, metrics, steps = outputs(), [], []
        for batch in batches:
            mine = micro_batches(batch, setup, built.runtime.coordinate.dp, setup.layout.dp)
            metrics.append(
                built.forward_backward(mine, policy_loss, OutputOptions(temperature=TEMPERATURE, with_entropy=True))
            )
            grads = {name: param.main_grad.clone() for name, param in built.weights.parameters().items()}
            steps.append(built.optimizer_step())
        # Whichever reads the weights first has to wait until the last step's changes are gathered.
        weights = built.weights.to_host() if setup.layout.pp > 1 else None
        after = outputs()
        return Run(before, metrics, steps, grads, weights or built.weights.to_host(), after)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("six_layers")
    return path, save_model(path, "qwen3", tied=True, num_hidden_layers=6)


BATCHES = [rows(1), rows(2)]


@pytest.fixture(scope="module")
def single(pool, model):
    return pool.run(run, 1, model[0], SINGLE, BATCHES)[0]


@pytest.mark.parametrize("name", of_release([name for name in SETUPS if name not in MORE], MORE))
def test_every_layout_equals_a_single_process(pool, model, single, name):
    path, reference = model
    # Interleaved schedules need a multiple of the stages: 4 micro-batches of 8 rows, or 3.
    setup = SETUPS[name]
    size = 3 if setup.layout.pp == 3 else 2
    setup = setup._replace(rows_per_micro_batch=size, optimizer=setup.optimizer or ADAM)
    results = pool.run(run, setup.layout.world_size, path, setup, BATCHES)
    last = results[-1]
    for ours, row in zip(in_parts(last.before, BATCHES[0]), BATCHES[0], strict=True):
        assert (ours - policy_reference(reference, row)[0].detach()).abs().max() < 1e-5
    assert (last.after - single.after).abs().max() < 1e-5
    for result in results:
        assert result.metrics == last.metrics and result.steps == last.steps
    for ours, theirs in zip(last.metrics, single.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for ours, theirs in zip(last.steps, single.steps, strict=True):
        assert tuple(ours)[:2] == pytest.approx(tuple(theirs)[:2], rel=1e-5)
    check_same(assemble(path, setup, [result.weights for result in results]), assemble(path, SINGLE, [single.weights]))
    if setup.layout.dp == 1 or not setup.optimizer.use_distributed_optimizer:
        check_same(assemble(path, setup, [result.grads for result in results]), assemble(path, SINGLE, [single.grads]))


def check_same(ours, theirs):
    scale = max(tensor.abs().max().item() for tensor in theirs.values())
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


def odd_number(place, path, setup):
    with engine(place, path, setup) as built:
        built.forward(micro_batches(rows(), setup))


def test_interleaved_schedule_raises_on_indivisible_micro_batches(pool, model):
    for message in pool.run(refusal, 2, odd_number, model[0], SETUPS["pp2vpp3"]):
        assert "3 micro-batches with virtual_pipeline_model_parallel_size=3" in message
        assert " pipeline_model_parallel_size=2" in message and message.endswith("[batch.micro-batches-vpp]")


def messages(place, path, setup):
    """Ranks to which a stage connects at the start, and sizes of the tensors that it then receives in a forward run."""
    sent, received = [], []
    send, receive = dist.isend, dist.irecv

    def isend(tensor, dst, **options):
        sent.append(dst)
        return send(tensor, dst, **options)

    def irecv(tensor, src, **options):
        received.append(tensor.numel())
        return receive(tensor, src, **options)

    with (
        mock.patch.object(dist, "isend", isend),
        mock.patch.object(dist, "irecv", irecv),
        engine(place, path, setup) as built,
    ):
        connected = list(sent)
        received.clear()
        built.forward(micro_batches(rows(), setup))
    return connected, received


def test_stages_connect_before_the_first_step_and_then_exchange_nothing_but_activations(pool, model):
    """NCCL blocks the host at the first message of a pair, and a shape that is sent costs a synchronization."""
    setup = Setup(ParallelLayout(pp=3, vpp=2))
    tokens = [sum(len(row.prompt) + len(row.response) for row in rows()[start : start + 3]) for start in (0, 3, 6)]
    hidden, first = 32, True
    for rank, (connected, received) in enumerate(pool.run(messages, 3, model[0], setup)):
        assert sorted(connected) == sorted({(rank + 1) % 3, (rank - 1) % 3})
        # The first stage receives activations for its second chunk only.
        assert received == [hidden * count for count in (tokens if first else 2 * tokens)]
        first = False


def test_stages_of_a_plain_pipeline_know_the_sizes_too(pool, model):
    setup = Setup(ParallelLayout(pp=2), rows_per_micro_batch=4)
    tokens = [sum(len(row.prompt) + len(row.response) for row in rows()[start : start + 4]) for start in (0, 4)]
    results = pool.run(messages, 2, model[0], setup)
    assert results == [([], []), ([], [32 * count for count in tokens])]
