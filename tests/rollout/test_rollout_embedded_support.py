"""Sets that the embedded engine samples from, against a numpy filter of transformers' logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.rollout import EngineOptions, Request, SamplingParams, create_engine
from megarl.rollout.embedded.sampling import Sampler

WIDTH, PROMPT = 6, [3, 1, 4]
FILTERS = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.8},
    "all": {"top_k": 5, "top_p": 0.9, "min_p": 0.5, "temperature": 0.7},
    "bound": {"top_p": 0.99},
}


def numpy_filter(logits, params):
    """Token ids inside, by top-k or the bound, then top-p of their mass, then min-p; and their log-probs."""
    scaled = np.asarray(logits, np.float64) / (params.temperature or 1.0)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    most = min(params.support, params.top_k) if params.top_k > 0 else params.support
    order = np.argsort(-probs, kind="stable")[:most]
    ranked = probs[order]
    before = np.cumsum(ranked) - ranked
    inside = order[before < params.top_p * ranked.sum()]
    inside = inside[probs[inside] >= params.min_p * probs.max()]
    if params.temperature == 0:
        inside = inside[:1]
    return inside.tolist(), np.log(probs[inside] / probs[inside].sum())


def check(completion, params, reference, prompt=PROMPT):
    assert completion.support.dtype == np.int32
    assert completion.support.shape == (len(completion.token_ids), params.support)
    sizes = []
    for step, (token, log_prob, row) in enumerate(
        zip(completion.token_ids, completion.log_probs, completion.support, strict=True)
    ):
        inside, log_probs = numpy_filter(reference.next_logits([*prompt, *completion.token_ids[:step]]), params)
        assert sorted(row[row >= 0].tolist()) == sorted(inside)
        assert log_prob == pytest.approx(log_probs[inside.index(token)], abs=2e-5)
        sizes.append(len(inside))
    return sizes


@pytest.fixture(scope="module")
def engine(make_folder):
    folder = make_folder("qwen2")
    engine = create_engine("embedded", str(folder), EngineOptions(max_num_seqs=4))
    engine.load_hf(str(folder))
    return engine


@pytest.mark.parametrize("name", FILTERS)
def test_support_equals_a_filter_of_the_references_logits(engine, make_folder, reference_for, name):
    """Beside requests without a support, which may be longer, and with a wider one."""
    reference = reference_for(make_folder("qwen2"))
    params = SamplingParams(5, ignore_eos=True, support=WIDTH, **FILTERS[name])
    plain = SamplingParams(9, top_p=0.5, ignore_eos=True)
    others = [Request("plain", PROMPT, plain, 5), Request("wide", [7], replace(params, support=WIDTH + 2), 6)]
    requests = [Request(f"r{seed}", PROMPT, params, seed) for seed in range(3)]
    *answers, alone, wide = engine.generate([*requests, *others])
    sizes = [size for answer in answers for size in check(answer, params, reference)]
    assert max(sizes) > 1 and max(sizes) <= WIDTH
    check(wide, replace(params, support=WIDTH + 2), reference, [7])
    assert alone.support is None
    assert alone.log_probs == pytest.approx(reference.log_probs(PROMPT, alone.token_ids), abs=2e-5)


def test_greedy_requests_have_one_token(engine, make_folder, reference_for):
    params = SamplingParams(4, 0.0, ignore_eos=True, support=WIDTH)
    sampled = SamplingParams(6, top_k=2, ignore_eos=True, support=WIDTH)
    (alone,) = engine.generate([Request("greedy", PROMPT, params, 0)])
    mixed, other = engine.generate([Request("greedy", PROMPT, params, 0), Request("r", PROMPT, sampled, 1)])
    for answer in (alone, mixed):
        assert check(answer, params, reference_for(make_folder("qwen2"))) == [1] * 4
        assert answer.log_probs == [0.0] * 4
    assert (other.support >= 0).sum(-1).tolist() == [2] * 6


def test_an_interrupted_response_continues_with_its_support(engine):
    params = SamplingParams(8, top_p=0.6, ignore_eos=True, support=WIDTH)
    request = Request("r", PROMPT, params, 3)
    (whole,) = engine.generate([request])
    (half,) = engine.generate([replace(request, params=replace(params, max_new_tokens=3))])
    (continued,) = engine.generate([replace(request, prior=half)])
    assert continued.token_ids == whole.token_ids
    assert np.array_equal(half.support, whole.support[:3])
    assert np.array_equal(continued.support, whole.support)
    engine.submit([replace(request, prior=half)])
    engine.abort(["r"])
    (aborted,) = engine.poll(1.0)
    assert np.array_equal(aborted.support, half.support) and aborted.token_ids == half.token_ids


def test_ties_and_a_vocabulary_below_the_width():
    """Ties are ranked by id; the set is never larger than the vocabulary."""
    sampler, lanes = Sampler(2, torch.device("cpu")), torch.tensor([0, 1])
    ties, bound = SamplingParams(1, top_k=2, support=9), SamplingParams(1, support=9)
    sampler.assign([0, 1], [ties, bound], [0, 1])
    draws = sampler.draw(torch.tensor([[1.0, 2.0, 1.0, 1.0]] * 2), lanes, torch.zeros(2, dtype=torch.int64))
    assert sorted(draws.support[0].tolist()) == [-1] * 7 + [0, 1]
    assert sorted(draws.support[1].tolist()) == [-1] * 5 + [0, 1, 2, 3]
    expected = torch.tensor([[1.0, 2.0]]).log_softmax(-1)[0, int(draws.tokens[0])]
    torch.testing.assert_close(draws.log_probs[0], expected)
