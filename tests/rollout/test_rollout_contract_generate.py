"""Contract of generation for every engine; the reference is transformers' whole-sequence forward."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.expected_errors import raises

from megarl.rollout import Request, RolloutError, SamplingParams

VOCAB, EOS = 50, 7


def requests_of(prompts, seed=0, **params):
    return [Request(f"r{i}", p, SamplingParams(**params), seed + i) for i, p in enumerate(prompts)]


def mixed_prompts(count, shortest=1, longest=20, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def assert_log_probs_match(reference, requests, completions):
    for request, completion in zip(requests, completions, strict=True):
        expected = reference.log_probs(request.prompt_ids, completion.token_ids, request.params.temperature or 1.0)
        assert torch.tensor(completion.log_probs).double() == pytest.approx(expected, abs=1e-5)


DENSE = ["qwen2", "qwen3", "llama", "olmo2", "olmo3", "gemma3_text", "qwen3_5_text"]
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3"]
MIXTURES += ["qwen3_next", "qwen3_5_moe_text", "gpt_oss"]
FAMILIES = [*((family, False) for family in (*DENSE, *MIXTURES)), ("qwen2", True), ("gemma3_text", True)]


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_log_probs_equal_a_whole_forward_while_slots_are_refilled(engine_for, reference_for, make_folder, family, tied):
    folder = make_folder(family, tied)
    rng = random.Random(1)
    prompts = [p for p in mixed_prompts(6) for _ in range(rng.randint(1, 4))]
    requests = [
        Request(f"r{i}", p, SamplingParams(rng.randint(1, 30), rng.choice([0.0, 0.7, 1.0, 1.3]), ignore_eos=True), i)
        for i, p in enumerate(prompts)
    ]
    rng.shuffle(requests)
    completions = engine_for(folder, max_num_seqs=3).generate(requests)
    assert [c.request_id for c in completions] == [r.request_id for r in requests]
    assert [len(c.token_ids) for c in completions] == [r.params.max_new_tokens for r in requests]
    assert {c.finish_reason for c in completions} == {"length"}
    assert_log_probs_match(reference_for(folder), requests, completions)


@pytest.mark.parametrize("family", ["qwen2", "olmo3", "qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss"])
def test_prompts_with_a_shared_prefix(engine_for, reference_for, make_folder, family):
    folder = make_folder(family)
    start = [3] * 3 + list(range(20, 40))
    requests = requests_of([start + tail for tail in mixed_prompts(9, shortest=1, longest=9)], max_new_tokens=12)
    completions = engine_for(folder, max_num_seqs=4).generate(requests)
    assert_log_probs_match(reference_for(folder), requests, completions)


def test_running_sequences_continue_after_others_end(engine_for, reference_for, make_folder):
    folder = make_folder()
    prompts = [[1], [2], [3], *mixed_prompts(3, shortest=25, longest=30), [4, 5], [6]]
    limits = [1, 2, 1, 9, 9, 9, 9, 9]
    requests = [
        Request(f"r{i}", p, SamplingParams(n, ignore_eos=True), i)
        for i, (p, n) in enumerate(zip(prompts, limits, strict=True))
    ]
    completions = engine_for(folder, max_num_seqs=16).generate(requests)
    assert_log_probs_match(reference_for(folder), requests, completions)


def test_greedy_takes_the_most_likely_token(engine_for, reference_for, make_folder):
    folder = make_folder()
    prompts = mixed_prompts(5)
    requests = requests_of(prompts, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    completions = engine_for(folder, max_num_seqs=4).generate(requests)
    assert [c.token_ids for c in completions] == [reference_for(folder).greedy(p, 8) for p in prompts]


def test_a_seed_gives_the_same_tokens_in_any_batch(engine_for, make_folder):
    folder = make_folder()
    requests = requests_of(mixed_prompts(12), seed=100, max_new_tokens=15)
    together = engine_for(folder, max_num_seqs=16).generate(requests)
    crowded = engine_for(folder, max_num_seqs=4).generate(list(reversed(requests)))[::-1]
    alone = [engine_for(folder, max_num_seqs=16).generate([request])[0] for request in requests[:4]]
    filtered = Request("other", requests[0].prompt_ids, SamplingParams(15, 0.5, top_p=0.8, top_k=5), 1)
    mixed = engine_for(folder, max_num_seqs=16).generate([filtered, *requests])[1:]
    for other in (crowded, alone, mixed):
        assert [c.token_ids for c in other] == [c.token_ids for c in together[: len(other)]]


def test_samples_of_one_prompt_differ_by_seed(engine_for, make_folder):
    requests = requests_of([[5, 6, 8]] * 8, max_new_tokens=10, ignore_eos=True)
    completions = engine_for(make_folder(), max_num_seqs=16).generate(requests)
    assert len({tuple(c.token_ids) for c in completions}) == 8


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_follow_the_models_distribution(engine_for, reference_for, make_folder, temperature):
    folder, prompt, count = make_folder(), [9, 4, 30, 2], 4000
    requests = requests_of([prompt] * count, max_new_tokens=1, temperature=temperature)
    completions = engine_for(folder, max_num_seqs=4000).generate(requests)
    drawn = Counter(c.token_ids[0] for c in completions)
    expected = (reference_for(folder).next_logits(prompt) / temperature).softmax(-1) * count
    common = [token for token in range(VOCAB) if expected[token] >= 5]
    rare = sum(drawn[t] for t in range(VOCAB) if t not in common), count - sum(float(expected[t]) for t in common)
    cells = [(drawn[t], float(expected[t])) for t in common] + ([rare] if rare[1] >= 1 else [])
    chi_square = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    freedom = len(cells) - 1
    assert freedom >= 10
    # Six standard deviations; the seeds are fixed, so this never flickers.
    assert chi_square < freedom + 6 * (2 * freedom) ** 0.5


def test_top_k_and_top_p_sample_only_likely_tokens(engine_for, reference_for, make_folder):
    folder, prompt = make_folder(), [9, 4, 30, 2]
    probs = reference_for(folder).next_logits(prompt).softmax(-1)
    ranked = probs.argsort(descending=True).tolist()
    nucleus = next(n for n in range(1, VOCAB) if probs[ranked[:n]].sum() >= 0.6)
    assert nucleus > 2
    engine = engine_for(folder, max_num_seqs=512)

    def drawn(**params):
        completions = engine.generate(requests_of([prompt] * 400, max_new_tokens=1, **params))
        # Log-probs stay those of the whole distribution.
        for c in completions[:20]:
            assert c.log_probs[0] == pytest.approx(float(probs[c.token_ids[0]].log()), abs=1e-5)
        return {c.token_ids[0] for c in completions}

    assert drawn(top_k=3) == set(ranked[:3])
    assert drawn(top_k=1) == {ranked[0]}
    assert drawn(top_p=0.6) == set(ranked[:nucleus])
    assert drawn(top_p=1e-6) == {ranked[0]}


def test_min_p_samples_only_likely_tokens(engine_for, reference_for, make_folder):
    folder, prompt = make_folder(), [9, 4, 30, 2]
    probs = reference_for(folder).next_logits(prompt).softmax(-1)
    ranked = probs.argsort(descending=True).tolist()
    share = float((probs[ranked[4]] + probs[ranked[5]]) / 2 / probs[ranked[0]])  # between the fifth and the sixth
    engine = engine_for(folder, max_num_seqs=512)

    def drawn(**params):
        completions = engine.generate(requests_of([prompt] * 400, max_new_tokens=1, **params))
        for c in completions[:20]:
            assert c.log_probs[0] == pytest.approx(float(probs[c.token_ids[0]].log()), abs=1e-5)
        return {c.token_ids[0] for c in completions}

    assert drawn(min_p=share) == set(ranked[:5])
    assert drawn(min_p=1.0) == {ranked[0]}
    assert drawn(min_p=share, top_k=3) == set(ranked[:3])


def test_repetition_penalty_lowers_the_tokens_of_the_response(engine_for, reference_for, make_folder):
    folder, prompt, penalty = make_folder(), [9, 4, 30, 2], 1.8
    reference = reference_for(folder)
    greedy = requests_of([prompt], max_new_tokens=10, temperature=0.0, repetition_penalty=penalty, ignore_eos=True)
    sampled = requests_of([prompt] * 3, max_new_tokens=10, temperature=0.7, repetition_penalty=penalty, ignore_eos=True)
    plain = requests_of([prompt], max_new_tokens=10, temperature=0.0, ignore_eos=True)
    requests = [replace(r, request_id=f"p{i}") for i, r in enumerate([*greedy, *sampled, *plain])]
    completions = engine_for(folder, max_num_seqs=16).generate(requests)
    assert completions[-1].token_ids == reference.greedy(prompt, 10)  # a neighbour without penalty
    for request, completion in zip(requests[:-1], completions[:-1], strict=True):
        ids: list[int] = []
        for token, log_prob in zip(completion.token_ids, completion.log_probs, strict=True):
            logits = reference.next_logits([*prompt, *ids]).clone()
            for seen in set(ids):  # of the response, not of the prompt
                logits[seen] = logits[seen] / penalty if logits[seen] > 0 else logits[seen] * penalty
            expected = (logits / (request.params.temperature or 1.0)).log_softmax(-1)
            assert log_prob == pytest.approx(float(expected[token]), abs=2e-5)
            if request.params.temperature == 0:
                assert token == int(logits.argmax())
            ids.append(token)


class TestStopping:
    @pytest.fixture
    def answer(self, reference_for, make_folder):
        return reference_for(make_folder()).greedy([1, 2, 3], 12)

    def generate(self, engine_for, folder, **params):
        params = {"max_new_tokens": 12, "temperature": 0.0, **params}
        return engine_for(folder, max_num_seqs=16).generate([Request("r", [1, 2, 3], SamplingParams(**params), 0)])[0]

    def test_a_stop_token_ends_the_response_and_is_included(self, engine_for, make_folder, answer):
        stop = answer[4]
        first = answer.index(stop)
        done = self.generate(engine_for, make_folder(), stop_token_ids=(stop,))
        assert done.token_ids == answer[: first + 1]
        assert done.finish_reason == "stop"
        assert len(done.log_probs) == first + 1

    def test_ignore_eos_runs_to_the_limit(self, engine_for, make_folder, answer):
        done = self.generate(engine_for, make_folder(), stop_token_ids=(answer[4],), ignore_eos=True)
        assert (done.token_ids, done.finish_reason) == (answer, "length")

    def test_the_limit_ends_the_response(self, engine_for, make_folder, answer):
        done = self.generate(engine_for, make_folder(), max_new_tokens=3, stop_token_ids=())
        assert (done.token_ids, done.finish_reason) == (answer[:3], "length" if answer[2] != EOS else "stop")

    def test_the_models_eos_ends_the_response(self, engine_for, make_folder, answer):
        folder = make_folder(eos_token_id=answer[4])
        done = self.generate(engine_for, folder)
        assert done.token_ids == answer[: answer.index(answer[4]) + 1]
        assert done.finish_reason == "stop"

    def test_a_stop_token_as_the_last_allowed_one_counts_as_stop(self, engine_for, make_folder, answer):
        first = answer.index(answer[4])
        done = self.generate(engine_for, make_folder(), max_new_tokens=first + 1, stop_token_ids=(answer[4],))
        assert done.finish_reason == "stop"

    def test_each_request_has_its_own_stop_tokens(self, engine_for, make_folder, answer):
        stops = [(answer[4],), (answer[1],), ()]
        requests = [
            Request(f"r{i}", [1, 2, 3], SamplingParams(12, 0.0, stop_token_ids=ids), 0) for i, ids in enumerate(stops)
        ]
        done = engine_for(make_folder(), max_num_seqs=16).generate(requests)
        lengths = [answer.index(answer[4]) + 1, answer.index(answer[1]) + 1, 12]
        assert [len(c.token_ids) for c in done] == lengths


def test_generate_without_requests(engine_for, make_folder):
    assert engine_for(make_folder(), max_num_seqs=16).generate([]) == []


@pytest.mark.parametrize(
    ("prompt", "params", "code", "value"),
    [
        ([], {}, "rollout.empty-prompt", "prompt"),
        ([1, VOCAB], {}, "rollout.token-id-range", f"prompt_ids: {VOCAB}"),
        ([-1], {}, "rollout.token-id-range", "prompt_ids: -1"),
        ([1] * 100, {"max_new_tokens": 29}, "rollout.request-too-long", "max_model_len=128"),
        ([1], {"stop_token_ids": (999,)}, "rollout.token-id-range", "stop_token_ids: 999"),
    ],
)
def test_an_invalid_request_is_refused_by_id(engine_for, make_folder, prompt, params, code, value):
    good = Request("good", [1], SamplingParams(2), 0)
    bad = Request("bad", prompt, SamplingParams(**{"max_new_tokens": 2, **params}), 0)
    with raises(code, "request 'bad'", value, error=RolloutError):
        engine_for(make_folder(), max_num_seqs=16).generate([good, bad])


@pytest.mark.parametrize(
    "field",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 2.1},
    ],
)
def test_sampling_parameters_out_of_range_are_refused(field):
    name, value = next(iter(field.items()))
    with raises("rollout.sampling-range", f"{name}={value}", error=RolloutError):
        SamplingParams(**{"max_new_tokens": 1, **field})
