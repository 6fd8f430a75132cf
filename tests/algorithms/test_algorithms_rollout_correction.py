"""Rollout correction against formulas, and the proximal policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megarl.algorithms import (
    REJECTIONS,
    RatioMoments,
    Rejection,
    RejectionCounts,
    Truncation,
    WeightMoments,
    importance_weights,
    log_ratios,
    loglinear_log_probs,
    proximal_fractions,
    proximal_weights,
    rejected_tokens,
)

ROWS, WIDTH = 6, 7


@pytest.fixture(scope="module")
def drawn():
    """Log-probs with masks that have holes: row 1 has a trained tool token, row 4 no trained token."""
    generator = torch.Generator().manual_seed(1)
    old = -3 * torch.rand(ROWS, WIDTH, generator=generator)
    rollout = old + 0.5 * torch.randn(ROWS, WIDTH, generator=generator)
    trained = (torch.rand(ROWS, WIDTH, generator=generator) < 0.8).long()
    trained[4] = 0
    trained[1, 2] = 1
    compared = trained.bool().clone()
    compared[1, 2] = False
    rollout[1, 2] = math.nan  # the engine has said nothing of it
    return {"old": old, "rollout": rollout, "trained": trained, "compared": compared}


def tokens_of(drawn):
    """Row, position, and log-probs of actor and engine of each compared token."""
    return [
        (i, j, drawn["old"][i, j].item(), drawn["rollout"][i, j].item())
        for i in range(ROWS)
        for j in range(WIDTH)
        if drawn["compared"][i, j]
    ]


def rows_of(drawn):
    rows: dict[int, list[tuple[float, float]]] = {}
    for i, _, a, b in tokens_of(drawn):
        rows.setdefault(i, []).append((a, b))
    return rows


def weights_in_parts(tensors, normalize, **options):
    """Weights and statistics of the rows in two parts, as two processes compute them."""
    parts = [[one[rows] for one in tensors] for rows in (slice(2), slice(2, None))]
    raw = WeightMoments.merged([importance_weights(*part, **options)[1] for part in parts])
    results = [importance_weights(*part, **options, mean=raw.mean if normalize else 1.0) for part in parts]
    moments = WeightMoments.merged([moments for _, moments in results])
    return torch.cat([weights for weights, _ in results]), moments.statistics()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", [(1.3, None), (1.3, 0.6)])
@pytest.mark.parametrize("normalize", [False, True])
def test_importance_weights(drawn, level, bounds, normalize):
    upper, lower = bounds

    def cut(ratio):
        if lower is not None:
            return ratio if lower <= ratio <= upper else 0.0
        return min(ratio, upper)

    ratios = {(i, j): math.exp(a - b) for i, j, a, b in tokens_of(drawn)}
    whole = {i: math.prod(math.exp(a - b) for a, b in row) for i, row in rows_of(drawn).items()}
    units = list(ratios.values()) if level == "token" else list(whole.values())
    mean = np.mean([cut(ratio) for ratio in units]) if normalize else 1.0
    expected = np.zeros((ROWS, WIDTH))
    for i, j in np.argwhere(drawn["trained"].numpy()).tolist():
        ratio = whole[i] if level == "sequence" else ratios.get((i, j), 1.0)
        expected[i, j] = cut(ratio) / mean
    tensors = [log_ratios(drawn["old"], drawn["rollout"], drawn["compared"]), drawn["compared"], drawn["trained"]]
    weights, statistics = weights_in_parts(tensors, normalize, level=level, truncation=Truncation(upper, lower))
    assert weights.dtype == torch.float32 and not weights.requires_grad
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-5)
    used = np.array([expected[i, j] for i, j, _, _ in tokens_of(drawn)])
    lowest = 1 / upper if lower is None else lower
    wanted = {
        "rollout_is_mean": used.mean(),
        "rollout_is_std": used.std(),
        "rollout_is_min": min(units),
        "rollout_is_max": max(units),
        "rollout_is_eff_sample_size": used.sum() ** 2 / (used**2).sum() / len(used),
        "rollout_is_ratio_fraction_high": np.mean([ratio > upper for ratio in units]),
        "rollout_is_ratio_fraction_low": np.mean([ratio < lowest for ratio in units]),
    }
    if level == "sequence":
        by_row = np.array([cut(ratio) / mean for ratio in units])
        wanted |= {
            "rollout_is_seq_mean": by_row.mean(),
            "rollout_is_seq_std": by_row.std(),
            "rollout_is_seq_min": by_row.min(),
            "rollout_is_seq_max": by_row.max(),
            "rollout_is_seq_max_deviation": np.abs(by_row - 1).max(),
        }
    assert statistics == pytest.approx(wanted, rel=1e-5)
    assert 0 < statistics["rollout_is_ratio_fraction_high"] < 1


ESTIMATES = {
    "k1": lambda r: math.log(r),
    "k2": lambda r: math.log(r) ** 2 / 2,
    "k3": lambda r: r - 1 - math.log(r),
}
REDUCE = {"seq_sum": sum, "seq_mean": lambda values: sum(values) / len(values), "seq_max": max}


def out_by_loops(drawn, rule):
    scope, _, estimate = rule.option.rpartition("_")

    def out(value):
        if estimate == "k1":
            return not rule.lower <= math.exp(value) <= rule.upper
        return value > rule.upper

    result = np.zeros((ROWS, WIDTH), dtype=bool)
    if scope == "token":
        for i, j, a, b in tokens_of(drawn):
            result[i, j] = out(ESTIMATES[estimate](math.exp(a - b)))
        return result
    for i, row in rows_of(drawn).items():
        if out(REDUCE[scope]([ESTIMATES[estimate](math.exp(a - b)) for a, b in row])):
            result[i] = drawn["trained"][i].numpy() > 0
    return result


LIMITS = {"k1": (0.75, 1.4), "k2": (0.0, 0.15), "k3": (0.0, 0.12)}


@pytest.mark.parametrize("option", REJECTIONS)
def test_rejections(drawn, option):
    lower, upper = LIMITS[option[-2:]]
    rule = Rejection(option, upper * (3 if "sum" in option else 1), lower)
    ratios = log_ratios(drawn["old"], drawn["rollout"], drawn["compared"])
    rejected, counts = rejected_tokens(ratios, drawn["compared"], drawn["trained"], [rule])
    tensors = [ratios, drawn["compared"], drawn["trained"]]
    parts = [rejected_tokens(*(one[rows] for one in tensors), [rule])[1] for rows in (slice(2), slice(2, None))]
    assert RejectionCounts.merged(parts) == counts
    expected = out_by_loops(drawn, rule)
    np.testing.assert_array_equal(rejected.numpy(), expected)
    tokens = int(drawn["trained"].sum())
    assert counts.statistics() == pytest.approx(
        {
            f"rollout_rs_{option}_masked_fraction": expected.sum() / tokens,
            "rollout_rs_masked_fraction": expected.sum() / tokens,
            "rollout_rs_seq_masked_fraction": expected.any(-1).sum() / (ROWS - 1),
        }
    )
    assert 0 < expected.sum() < tokens


@pytest.mark.parametrize(
    ("option", "low", "high"), [("token_k1", 0.5, 1.3), ("seq_sum_k1", 0.3, 1.3), ("seq_mean_k1", 0.75, 1.1)]
)
def test_reciprocal_bounds_reject_as_verl_does(drawn, option, low, high):
    """verl keeps ``log a <= -log r <= log b``, also over a sequence (docs/reference/rollout_correction.md)."""
    ratios = log_ratios(drawn["old"], drawn["rollout"], drawn["compared"])
    trained = drawn["trained"]
    rejected, _ = rejected_tokens(ratios, drawn["compared"], trained, [Rejection(option, 1 / low, 1 / high)])
    expected = np.zeros((ROWS, WIDTH), dtype=bool)
    for i, row in rows_of(drawn).items():
        negative = [b - a for a, b in row]
        statistic = {"seq_sum_k1": sum(negative), "seq_mean_k1": sum(negative) / len(negative)}.get(option, 0.0)
        expected[i] = not math.log(low) <= statistic <= math.log(high)
    if option == "token_k1":
        for i, j, a, b in tokens_of(drawn):
            expected[i, j] = not math.log(low) <= b - a <= math.log(high)
    expected &= trained.numpy() > 0
    np.testing.assert_array_equal(rejected.numpy(), expected)
    unchanged, _ = rejected_tokens(ratios, drawn["compared"], trained, [Rejection(option, high, low)])
    assert expected.any() and not torch.equal(unchanged, rejected)


def test_rejection_rules_combine_and_unknown_ones_are_errors(drawn):
    rules = [Rejection("token_k1", 1.4, 0.75), Rejection("seq_max_k2", 0.3)]
    ratios = log_ratios(drawn["old"], drawn["rollout"], drawn["compared"])
    rejected, counts = rejected_tokens(ratios, drawn["compared"], drawn["trained"], rules)
    both = out_by_loops(drawn, rules[0]) | out_by_loops(drawn, rules[1])
    np.testing.assert_array_equal(rejected.numpy(), both)
    assert counts.statistics()["rollout_rs_masked_fraction"] == pytest.approx(both.sum() / int(drawn["trained"].sum()))
    with pytest.raises(ValueError, match="'seq_max_k1' is unknown; known ones: token_k1"):
        rejected_tokens(ratios, drawn["compared"], drawn["trained"], [Rejection("seq_max_k1", 2.0)])


def ratio_moments(drawn):
    """Moments of the rows in two parts, as two processes compute them."""
    tensors = [drawn[name] for name in ("old", "rollout", "compared")]
    return RatioMoments.merged(
        [RatioMoments.of(*(one[rows] for one in tensors)) for rows in (slice(2), slice(2, None))]
    )


def test_kl_distances(drawn):
    logs = [a - b for _, _, a, b in tokens_of(drawn)]
    rows = [np.array(row) for row in rows_of(drawn).values()]
    old, rollout = [-row[:, 0].mean() for row in rows], [-row[:, 1].mean() for row in rows]
    difference = [a - b for a, b in zip(old, rollout, strict=True)]
    assert ratio_moments(drawn).off_policy_statistics() == pytest.approx(
        {
            "kl": -np.mean(logs),
            "k3_kl": np.mean([math.exp(x) - 1 - x for x in logs]),
            "training_ppl": np.mean(np.exp(old)),
            "rollout_ppl": np.mean(np.exp(rollout)),
            "ppl_ratio": np.mean([math.exp(a - b) for a, b in zip(old, rollout, strict=True)]),
            "training_log_ppl": np.mean(old),
            "rollout_log_ppl": np.mean(rollout),
            "log_ppl_diff": np.mean(difference),
            "log_ppl_abs_diff": np.mean(np.abs(difference)),
            "log_ppl_diff_max": max(difference),
            "log_ppl_diff_min": min(difference),
            "chi2_token": np.mean([math.exp(x) ** 2 for x in logs]) - 1,
            "chi2_seq": np.mean([math.exp(sum(a - b for a, b in row)) ** 2 for row in rows]) - 1,
        },
        rel=1e-5,
    )
    none = RatioMoments.of(drawn["old"], drawn["rollout"], torch.zeros(ROWS, WIDTH))
    assert none.off_policy_statistics() == none.differences() == {}


def test_differences_of_two_lists(drawn):
    mask = drawn["compared"]
    old, rollout = drawn["old"][mask], drawn["rollout"][mask]
    a, b = old.double().numpy(), rollout.double().numpy()
    probs = np.abs(np.exp(a) - np.exp(b))
    assert ratio_moments(drawn).differences() == pytest.approx(
        {
            "rollout_log_probs_diff_mean": np.abs(a - b).mean(),
            "rollout_log_probs_diff_max": np.abs(a - b).max(),
            "rollout_probs_diff_mean": probs.mean(),
            "rollout_probs_diff_max": probs.max(),
            "rollout_probs_diff_std": probs.std(),
            "rollout_actor_probs_pearson_corr": np.corrcoef(np.exp(a), np.exp(b))[0, 1],
        }
    )
    one = RatioMoments.of(old[None, :1], rollout[None, :1], torch.ones(1, 1))
    assert "rollout_actor_probs_pearson_corr" not in one.differences()


def test_overflowing_ratios_stay_finite():
    old, rollout = torch.tensor([[0.0, -400.0]]), torch.tensor([[-300.0, 0.0]])
    mask = torch.ones(1, 2)
    ratios = log_ratios(old, rollout, mask)
    for level in ("token", "sequence"):
        weights, moments = importance_weights(ratios, mask, mask, level=level, truncation=Truncation(2.0))
        assert torch.isfinite(weights).all() and weights.max() <= 2
        statistics = moments.statistics()
        assert statistics["rollout_is_ratio_fraction_high"] + statistics["rollout_is_ratio_fraction_low"] == 1


@pytest.mark.parametrize(
    ("version", "proximal", "behaviour", "current", "expected"),
    [(0, 1, -1.0, -1.5, -1.25), (0, 1, -3.0, -3.5, -3.25), (0, 3, -1.0, -1.5, -1.375), (2, 3, -2.0, -2.2, -2.1)],
)
def test_numbers_of_areal(version, proximal, behaviour, current, expected):
    """The cases of AReaL's ``tests/test_prox_approx.py``, whose current version is the proximal one plus 1."""
    fractions = proximal_fractions(torch.tensor([version]), proximal)
    log_prob = torch.tensor([current], requires_grad=True)
    estimate = loglinear_log_probs(log_prob, torch.tensor([behaviour]), fractions)
    assert estimate.tolist() == pytest.approx([expected]) and not estimate.requires_grad


def test_tokens_of_the_last_version_or_of_none_keep_the_behaviour_policy():
    """Version 5 is that of the last sync; -1 marks tool results; 6 came in while the update ran."""
    versions = torch.tensor([[5, 4, 3, -1, 6]], dtype=torch.int32)
    assert proximal_fractions(versions, 5).tolist() == [pytest.approx([0.0, 1 / 2, 2 / 3, 0.0, 0.0])]


@pytest.mark.parametrize(("bounds", "weights"), [((1.5, None), [0.5, 1.0, 1.5]), ((1.5, 0.6), [0.0, 1.0, 0.0])])
def test_weights_are_the_ratio_of_proximal_and_behaviour_policy(bounds, weights):
    proximal, behaviour = torch.tensor([math.log(0.5), 0.0, 500.0]), torch.zeros(3)
    result = proximal_weights(proximal, behaviour, Truncation(*bounds))
    assert result.tolist() == pytest.approx(weights)
