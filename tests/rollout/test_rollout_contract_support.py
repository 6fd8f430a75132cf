"""Contract of the sampled support for every engine; the reference is transformers' whole-sequence forward."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.rollout import Request, SamplingParams

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [8]]
WIDTH = 20


def check(reference, request, completion):
    """Each set has its token, and the log-prob is that of the softmax over the set; returns the sizes."""
    ids, support = completion.token_ids, completion.support
    assert support.shape == (len(ids), WIDTH) and support.dtype == np.int32
    for step, (token, log_prob, row) in enumerate(zip(ids, completion.log_probs, support, strict=True)):
        inside = row[row >= 0].tolist()
        assert token in inside and len(set(inside)) == len(inside)
        logits = torch.as_tensor(reference.next_logits([*request.prompt_ids, *ids[:step]])).double()
        scaled = logits[inside] / (request.params.temperature or 1.0)
        assert log_prob == pytest.approx(float(scaled.log_softmax(-1)[inside.index(token)]), abs=1e-4)
        assert set(inside) == set(logits.topk(len(inside)).indices.tolist())
    return (support >= 0).sum(-1)


@pytest.mark.parametrize("filters", [{"top_p": 0.6}, {"top_k": 5, "top_p": 0.9}, {"top_k": 3, "temperature": 0.7}])
def test_log_probs_are_over_the_support(engine_for, reference_for, make_folder, filters):
    folder = make_folder("qwen2")
    engine, reference = engine_for(folder), reference_for(folder)
    params = SamplingParams(6, ignore_eos=True, support=WIDTH, **filters)
    requests = [Request(f"r{i}", prompt, params, i) for i, prompt in enumerate(PROMPTS)]
    plain = Request("plain", PROMPTS[0], SamplingParams(8, ignore_eos=True), 9)
    *completions, alone = engine.generate([*requests, plain])
    for request, completion in zip(requests, completions, strict=True):
        sizes = check(reference, request, completion)
        assert 1 < sizes.max() <= filters.get("top_k", WIDTH)
    assert alone.support is None
    expected = reference.log_probs(PROMPTS[0], alone.token_ids)
    assert alone.log_probs == pytest.approx(expected.tolist(), abs=1e-5)


def test_greedy_and_continued_responses(engine_for, reference_for, make_folder):
    folder = make_folder("qwen2")
    engine, reference = engine_for(folder), reference_for(folder)
    greedy = Request("greedy", PROMPTS[0], SamplingParams(5, 0.0, ignore_eos=True, support=WIDTH), 0)
    sampled = Request("r", PROMPTS[1], SamplingParams(7, top_p=0.6, ignore_eos=True, support=WIDTH), 1)
    half_of = replace(sampled, params=replace(sampled.params, max_new_tokens=3))
    most_likely, half = engine.generate([greedy, half_of])
    assert most_likely.support[:, 0].tolist() == most_likely.token_ids
    assert (most_likely.support[:, 1:] == -1).all() and most_likely.log_probs == [0.0] * 5
    (whole,) = engine.generate([replace(sampled, prior=half)])
    check(reference, sampled, whole)
    assert np.array_equal(whole.support[:3], half.support) and whole.token_ids[:3] == half.token_ids
