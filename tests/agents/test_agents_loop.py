"""Agent loops, limits, transcript and runner, with scripted turns and a real engine."""

import asyncio

import numpy as np
import pytest
from agent_cases import EngineGenerate, Scripted, lead_all, merging_tokenizer, sampling
from support.expected_errors import raises

from megarl.agents import (
    AgentLoop,
    Conversation,
    ConversationLimits,
    Trajectory,
    Transcript,
    trajectories_to_batch,
    trajectory_metrics,
    turn_seed,
)
from megarl.agents.frames import encode_prompt, turn_frame
from megarl.agents.loop import AGENT_LOOPS, SingleTurnLoop
from megarl.agents.runner import AgentRunner
from megarl.agents.types import ConversationGroup
from megarl.config import TrainConfig
from megarl.config.build import build
from megarl.rollout import Completion, Request

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer():
    return merging_tokenizer()


def conversation_of(key, **fields):
    return Conversation(USER, fields.pop("params", sampling()), [1, 2, 3], seed=5, key=key, **fields)


class Echo(AgentLoop):
    """Generates a number of turns, each followed by a fixed observation."""

    def __init__(self, turns=3, observation=(9, 9)):
        self.turns, self.observation = turns, observation

    async def run(self, conversation, generate):
        transcript = Transcript(conversation)
        for _ in range(self.turns):
            await transcript.generate(generate)
            if not transcript.observe(self.observation):
                return transcript.end("length")
        return transcript.end("turns")


async def two_tokens(prompt_ids, params, *, seed, key):
    if key == "bad":
        raise ValueError("broken")
    if key == "slow":
        await asyncio.sleep(60)
    ids = [4, 5][: params.max_new_tokens]
    return Completion("", ids, [-1.0] * len(ids), "stop", weight_version=len(prompt_ids))


def test_transcript_masks_and_weight_versions():
    (trajectory,) = asyncio.run(lead_all([conversation_of("a", agent_name="echo")], {"echo": Echo(2)}, two_tokens))
    assert trajectory.prompt_ids == [1, 2, 3]
    assert trajectory.response_ids == [4, 5, 9, 9, 4, 5, 9, 9]
    assert trajectory.response_mask == [1, 1, 0, 0, 1, 1, 0, 0]
    assert trajectory.log_probs == [-1.0, -1.0, 0.0, 0.0] * 2
    assert (trajectory.num_turns, trajectory.finish_reason, trajectory.weight_version) == (5, "turns", 3)
    assert trajectory.weight_versions == [3, 3, 3, 3, 7, 7, 7, 7]


def test_response_limit_leaves_room_for_the_policy():
    for limit in range(1, 12):
        conversation = conversation_of("a", agent_name="echo", limits=ConversationLimits(response_tokens=limit))
        (trajectory,) = asyncio.run(lead_all([conversation], {"echo": Echo(9)}, two_tokens))
        expected = [4, 5, 9, 9, 4, 5, 9, 9, 4, 5, 9, 9][:limit]
        while expected[-1:] == [9]:  # an observation without room for a response is not appended
            expected.pop()
        assert list(trajectory.response_ids) == expected, limit
        assert trajectory.finish_reason == "length" and trajectory.error is None


def test_failed_conversation_is_masked_and_counted():
    conversations = [
        conversation_of("good"),
        conversation_of("bad"),
        conversation_of("slow", limits=ConversationLimits(seconds=0.05)),
        conversation_of("good too"),
        conversation_of("good as well", agent_name="broken"),
    ]

    class Broken(AgentLoop):
        async def run(self, conversation, generate):
            transcript = Transcript(conversation)
            await transcript.generate(generate)
            transcript.response_mask.pop()
            return transcript.end("stop")

    loops = {"single_turn_agent": SingleTurnLoop(), "broken": Broken()}
    trajectories = asyncio.run(lead_all(conversations, loops, two_tokens))
    assert [trajectory.error is None for trajectory in trajectories] == [True, False, False, True, False]
    assert "ValueError: broken" in trajectories[1].error and "longer than 0.05 s" in trajectories[2].error
    assert "1 entries of response_mask for 2 response tokens" in trajectories[4].error
    batch = trajectories_to_batch(trajectories, pad_token_id=0).tensors
    assert batch["response_mask"].tolist() == [[1, 1], [0, 0], [0, 0], [1, 1], [0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1] * 5, [1] * 5]
    metrics = trajectory_metrics(trajectories)
    assert metrics["agent/failed"] == 3 and metrics["num_turns/mean"] == 2


def test_generated_tokens_are_never_retokenized(tokenizer):
    """The tokenizer would merge ``>`` with the line break after the turn, and ``a`` with ``b``."""
    written = "ab>"
    script = Scripted(tokenizer, [written + "<|im_end|>", "ok<|im_end|>"])
    frame = "\n<|im_start|>user\n<tool_response>\nyes\n</tool_response><|im_end|>\n<|im_start|>assistant\n"

    class OneTool(AgentLoop):
        async def run(self, conversation, generate):
            transcript = Transcript(conversation)
            turn = await transcript.generate(generate)
            answer = [{"role": "tool", "content": "yes"}]
            transcript.observe(turn_frame(tokenizer, answer, turn.token_ids[-1]))
            await transcript.generate(generate)
            return transcript.end("stop")

    prompt = encode_prompt(tokenizer, USER)
    conversation = Conversation(USER, sampling(), prompt, key="k", agent_name="one")
    (trajectory,) = asyncio.run(lead_all([conversation], {"one": OneTool()}, script))
    first = script.spelled(written + "<|im_end|>")
    environment = tokenizer(frame, add_special_tokens=False)["input_ids"]
    assert trajectory.response_ids == first + environment + script.spelled("ok<|im_end|>")
    assert script.calls[1][0] == prompt + first + environment
    assert trajectory.response_mask == [1] * len(first) + [0] * len(environment) + [1] * 3
    whole = tokenizer.decode(trajectory.prompt_ids + trajectory.response_ids)
    assert tokenizer(whole, add_special_tokens=False)["input_ids"] != trajectory.prompt_ids + trajectory.response_ids
    turns = [*USER, {"role": "assistant", "content": written}, {"role": "tool", "content": "yes"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert whole == rendered + "ok<|im_end|>"


def test_frame_closes_an_open_turn(tokenizer):
    closed = tokenizer.decode(turn_frame(tokenizer, [{"role": "user", "content": "go on"}], None))
    assert closed == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_frame_does_not_close_a_turn_twice():
    """Llama 3 ends a call with ``<|eom_id|>`` where the template writes ``<|eot_id|>``."""
    llama = merging_tokenizer()
    llama.add_special_tokens({"additional_special_tokens": ["<|eom_id|>", "<|eot_id|>", "<|h|>"]})
    llama.chat_template = (
        "{% for m in messages %}<|h|>{{ 'ipython' if m.role == 'tool' else m.role }}:{{ m.content | trim }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|h|>assistant:{% endif %}"
    )
    rest = "<|h|>ipython:5<|eot_id|><|h|>assistant:"
    for end, expected in (("<|eom_id|>", rest), ("<|eot_id|>", rest), ("x", "<|eot_id|>" + rest)):
        frame = turn_frame(llama, [{"role": "tool", "content": "5"}], llama.convert_tokens_to_ids(end))
        assert llama.decode(frame) == expected


def test_unsuitable_template_is_refused(tokenizer):
    other = merging_tokenizer()
    other.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with raises("tokenizer.template-hides-turns"):
        turn_frame(other, USER, None)
    other.chat_template = "{{ raise_exception('no tools here') }}"
    with raises("tokenizer.template-rejects", "no tools here"):
        turn_frame(other, USER, None)


def test_concurrent_conversations_equal_single_ones_with_a_real_engine(make_folder):
    from megarl.rollout import EngineOptions, create_engine

    folder = make_folder()
    engine = create_engine("embedded", str(folder), EngineOptions(max_num_seqs=4))
    engine.load_hf(str(folder))
    conversations = [
        Conversation(USER, sampling(max_new_tokens=6), [3 + n % 3, 11, 12], seed=n, key=f"{n}", agent_name="echo")
        for n in range(9)
    ]
    limited = [ConversationLimits(response_tokens=20)] * 9
    conversations = [
        Conversation(c.messages, c.params, c.prompt_ids, c.seed, c.key, c.agent_name, limits=limit)
        for c, limit in zip(conversations, limited, strict=True)
    ]
    trajectories = asyncio.run(lead_all(conversations, {"echo": Echo(2)}, EngineGenerate(engine)))
    for conversation, trajectory in zip(conversations, trajectories, strict=True):
        context = list(conversation.prompt_ids)
        for turn in range(2):  # the same turns, one request at a time
            request = Request("r", context, conversation.params, turn_seed(conversation.seed, turn))
            (alone,) = engine.generate([request])
            context += [*alone.token_ids, 9, 9]
        assert list(conversation.prompt_ids) + list(trajectory.response_ids) == context
        assert sum(trajectory.response_mask) == len(trajectory.response_ids) - 4
    engine.shutdown()


def test_state_masking():
    trajectories = asyncio.run(lead_all([conversation_of("a", agent_name="echo")], {"echo": Echo(1)}, two_tokens))
    assert trajectories_to_batch(trajectories, 0).tensors["response_mask"].tolist() == [[1, 1, 0, 0]]
    without = trajectories_to_batch(trajectories, 0, state_masking=False).tensors
    assert without["response_mask"].tolist() == [[1, 1, 1, 1]]
    assert trajectory_metrics(trajectories)["state_tokens/total"] == 2
    assert trajectory_metrics(trajectories)["state_tokens/coverage"] == 0.5


def test_find_loop_by_name_and_file(tmp_path):
    assert AGENT_LOOPS.find("single_turn_agent") is SingleTurnLoop
    names = ("tool_agent", "search_agent", "external_agent")
    assert [AGENT_LOOPS.find(name).__name__ for name in names] == ["ToolLoop", "SearchLoop", "ExternalAgent"]
    file = tmp_path / "mine.py"
    file.write_text(
        "from megarl.agents import AgentLoop\nclass Mine(AgentLoop):\n    async def run(self, c, g): ...\n",
        encoding="utf-8",
    )
    assert AGENT_LOOPS.find(f"{file}:Mine").__name__ == "Mine"
    for name, code, value in (
        ("singel_turn", "config.unknown-name", "external_agent, search_agent"),
        (f"{file}:Other", "config.user-code-class", ["Mine"]),
        (f"{tmp_path}/none.py:Mine", "config.user-code-file", "none.py"),
        ("megarl.base.errors.DataError", "config.user-code-class", "'DataError'"),
    ):
        with raises(code, name, value):
            AGENT_LOOPS.find(name)


def test_versions_of_tokens_are_a_column_on_demand():
    one = Trajectory([1], [2, 3], [1, 1], [-0.1, -0.2], "stop", 2, 4)
    two = Trajectory([1], [2, 3, 4], [1, 0, 1], [-0.1, 0.0, -0.3], "stop", 2, 4, [4, 4, 5])
    assert "weight_versions" not in trajectories_to_batch([one, two], 0).tensors
    versions = trajectories_to_batch([one, two], 0, with_versions=True).tensors["weight_versions"]
    assert versions.tolist() == [[4, 4, 0], [4, 4, 5]]


class Changing(AgentLoop):
    """Uses up the messages and hints of its conversation, and returns as many tokens."""

    @classmethod
    def create(cls, config, tokenizer, **options):
        return cls()

    async def run(self, conversation, generate):
        count = len(conversation.messages) + len(conversation.facts["extra_info"]["hints"])
        conversation.messages.clear()
        conversation.facts["extra_info"]["hints"].clear()
        return Trajectory([1], [4] * count, [1] * count, [-1.0] * count, "stop", 2)


class IdleReplica:
    async def accept(self, client, requests, aborted):
        pass

    async def completions(self, client, wait_s):
        await asyncio.sleep(wait_s)
        return []


def test_samples_of_a_group_share_no_objects_that_an_agent_may_change(tokenizer, make_folder):
    settings = {
        "data": {"train_files": "a.parquet", "max_response_length": 600},
        "actor_rollout_ref": {"model": {"path": str(make_folder())}},
        "trainer": {"device": "cpu", "n_gpus_per_node": 1, "experiment_name": "agents"},
    }
    runner = AgentRunner(build(TrainConfig, settings), tokenizer)
    facts = {"extra_info": {"hints": ["a", "b"]}}
    loop = f"{__file__}:Changing"
    try:
        runner.open({0: IdleReplica()})
        prompt, params = np.array([1], np.int32), [sampling()] * 3
        runner.submit([ConversationGroup(0, list(USER), prompt, params, range(3), "k", loop, facts)])
        ended = {}
        while len(ended) < 3:
            ended |= runner.finished(60)
    finally:
        runner.shutdown()
    assert [len(trajectory.response_ids) for trajectory in ended.values()] == [3, 3, 3]
