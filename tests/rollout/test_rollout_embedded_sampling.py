import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout import SamplingParams
from megarl.rollout.embedded.sampling import Sampler, filter_top_k_top_p, uniform_table


def split_mix(seed, count):
    """The published algorithm in Python integers, for one stream."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    start = mix((seed + golden) & mask)
    return [(mix((start + j * golden) & mask) >> 11) / 2**53 for j in range(1, count + 1)]


def test_uniforms_depend_on_seed_and_position_only():
    seeds = [0, 1, 2**63 + 5, 2**64 - 1]
    table = uniform_table(seeds, 7)
    assert table.tolist() == [split_mix(seed, 7) for seed in seeds]
    assert uniform_table([-1], 3).tolist() == [split_mix(2**64 - 1, 3)]
    assert (uniform_table(seeds, 3) == table[:, :3]).all()


def test_uniforms_are_uniform_along_both_axes():
    for table in (uniform_table(range(2000), 50), uniform_table(range(50), 2000).T):
        assert table.min() >= 0
        assert table.max() < 1
        counts = np.histogram(table, bins=20, range=(0, 1))[0]
        assert abs(counts - 5000).max() < 5 * 5000**0.5
        centred = table - 0.5
        neighbours = [(centred[1:] * centred[:-1]).mean(), (centred[:, 1:] * centred[:, :-1]).mean()]
        assert np.abs(neighbours).max() < 5 / 12 / table.size**0.5


def loop_keep(probs, top_k, top_p):
    """Top-k, then top-p over the rest, one token at a time."""
    ranked = sorted(range(len(probs)), key=lambda token: (-probs[token], token))[:top_k]
    mass, before, kept = sum(probs[t] for t in ranked), 0.0, [0.0] * len(probs)
    for rank, token in enumerate(ranked):
        if rank == 0 or before < top_p * mass:
            kept[token] = probs[token]
        before += probs[token]
    return kept


@settings(max_examples=60)
@given(
    weights=st.lists(st.lists(st.integers(0, 8), min_size=6, max_size=6).filter(any), min_size=1, max_size=4),
    top_k=st.sampled_from([1, 2, 5, 2**31]),
    top_p=st.sampled_from([1e-9, 0.3, 0.75, 1.0]),
)
def test_top_k_and_top_p_filter_against_a_loop(weights, top_k, top_p):
    # Multiples of 1/64 add up exactly, so that no outcome hangs on rounding.
    probs = torch.tensor(weights, dtype=torch.float32) / 64
    rows = len(weights)
    kept = filter_top_k_top_p(probs, torch.full((rows,), top_k), torch.full((rows,), top_p, dtype=torch.float64))
    for row, expected in zip(kept.tolist(), probs.tolist(), strict=True):
        wanted = loop_keep(expected, top_k, top_p)
        assert row == wanted


def draw(logits, params, seeds=None, steps=None):
    rows = len(params)
    sampler = Sampler(rows + 2, torch.device("cpu"))
    # Lanes are given in any order, and were used before.
    lanes = list(range(rows + 2))[::-1]
    sampler.assign(lanes, [SamplingParams(3, 0.3, top_k=2)] * len(lanes), [5] * len(lanes))
    sampler.release(lanes)
    lanes = lanes[:rows]
    sampler.assign(lanes, params, list(seeds or range(rows)))
    steps = torch.zeros(rows, dtype=torch.int64) if steps is None else steps
    return sampler.draw(logits, torch.tensor(lanes), steps)[:2]


def test_tokens_invert_the_cumulative_distribution():
    torch.manual_seed(0)
    logits, count = torch.randn(40, 13), 40
    temperature = 0.8
    tokens, log_probs = draw(logits, [SamplingParams(1, temperature)] * count)
    probs = (logits.double() / temperature).softmax(-1)
    for row, u in enumerate(uniform_table(range(count), 1)[:, 0]):
        total, expected = 0.0, 0
        for expected in range(13):
            total += float(probs[row, expected])
            if total > u:
                break
        assert tokens[row] == expected
        assert log_probs[row] == pytest.approx(float(probs[row, expected].log()), abs=1e-6)


def test_impossible_tokens_are_never_drawn(monkeypatch):
    # The largest and smallest random numbers there are, against zero probability at both ends.
    extremes = np.array([[0.0], [1 - 2**-53]])
    table = "megarl.rollout.embedded.sampling.uniform_table"
    monkeypatch.setattr(table, lambda seeds, count: np.resize(extremes, (len(seeds), count)))
    row = torch.tensor([-torch.inf, -torch.inf, 0.3, -1.0, 0.1, -torch.inf])
    tokens, log_probs = draw(torch.stack([row, row]), [SamplingParams(1)] * 2)
    assert tokens.tolist() == [2, 4]
    assert log_probs.isfinite().all()


def test_each_row_has_its_own_parameters():
    torch.manual_seed(0)
    logits = torch.randn(1, 30).expand(6, 30)
    settings_ = [
        SamplingParams(1),
        SamplingParams(1, 0.0),
        SamplingParams(1, 1.7),
        SamplingParams(1, top_k=4),
        SamplingParams(1, top_p=0.5),
        SamplingParams(1, min_p=0.4),
    ]
    together = draw(logits, settings_, seeds=[3] * 6)
    for row, params in enumerate(settings_):
        token, log_prob = draw(logits[:1], [params], seeds=[3])
        assert (together[0][row], together[1][row]) == (token[0], log_prob[0])
    assert together[0][1] == logits[0].argmax()
    assert together[1][1] == logits[0].log_softmax(-1).max()


def test_a_random_stream_continues_with_the_steps():
    logits = torch.zeros(1, 1000)
    params = [SamplingParams(50)]
    drawn = [int(draw(logits, params, [9], torch.tensor([step]))[0]) for step in range(50)]
    assert drawn == [int(u * 1000) for u in uniform_table([9], 50)[0]]


def test_repetition_penalty_forgets_the_lanes_former_request():
    sampler, lanes = Sampler(2, torch.device("cpu")), torch.tensor([0, 1])
    logits = torch.tensor([[1.0, 0.9, -0.5], [1.0, 0.9, -0.5]])
    greedy = SamplingParams(9, 0.0, repetition_penalty=2.0)
    sampler.assign([0, 1], [greedy, SamplingParams(9, 0.0)], [0, 0])
    drawn = [sampler.draw(logits, lanes, torch.full((2,), step))[0].tolist() for step in range(3)]
    assert drawn == [[0, 0], [1, 0], [0, 0]]  # 1.0; then 0.9 above 1.0 / 2; then 0.5 above 0.45
    sampler.release([0])
    sampler.assign([0], [greedy], [0])
    assert sampler.draw(logits, lanes, torch.zeros(2, dtype=torch.int64))[0].tolist() == [0, 0]
