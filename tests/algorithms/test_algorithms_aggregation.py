import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.algorithms import AGGREGATIONS, loss_counts, token_weights

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
HORIZON = 11


def by_definition(losses, masks, mode):
    """The aggregated loss of a mini-batch, a list of sequences of different lengths, by the papers' formulas."""
    kept = [loss[mask] for loss, mask in zip(losses, masks, strict=True) if mask.any()]
    if not kept:
        return 0.0
    if mode == "token-mean":
        return np.concatenate(kept).mean()
    if mode == "token-sum":
        return np.concatenate(kept).sum()
    per_sequence = {
        "seq-mean-token-sum": lambda tokens: tokens.sum(),
        "seq-mean-token-mean": lambda tokens: tokens.mean(),
        "seq-mean-token-sum-norm": lambda tokens: tokens.sum() / HORIZON,
    }[mode]
    return np.mean([per_sequence(tokens) for tokens in kept])


@st.composite
def mini_batches(draw):
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=9))
    density = draw(st.sampled_from([0.0, 0.6, 1.0]))
    losses = [generator.normal(size=length) for length in lengths]
    masks = [generator.random(length) < density for length in lengths]
    parts = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    return losses, masks, parts


def rectangle(columns, dtype):
    padded = torch.zeros(len(columns), max(len(column) for column in columns), dtype=dtype)
    for row, column in enumerate(columns):
        padded[row, : len(column)] = torch.tensor(column)
    return padded


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40)
@given(mini_batches())
def test_every_micro_batch_split_gives_the_same_loss(mode, case):
    """Complete or in parts (micro-batches, ranks), rectangular or packed: the same loss."""
    losses, masks, part_of = case
    expected = by_definition(losses, masks, mode)
    whole = loss_counts(rectangle(masks, torch.bool))
    counts = {"global_tokens": whole.tokens, "global_sequences": whole.sequences, "horizon": HORIZON}
    weights = token_weights(rectangle(masks, torch.bool), mode, **counts)
    assert (weights * rectangle(losses, torch.double)).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-6)

    total, tokens, sequences = 0.0, 0, 0
    for part in sorted(set(part_of)):
        rows = [row for row in range(len(losses)) if part_of[row] == part]
        packed = torch.tensor(np.concatenate([masks[row] for row in rows]).astype(np.int64))
        lengths = torch.tensor([len(losses[row]) for row in rows])
        own = loss_counts(packed, lengths)
        tokens, sequences = tokens + own.tokens, sequences + own.sequences
        weights = token_weights(packed, mode, lengths=lengths, **counts)
        assert weights.shape == packed.shape and not weights[packed == 0].any()
        total += (weights * torch.tensor(np.concatenate([losses[row] for row in rows]))).sum().item()
    assert total == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert (tokens, sequences) == whole


def test_counts_by_hand():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]])
    assert loss_counts(mask) == (3, 2)
    assert loss_counts(torch.tensor([1, 1, 0, 1]), torch.tensor([2, 1, 1])) == (3, 2)


def test_missing_inputs_are_named():
    counts = {"global_tokens": 1, "global_sequences": 1}
    with raises("config.unknown-name", "loss_agg_mode='mean'", "token-mean"):
        token_weights(torch.ones(1, 1), "mean", **counts)
    with pytest.raises(ValueError, match="horizon"):
        token_weights(torch.ones(1, 1), "seq-mean-token-sum-norm", **counts)
    with pytest.raises(ValueError, match="lengths"):
        token_weights(torch.ones(3), "token-mean", **counts)
    assert set(AGGREGATIONS) == set(MODES)
