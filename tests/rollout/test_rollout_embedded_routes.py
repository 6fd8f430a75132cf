"""Experts that the embedded engine returns, for routing replay: those of transformers' routers."""

from dataclasses import replace

import numpy as np
import pytest
from support.expected_errors import raises

from megarl.rollout import EngineOptions, Request, SamplingParams, create_engine

START = list(range(10, 34))
PROMPTS = [[1], [2, 3, 4], *([*START, tail] for tail in range(4)), [5] * 7]


def routing_engine(folder, **options):
    engine = create_engine("embedded", str(folder), EngineOptions(return_routes=True, **options))
    engine.load_hf(str(folder))
    return engine


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_routes_equal_transformers_while_slots_are_refilled(make_folder, reference_for, family):
    """With prompts of one group, a shared prefix, and requests that need no routes of their first tokens."""
    folder = make_folder(family)
    engine, reference = routing_engine(folder, max_num_seqs=3), reference_for(folder)
    requests = [
        Request(
            f"r{i}-{j}", prompt, SamplingParams(3 + 4 * i + j, ignore_eos=True), i, routes_from=j * len(prompt) // 2
        )
        for i, prompt in enumerate(PROMPTS)
        for j in range(3)
    ]
    requests.append(Request("plain", PROMPTS[1], SamplingParams(4), 0))
    *completions, plain = engine.generate(requests)
    assert plain.routes is None
    for request, completion in zip(requests, completions, strict=False):
        expected = reference.routes([*request.prompt_ids, *completion.token_ids])
        assert completion.routes.dtype == np.int16
        assert np.array_equal(np.sort(completion.routes, -1), expected[request.routes_from : -1])


def test_an_interrupted_response_keeps_its_routes(make_folder, reference_for):
    """The new weights select other experts for the tokens before the interruption, which are computed again."""
    old, new = make_folder("qwen3_moe", seed=0), make_folder("qwen3_moe", seed=1)
    engine = routing_engine(old)
    request = Request("r", [3, 1, 4], SamplingParams(12, ignore_eos=True), 0, routes_from=1)
    (half,) = engine.generate([replace(request, params=SamplingParams(5, ignore_eos=True))])
    engine.load_hf(str(new), version=1)
    (whole,) = engine.generate([replace(request, prior=half)])
    ids, before = [*request.prompt_ids, *whole.token_ids], len(half.routes)
    assert whole.token_ids[: len(half.token_ids)] == half.token_ids and len(whole.routes) == len(ids) - 2
    first, second = (reference_for(folder).routes(ids)[1:-1] for folder in (old, new))
    assert not np.array_equal(first[:before], second[:before])
    assert np.array_equal(np.sort(whole.routes, -1), np.concatenate([first[:before], second[before:]]))


def test_routes_that_the_engine_does_not_record_are_refused(make_folder):
    folder = make_folder("qwen3_moe")
    with raises("rollout.routes-off", "'r'", "routes_from=0", "return_routes=False"):
        engine = create_engine("embedded", str(folder))
        engine.load_hf(str(folder))
        engine.generate([Request("r", [1], SamplingParams(1), 0, routes_from=0)])
    with raises("rollout.routes-range", "'r'", "routes_from=2, expected 0 to 1"):
        routing_engine(folder).generate([Request("r", [1], SamplingParams(1), 0, routes_from=2)])
    with raises("model.no-experts", "return_routes=True", "Qwen2ForCausalLM"):
        create_engine("embedded", str(make_folder()), EngineOptions(return_routes=True))
