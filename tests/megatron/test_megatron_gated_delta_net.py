"""Gated delta nets over sequences of several chunks, with recomputation, and through the kernels' interfaces."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from engine_cases import Setup, assemble, engine, micro_batches, policy_loss
from family_cases import LINEAR
from tiny_models import TEMPERATURE, policy_reference, rows_of, save_model
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from megarl.megatron import OptimizerOptions, OutputOptions, RecomputeOptions
from megarl.megatron.layers.gated_delta_net import in_convolution_kernel, in_rule_kernel
from megarl.models import ParallelLayout
from megarl.models.delta_rule import CHUNK, ChunkPlan, causal_convolution, chunked_delta_rule

LONG = [(90, 60), (3, 5), (70, 0), (1, CHUNK - 1), (120, 20), (CHUNK, 1)]
"""Prompt and response lengths: one chunk, full chunks, several chunks."""
MODEL = {"family": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], **LINEAR}
MODEL |= {"max_position_embeddings": 512}


def step(place, path, setup, batch):
    """Log-probs and gradients of one step."""
    with engine(place, path, setup) as built:
        mine = micro_batches(batch, setup)
        outputs = built.forward(mine, OutputOptions(TEMPERATURE))
        built.forward_backward(mine, policy_loss, OutputOptions(TEMPERATURE, with_entropy=True))
        grads = {name: param.main_grad.clone() for name, param in built.weights.parameters().items()}
        return torch.cat([output.log_probs for output in outputs or ()]), grads


@pytest.mark.parametrize(
    ("tp", "recompute"),
    [
        (1, None),
        (2, None),
        (2, RecomputeOptions("selective", modules=("core_attn", "layernorm"))),
        (1, RecomputeOptions()),
    ],
)
def test_states_pass_between_chunks_of_one_sequence_only(pool, tmp_path, tp, recompute):
    reference = save_model(tmp_path, **MODEL)
    # transformers does not train the embedding of padding, token 0.
    batch = [row._replace(prompt=row.prompt.clamp_min(1), response=row.response.clamp_min(1)) for row in rows_of(LONG)]
    loss = torch.zeros(())
    theirs = []
    for row in batch:
        log_probs, entropy = policy_reference(reference, row)
        theirs.append(log_probs.detach())
        loss = loss - (log_probs * row.weights).sum() - 0.3 * (entropy * row.weights).sum()
    loss.backward()
    setup = Setup(
        ParallelLayout(tp=tp),
        sequence_parallel=tp > 1,
        rows_per_micro_batch=len(batch),
        optimizer=OptimizerOptions(),
        recompute=recompute,
    )
    answers = pool.run(step, tp, tmp_path, setup, batch)
    for log_probs, _ in answers:
        assert (log_probs - torch.cat(theirs)).abs().max() < 1e-5
    grads = assemble(tmp_path, setup, [grads for _, grads in answers])
    scale = max(float(param.grad.abs().max()) for param in reference.parameters())
    for name, param in reference.named_parameters():
        torch.testing.assert_close(
            grads[name], param.grad, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def rule_kernel(q, k, v, g, beta, *, use_qk_l2norm_in_kernel, cu_seqlens):
    """flash-linear-attention's interface: one batch of packed sequences, with as many keys as values."""
    assert all(part.is_contiguous() and part.shape[:2] == v.shape[:2] for part in (q, k, v, g, beta))
    assert q.shape[2] == k.shape[2] == v.shape[2] and cu_seqlens.dtype is torch.int32
    parts = [
        torch_chunk_gated_delta_rule(
            *(part[:, start:stop] for part in (q, k, v)),
            g=g[:, start:stop],
            beta=beta[:, start:stop],
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )[0]
        for start, stop in pairwise(cu_seqlens.tolist())
    ]
    return torch.cat(parts, 1), None


def convolution_kernel(x, weight, bias, *, seq_idx, activation):
    """causal-conv1d's interface: ``[batch, channels, tokens]`` with neighbouring channels, and a number per token."""
    assert x.stride(1) == 1 and bias is None and activation == "silu"
    assert seq_idx.dtype is torch.int32 and seq_idx.shape == (1, x.shape[2])
    parts = []
    for number in seq_idx.unique():
        part = x[:, :, seq_idx[0] == number]
        convolved = F.conv1d(F.pad(part, (weight.shape[1] - 1, 0)), weight[:, None], groups=len(weight))
        parts.append(F.silu(convolved))
    return torch.cat(parts, 2)


def test_the_interfaces_of_the_kernels_give_the_results_of_torch():
    """The kernels need a GPU; functions with their arguments take their place."""
    lengths = [5, 70, 1]
    tokens, ends = sum(lengths), torch.tensor([0, 5, 75, 76], dtype=torch.int32)
    plan = ChunkPlan.of(lengths, 4, torch.device("cpu"))
    query, key, value = torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 8), torch.randn(tokens, 4, 6)
    g, b = -torch.rand(tokens, 4), torch.rand(tokens, 4)
    expected, _ = chunked_delta_rule(query, key, value, g, b, plan)
    torch.testing.assert_close(in_rule_kernel(rule_kernel, query, key, value, g, b, ends), expected)
    inputs, weight = torch.randn(tokens, 7), torch.randn(7, 4)
    convolved = F.silu(causal_convolution(inputs, weight, plan)[0])
    torch.testing.assert_close(in_convolution_kernel(convolution_kernel, inputs, weight, ends), convolved)
