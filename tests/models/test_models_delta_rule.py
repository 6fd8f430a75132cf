"""The gated delta rule and its convolution against loops in numpy, and against transformers' layers."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models.delta_rule import (
    CHUNK,
    ChunkPlan,
    causal_convolution,
    chunked_delta_rule,
    delta_rule_step,
    gated_norm,
    log_decay,
)

CPU, WIDTH, KEYS, VALUES, KEY_DIM, VALUE_DIM = torch.device("cpu"), 4, 2, 6, 5, 3
LENGTHS = st.lists(st.integers(1, 3 * CHUNK + 5), min_size=1, max_size=5)


def inputs_of(tokens, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(tokens, KEYS, KEY_DIM, generator=generator).to(dtype) for _ in range(2))
    value = torch.randn(tokens, VALUES, VALUE_DIM, generator=generator).to(dtype)
    g = -torch.rand(tokens, VALUES, generator=generator) * 2
    return query, key, value, g, torch.rand(tokens, VALUES, generator=generator)


def by_loop(query, key, value, g, b, state=None):
    """One sequence, token by token, in float64; the states of all heads."""
    query, key, value, g, b = (part.double().numpy() for part in (query, key, value, g, b))
    state = np.zeros((VALUES, KEY_DIM, VALUE_DIM)) if state is None else state.double().numpy().copy()
    outputs = np.zeros_like(value)
    for token in range(len(value)):
        for head in range(VALUES):
            shared = head // (VALUES // KEYS)
            q, k = (part[token, shared] / np.sqrt((part[token, shared] ** 2).sum() + 1e-6) for part in (query, key))
            held = np.exp(g[token, head]) * state[head]
            state[head] = held + b[token, head] * np.outer(k, value[token, head] - k @ held)
            outputs[token, head] = q @ state[head] / np.sqrt(KEY_DIM)
    return torch.tensor(outputs), torch.tensor(state)


@settings(max_examples=15, deadline=None)
@given(LENGTHS, st.booleans())
def test_chunks_equal_the_recurrence_token_by_token(lengths, begins):
    parts = inputs_of(sum(lengths))
    before = None if begins else torch.randn(len(lengths), VALUES, KEY_DIM, VALUE_DIM)
    outputs, states = chunked_delta_rule(*parts, ChunkPlan.of(lengths, WIDTH, CPU), before, with_state=True)
    for number, rows in enumerate(zip(*(part.split(lengths) for part in parts), strict=True)):
        expected, state = by_loop(*rows, None if before is None else before[number])
        torch.testing.assert_close(outputs.split(lengths)[number].double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[number].double(), state, rtol=1e-4, atol=1e-5)


def test_a_step_continues_from_the_states_of_a_prompt():
    lengths, parts = [70, 3], inputs_of(73)
    news = inputs_of(2, seed=1)
    _, states = chunked_delta_rule(*parts, ChunkPlan.of(lengths, WIDTH, CPU), with_state=True)
    outputs = delta_rule_step(*news, states)
    for number, rows in enumerate(zip(*(part.split(lengths) for part in parts), strict=True)):
        whole = [torch.cat([row, new[number : number + 1]]) for row, new in zip(rows, news, strict=True)]
        expected, state = by_loop(*whole)
        torch.testing.assert_close(outputs[number].double(), expected[-1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[number].double(), state, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_finite_differences():
    """Along a random direction, for sequences of one chunk and of two."""
    lengths = [6, CHUNK + 6]
    plan = ChunkPlan.of(lengths, WIDTH, CPU)
    assert plan.counts == (2, 1)
    parts = [part.requires_grad_() for part in inputs_of(sum(lengths))]
    weights = torch.randn(sum(lengths), VALUES, VALUE_DIM)

    def loss(step, directions):
        moved = [part.detach() + step * direction for part, direction in zip(parts, directions, strict=True)]
        rows = zip(*(part.split(lengths) for part in moved), strict=True)
        return sum(
            float((by_loop(*row)[0] * w).sum()) for row, w in zip(rows, weights.double().split(lengths), strict=True)
        )

    outputs, _ = chunked_delta_rule(*parts, plan)
    (outputs * weights).sum().backward()
    directions = [torch.randn_like(part) for part in parts]
    numeric = (loss(1e-3, directions) - loss(-1e-3, directions)) / 2e-3
    exact = sum(float((part.grad * direction).sum()) for part, direction in zip(parts, directions, strict=True))
    assert exact == pytest.approx(numeric, rel=1e-3)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(2, 5), st.booleans())
def test_a_convolution_sees_its_own_sequence_and_its_history(lengths, width, begins):
    inputs, weight = torch.randn(sum(lengths), 7), torch.randn(7, width)
    history = None if begins else torch.randn(len(lengths), width - 1, 7)
    outputs, after = causal_convolution(inputs, weight, ChunkPlan.of(lengths, width, CPU), history)
    for number, rows in enumerate(inputs.split(lengths)):
        before = torch.zeros(width - 1, 7) if history is None else history[number]
        held = torch.cat([before, rows]).numpy()
        expected = [(held[token : token + width] * weight.t().numpy()).sum(0) for token in range(len(rows))]
        torch.testing.assert_close(outputs.split(lengths)[number], torch.tensor(np.stack(expected)))
        assert torch.equal(after[number], torch.tensor(held[len(held) - width + 1 :]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_decay_are_those_of_transformers(dtype):
    layers = transformers.models.qwen3_next.modeling_qwen3_next
    norm = layers.Qwen3NextRMSNormGated(8, eps=1e-5).to(dtype)
    values, gate = (torch.randn(11, 8).to(dtype) for _ in range(2))
    with torch.no_grad():
        norm.weight.add_(torch.randn(8).to(dtype))
        expected = norm(values, gate)
        assert torch.equal(gated_norm(values, gate, norm.weight, 1e-5), expected)
    a, a_log, bias = torch.randn(5, 3).to(dtype), torch.rand(3).to(dtype), torch.randn(3).to(dtype)
    decays = np.exp(-np.exp(a_log.double()) * np.log1p(np.exp(a.double() + bias.double())))
    torch.testing.assert_close(log_decay(a, a_log, bias).exp().double(), decays, rtol=1e-5, atol=1e-6)
