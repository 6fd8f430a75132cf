"""Shared prompts with the layers of Transformer Engine: Megatron rotates, and the attention takes whole sequences."""

import pytest
import torch
from arranged_layers import arranged_engine
from engine_cases import Setup, engine, policy_loss
from family_cases import MODELS
from tiny_models import TEMPERATURE, policy_reference, rows, save_model

from megarl.megatron import OptimizerOptions, OutputOptions, PackedMicroBatch
from megarl.models import ParallelLayout


def step(place, path, setup, batch, share, arranged=True):
    """Log-probs, gradients and computed tokens of a step with all rows in one micro-batch."""
    with (arranged_engine if arranged else engine)(place, path, setup) as built:
        assert built.can_share_prompts
        columns = {"weights": torch.cat([row.weights for row in batch])}
        pairs = [(row.prompt, row.response) for row in batch]
        micro_batches = [PackedMicroBatch.from_rows(pairs, columns, share_prompts=share)]
        (outputs,) = built.forward(micro_batches, OutputOptions(TEMPERATURE))
        built.forward_backward(micro_batches, policy_loss, OutputOptions(TEMPERATURE, with_entropy=True))
        params = built.weights.parameters()
        grads = {n: p.main_grad.clone() if p.requires_grad else torch.zeros_like(p) for n, p in params.items()}
        return outputs.log_probs, grads, micro_batches[0].num_tokens


@pytest.mark.parametrize("family", ["qwen3", "llama_yarn", "glm4_moe", "deepseek_dense"])
@pytest.mark.parametrize("tp", [1, 2])
def test_shared_prompts_equal_repeated_ones_and_hugging_face(pool, tmp_path, family, tp):
    check(pool, tmp_path, MODELS.get(family, {"family": family}), tp, arranged=True)


@pytest.mark.parametrize(("family", "tp"), [("olmo3", 2), ("gemma3", 2), ("gpt_oss", 1)])
def test_shared_prompts_in_sliding_windows(pool, tmp_path, family, tp):
    check(pool, tmp_path, MODELS[family], tp=tp, arranged=False)


@pytest.mark.parametrize("family", ["qwen3_next_dense", "qwen3_5"])
def test_shared_prompts_in_gated_delta_nets(pool, tmp_path, family):
    check(pool, tmp_path, MODELS[family], tp=2, arranged=False)


def check(pool, tmp_path, model, tp, arranged):
    reference = save_model(tmp_path, **model)
    batch = [row._replace(prompt=rows()[number % 2].prompt) for number, row in enumerate(rows())]
    setup = Setup(ParallelLayout(tp=tp), sequence_parallel=tp > 1, optimizer=OptimizerOptions())
    repeated, shared = (pool.run(step, tp, tmp_path, setup, batch, share, arranged) for share in (False, True))
    theirs = torch.cat([policy_reference(reference, row)[0].detach() for row in batch])
    for (log_probs, grads, tokens), (plain, plain_grads, plain_tokens) in zip(shared, repeated, strict=True):
        assert tokens < plain_tokens
        assert (log_probs - theirs).abs().max() < 1e-5 and (plain - theirs).abs().max() < 1e-5
        scale = max(grad.abs().max().item() for grad in plain_grads.values())
        for name, grad in plain_grads.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-5 * scale)
