"""Conversations with images: requests of every turn have them, and the tokens of prompts keep them."""

import asyncio
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from make_squares import task_tokenizer
from support.squares_task import make_squares_task
from support.task_configs import arithmetic, train_config  # noqa: F401

from megarl.agents.loop import SingleTurnLoop, Transcript, encode_messages
from megarl.agents.runner import AgentRunner
from megarl.agents.tool_agent import ToolLoop
from megarl.agents.trajectories import PackedSamples, trajectories_to_batch
from megarl.agents.turns import context_digest
from megarl.agents.types import Conversation, ConversationGroup, SampleId, Trajectory, narrow_ids
from megarl.base.image_tokens import Image
from megarl.data.shared_prompts import prompt_digests
from megarl.rewards.scorer import decode_text
from megarl.rollout.image_reader import image_reader
from megarl.rollout.interface import Completion, SamplingParams
from megarl.samples.rollouts import Rollouts
from megarl.samples.selection import join
from megarl.trainer.phases.data_loading import prompt_loader
from megarl.trainer.state.trainer_state import Decoder, Encoder

PARAMS = SamplingParams(4)


class RecordingReplica:
    """Answers each request with two tokens; keeps the requests."""

    def __init__(self):
        self.requests, self.open = [], []

    async def accept(self, client, requests, aborted):
        self.requests += requests
        self.open += requests

    async def completions(self, client, wait_s):
        done, self.open = self.open, []
        return [Completion(r.request_id, [5, 6], [-1.0, -1.0], "length", 0) for r in done]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_squares_task(tmp_path_factory.mktemp("squares"))


@pytest.fixture(scope="module")
def vision_tokenizer():
    return task_tokenizer()


@pytest.fixture
def squares_config(train_config, task):  # noqa: F811
    return train_config(
        {
            "data.train_files": [str(task / "data" / "train.parquet")],
            "data.val_files": [str(task / "data" / "test.parquet")],
            "data.max_prompt_length": 64,
            "data.train_batch_size": 4,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "actor_rollout_ref.model.path": str(task / "model"),
            "actor_rollout_ref.rollout.n": 2,
        }
    )


@pytest.fixture
def prompts(squares_config, vision_tokenizer):
    return next(iter(prompt_loader(squares_config, vision_tokenizer)))


@pytest.fixture
def conversation(squares_config, prompts):
    row = {name: column[0] for name, column in prompts.non_tensor_batch.items()}
    ids, reader = prompts.unpadded("prompts")[0].tolist(), image_reader(squares_config)
    return Conversation(row["raw_prompt"], PARAMS, ids, facts=row, image_reader=reader, images=list(row["images"]))


def test_requests_of_a_run_have_the_images(squares_config, prompts, vision_tokenizer):
    replica = RecordingReplica()
    runner = AgentRunner(squares_config, vision_tokenizer)
    rollouts = Rollouts(runner, lambda: {0: replica}, squares_config, vision_tokenizer)
    try:
        groups = rollouts.training_groups(prompts, range(4))
        rollouts.submit(groups)
        ended = {}
        while len(ended) < 8:
            ended |= rollouts.finished(10.0)
        samples = [ended[name] for group in groups for name in group.ids]
        batch, _ = rollouts.batch_of(groups, samples)
        texts = [replace(sample, prompt_ids=[5, 6]) for sample in samples[:2]]
        of_texts, _ = rollouts.batch_of([replace(groups[0], facts={**groups[0].facts, "images": ()})], texts)
        mixed = join([of_texts, rollouts.batch_of(groups[1:2], samples[2:4])[0]])
        rollouts.close()
    finally:
        runner.shutdown()
    expected = [ids.tolist() for ids in prompts.unpadded("prompts") for _ in range(2)]
    images = [row for row in prompts.non_tensor_batch["images"] for _ in range(2)]
    assert sorted(list(r.prompt_ids) for r in replica.requests) == sorted(expected)
    for request in replica.requests:
        assert tuple(request.images) == images[expected.index(list(request.prompt_ids))]
    assert [ids.tolist() for ids in batch.unpadded("prompts")] == expected
    assert batch.non_tensor_batch["images"].tolist() == images
    assert batch.non_tensor_batch["images"][0] is batch.non_tensor_batch["images"][1]
    assert mixed.tensors["image_counts"].tolist() == [0, 0, *[len(images[2])] * 2]
    assert torch.equal(batch.tensors["prompt_digests"], prompt_digests(expected))


def test_a_restored_group_has_its_images(squares_config, prompts, vision_tokenizer, tmp_path):
    runner = AgentRunner(squares_config, vision_tokenizer)
    rollouts = Rollouts(runner, dict, squares_config, vision_tokenizer)
    try:
        (group, *_) = rollouts.training_groups(prompts, range(4))
        arrays = io.BytesIO()
        encoded = Encoder(arrays).encode(rollouts.stored_group(group), "group")
        (tmp_path / "arrays").write_bytes(arrays.getvalue())
        restored = rollouts.restored_group(Decoder(tmp_path / "arrays").decode(encoded), {})
    finally:
        runner.shutdown()
    assert restored.facts["images"] == group.facts["images"] and isinstance(restored.facts["images"][0], Image)
    assert restored.prompt_ids.dtype == np.int64 and restored.prompt_ids.tolist() == group.prompt_ids.tolist()


def test_loops_encode_the_images_of_messages(conversation, vision_tokenizer):
    seen = []

    async def generate(prompt_ids, params, *, seed, key):
        seen.append(list(prompt_ids))
        return Completion("r", [7], [-1.0], "stop", 0)

    unencoded = replace(conversation, prompt_ids=())
    for loop in (SingleTurnLoop(vision_tokenizer), ToolLoop(vision_tokenizer, {})):
        trajectory = asyncio.run(loop.run(unencoded, generate))
        assert seen.pop() == list(conversation.prompt_ids) == list(trajectory.prompt_ids)
    literal = [{"role": "user", "content": "<|image_pad|>"}]
    ids = asyncio.run(
        encode_messages(vision_tokenizer, replace(unencoded, messages=literal, facts={}))  # no image, no image token
    )
    assert min(ids) >= 0 and conversation.image_token not in ids


def test_later_turns_keep_the_images_of_the_prompt(conversation):
    prompts = []

    async def generate(prompt_ids, params, *, seed, key):
        prompts.append(list(prompt_ids))
        return Completion("r", [7], [-1.0], "stop", 0)

    async def lead():
        transcript = Transcript(replace(conversation, params=SamplingParams(20)))
        await transcript.generate(generate)
        transcript.observe([8, 9])
        await transcript.generate(generate)

    asyncio.run(lead())
    first = list(conversation.prompt_ids)
    assert prompts == [first, [*first, 7, 8, 9]] and min(first) < 0


def test_tokens_of_images_travel_between_processes(conversation):
    ids = list(conversation.prompt_ids)
    samples = {
        SampleId(0, 0): Trajectory(narrow_ids(ids), [1, 2], [1, 1], [-1.0, -1.0], "stop", 2),
        SampleId(0, 1): Trajectory([3, 4], [1], [1], [-1.0], "stop", 2),
    }
    unpacked = PackedSamples(samples).unpack()
    assert [trajectory.prompt_ids.tolist() for trajectory in unpacked.values()] == [ids, [3, 4]]
    text_only = PackedSamples({name: row for name, row in samples.items() if name.sample}).unpack()
    assert text_only[0, 1].prompt_ids.dtype == np.int32
    mixed = trajectories_to_batch([unpacked[0, 0], text_only[0, 1]], 0)
    assert [row.tolist() for row in mixed.unpadded("prompts")] == [ids, [3, 4]]
    assert context_digest(ids, 3) == context_digest(np.array(ids), 3) != context_digest([*ids[:-1], 0], 3)


def test_text_of_a_prompt_shows_its_images(conversation, vision_tokenizer):
    text = decode_text(vision_tokenizer, conversation.prompt_ids)
    assert text.count("<image>") == 1 and "<image>How many squares?" in text
    assert decode_text(vision_tokenizer, np.array([])) == ""


def test_groups_of_text_are_as_before(squares_config, vision_tokenizer):
    replica, runner = RecordingReplica(), AgentRunner(squares_config, vision_tokenizer)
    try:
        runner.open({0: replica})
        runner.submit([ConversationGroup(0, (), np.array([3], np.int32), [PARAMS], [1], "0", "single_turn_agent")])
        while not runner.finished(10.0):
            pass
        runner.close()
    finally:
        runner.shutdown()
    (request,) = replica.requests
    assert tuple(request.images) == () and request.prompt_ids == [3]
