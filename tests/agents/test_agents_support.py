"""The sampled support on its way from completions to the batch."""

import asyncio
from dataclasses import replace

import numpy as np
from agent_cases import lead_all
from support.expected_errors import raises

from megarl.agents.loop import AgentLoop, SingleTurnLoop, Transcript
from megarl.agents.trajectories import PackedSamples, trajectories_to_batch, trajectory_metrics
from megarl.agents.turns import TurnRecord, context_digest
from megarl.agents.types import Conversation, SampleId, StoredTurn, Trajectory
from megarl.data import DataProto
from megarl.rollout.interface import Completion, SamplingParams

WIDTH = 3
PARAMS = SamplingParams(20, top_p=0.5, support=WIDTH)


def support_of(tokens):
    """Each token's support: the token and its successor."""
    return np.array([[token, token + 1, -1] for token in tokens], np.int32).reshape(-1, WIDTH)


async def two_tokens(prompt_ids, params, *, seed, key):
    await asyncio.sleep(0)
    ids = [4, 5][: params.max_new_tokens]
    return Completion("", ids, [-1.0] * len(ids), "stop", 1, support=support_of(ids))


class Observing(AgentLoop):
    """Two turns with an observation between them."""

    async def run(self, conversation, generate):
        transcript = Transcript(conversation)
        await transcript.generate(generate)
        transcript.observe([9, 8])
        await transcript.generate(generate)
        return transcript.end("stop")


class Forgetful(AgentLoop):
    """Returns a trajectory without its support."""

    async def run(self, conversation, generate):
        completion = await generate(conversation.prompt_ids, conversation.params, seed=0, key="")
        return Trajectory(conversation.prompt_ids, completion.token_ids, [1, 1], [-1.0, -1.0], "stop", 2)


class Partial(AgentLoop):
    """A turn without a support, as with parameters of its own."""

    async def run(self, conversation, generate):
        transcript = Transcript(conversation)
        transcript.append(replace(await generate([1], conversation.params, seed=0, key=""), support=None))
        return transcript.end("stop")


def lead(*names, params=PARAMS):
    loops = {"single": SingleTurnLoop(), "observing": Observing(), "forgetful": Forgetful(), "partial": Partial()}
    talks = [Conversation((), params, prompt_ids=[1, 2], agent_name=name) for name in names]
    return asyncio.run(lead_all(talks, loops, two_tokens))


def test_tokens_of_the_environment_have_no_support():
    trajectories = lead("single", "observing")
    samples = PackedSamples({SampleId(0, n): trajectory for n, trajectory in enumerate(trajectories)}).unpack()
    batch = trajectories_to_batch(list(samples.values()), 0, support_tokens=WIDTH)
    none, of_4, of_5 = [-1] * 3, [4, 5, -1], [5, 6, -1]
    assert batch.tensors["support_ids"].tolist() == [
        [of_4, of_5, none, none, none, none],
        [of_4, of_5, none, none, of_4, of_5],
    ]
    assert "support_ids" not in trajectories_to_batch(trajectories, 0).tensors
    metrics = trajectory_metrics(trajectories)
    assert metrics["rollout/support_size/mean"] == metrics["rollout/support_size/max"] == 2


def test_batches_join_and_select_rows():
    single, observing = (trajectories_to_batch([row], 0, support_tokens=WIDTH) for row in lead("single", "observing"))
    joined = DataProto.concat([single, observing])
    assert joined.tensors["support_ids"].shape == (2, 6, WIDTH)
    assert [len(row) for row in joined.unpadded("support_ids")] == [2, 6]
    assert joined.tensors["support_ids"][0, 2:].unique().tolist() == [-1]


def test_a_loop_that_loses_the_support_fails_by_name():
    single, forgetful, partial = lead("single", "forgetful", "partial")
    assert single.error is None
    assert "'forgetful': generated tokens have no support" in forgetful.error
    assert "'partial': generated tokens have no support" in partial.error
    batch = trajectories_to_batch([single, forgetful, partial], 0, support_tokens=WIDTH)
    assert batch.tensors["response_mask"].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert batch.tensors["support_ids"][1:].unique().tolist() == [-1]
    assert lead("forgetful", params=SamplingParams(20))[0].error is None


def test_samples_of_a_run_with_other_settings_are_refused():
    (single,) = lead("single")
    for sample in (single, replace(single, support=None)):
        with raises("rollout.no-support", "actor_rollout_ref.rollout", WIDTH + 1):
            trajectories_to_batch([sample], 0, support_tokens=WIDTH + 1)


def test_an_interrupted_turn_continues_after_its_stored_support():
    async def rest(prompt_ids, params, *, seed, key, routes_from, prior):
        ids = [6, 7]
        return Completion("r", ids, [-0.5] * 2, "stop", 3, support=support_of(ids)).after(prior)

    context = context_digest([1, 2], 0)
    half = Completion("r", [4, 5], [-1.0, -2.0], "abort", 2, support=support_of([4, 5]))
    stored = StoredTurn(**dict(vars(StoredTurn.of(context, half))))
    turns = TurnRecord(rest, [stored])
    completion = asyncio.run(turns.generate([1, 2], PARAMS, seed=0, key=""))
    assert completion.token_ids == [4, 5, 6, 7] and completion.weight_versions == (2, 2, 3, 3)
    assert np.array_equal(completion.support, support_of([4, 5, 6, 7]))
    (whole,) = turns.stored({})
    assert np.array_equal(whole.completion.support, completion.support)
