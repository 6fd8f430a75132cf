"""The torch layers against plain formulas: values and gradients."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megarl.megatron.layers.kernels import window_attention
from megarl.megatron.layers.torch_layers import (
    PackedAttention,
    PackedSequences,
    RMSNorm,
    ValueHead,
    rotate,
    rotation_table,
)
from megarl.megatron.runtime import cuda_on_cpu
from megarl.models import parse_model_config
from megarl.models.rope import inverse_frequencies

RUNS = ((3, 4), (1, 5), (2, 7))
HEADS, GROUPS, WIDTH = 4, 2, 6


@pytest.fixture(scope="module", autouse=True)
def shim():
    cuda_on_cpu.install()


def config(dtype=torch.float32, sequence_parallel=False, zero_centered=False):
    return SimpleNamespace(
        params_dtype=dtype,
        sequence_parallel=sequence_parallel,
        hidden_size=8,
        layernorm_zero_centered_gamma=zero_centered,
    )


def gradients(output, *inputs):
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=output.dtype)
    return torch.autograd.grad(output, inputs, seed)


def assert_same(ours, theirs, *inputs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(ours, *inputs), gradients(theirs, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 1, 8), (5, 1, 3, 8)])
def test_rms_norm(shape):
    norm = RMSNorm(config(), 8, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(8))
    inputs = torch.randn(shape, requires_grad=True)
    theirs = inputs / (inputs.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    assert_same(norm(inputs), theirs, inputs, norm.weight)


def test_zero_centered_weights_are_added_to_one():
    norm = RMSNorm(config(zero_centered=True), 8, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(8))
    inputs = torch.randn(5, 1, 8, requires_grad=True)
    theirs = inputs / (inputs.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (1 + norm.weight)
    assert_same(norm(inputs), theirs, inputs, norm.weight)


def test_half_precision_rms_norm_computes_in_single_precision():
    norm = RMSNorm(config(torch.bfloat16), 8)
    inputs = (torch.randn(5, 1, 8) * 100).bfloat16()
    exact = inputs.float() / (inputs.float().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert norm(inputs).dtype is torch.bfloat16
    torch.testing.assert_close(norm(inputs), exact.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_rms_norm_marks_its_weight_for_sequence_parallelism(sequence_parallel):
    assert RMSNorm(config(sequence_parallel=sequence_parallel), 8).weight.sequence_parallel is sequence_parallel


def test_packed_attention_is_causal_attention_within_each_sequence():
    torch.manual_seed(0)
    lengths = [length for count, length in RUNS for _ in range(count)]
    tokens = sum(lengths)
    query = torch.randn(tokens, HEADS, WIDTH, requires_grad=True)
    key, value = (torch.randn(tokens, GROUPS, WIDTH, requires_grad=True) for _ in range(2))
    angles = torch.randn(tokens, WIDTH // 2)
    rotation = (angles.cos()[:, None], angles.sin()[:, None])
    sequences = PackedSequences(runs=RUNS, rotation=rotation)
    ours = PackedAttention(config())(query, key, value, None, packed_seq_params=sequences)

    def turned(heads, t, head):
        a, b = heads[t, head, : WIDTH // 2], heads[t, head, WIDTH // 2 :]
        c, s = angles[t].cos(), angles[t].sin()
        return torch.cat([a * c - b * s, b * c + a * s])

    theirs, start = [], 0
    for length in lengths:
        for t in range(start, start + length):
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                earlier = range(start, t + 1)
                scores = [turned(query, t, head) @ turned(key, s, group) / math.sqrt(WIDTH) for s in earlier]
                probs = torch.stack(scores).softmax(0)
                theirs.append(sum(p * value[s, group] for p, s in zip(probs, earlier, strict=True)))
        start += length
    assert_same(ours, torch.stack(theirs).view(tokens, HEADS * WIDTH), query, key, value)


@pytest.mark.parametrize("window", [1, 3, 5, 12, 40])
@pytest.mark.parametrize(("count", "seen"), [(12, 12), (4, 12), (1, 7)])
def test_window_attention_is_attention_with_a_banded_mask(window, count, seen):
    torch.manual_seed(1)
    query = torch.randn(2, HEADS, count, WIDTH, requires_grad=True)
    key, value = (torch.randn(2, GROUPS, seen, WIDTH, requires_grad=True) for _ in range(2))
    distance = torch.arange(seen - count, seen)[:, None] - torch.arange(seen)
    mask = (distance >= 0) & (distance < window)
    theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    assert_same(window_attention(query, key, value, window, 0.3), theirs, query, key, value)


def test_value_head_computes_in_single_precision():
    head = ValueHead(config(torch.bfloat16), torch.device("cpu"))
    assert not head.weight.any()
    with torch.no_grad():
        head.weight.copy_(torch.randn(1, 8))
    hidden = torch.randn(5, 8).bfloat16()
    assert head(hidden).dtype is torch.float32
    torch.testing.assert_close(head(hidden), (hidden.float() * head.weight.float()).sum(-1))


def llama(scaling):
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "max_position_embeddings": 512,
        "rope_theta": 5000.0,
        "rope_scaling": scaling,
    }
    return parse_model_config(raw)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rotary_table_equals_transformers(scaling):
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

    model = llama(scaling)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in model.raw.items() if k != "architectures"}))
    positions = torch.tensor([0, 1, 2, 63, 64, 300])
    heads = torch.randn(6, 2, 32)
    cosine, sine = theirs(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cosine, sine)
    ours = rotate(heads, *rotation_table(positions, inverse_frequencies(model)))
    torch.testing.assert_close(ours, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_rotation_gradient_equals_autograd():
    heads = torch.randn(6, 2, 8, requires_grad=True)
    angles = torch.randn(6, 1, 4)
    a, b = heads[..., :4], heads[..., 4:]
    plain = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
    assert_same(rotate(heads, angles.cos(), angles.sin()), plain, heads)


def test_half_precision_heads_are_rotated_in_single_precision():
    """Like SGLang's: a table in bfloat16 would be wrong by up to 2**-8 of each head."""
    positions = torch.tensor([0, 7, 5000, 31000])
    cosine, sine = rotation_table(positions, inverse_frequencies(llama(None)))
    assert cosine.dtype is sine.dtype is torch.float32
    heads = torch.randn(4, 2, 32).bfloat16().requires_grad_()
    a, b = heads.detach().double().chunk(2, -1)
    c, s = cosine.double(), sine.double()
    turned = rotate(heads, cosine, sine)
    assert turned.dtype is torch.bfloat16
    torch.testing.assert_close(turned, torch.cat([a * c - b * s, b * c + a * s], -1).bfloat16(), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(turned, heads, turned.detach())
    assert grad.dtype is torch.bfloat16
    torch.testing.assert_close(grad, heads.detach(), rtol=2**-7, atol=2**-7)  # the rotation is undone
