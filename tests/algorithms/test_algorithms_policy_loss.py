"""Policy losses, a critic's loss, and the weights of tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_options import loss_options
from support.expected_errors import raises

from megarl.algorithms import (
    AGGREGATIONS,
    POLICY_LOSSES,
    PolicyLossInputs,
    bradley_terry_loss,
    clipped_value_loss,
    loss_counts,
    token_weights,
)

vanilla = POLICY_LOSSES["vanilla"]


def tokens(log_prob, old, advantages, **others):
    """Packed trained tokens of one sequence."""
    mask, lengths = torch.ones(log_prob.shape), torch.tensor([len(log_prob)])
    return PolicyLossInputs(log_prob, old, advantages, mask, lengths, **{"options": loss_options(), **others})


def by_cases(log_prob, old, advantage, low, high, dual):
    """The loss of one token by cases, its slope in the ratio, and the active clip."""
    ratio = math.exp(log_prob - old)
    if advantage >= 0:
        clipped = ratio > 1 + high and advantage > 0
        return (-advantage * min(ratio, 1 + high), 0.0 if clipped else -advantage * ratio, clipped, False)
    if ratio > dual:
        return (-advantage * dual, 0.0, False, True)
    clipped = ratio < 1 - low
    return (-advantage * max(ratio, 1 - low), 0.0 if clipped else -advantage * ratio, clipped, False)


@settings(max_examples=80)
@given(
    st.integers(1, 12),
    st.integers(0, 2**31),
    st.sampled_from([(0.2, 0.2, 3.0), (0.2, 0.28, 10.0), (0.1, 0.5, 1.7)]),
)
def test_loss_gradient_and_diagnostics_equal_the_cases(size, seed, clips):
    generator = np.random.default_rng(seed)
    old, new = generator.normal(-2, 1, size), generator.normal(-2, 1, size)
    advantages = generator.normal(0, 1, size) * (generator.random(size) < 0.9)
    log_prob = torch.tensor(new, requires_grad=True)
    low, high, dual = clips
    options = loss_options(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual)
    result = vanilla(tokens(log_prob, torch.tensor(old), torch.tensor(advantages), options=options))
    result.loss.sum().backward()
    cases = [by_cases(n, o, a, *clips) for n, o, a in zip(new, old, advantages, strict=True)]
    np.testing.assert_allclose(result.loss.detach(), [case[0] for case in cases], atol=1e-12)
    np.testing.assert_allclose(log_prob.grad, [case[1] for case in cases], atol=1e-12)
    np.testing.assert_array_equal(result.diagnostics["pg_clipfrac"], [case[2] for case in cases])
    np.testing.assert_array_equal(result.diagnostics["pg_clipfrac_lower"], [case[3] for case in cases])
    np.testing.assert_allclose(result.diagnostics["ppo_kl"], old - new)
    assert not any(tensor.requires_grad for tensor in result.diagnostics.values())


@st.composite
def batches(draw):
    """Rectangles of log-probs, old ones, advantages equal within a row or not, and a mask with holes."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    mask = generator.random((rows, columns)) < draw(st.sampled_from([0.5, 1.0]))
    old = generator.normal(-2, 1, (rows, columns))
    advantages = generator.normal(0, 1, (rows, 1 if draw(st.booleans()) else columns)) * np.ones((rows, columns))
    return old + generator.normal(0, 0.3, (rows, columns)), old, advantages, mask


def run(name, batch, options=loss_options()):  # noqa: B008
    """The loss of a rectangle, with the gradient of its sum over the mask."""
    log_prob = torch.tensor(batch[0], requires_grad=True)
    mask = torch.tensor(batch[3])
    chosen = torch.zeros(mask.shape) if POLICY_LOSSES[name].choose else None
    result = POLICY_LOSSES[name](
        PolicyLossInputs(log_prob, torch.tensor(batch[1]), torch.tensor(batch[2]), mask, chosen=chosen, options=options)
    )
    result.loss[mask].sum().backward()
    return result, log_prob.grad


@settings(max_examples=25)
@given(batches())
def test_cispo_with_trls_cap(batch):
    """docs/tutorials/from_trl.md: TRL caps the ratio at ``epsilon_high`` itself, without a lower bound."""
    epsilon_high = 1.2
    result, slopes = run("cispo", batch, loss_options(clip_ratio_low=1.0, clip_ratio_high=epsilon_high - 1))
    new, old, advantages, mask = batch
    capped = np.minimum(np.exp(new - old), epsilon_high)
    np.testing.assert_allclose(result.loss.detach()[mask], (-capped * advantages * new)[mask], atol=1e-12)
    np.testing.assert_allclose(slopes, np.where(mask, -capped * advantages, 0.0), atol=1e-12)


CLIPS = loss_options(clip_ratio_low=0.2, clip_ratio_high=0.3, tau_pos=1.0, tau_neg=1.3)


def gspo_of(ratios, advantages, t):
    """arXiv:2507.18071, GSPO-token: loss of a token and slope in its log-prob."""
    s, advantage = math.prod(ratios) ** (1 / len(ratios)), advantages[t]
    clipped = advantage * min(max(s, 0.8), 1.3)
    return (-advantage * s, -advantage * s) if advantage * s <= clipped else (-clipped, 0.0)


def gmpo_of(ratios, advantages, t):
    """arXiv:2507.20673, at one token: all tokens of a sequence have one loss."""
    kept = []
    for ratio, advantage in zip(ratios, advantages, strict=True):
        near = min(max(ratio, math.exp(-0.2)), math.exp(0.3))
        kept.append(min(ratio, near) if advantage > 0 else max(ratio, near))
    mean = math.prod(kept) ** (1 / len(kept))
    loss = -np.mean(advantages) * mean
    # each of the sequence's losses moves with this token, if its ratio is the one that counts
    return loss, loss if kept[t] == ratios[t] else 0.0


def cispo_of(ratios, advantages, t):
    """arXiv:2506.13585, without its factor ``log p``."""
    return None, -advantages[t] * min(max(ratios[t], 0.8), 1.3)


def reinforce_of(ratios, advantages, t):
    return None, -advantages[t]


def sapo_of(ratios, advantages, t):
    """arXiv:2511.20347: the gate, and its slope in the log-prob by the derivative of the logistic function."""
    tau = 1.0 if advantages[t] > 0 else 1.3
    logistic = 1 / (1 + math.exp(-tau * (ratios[t] - 1)))
    slope = 4 * logistic * (1 - logistic) * ratios[t]
    return -advantages[t] * logistic * 4 / tau, -advantages[t] * slope


OF_SEQUENCES = {"gspo": gspo_of, "geo_mean": gmpo_of, "cispo": cispo_of, "reinforce": reinforce_of, "sapo": sapo_of}


@pytest.mark.parametrize("name", OF_SEQUENCES)
@settings(max_examples=60)
@given(batch=batches())
def test_losses_and_gradients_equal_the_papers_formulas(name, batch):
    new, old, advantages, mask = batch
    result, grad = run(name, batch, CLIPS)
    for row in range(len(new)):
        own = np.flatnonzero(mask[row])
        ratios, of_row = np.exp(new[row] - old[row])[own].tolist(), advantages[row, own].tolist()
        for place, t in enumerate(own):
            loss, slope = OF_SEQUENCES[name](ratios, of_row, place)
            loss = slope * new[row, t] if loss is None else loss
            assert result.loss[row, t].item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
            assert grad[row, t].item() == pytest.approx(slope, rel=1e-9, abs=1e-12)
    assert not grad[~torch.tensor(mask)].any()


# By hand from the same equations: two tokens with the ratios 1.1 and 1.5, advantage 2, clips of 0.2 and 0.3.
REFERENCE = {
    "vanilla": [-2.2, -2.6],
    "gspo": [-2 * math.sqrt(1.65)] * 2,  # 1.2845 is below 1.3
    "geo_mean": [-2 * math.sqrt(1.1 * math.exp(0.3))] * 2,
    "cispo": [1.1 * 2 * 1.0, 1.3 * 2 * 1.0],  # times -log p = 1
    "reinforce": [2.0, 2.0],
    "sapo": [-2 * 4 / (1 + math.exp(-0.1)), -2 * 4 / (1 + math.exp(-0.5))],
}


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_values(name):
    old = np.array([[-1 - math.log(1.1), -1 - math.log(1.5)]])
    batch = (np.array([[-1.0, -1.0]]), old, np.full((1, 2), 2.0), np.ones((1, 2), bool))
    result, _ = run(name, batch, CLIPS)
    assert result.loss.tolist() == [pytest.approx(REFERENCE[name], rel=1e-12)]


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=25)
@given(batch=batches(), order=st.randoms())
def test_rectangles_and_packed_tokens_give_the_same_numbers(name, batch, order):
    """Permuted rows, packed, cut after their last trained token."""
    rectangle, slopes = run(name, batch, CLIPS)
    rows = list(range(len(batch[0])))
    order.shuffle(rows)
    lengths = [int(np.flatnonzero(mask).max(initial=0)) + 1 for mask in batch[3]]
    places = [(row, t) for row in rows for t in range(lengths[row])]
    new, old, advantages, mask = (torch.tensor([column[place] for place in places]) for column in batch)
    log_prob = new.requires_grad_()
    chosen = torch.zeros(len(mask)) if POLICY_LOSSES[name].choose else None
    inputs = PolicyLossInputs(
        log_prob, old, advantages, mask, torch.tensor([lengths[row] for row in rows]), chosen, options=CLIPS
    )
    packed = POLICY_LOSSES[name](inputs)
    packed.loss[mask].sum().backward()
    where = tuple(torch.tensor(places)[mask].T)
    torch.testing.assert_close(packed.loss[mask], rectangle.loss[where], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_prob.grad[mask], slopes[where], rtol=1e-12, atol=1e-12)
    for diagnostic, values in packed.diagnostics.items():
        torch.testing.assert_close(values[mask], rectangle.diagnostics[diagnostic][where], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_gradients_are_the_policy_gradient(name):
    """Without policy change every loss has the slope ``-A`` at each token."""
    old = np.array([[-1.0, -2.0]])
    batch = (old.copy(), old, np.array([[2.0, 2.0]]), np.ones((1, 2), bool))
    assert run(name, batch)[1].tolist() == [pytest.approx([-2.0, -2.0])]


def test_huge_ratio_stays_finite():
    log_prob = torch.tensor([0.0, -500.0], requires_grad=True)
    result = vanilla(tokens(log_prob, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 1.0])))
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all() and torch.isfinite(log_prob.grad).all()
    assert result.loss[0].item() == 3.0 and result.diagnostics["ppo_kl"].tolist() == [-20.0, 20.0]


def test_packed_tokens_need_lengths():
    inputs = PolicyLossInputs(*(torch.zeros(2) for _ in range(3)), torch.ones(2), options=loss_options())
    with pytest.raises(ValueError, match="lengths"):
        POLICY_LOSSES["gspo"](inputs)


def test_user_loss(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from megarl.algorithms import TokenLoss\n"
        "def plain(inputs):\n    return TokenLoss(-inputs.advantages * inputs.log_prob, {})\n"
        "def wrong():\n    return 1\n",
        encoding="utf-8",
    )
    own = POLICY_LOSSES.find(f"{file}:plain")
    assert own(tokens(*(torch.full((1,), 2.0) for _ in range(3)))).loss.tolist() == [-4.0] and own.choose is None
    with raises("config.user-code-signature", "loss_mode", "1 argument"):
        POLICY_LOSSES.find(f"{file}:wrong")
    with raises("config.unknown-name", "loss_mode='ppo'", "vanilla"):
        POLICY_LOSSES.find("ppo")


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


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(0, 2**31), st.sampled_from([0.1, 0.5, 2.0]))
def test_loss_gradient_and_clip_fraction_equal_the_loop(size, seed, cliprange):
    generator = np.random.default_rng(seed)
    new, old, returns = (generator.normal(size=size) for _ in range(3))
    vpreds = torch.tensor(new, requires_grad=True)
    result = clipped_value_loss(vpreds, torch.tensor(old), torch.tensor(returns), cliprange)
    result.loss.sum().backward()
    for i in range(size):
        near = min(max(new[i], old[i] - cliprange), old[i] + cliprange)
        free, held = (new[i] - returns[i]) ** 2, (near - returns[i]) ** 2
        np.testing.assert_allclose(result.loss[i].item(), 0.5 * max(free, held))
        np.testing.assert_allclose(vpreds.grad[i], 0.0 if held > free else new[i] - returns[i], atol=1e-12)
        assert result.diagnostics["vf_clipfrac"][i].item() == float(held > free)
    assert torch.equal(result.diagnostics["vpred_mean"], vpreds.detach())


def test_rectangle_and_packed_tokens_give_the_same_numbers():
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randn(2, 4, generator=generator) for _ in range(3)]
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]]).bool()
    rectangle = clipped_value_loss(*columns, 0.2)
    packed = clipped_value_loss(*(column[mask] for column in columns), 0.2)
    assert torch.equal(rectangle.loss[mask], packed.loss)


CHOSEN, REJECTED, MARGINS = [2.0, -1.0, 0.5], [1.0, 3.0, 0.5], [0.0, 1.0, 0.25]


def test_bradley_terry_loss_equals_the_equation():
    result = bradley_terry_loss(
        torch.tensor(CHOSEN), torch.tensor(REJECTED), torch.tensor(MARGINS), center_coefficient=0.01
    )
    expected = [
        -math.log(1 / (1 + math.exp(-(c - r - m)))) + 0.01 * (c + r) ** 2
        for c, r, m in zip(CHOSEN, REJECTED, MARGINS, strict=True)
    ]
    assert result.loss.tolist() == pytest.approx(expected)
    assert result.diagnostics["accuracy"].tolist() == [1, 0, 0]  # equal rewards are no order
    assert result.diagnostics["margin"].tolist() == [1, -4, 0]


def test_without_margins_a_pair_of_equal_rewards_costs_log_two_and_pulls_them_apart():
    chosen, rejected = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    loss = bradley_terry_loss(chosen, rejected).loss
    assert loss.tolist() == pytest.approx([math.log(2)] * 2)
    loss.sum().backward()
    assert chosen.grad.tolist() == [-0.5, -0.5] and rejected.grad.tolist() == [0.5, 0.5]


def test_badly_ordered_pair_has_a_finite_loss():
    chosen = torch.tensor([-1000.0], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.tensor([1000.0])).loss
    loss.sum().backward()
    assert loss.item() == pytest.approx(2000.0) and chosen.grad.item() == -1
