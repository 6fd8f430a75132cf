"""Records of a conversation's turns: stored turns are not generated again, and experts are gathered (R3)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from support.expected_errors import raises

from megarl.agents.loop import Transcript
from megarl.agents.trajectories import PackedSamples, trajectories_to_batch
from megarl.agents.turns import RouteRecord, TurnRecord, context_digest
from megarl.agents.types import Conversation, SampleId, Trajectory
from megarl.rollout.interface import Completion, SamplingParams

PARAMS = SamplingParams(6)


class CountingEngine:
    """Generates the tokens 0, 1, 2, ... of each response under a version; a response has ``length`` tokens at most."""

    def __init__(self, length=100, version=1):
        self.length, self.version = length, version
        self.priors: list[list[int]] = []

    async def generate(
        self,
        prompt_ids,
        params,
        *,
        prior,
        **_,
    ):
        await asyncio.sleep(0)
        first = 0 if prior is None else len(prior.token_ids)
        self.priors.append([] if prior is None else list(prior.token_ids))
        end = min(self.length, params.max_new_tokens)
        tokens = list(range(first, end))
        finish = "stop" if end == self.length else "length"
        return Completion("r", tokens, [-0.5] * len(tokens), finish, self.version).after(prior)


def turn_record(engine, turns=()):
    return TurnRecord(engine.generate, turns)


async def lead(turns, count=3):
    """Generate turns, with an observation of two tokens after each."""
    transcript = Transcript(Conversation((), PARAMS, prompt_ids=[7, 8], seed=5))
    transcript.conversation = replace(transcript.conversation, params=SamplingParams(100))
    for _ in range(count):
        await transcript.generate(turns.generate, PARAMS)
        transcript.observe([50, 51])
    return transcript.end("stop")


def test_a_conversation_that_resumes_generates_the_missing_tokens_only():
    engine = CountingEngine(4)
    turns = turn_record(engine)
    whole = asyncio.run(lead(turns))
    stored = turns.stored({})
    assert [turn.token_ids.tolist() for turn in stored] == [[0, 1, 2, 3]] * 3 and len(engine.priors) == 3
    assert asyncio.run(lead(turn_record(engine, turns=stored))) == whole
    assert len(engine.priors) == 3, "the engine was not asked again"

    half = replace(stored[1], token_ids=stored[1].token_ids[:2], log_probs=stored[1].log_probs[:2],
                   versions=stored[1].versions[:2], finish_reason="abort")  # fmt: skip
    later = CountingEngine(4, version=3)
    resumed = asyncio.run(lead(turn_record(later, turns=[stored[0], half])))
    assert later.priors == [[0, 1], []]
    assert resumed.response_ids == whole.response_ids and resumed.response_mask == whole.response_mask
    versions = [version for version, mask in zip(resumed.weight_versions, resumed.response_mask, strict=True) if mask]
    assert versions == [1] * 6 + [3] * 6 and whole.weight_version == 1 and not len(whole.weight_versions)


def test_a_tool_that_answers_differently_makes_later_turns_new():
    engine = CountingEngine(4)
    turns = turn_record(engine)
    asyncio.run(lead(turns))

    async def other(turns):
        transcript = Transcript(Conversation((), SamplingParams(100), prompt_ids=[7, 8], seed=5))
        for _ in range(2):
            await transcript.generate(turns.generate, PARAMS)
            transcript.observe([60])

    assert not turns.was_led_again
    again = turn_record(engine, turns=turns.stored({}))
    asyncio.run(other(again))
    assert again.was_led_again
    assert len(engine.priors) == 4, "three turns before; then the second turn only"


def test_unfinished_turns_of_the_engine_are_stored_once_they_are_open():
    async def run():
        waiting = asyncio.Event()

        async def generate(*_, **__):
            waiting.set()
            return await asyncio.Future()

        turns = TurnRecord(generate, ())
        task = asyncio.ensure_future(turns.generate([7, 8], PARAMS, seed=5, key=""))
        await waiting.wait()
        part = Completion("r", [1, 2], [-1.0, -2.0], "abort", 4, (3, 4))
        stored = turns.stored({context_digest([7, 8], 5): part, context_digest([7, 8], 6): part})
        task.cancel()
        return stored

    (stored,) = asyncio.run(run())
    assert stored.completion == Completion(context_digest([7, 8], 5), [1, 2], [-1.0, -2.0], "abort", 3, (3, 4))


def test_an_abort_of_the_engine_reaches_the_loop():
    async def generate(*_, **__):
        return Completion("r", [1], [-1.0], "abort", 1)

    turns = TurnRecord(generate, ())
    completion = asyncio.run(turns.generate([7], PARAMS, seed=5, key=""))
    assert completion.finish_reason == "abort" and turns.stored({}) == []


@pytest.mark.parametrize("seed", [0, 2**62, -1])
def test_contexts_differ_in_tokens_and_seeds(seed):
    digests = {context_digest(*case) for case in (([1, 2], seed), ([1], seed), ([1, 2], seed + 1), ([], seed))}
    assert len(digests) == 4 and context_digest([1, 2], seed) == context_digest(np.array([1, 2]), seed)


ROUTE_PARAMS = SamplingParams(max_new_tokens=9)


class Engine:
    """Returns set responses; the two experts of a token in the only layer are the weight version and the token."""

    def __init__(self):
        self.version, self.starts = 0, list[int | None]()

    async def respond(self, prompt_ids, params, *, seed, key, routes_from):
        self.starts.append(routes_from)
        tokens = [int(token) for token in key.split()]
        computed = [*prompt_ids, *tokens][routes_from:-1]
        routes = np.array([[[self.version, token]] for token in computed], np.int16).reshape(-1, 1, 2)
        return Completion("r", tokens, [0.0] * len(tokens), "stop", self.version, routes=routes)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def record(engine):
    return RouteRecord(engine.respond)


def generate(record, prompt, response):
    asyncio.run(record.generate(prompt, ROUTE_PARAMS, seed=0, key=" ".join(map(str, response))))


def trajectory(prompt, response, mask):
    return Trajectory(prompt, response, mask, [0.0] * len(response), "stop", 2)


def routes(record, *parts):
    result = record.add_to(trajectory(*parts))
    assert result.error is None and result.routes is not None
    return result.routes[:, 0].tolist()


def test_each_turn_extends_the_routes_of_the_turns_before(engine, record):
    """Tokens keep the experts that they had when they were generated; only new ones are requested."""
    generate(record, [1, 2], [3, 4])
    engine.version = 5
    generate(record, [1, 2, 3, 4, 7, 8], [9, 6])
    assert engine.starts == [0, 3]
    assert routes(record, [1, 2], [3, 4, 7, 8, 9, 6, 5], [1, 1, 0, 0, 1, 1, 0]) == [
        [0, 1], [0, 2], [0, 3], [5, 4], [5, 7], [5, 8], [5, 9],
    ]  # fmt: skip


def test_branches_and_shortened_trajectories_have_the_routes_of_their_tokens(engine, record):
    generate(record, [1, 2], [3, 4])
    generate(record, [1, 2], [5, 6, 7])
    generate(record, [1, 2, 3, 4, 8], [9])
    assert engine.starts == [0, 2, 3]
    assert routes(record, [1, 2], [5, 6, 7], [1, 1, 1]) == [[0, 1], [0, 2], [0, 5], [0, 6]]
    assert routes(record, [1, 2], [3, 4], [1, 1]) == [[0, 1], [0, 2], [0, 3], [0, 4]]
    assert routes(record, [1, 2, 3], [4, 8], [1, 0]) == [[0, 1], [0, 2], [0, 3], [0, 4], [0, 8]]


def test_a_rewritten_history_fails_by_name(record):
    generate(record, [1, 2], [3, 4])
    generate(record, [1, 2, 3, 4, 8], [9])
    failed = record.add_to(trajectory([1, 2], [3, 5, 8, 9], [1, 1, 0, 1]))
    assert failed.error is not None and "token 3 of the trajectory follows other tokens" in failed.error
    assert list(failed.response_mask) == [0, 0, 0, 0]
    # A changed token that nothing generated follows does no harm.
    assert record.add_to(trajectory([1, 2], [3, 5], [1, 0])).error is None


def test_routes_become_a_ragged_column(record):
    generate(record, [1, 2], [3, 4])
    whole = record.add_to(trajectory([1, 2], [3, 4], [1, 1]))
    failed = Trajectory([7, 8, 9], [], [], [], "error", 1, error="failed")
    samples = PackedSamples({SampleId(0, n): row for n, row in enumerate((whole, failed))})
    batch = trajectories_to_batch(list(samples.unpack().values()), 0, with_routes=True)
    column = batch.tensors["routed_experts"]
    assert column.shape == (2, 5, 1, 2) and str(column.dtype) == "torch.int16"
    assert column[0, :, 0, 1].tolist() == [-1, 1, 2, 3, -1]  # padding, and the last token
    assert column[1].unique().tolist() == [-1]
    rows = batch.unpadded("routed_experts")
    assert [len(row) for row in rows] == [4, 4]


def test_an_engine_without_routes_is_an_error():
    with raises("rollout.no-routes") as caught:
        trajectories_to_batch([trajectory([1], [2], [1])], 0, with_routes=True)
    assert str(caught.value) == (
        "the rollout engine returned no experts, which actor.router_replay.mode=R3 replays; set R2 to replay those of "
        "the pass for old log-probs [rollout.no-routes]"
    )
