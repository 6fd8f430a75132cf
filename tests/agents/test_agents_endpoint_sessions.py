"""Endpoint sessions: the trajectory of an external agent equals the generated tokens."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from agent_cases import EngineGenerate, Scripted, ids_of, merging_tokenizer, sampling, tokenized
from endpoint_cases import ADD, USER, Refused, client, complete, lead, listening, message_of, talk
from support.expected_errors import raises

from megarl.agents import ConversationLimits, trajectory_metrics, turn_seed
from megarl.agents.external_agent import load_agent
from megarl.agents.frames import encode_prompt
from megarl.rollout import EngineOptions, Request, RolloutError, create_engine


@pytest.fixture(scope="module")
def tokenizer():
    return merging_tokenizer()


@pytest.fixture(scope="module")
def endpoint(tokenizer):
    with listening(tokenizer) as endpoint:
        yield endpoint


def continued(history, body, text):
    """Append the response and a new user message to a history."""
    return [*history, message_of(body), {"role": "user", "content": text}]


def test_generated_tokens_are_kept_when_the_text_returns(endpoint, tokenizer):
    """The tokenizer would merge ``>`` with the line break after the turn, and ``a`` with ``b``."""
    script = Scripted(tokenizer, ["ab> <|im_end|>", "ok<|im_end|>"])

    def agent(task):
        assert task.env == {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key, "OPENAI_MODEL": "policy"}
        assert task.api_key not in repr(task)
        first = complete(task, task.messages)
        assert message_of(first)["content"] == "ab> "
        stripped = {"role": "assistant", "content": [{"type": "text", "text": "ab>"}], "refusal": None}
        assert (
            message_of(complete(task, [*task.messages, stripped, {"role": "user", "content": "more"}]))["content"]
            == "ok"
        )

    (trajectory,) = lead(endpoint, script, agent)
    first, prompt = script.spelled("ab> <|im_end|>"), encode_prompt(tokenizer, USER)
    between = ids_of(tokenizer, "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.error is None and trajectory.prompt_ids == prompt
    assert trajectory.response_ids == first + between + script.spelled("ok<|im_end|>")
    assert script.calls[1][0] == prompt + first + between
    assert trajectory.response_mask == [1] * len(first) + [0] * len(between) + [1] * 3
    assert trajectory.log_probs == [-0.5 * mask for mask in trajectory.response_mask]
    assert (trajectory.weight_version, trajectory.num_turns, trajectory.finish_reason) == (0, 4, "stop")
    assert set(trajectory.weight_versions) == {0, 1}
    whole = tokenizer.decode(trajectory.prompt_ids + trajectory.response_ids)
    assert ids_of(tokenizer, whole) != trajectory.prompt_ids + trajectory.response_ids


def test_tool_calls_are_parsed_and_their_tokens_kept(endpoint, tokenizer):
    call = '<tool_call>\n{"name": "add", "arguments": {"a":1,  "b":2}}\n</tool_call>'
    broken = "<tool_call>{oops</tool_call>"
    script = Scripted(tokenizer, [f"Let me see.\n{call}<|im_end|>", f"{broken}<|im_end|>"])

    def agent(task):
        body = complete(task, task.messages, tools=[ADD], tool_choice="auto")
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        message = message_of(body)
        assert message["content"] == "Let me see."
        (call_message,) = message["tool_calls"]
        assert call_message["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
        # as frameworks return it: different white space and ids, no content, additional fields
        again = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
        history = [*task.messages, {**message, "tool_calls": [again], "audio": None}]
        result = {"role": "tool", "tool_call_id": "mine", "content": "3<|im_end|>"}
        last = complete(task, [*history, result], tools=[ADD])
        assert message_of(last)["content"] == broken and last["choices"][0]["finish_reason"] == "stop"
        return {"score": 1, "note": "x"}

    (trajectory,) = lead(endpoint, script, agent)
    text = tokenizer.decode(trajectory.prompt_ids + trajectory.response_ids)
    assert "Tools: " in text and f"{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n3<|im_end|>\n" in text
    assert trajectory.response_ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 3  # not the result's
    assert trajectory.fields == {"agent_result": {"score": 1, "note": "x"}}
    metrics = trajectory_metrics([trajectory])
    assert metrics["tool_call_counts/mean"] == 2 and metrics["tool_call_counts/malformed_ratio"] == 0.5


def test_longest_branch_is_trained_on(endpoint, tokenizer):
    script = Scripted(tokenizer, ["one<|im_end|>", "two<|im_end|>", "short<|im_end|>", "three<|im_end|>"])

    def agent(task):
        history = continued(task.messages, complete(task, task.messages), "next")
        complete(task, history, temperature=0.2)
        summary = [{"role": "system", "content": "a summary"}, {"role": "user", "content": "go"}]
        complete(task, summary)  # starts a new branch
        return complete(task, history) and 2  # the second turn again: a branch at the first turn, from the same tokens

    (trajectory,) = lead(endpoint, script, agent)
    assert tokenizer.decode(trajectory.response_ids).endswith("assistant\nthree<|im_end|>")
    assert trajectory.metrics["branches_dropped"] == 2 and trajectory.metrics["turns_dropped"] == 2
    assert "tool_call_counts" not in trajectory.metrics
    assert trajectory.metrics["tokens_dropped"] == len("two") + len("short") + 2
    assert trajectory.metrics["sampling_overridden"] == 1 and trajectory.fields["agent_result"] == {"score": 2.0}
    assert script.calls[3][0] == script.calls[1][0] and {params.temperature for _, params, _, _ in script.calls} == {
        1.0
    }
    assert [seed for _, _, seed, _ in script.calls] == [turn_seed(0, turn) for turn in range(4)]


def test_concurrent_agents_in_one_conversation(endpoint, tokenizer):
    script = Scripted(tokenizer, lambda prompt, turn: f"echo {prompt.split('user')[-1].split('<|im')[0].strip()}", 0.01)

    def agent(task):
        def work(number):
            history = [{"role": "user", "content": f"task {number}"}]
            for turn in range(3):
                history = continued(history, complete(task, history), f"{number}/{turn}")
            return [message["content"] for message in history if message["role"] == "assistant"]

        with ThreadPoolExecutor(8) as pool:
            for number, replies in enumerate(pool.map(work, range(8))):
                assert replies == [f"echo task {number}", f"echo {number}/0", f"echo {number}/1"]

    (trajectory,) = lead(endpoint, script, agent)
    assert trajectory.error is None and trajectory.num_turns == 6
    assert trajectory.metrics["branches_dropped"] == 7 and trajectory.metrics["turns_dropped"] == 21
    number = tokenizer.decode(trajectory.prompt_ids).split("task ")[1][0]
    assert tokenizer.decode(trajectory.response_ids).count(f"echo {number}/") == 2


def test_choices_are_branches_with_different_seeds(endpoint, tokenizer):
    script = Scripted(tokenizer, ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])

    def agent(task):
        body = complete(task, task.messages, n=2, seed=7, logprobs=True)
        assert [message_of(body, choice)["content"] for choice in (0, 1)] == ["a", "b"]
        complete(task, [*task.messages, message_of(body, 1), *USER], seed=7)

    (trajectory,) = lead(endpoint, script, agent)
    assert (
        tokenizer.decode(trajectory.response_ids).startswith("b<|im_end|>")
        and trajectory.metrics["branches_dropped"] == 1
    )
    assert len({seed for _, _, seed, _ in script.calls}) == 2  # the same requested seed gives the same seed
    assert script.calls[0][2] not in (7, turn_seed(0, 0))
    (other,) = lead(endpoint, Scripted(tokenizer, ["a", "b", "c"]), agent, [talk(seed=5)])
    assert other.error is None


@pytest.mark.parametrize(
    ("limits", "code", "reason"),
    [
        (ConversationLimits(response_tokens=20), "context_length_exceeded", "length"),
        (ConversationLimits(assistant_turns=1), "max_turns_exceeded", "turns"),
        (ConversationLimits(user_turns=0), "max_turns_exceeded", "turns"),
    ],
)
def test_conversation_at_a_limit_ends_normally(endpoint, tokenizer, limits, code, reason):
    def agent(task):
        history = continued(task.messages, complete(task, task.messages), "more")
        with pytest.raises(Refused, match=code) as refused:
            complete(task, history)
        assert refused.value.status == 400
        raise refused.value

    (trajectory,) = lead(endpoint, Scripted(tokenizer, ["one<|im_end|>"]), agent, [talk(limits=limits)])
    assert (
        trajectory.error is None
        and trajectory.finish_reason == reason
        and tokenizer.decode(trajectory.response_ids) == "one<|im_end|>"
    )
    assert trajectory.metrics["ended_at_limit"] == 1 and trajectory.fields == {"agent_result": {}}


def test_a_limit_counts_for_the_branch_that_it_ended(endpoint, tokenizer):
    """The agent goes on after the refusal with a shorter history, and ends by itself."""

    def agent(task):
        history = continued(task.messages, complete(task, task.messages), "a long message")
        with pytest.raises(Refused, match="context_length_exceeded"):
            complete(task, history)
        complete(task, [{"role": "user", "content": "shorter"}])

    script = Scripted(tokenizer, ["one<|im_end|>", "answered<|im_end|>"])
    (trajectory,) = lead(endpoint, script, agent, [talk(limits=ConversationLimits(response_tokens=20))])
    assert tokenizer.decode(trajectory.response_ids) == "answered<|im_end|>"
    assert (trajectory.finish_reason, trajectory.metrics["ended_at_limit"]) == ("stop", 1)


def test_a_message_that_is_too_long_by_its_bytes_ends_the_conversation_at_its_length(endpoint, tokenizer):
    def agent(task):
        history = continued(task.messages, complete(task, task.messages), "x" * 10**6)
        with tokenized(tokenizer) as lengths, pytest.raises(Refused, match="context_length_exceeded") as refused:
            complete(task, history)
        assert lengths == []
        raise refused.value

    (trajectory,) = lead(endpoint, Scripted(tokenizer, ["one<|im_end|>"]), agent)
    assert trajectory.error is None and trajectory.finish_reason == "length"


def test_max_tokens_of_a_turn(endpoint, tokenizer):
    def agent(task):
        body = complete(task, task.messages, max_completion_tokens=4)
        assert message_of(body)["content"] == "long" and body["choices"][0]["finish_reason"] == "length"
        body = complete(task, continued(task.messages, body, "x"), max_tokens=999)
        assert body["choices"][0]["finish_reason"] == "length"

    script = Scripted(tokenizer, ["long text", "x" * 90])
    (trajectory,) = lead(endpoint, script, agent, [talk(limits=ConversationLimits(response_tokens=80))])
    assert len(trajectory.response_ids) == 80 and trajectory.finish_reason == "length" and trajectory.error is None


def test_unchanged_prompt_uses_the_datasets_encoding(endpoint, tokenizer):
    script = Scripted(tokenizer, ["a<|im_end|>"])
    (trajectory,) = lead(
        endpoint, script, lambda task: complete(task, task.messages) and None, [talk(prompt_ids=[5, 6, 7])]
    )
    assert trajectory.prompt_ids == [5, 6, 7]  # for example, a dataset truncates prompts at the left


def test_too_long_prompt_fails_the_conversation(endpoint, tokenizer):
    short = talk("fine", prompt_ids=[1, 2], limits=ConversationLimits(prompt_tokens=3))
    long = talk("long", limits=ConversationLimits(prompt_tokens=3))
    script = Scripted(tokenizer, ["a<|im_end|>"])
    trajectories = lead(endpoint, script, lambda task: complete(task, task.messages) and None, [short, long])
    assert trajectories[0].error is None and "[agent.no-turn]" in trajectories[1].error


def test_agent_errors_fail_their_conversation_only(endpoint, tokenizer):
    def agent(task):
        complete(task, task.messages)
        behavior = task.facts["behavior"]
        if behavior == "raises":
            raise ValueError("broken agent")
        if behavior == "exits":
            raise SystemExit(3)
        return {"fine": None, "odd": "a text", "nan": float("nan")}[behavior]

    behaviors = ["fine", "raises", "exits", "odd", "nan"]
    conversations = [talk(name, facts={"behavior": name}) for name in behaviors]
    trajectories = lead(endpoint, Scripted(tokenizer, ["a<|im_end|>"] * 2), agent, conversations)
    errors = dict(zip(behaviors, [trajectory.error for trajectory in trajectories], strict=True))
    assert errors.pop("fine") is None
    assert errors["raises"].startswith("ValueError: broken agent (") and "SystemExit: 3" in errors["exits"]
    assert "'a text'" in errors["odd"] and "returned nan" in errors["nan"]
    codes = {name: error.rpartition("[")[2] for name, error in errors.items() if name != "raises"}
    assert codes == {"exits": "agent.exit-called]", "odd": "agent.result-type]", "nan": "agent.result-type]"}
    assert trajectory_metrics(trajectories)["agent/failed"] == 4
    with raises("agent.all-conversations-failed", "[agent.no-turn]"):
        lead(endpoint, Scripted(tokenizer, []), lambda task: None)


def test_asynchronous_agent_may_block_and_is_cancelled(tokenizer, monkeypatch):
    """The clock of the conversations passes the limit of time once the slow agent sleeps."""
    ended, other_ended = threading.Event(), threading.Event()

    async def agent(task):
        complete(task, task.messages)  # a blocking client in a coroutine does not delay other conversations
        if not task.facts["slow"]:
            other_ended.set()
            return 1
        assert other_ended.wait(60)
        try:
            monkeypatch.setattr(endpoint.loop.loop, "time", lambda: time.monotonic() + 600)
            endpoint.loop.loop.call_soon_threadsafe(lambda: None)  # ends the loop's wait by the old clock
            await asyncio.sleep(60)
        finally:
            ended.set()

    limits = {False: ConversationLimits(), True: ConversationLimits(seconds=500)}
    pair = [talk(f"{slow}", facts={"slow": slow}, limits=limits[slow]) for slow in (False, True)]
    with listening(tokenizer) as endpoint:
        trajectories = lead(endpoint, Scripted(tokenizer, ["a<|im_end|>"]), agent, pair)
    assert trajectories[0].fields == {"agent_result": {"score": 1.0}} and "longer than 500 s" in trajectories[1].error
    assert ended.wait(60)


def test_agents_reach_the_endpoint_past_a_proxy_of_the_environment(tokenizer, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "corp.example")
    seen = {}
    with listening(tokenizer) as endpoint:

        def agent(task):
            seen.update(task.env)
            return complete(task, task.messages) and None

        (trajectory,) = lead(endpoint, Scripted(tokenizer, ["a<|im_end|>"]), agent)
    assert trajectory.error is None and {"corp.example", "127.0.0.1"} <= set(seen["NO_PROXY"].split(","))


def test_requests_after_the_end_are_refused(endpoint, tokenizer):
    statuses, started = [], threading.Event()

    def agent(task):
        def late():
            started.set()
            for _ in range(2):  # one running at the end of the conversation, one started after it
                try:
                    complete(task, USER)
                except Refused as refused:
                    statuses.append((refused.status, refused.error["code"]))

        complete(task, task.messages)
        thread = threading.Thread(target=late)
        thread.start()
        started.wait()
        threads.append(thread)
        slow.wait()

    threads, slow = [], threading.Event()

    class Slow(Scripted):
        async def __call__(self, prompt_ids, params, **options):
            if self.at:
                slow.set()
                await asyncio.sleep(60)
            return await super().__call__(prompt_ids, params, **options)

    (trajectory,) = lead(endpoint, Slow(tokenizer, ["a<|im_end|>"]), agent)
    assert trajectory.error is None and trajectory.metrics["requests_cut_off"] == 1
    threads[0].join(60)
    assert statuses == [(410, "session_closed")] * 2


def test_fatal_engine_failure_stops_all_conversations(endpoint, tokenizer):
    def agent(task):
        complete(task, task.messages)

    script = Scripted(tokenizer, [RolloutError("all replicas are lost", code="rollout.engine-lost")])
    with raises("rollout.engine-lost", error=RolloutError):
        lead(endpoint, script, agent, [talk("one"), talk("two")])


def test_concurrent_conversations_equal_single_ones_with_a_real_engine(endpoint, tokenizer, make_folder):
    folder = make_folder(vocab_size=len(tokenizer), eos_token_id=1, max_position_embeddings=512)
    engine = create_engine("embedded", str(folder), EngineOptions(max_num_seqs=16))
    engine.load_hf(str(folder))

    def agent(task):
        with client(task) as http:
            history = list(task.messages)
            for turn in range(2):
                body = {"messages": history, "max_tokens": 6}
                answer = http.post(f"{task.base_url}/chat/completions", json=body).raise_for_status().json()
                history = continued(history, answer, f"turn {turn}")

    conversations = [talk(f"{number}", seed=number, params=sampling(max_new_tokens=200)) for number in range(64)]
    trajectories = lead(endpoint, EngineGenerate(engine), agent, conversations)
    between = ids_of(tokenizer, "\n<|im_start|>user\nturn 0<|im_end|>\n<|im_start|>assistant\n")
    for conversation, trajectory in zip(conversations, trajectories, strict=True):
        context = encode_prompt(tokenizer, USER)
        for turn in range(2):
            params = sampling(max_new_tokens=6)
            (alone,) = engine.generate([Request("r", context, params, turn_seed(conversation.seed, turn))])
            close = [] if alone.token_ids[-1] == 1 else [1]
            context = [*context, *alone.token_ids, *(close + between if turn == 0 else [])]
        assert list(trajectory.prompt_ids) + list(trajectory.response_ids) == context
        generated = [p for p, mask in zip(trajectory.log_probs, trajectory.response_mask, strict=True) if mask]
        assert generated[-len(alone.log_probs) :] == pytest.approx(alone.log_probs, abs=1e-5)
    engine.shutdown()


def test_load_agent_checks_the_function(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def lead(task): ...\ndef other(): ...\n", encoding="utf-8")
    assert load_agent(f"{file}:lead").__name__ == "lead"
    for name, code, value in (
        (f"{file}", "config.user-code-spec", "function"),
        (f"{file}:led", "config.user-code-function", ["lead", "other"]),
        (f"{file}:other", "config.user-code-signature", "AgentTask"),
        (f"{tmp_path}/none.py:lead", "config.user-code-file", "none.py"),
        ("megarl.none.lead", "config.user-code-import", "ModuleNotFoundError"),
    ):
        with raises(code, name, value):
            load_agent(name)
