"""Turns of a conversation: stored ones are not generated again, and unfinished ones go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from megarl.agents.loop import Transcript
from megarl.agents.turns import TurnRecord, context_digest
from megarl.agents.types import Conversation
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


def record(engine, turns=()):
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
    turns = record(engine)
    whole = asyncio.run(lead(turns))
    stored = turns.stored({})
    assert [turn.token_ids.tolist() for turn in stored] == [[0, 1, 2, 3]] * 3 and len(engine.priors) == 3
    assert asyncio.run(lead(record(engine, turns=stored))) == whole
    assert len(engine.priors) == 3, "the engine was not asked again"

    half = replace(stored[1], token_ids=stored[1].token_ids[:2], log_probs=stored[1].log_probs[:2],
                   versions=stored[1].versions[:2], finish_reason="abort")  # fmt: skip
    later = CountingEngine(4, version=3)
    resumed = asyncio.run(lead(record(later, turns=[stored[0], half])))
    assert later.priors == [[0, 1], []]
    assert resumed.response_ids == whole.response_ids and resumed.response_mask == whole.response_mask
    versions = [version for version, mask in zip(resumed.weight_versions, resumed.response_mask, strict=True) if mask]
    assert versions == [1] * 6 + [3] * 6 and whole.weight_version == 1 and not len(whole.weight_versions)


def test_a_tool_that_answers_differently_makes_later_turns_new():
    engine = CountingEngine(4)
    turns = record(engine)
    asyncio.run(lead(turns))

    async def other(turns):
        transcript = Transcript(Conversation((), SamplingParams(100), prompt_ids=[7, 8], seed=5))
        for _ in range(2):
            await transcript.generate(turns.generate, PARAMS)
            transcript.observe([60])

    assert not turns.was_led_again
    again = record(engine, turns=turns.stored({}))
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
