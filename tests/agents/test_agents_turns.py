"""Turns of a conversation: stored ones are not generated again, unfinished ones go on, recorded versions wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.agents.loop import Transcript, turn_seed
from megarl.agents.turns import TurnRecord, VersionGate, context_digest, version_spans
from megarl.agents.types import Conversation, StoredTurn, Trajectory, VersionSpan
from megarl.rollout.interface import Completion, SamplingParams

PARAMS = SamplingParams(6)


class CountingEngine:
    """Generates the tokens 0, 1, 2, ... of each response under a version; a response has ``length`` tokens at most."""

    def __init__(self, length: int = 100, version: int = 1) -> None:
        self.length, self.version = length, version
        self.priors: list[list[int]] = []

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        prior: Completion | None,
        **_: object,
    ) -> Completion:
        await asyncio.sleep(0)
        first = 0 if prior is None else len(prior.token_ids)
        self.priors.append([] if prior is None else list(prior.token_ids))
        end = min(self.length, params.max_new_tokens)
        tokens = list(range(first, end))
        finish = "stop" if end == self.length else "length"
        return Completion("r", tokens, [-0.5] * len(tokens), finish, self.version).after(prior)


def record(engine: CountingEngine, gate: VersionGate | None = None, turns=(), spans=()) -> TurnRecord:
    return TurnRecord(engine.generate, gate or VersionGate(), turns, spans)


async def lead(turns: TurnRecord, count: int = 3) -> Trajectory:
    """Generate turns, with an observation of two tokens after each."""
    transcript = Transcript(Conversation((), PARAMS, prompt_ids=[7, 8], seed=5))
    transcript.conversation = replace(transcript.conversation, params=SamplingParams(100))
    for _ in range(count):
        await transcript.generate(turns.generate, PARAMS)
        transcript.observe([50, 51])
    return transcript.end("stop")


def test_a_conversation_that_resumes_generates_the_missing_tokens_only() -> None:
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
    assert version_spans(resumed) == [VersionSpan(1, 6), VersionSpan(3, 6)] and version_spans(whole) == [(1, 12)]


def test_a_tool_that_answers_differently_makes_later_turns_new() -> None:
    engine = CountingEngine(4)
    turns = record(engine)
    asyncio.run(lead(turns))

    async def other(turns: TurnRecord) -> None:
        transcript = Transcript(Conversation((), SamplingParams(100), prompt_ids=[7, 8], seed=5))
        for _ in range(2):
            await transcript.generate(turns.generate, PARAMS)
            transcript.observe([60])

    asyncio.run(other(record(engine, turns=turns.stored({}))))
    assert len(engine.priors) == 4, "three turns before; then the second turn only"


def test_unfinished_turns_of_the_engine_are_stored_once_they_are_open() -> None:
    async def run() -> list[StoredTurn]:
        waiting = asyncio.Event()

        async def generate(*_: object, **__: object) -> Completion:
            waiting.set()
            return await asyncio.Future()

        turns = TurnRecord(generate, VersionGate(), (), ())
        task = asyncio.ensure_future(turns.generate([7, 8], PARAMS, seed=5, key=""))
        await waiting.wait()
        part = Completion("r", [1, 2], [-1.0, -2.0], "abort", 4, (3, 4))
        stored = turns.stored({context_digest([7, 8], 5): part, context_digest([7, 8], 6): part})
        task.cancel()
        return stored

    (stored,) = asyncio.run(run())
    assert stored.completion == Completion(context_digest([7, 8], 5), [1, 2], [-1.0, -2.0], "abort", 3, (3, 4))


def test_an_abort_of_the_engine_reaches_the_loop() -> None:
    async def generate(*_: object, **__: object) -> Completion:
        return Completion("r", [1], [-1.0], "abort", 1)

    turns = TurnRecord(generate, VersionGate(), (), ())
    completion = asyncio.run(turns.generate([7], PARAMS, seed=5, key=""))
    assert completion.finish_reason == "abort" and turns.stored({}) == []


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    versions=st.lists(st.integers(1, 3), min_size=6, max_size=6),
    kept=st.integers(0, 40),
)
def test_recorded_versions_are_repeated(lengths: list[int], versions: list[int], kept: int) -> None:
    """Each part of the record is generated under its version, also by a conversation that resumes in the middle."""
    numbers = np.cumsum(versions)[: len(lengths)].tolist()
    spans = [VersionSpan(number, tokens) for number, tokens in zip(numbers, lengths, strict=True)]

    async def run(stored: Sequence[StoredTurn], first: int) -> Trajectory:
        engine, gate = CountingEngine(4), VersionGate()
        turns = record(engine, gate, stored, spans)

        async def begin() -> Trajectory:
            await turns.begin()
            return await lead(turns, -(-sum(lengths) // 4))

        task = asyncio.ensure_future(begin())
        for version in range(first, numbers[-1] + 1):
            engine.version = version
            gate.set_version(version)
            for _ in range(40):
                await asyncio.sleep(0)
            assert task.done() or gate.waiting == 1 or version == numbers[-1]
        return await task

    whole = asyncio.run(run((), 0))
    found = [version for version, tokens in version_spans(whole) for _ in range(tokens)]
    recorded = [version for version, tokens in spans for _ in range(tokens)]
    assert found[: len(recorded)] == recorded

    # The first tokens as a checkpoint has them: whole turns, and the part of the last one.
    tokens = min(kept, len(recorded))
    stored, at = [], 0
    while at < tokens:
        count = min(4, tokens - at)
        context = [7, 8, *(token for _ in range(at // 4) for token in (0, 1, 2, 3, 50, 51))]
        part = Completion("r", list(range(count)), [-0.5] * count, "stop" if count == 4 else "abort",
                          min(found[at : at + count]), tuple(found[at : at + count]))  # fmt: skip
        stored.append(StoredTurn.of(context_digest(context, turn_seed(5, at // 4)), part))
        at += count
    resumed = asyncio.run(run(stored, recorded[tokens - 1] if tokens else 0))
    assert resumed == whole


def test_failed_samples_and_environments_have_no_spans() -> None:
    trajectory = Trajectory([1], [5, 6, 50, 7], [1, 1, 0, 1], [0.0] * 4, "stop", 2, 3, [3, 3, 3, 4])
    assert version_spans(trajectory) == [VersionSpan(3, 2), VersionSpan(4, 1)]
    assert version_spans(Trajectory([1], [], [], [], "error", 1, error="lost")) == []
    failed = trajectory.failed("late")
    assert version_spans(failed) == version_spans(trajectory)


@pytest.mark.parametrize("seed", [0, 2**62, -1])
def test_contexts_differ_in_tokens_and_seeds(seed: int) -> None:
    digests = {context_digest(*case) for case in (([1, 2], seed), ([1], seed), ([1, 2], seed + 1), ([], seed))}
    assert len(digests) == 4 and context_digest([1, 2], seed) == context_digest(np.array([1, 2]), seed)
