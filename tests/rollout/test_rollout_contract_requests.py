"""Contract of requests that are added and aborted while others run; the reference is the same request alone."""

import threading
from dataclasses import replace

import pytest
from support.expected_errors import raises
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megarl.base.errors import WeightSyncError
from megarl.rollout import Completion, Request, RequestRefused, RolloutError, SamplingParams

VOCAB = 50


def requests_of(lengths, prompt=(1, 2, 3), seed=0, **params):
    params = {"ignore_eos": True, **params}
    return [
        Request(f"r{i}", [*prompt, i % VOCAB], SamplingParams(length, **params), seed + i)
        for i, length in enumerate(lengths)
    ]


def poll_until(engine, count):
    completions = []
    while len(completions) < count:
        completions += engine.poll(5.0)
    return {completion.request_id: completion for completion in completions}


def test_later_requests_give_the_same_tokens_as_alone(engine_for, make_folder):
    engine = engine_for(make_folder())
    requests = requests_of([30, 3, 12, 25, 1, 40, 8, 19], temperature=0.0)
    alone = {request.request_id: engine.generate([request])[0].token_ids for request in requests}
    engine.submit(requests[:2])
    done = poll_until(engine, 1)
    assert set(done) == {"r1"}
    engine.submit(requests[2:5])
    engine.submit([])
    done |= poll_until(engine, 1)
    engine.submit(requests[5:])
    done |= poll_until(engine, len(requests) - len(done))
    assert {name: completion.token_ids for name, completion in done.items()} == alone
    assert engine.poll(0.0) == engine.poll(1.0) == []


def test_a_poll_without_timeout_returns_at_once(engine_for, make_folder):
    engine = engine_for(make_folder())
    engine.submit(requests_of([40]))
    assert engine.poll(0.0) == []
    assert len(poll_until(engine, 1)["r0"].token_ids) == 40


def test_an_interrupted_poll_returns_early(engine_for, make_folder):
    """So that a server can add a request; before a poll the interruption applies to the next one."""
    engine = engine_for(make_folder(seed=3))
    engine.submit(requests_of([100]))
    engine.interrupt_poll()
    assert engine.poll(3600.0) == []
    timer = threading.Timer(0.02, engine.interrupt_poll)
    timer.start()
    done = {completion.request_id: completion for completion in engine.poll(3600.0)}
    timer.join()
    assert len((done or poll_until(engine, 1))["r0"].token_ids) == 100


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_text"])
def test_an_aborted_request_returns_its_tokens_and_others_continue(engine_for, make_folder, family):
    engine = engine_for(make_folder(family))
    requests = requests_of([100, 5, 30, 100], temperature=0.0)
    alone = {request.request_id: engine.generate([request])[0].token_ids for request in requests}
    engine.submit(requests)
    done = poll_until(engine, 1)
    engine.abort(["r0", "r3", "r1", "unknown"])
    done |= poll_until(engine, 3)
    assert {name: completion.finish_reason for name, completion in done.items()} == {
        "r0": "abort", "r1": "length", "r2": "length", "r3": "abort"}  # fmt: skip
    for name, completion in done.items():
        assert completion.token_ids == alone[name][: len(completion.token_ids)]
        assert len(completion.log_probs) == len(completion.token_ids)
    assert len(done["r0"].token_ids) < 100
    assert done["r2"].token_ids == alone["r2"]
    # Their ids are free again.
    assert engine.generate(requests[:1])[0].token_ids == alone["r0"]


def test_a_waiting_request_can_be_aborted(engine_for, make_folder):
    engine = engine_for(make_folder(), max_num_seqs=1)
    engine.submit(requests_of([20, 20, 20]))
    engine.abort(["r1"])
    done = poll_until(engine, 3)
    assert done["r1"].token_ids == [] and done["r1"].finish_reason == "abort"
    assert len(done["r0"].token_ids) == len(done["r2"].token_ids) == 20


def test_ids_of_running_requests_must_differ(engine_for, make_folder):
    engine = engine_for(make_folder())
    requests = requests_of([30])
    with raises("rollout.duplicate-request", "'r0'", error=RolloutError):
        engine.submit([*requests, *requests])
    assert engine.poll(0.0) == []
    engine.submit(requests)
    with raises("rollout.duplicate-request", "'r0'", error=RolloutError):
        engine.submit(requests)
    poll_until(engine, 1)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"top_k": 2**63}, "rollout.sampling-range"),
        ({"top_k": 2**31}, "rollout.sampling-range"),
        ({"top_k": 2.5}, "rollout.sampling-type"),
        ({"max_new_tokens": 5.5}, "rollout.sampling-type"),
        ({"temperature": float("nan")}, "rollout.sampling-range"),
        ({"top_p": float("nan")}, "rollout.sampling-range"),
        ({"stop": "text"}, "rollout.sampling-type"),
        ({"stop": ("",)}, "rollout.sampling-type"),
        ({"stop": (5,)}, "rollout.sampling-type"),
    ],
)
def test_parameters_that_no_engine_can_use_make_no_request(fields, code):
    ((name, value),) = fields.items()
    with raises(code, f"{name}={value!r}", error=RequestRefused):
        SamplingParams(**{"max_new_tokens": 5} | fields)
    SamplingParams(5, top_k=2**31 - 1)


def test_running_requests_forbid_updates_and_sleep(engine_for, make_folder):
    engine = engine_for(make_folder())
    engine.submit(requests_of([60]))
    with raises("engine.requests-running", "1 requests", error=WeightSyncError):
        engine.receiver.begin(3)
    with raises("engine.requests-running", "1 requests", error=RolloutError):
        engine.sleep(["kv_cache"])
    assert not engine.stale and not engine.asleep
    poll_until(engine, 1)
    engine.sleep(["kv_cache"])
    engine.wake(["kv_cache"])


@pytest.fixture(scope="module")
def folder_with_text(tmp_path_factory, make_folder):
    """A model whose token ``i`` is one letter."""
    import shutil

    folder = tmp_path_factory.mktemp("text") / "model"
    shutil.copytree(make_folder(seed=3), folder)
    tokenizer = Tokenizer(models.WordLevel({letter(i): i for i in range(VOCAB)}, unk_token=letter(0)))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=letter(0)).save_pretrained(folder)
    return folder


def letter(token):
    return chr(ord("A") + token)


def test_a_stop_string_ends_generation_after_the_completing_token(engine_for, folder_with_text):
    engine = engine_for(folder_with_text)
    whole = engine.generate(requests_of([60] * 6, temperature=0.0))
    texts = ["".join(map(letter, completion.token_ids)) for completion in whole]
    # Strings of one to three letters, from somewhere in each answer; the last request has none.
    stops = [(texts[0][17:20],), (texts[1][40:42], texts[1][11:13]), (texts[2][0],), ("~~",), (texts[4][59],), ()]
    requests = [
        Request(f"r{i}", request.prompt_ids, SamplingParams(60, 0.0, stop=stop, ignore_eos=True), request.seed)
        for i, (request, stop) in enumerate(zip(requests_of([60] * 6), stops, strict=True))
    ]
    for text, stop, completion in zip(texts, stops, engine.generate(requests), strict=True):
        ends = [text.find(string) + len(string) for string in stop if string in text]
        assert "".join(map(letter, completion.token_ids)) == text[: min(ends, default=60)]
        assert completion.finish_reason == ("stop" if ends else "length")


def test_a_stop_string_ends_a_response_that_ignores_stop_tokens(engine_for, folder_with_text):
    """``ignore_eos`` is about tokens: generation runs past a stop token to a string of ``stop``."""
    engine = engine_for(folder_with_text)
    (whole,) = engine.generate(requests_of([60], temperature=0.0))
    ids = whole.token_ids
    end = next(i for i in range(2, 60) if ids[i] not in ids[:i])  # a string at a later place than the token
    params = SamplingParams(60, 0.0, stop=(letter(ids[end]),), stop_token_ids=(ids[0],), ignore_eos=True)
    (request,) = requests_of([60])
    (completion,) = engine.generate([Request("r", request.prompt_ids, params, request.seed)])
    assert (completion.token_ids, completion.finish_reason) == (ids[: end + 1], "stop")


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_text"])
def test_a_request_with_a_prior_continues_its_response(engine_for, make_folder, family):
    """The same tokens as without the interruption, since random numbers and limit are those of the whole response."""
    engine = engine_for(make_folder(family))
    requests = [
        Request("greedy", [1, 2, 3], SamplingParams(20, 0.0, ignore_eos=True), 5),
        Request("drawn", [4, 5], SamplingParams(24, top_p=0.9, ignore_eos=True), 6),
    ]
    whole = {completion.request_id: completion for completion in engine.generate(requests)}
    engine.submit(requests)
    continued = []
    for request in requests:
        done = whole[request.request_id]
        prior = Completion(request.request_id, done.token_ids[:9], done.log_probs[:9], "abort", 70)
        continued.append(replace(request, request_id=f"{request.request_id} again", prior=prior))
    engine.submit(continued)
    ended = poll_until(engine, 4)
    for request in requests:
        expected, done = whole[request.request_id], ended[f"{request.request_id} again"]
        assert done.token_ids == expected.token_ids and done.finish_reason == "length"
        assert done.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
        version = engine.weight_version
        assert done.versions == (70,) * 9 + (version,) * (len(expected.token_ids) - 9)
        assert done.weight_version == min(70, version)
    with raises("rollout.prior-too-long", "'greedy again'", "9 tokens"):
        engine.submit([replace(continued[0], params=SamplingParams(9))])
    with raises("rollout.token-id-range", "'greedy again': prior: 50"):
        engine.submit([replace(continued[0], prior=Completion("r", [50], [0.0], "abort", 0))])


def test_an_aborted_request_with_a_prior_returns_both_parts(engine_for, make_folder):
    engine = engine_for(make_folder())
    prior = Completion("r", [8, 9], [-1.0, -2.0], "abort", 3)
    engine.submit([Request("r", [1, 2, 3], SamplingParams(100, ignore_eos=True), 5, prior)])
    engine.abort(["r"])
    done = poll_until(engine, 1)["r"]
    assert done.finish_reason == "abort" and done.token_ids[:2] == [8, 9] and done.log_probs[:2] == [-1.0, -2.0]
    assert done.versions[:2] == (3, 3) and len(done.versions) == len(done.token_ids) == len(done.log_probs)
