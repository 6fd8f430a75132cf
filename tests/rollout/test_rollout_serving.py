"""The engine server: a real embedded engine in a thread, with several clients."""

import math
import threading
import time
from dataclasses import replace

import pytest
from engine_stops import Stops
from support.expected_errors import raises

from megarl.rollout import Completion, EngineOptions, Request, SamplingParams, create_engine
from megarl.rollout.serving import EngineServer

LONG = 4000


@pytest.fixture(scope="module")
def engine(make_folder):
    folder = make_folder(max_position_embeddings=4096)
    engine = create_engine("embedded", str(folder), EngineOptions(max_num_seqs=4))
    engine.load_hf(str(folder))
    yield engine
    engine.shutdown()


def request(name, tokens, seed=0):
    return Request(name, [3, 11, 12], SamplingParams(tokens, ignore_eos=True), seed)


def fetch(server, client, count):
    done = []
    while len(done) < count:
        done += server.completions(client, 5.0)
    return {completion.request_id: completion for completion in done}


def test_requests_that_arrive_while_others_run_get_the_same_tokens_and_go_to_their_client(engine):
    alone = {seed: engine.generate([request("r", 20, seed)])[0].token_ids for seed in range(6)}
    server = EngineServer(engine)
    server.accept("a", [request("a0", 60, 0), request("a1", 20, 1)])
    for seed in range(2, 6):
        server.accept("b", [request(f"b{seed}", 20, seed)])
    assert {name: done.token_ids for name, done in fetch(server, "b", 4).items()} == {
        f"b{seed}": alone[seed] for seed in range(2, 6)
    }
    ended = fetch(server, "a", 2)
    assert ended["a1"].token_ids == alone[1] and ended["a0"].token_ids[:20] == alone[0]
    assert server.completions("a", 5.0) == [] == server.completions("unknown", 5.0), "without requests, no wait"


def test_a_request_interrupts_the_wait_for_a_long_one(engine, monkeypatch):
    """The poll would last for an hour."""
    monkeypatch.setattr("megarl.rollout.serving.POLL_S", 3600.0)
    server = EngineServer(engine)
    server.accept("a", [request("long", LONG)])
    server.accept("b", [request("short", 2)])
    assert list(fetch(server, "b", 1)) == ["short"] and "long" in server._open
    server.accept("a", [], ["long", "unknown"])
    (done,) = fetch(server, "a", 1).values()
    assert done.finish_reason == "abort" and len(done.token_ids) < LONG


def test_requests_of_a_client_that_is_gone_are_aborted(engine):
    server = EngineServer(engine)
    server.accept("gone", [request(f"g{n}", LONG) for n in range(6)])
    server.accept("stays", [request("s", 5)])
    server.forget("gone")
    assert not any(name.startswith("g") for name in server._open)
    assert list(fetch(server, "stays", 1)) == ["s"]
    server.forget("gone")
    engine.sleep(["kv_cache"])  # nothing is running
    engine.wake(["kv_cache"])


def test_a_refused_request_ends_alone(engine):
    alone = engine.generate([request("f", 30)])[0].token_ids
    server = EngineServer(engine)
    server.accept("a", [request("running", 300)])
    unusable = {
        "rollout.request-too-long": {"params": SamplingParams(10**6)},
        "rollout.token-id-range": {"prompt_ids": [3, 50]},
        "rollout.token-id-type": {"prompt_ids": [3, None]},
        "rollout.request-failed": {"prompt_ids": None},
        "rollout.seed-type": {"seed": "5"},
        "rollout.stop-without-tokenizer": {"params": SamplingParams(5, stop=("x",))},
    }
    refused = [replace(request(code, 5), **fields) for code, fields in unusable.items()]
    server.accept("a", [*refused, request("f", 30)])
    server.accept("b", [request("other", 5)])
    done = fetch(server, "a", len(unusable) + 2)
    refusals = {name: completion.refusal.code for name, completion in done.items() if completion.refusal}
    assert refusals == {code: code for code in unusable}
    assert all(done[name].token_ids == [] for name in unusable)
    assert done["f"].token_ids == alone and len(done["running"].token_ids) == 300
    assert list(fetch(server, "b", 1)) == ["other"]


def test_a_failed_engine_fails_all_clients_and_serves_again(engine, monkeypatch):
    server = EngineServer(engine)
    with monkeypatch.context() as patch:
        patch.setattr(math, "isfinite", lambda value: False)
        for client in "ab":
            server.accept(client, [request(client, 9)])
        for client in "ab":
            with raises("rollout.logprobs-not-finite"):
                fetch(server, client, 1)
    server.accept("a", [request("again", 3)])
    assert list(fetch(server, "a", 1)) == ["again"]


def test_a_hanging_engine_reports_nothing():
    """An empty report would tell the router that the replica works."""

    answer = Completion("r", [7], [0.0], "length", 1)

    class Hanging:
        released = threading.Event()

        def interrupt_poll(self): ...

        def submit(self, requests): ...

        def abort(self, names): ...

        def poll(self, timeout_s):
            self.released.wait()
            return [answer]

    engine = Hanging()
    server = EngineServer(engine)
    server.accept("a", [request("r", 1)])
    reports = []
    thread = threading.Thread(target=lambda: reports.append(server.completions("a", 0.0)), daemon=True)
    thread.start()
    time.sleep(0.3)
    assert reports == []
    engine.released.set()
    thread.join(60)
    assert reports == [[answer]]


def test_paused_requests_continue_with_the_next_weights(make_folder, monkeypatch):
    """Each part of a response is that of its weights; a request that came during the pause has the new ones only."""
    old, new = (make_folder(seed=seed, max_position_embeddings=4096) for seed in (0, 1))
    engine = create_engine("embedded", str(old), EngineOptions(max_num_seqs=4))
    engine.load_hf(str(old), 3)
    whole = {seed: engine.generate([request("r", 200, seed)])[0].token_ids for seed in range(6)}
    server = EngineServer(engine)
    stops = Stops(monkeypatch, 20, 1, lambda: server._paused)
    server.accept("a", [request(f"a{seed}", 200, seed) for seed in range(6)])  # two of them wait for a slot
    server.accept("b", [request("b", LONG, 9)])
    stops.wait()
    held = server.pause()
    assert 0 < held.requests <= 4 and held.tokens > 3 * held.requests
    assert server.completions("b", 0.0) == [], "a pause is no hang"
    server.accept("b", [], ["b"])
    server.accept("a", [request("late", 10)])
    engine.load_hf(str(new), 4)
    alone = engine.generate([request("late", 10)])[0].token_ids
    server.resume()
    done = fetch(server, "a", 7)
    assert done["late"].token_ids == alone and done["late"].versions == (4,) * 10
    aborted = fetch(server, "b", 1)["b"]
    parts = [done[f"a{seed}"].versions.count(3) for seed in range(6)]
    assert aborted.finish_reason == "abort"
    assert sum(count > 0 for count in [*parts, len(aborted.token_ids)]) == held.requests
    for seed, count in enumerate(parts):
        ended = done[f"a{seed}"]
        assert ended.versions == (3,) * count + (4,) * (200 - count) and ended.finish_reason == "length"
        assert ended.token_ids[:count] == whole[seed][:count]
        prior = replace(ended, token_ids=ended.token_ids[:count], log_probs=ended.log_probs[:count], weight_versions=())
        rest = engine.generate([replace(request("r", 200, seed), prior=prior if count else None)])[0]
        assert ended.token_ids == rest.token_ids


def test_a_request_that_the_engine_cannot_continue_begins_again(engine, monkeypatch):
    monkeypatch.setattr(engine, "can_continue", lambda request: request.params.repetition_penalty == 1)
    penalized = SamplingParams(20, ignore_eos=True, repetition_penalty=1.2)
    new = Request("new", [3, 11, 12], penalized, 4)
    (whole,) = engine.generate([new])
    prior = Completion("new", [5] * 10, [-1.0] * 10, "abort", -1)
    server = EngineServer(engine)
    server.accept("a", [replace(new, prior=prior), replace(request("kept", 20), prior=prior)])
    done = fetch(server, "a", 2)
    assert done["new"].token_ids == whole.token_ids and done["kept"].token_ids[:10] == [5] * 10
    assert (done["new"].discarded_tokens, done["kept"].discarded_tokens) == (10, 0)
    assert server._open == {}


def test_pauses_change_no_response_of_the_same_weights(engine, monkeypatch):
    """Stop strings, penalties, random numbers and limits do not see the interruptions."""
    params = [
        SamplingParams(300, ignore_eos=True),
        SamplingParams(300, 0.0, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(300, 0.8, top_k=5, ignore_eos=True, stop_token_ids=(9,)),
    ]
    requests = [Request(str(n), [3, 11, n], one, n) for n, one in enumerate(params)]
    whole = {done.request_id: done for done in engine.generate(requests)}
    server = EngineServer(engine)
    stops = Stops(monkeypatch, 13, 20, lambda: server._paused)
    server.accept("a", requests)
    interrupted = 0
    for _ in range(20):
        stops.wait()
        interrupted += server.pause().requests
        server.resume()
    done = fetch(server, "a", 3)
    assert interrupted >= 20
    for name, expected in whole.items():
        assert done[name].token_ids == expected.token_ids and done[name].finish_reason == expected.finish_reason
        assert done[name].log_probs == pytest.approx(expected.log_probs, abs=1e-5)
