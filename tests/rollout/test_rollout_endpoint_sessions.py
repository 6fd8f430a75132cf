"""Conversations that other people's programs lead over HTTP: what comes back is, token by token, what was written."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from agent_cases import EngineGenerate, Scripted, ids_of, merging_tokenizer, sampling
from endpoint_cases import ADD, USER, Refused, ask, client, lead, listening, said, talk

from megarl.errors import ConfigError
from megarl.rollout import EngineOptions, Request, RolloutError, create_engine
from megarl.rollout.agents import AgentError, Limits, trajectory_metrics, turn_seed
from megarl.rollout.agents.frames import encode_prompt
from megarl.rollout.agents.own_agent import load_agent


@pytest.fixture(scope="module")
def tokenizer():
    return merging_tokenizer()


@pytest.fixture(scope="module")
def endpoint(tokenizer):
    with listening(tokenizer) as endpoint:
        yield endpoint


def go_on(history, body, text):
    """The history with the answer as it came and a new message."""
    return [*history, said(body), {"role": "user", "content": text}]


def test_what_the_model_wrote_comes_back_as_text_and_goes_on_as_the_tokens_it_was(endpoint, tokenizer):
    """The tokenizer would join ``>`` with the line break that follows the turn, and ``a`` with ``b``."""
    script = Scripted(tokenizer, ["ab> <|im_end|>", "ok<|im_end|>"])

    def agent(task):
        assert task.env == {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key, "OPENAI_MODEL": "policy"}
        assert task.api_key not in repr(task)
        first = ask(task, task.messages)
        assert said(first)["content"] == "ab> "
        stripped = {"role": "assistant", "content": [{"type": "text", "text": "ab>"}], "refusal": None}
        assert said(ask(task, [*task.messages, stripped, {"role": "user", "content": "more"}]))["content"] == "ok"

    (done,) = lead(endpoint, script, agent)
    first, prompt = script.spelled("ab> <|im_end|>"), encode_prompt(tokenizer, USER)
    between = ids_of(tokenizer, "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    assert done.error is None and done.prompt_ids == prompt
    assert done.response_ids == first + between + script.spelled("ok<|im_end|>")
    assert script.asked[1][0] == prompt + first + between
    assert done.response_mask == [1] * len(first) + [0] * len(between) + [1] * 3
    assert done.log_probs == [-0.5 * mask for mask in done.response_mask]
    assert (done.weight_version, done.num_turns, done.finish_reason) == (0, 4, "stop")
    assert set(done.weight_versions) == {0, 1}
    whole = tokenizer.decode(done.prompt_ids + done.response_ids)
    assert ids_of(tokenizer, whole) != done.prompt_ids + done.response_ids


def test_calls_are_told_apart_and_their_answers_follow_the_tokens_of_the_call(endpoint, tokenizer):
    call = '<tool_call>\n{"name": "add", "arguments": {"a":1,  "b":2}}\n</tool_call>'
    broken = "<tool_call>{oops</tool_call>"
    script = Scripted(tokenizer, [f"Let me see.\n{call}<|im_end|>", f"{broken}<|im_end|>"])

    def agent(task):
        body = ask(task, task.messages, tools=[ADD], tool_choice="auto")
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        message = said(body)
        assert message["content"] == "Let me see."
        (made,) = message["tool_calls"]
        assert made["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
        # as frameworks send it back: other white space and ids, no content, fields of their own
        again = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
        history = [*task.messages, {**message, "tool_calls": [again], "audio": None}]
        result = {"role": "tool", "tool_call_id": "mine", "content": "3<|im_end|>"}
        last = ask(task, [*history, result], tools=[ADD])
        assert said(last)["content"] == broken and last["choices"][0]["finish_reason"] == "stop"
        return {"score": 1, "note": "x"}

    (done,) = lead(endpoint, script, agent)
    text = tokenizer.decode(done.prompt_ids + done.response_ids)
    assert "Tools: " in text and f"{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response>" in text
    assert done.fields == {"agent_result": {"score": 1, "note": "x"}}
    metrics = trajectory_metrics([done])
    assert metrics["tool_call_counts/mean"] == 2 and metrics["tool_call_counts/malformed_ratio"] == 0.5


def test_rewritten_histories_are_branches_of_which_the_longest_counts(endpoint, tokenizer):
    script = Scripted(tokenizer, ["one<|im_end|>", "two<|im_end|>", "short<|im_end|>", "three<|im_end|>"])

    def agent(task):
        history = go_on(task.messages, ask(task, task.messages), "next")
        ask(task, history, temperature=0.2)
        summary = [{"role": "system", "content": "a summary"}, {"role": "user", "content": "go"}]
        ask(task, summary)  # begins anew
        return ask(task, history) and 2  # the second turn once more: from the same tokens, a branch at the first

    (done,) = lead(endpoint, script, agent)
    assert tokenizer.decode(done.response_ids).endswith("assistant\nthree<|im_end|>")
    assert done.metrics["branches_dropped"] == 2 and done.metrics["turns_dropped"] == 2
    assert "tool_call_counts" not in done.metrics
    assert done.metrics["tokens_dropped"] == len("two") + len("short") + 2
    assert done.metrics["sampling_overridden"] == 1 and done.fields["agent_result"] == {"score": 2.0}
    assert script.asked[3][0] == script.asked[1][0] and {params.temperature for _, params, _, _ in script.asked} == {
        1.0
    }
    assert [seed for _, _, seed, _ in script.asked] == [turn_seed(0, turn) for turn in range(4)]


def test_agents_side_by_side_in_one_conversation_do_not_mix(endpoint, tokenizer):
    script = Scripted(tokenizer, lambda prompt, turn: f"echo {prompt.split('user')[-1].split('<|im')[0].strip()}", 0.01)

    def agent(task):
        def work(number):
            history = [{"role": "user", "content": f"task {number}"}]
            for turn in range(3):
                history = go_on(history, ask(task, history), f"{number}/{turn}")
            return [message["content"] for message in history if message["role"] == "assistant"]

        with ThreadPoolExecutor(8) as pool:
            for number, told in enumerate(pool.map(work, range(8))):
                assert told == [f"echo task {number}", f"echo {number}/0", f"echo {number}/1"]

    (done,) = lead(endpoint, script, agent)
    assert done.error is None and done.num_turns == 6
    assert done.metrics["branches_dropped"] == 7 and done.metrics["turns_dropped"] == 21
    number = tokenizer.decode(done.prompt_ids).split("task ")[1][0]
    assert tokenizer.decode(done.response_ids).count(f"echo {number}/") == 2


def test_several_choices_are_branches_with_seeds_of_their_own(endpoint, tokenizer):
    script = Scripted(tokenizer, ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])

    def agent(task):
        body = ask(task, task.messages, n=2, seed=7, logprobs=True)
        assert [said(body, choice)["content"] for choice in (0, 1)] == ["a", "b"]
        ask(task, [*task.messages, said(body, 1), *USER], seed=7)

    (done,) = lead(endpoint, script, agent)
    assert tokenizer.decode(done.response_ids).startswith("b<|im_end|>") and done.metrics["branches_dropped"] == 1
    assert len({seed for _, _, seed, _ in script.asked}) == 2  # the same seed asked again gives the same numbers
    assert script.asked[0][2] not in (7, turn_seed(0, 0))
    (other,) = lead(endpoint, Scripted(tokenizer, ["a", "b", "c"]), agent, [talk(seed=5)])
    assert other.error is None


@pytest.mark.parametrize(
    ("limits", "code", "reason"),
    [
        (Limits(response_tokens=20), "context_length_exceeded", "length"),
        (Limits(assistant_turns=1), "max_turns_exceeded", "turns"),
        (Limits(user_turns=0), "max_turns_exceeded", "turns"),
    ],
)
def test_a_conversation_that_meets_a_limit_ends_and_counts_however_its_agent_takes_it(
    endpoint, tokenizer, limits, code, reason
):
    def agent(task):
        history = go_on(task.messages, ask(task, task.messages), "more")
        with pytest.raises(Refused, match=code) as refused:
            ask(task, history)
        assert refused.value.status == 400
        raise refused.value

    (done,) = lead(endpoint, Scripted(tokenizer, ["one<|im_end|>"]), agent, [talk(limits=limits)])
    assert (
        done.error is None and done.finish_reason == reason and tokenizer.decode(done.response_ids) == "one<|im_end|>"
    )
    assert done.metrics["ended_at_limit"] == 1 and done.fields == {"agent_result": {}}


def test_a_turn_never_takes_more_than_is_left_and_may_take_less(endpoint, tokenizer):
    def agent(task):
        body = ask(task, task.messages, max_completion_tokens=4)
        assert said(body)["content"] == "long" and body["choices"][0]["finish_reason"] == "length"
        body = ask(task, go_on(task.messages, body, "x"), max_tokens=999)
        assert body["choices"][0]["finish_reason"] == "length"

    script = Scripted(tokenizer, ["long text", "x" * 90])
    (done,) = lead(endpoint, script, agent, [talk(limits=Limits(response_tokens=80))])
    assert len(done.response_ids) == 80 and done.finish_reason == "length" and done.error is None


def test_the_row_s_own_encoding_is_used_where_the_agent_asks_it_as_it_is(endpoint, tokenizer):
    script = Scripted(tokenizer, ["a<|im_end|>"])
    (done,) = lead(endpoint, script, lambda task: ask(task, task.messages) and None, [talk(prompt_ids=[5, 6, 7])])
    assert done.prompt_ids == [5, 6, 7]  # a data set cuts prompts at its left, for one


def test_a_prompt_that_is_too_long_is_told_so_and_fails_the_conversation(endpoint, tokenizer):
    short = talk("fine", prompt_ids=[1, 2], limits=Limits(prompt_tokens=3))
    long = talk("long", limits=Limits(prompt_tokens=3))
    script = Scripted(tokenizer, ["a<|im_end|>"])
    done = lead(endpoint, script, lambda task: ask(task, task.messages) and None, [short, long])
    assert done[0].error is None and "nothing to learn from" in done[1].error


def test_what_an_agent_raises_or_returns_fails_its_conversation_alone(endpoint, tokenizer):
    def agent(task):
        ask(task, task.messages)
        how = task.facts["how"]
        if how == "raises":
            raise ValueError("broken agent")
        if how == "exits":
            raise SystemExit(3)
        return {"fine": None, "odd": "a text", "nan": float("nan")}[how]

    hows = ["fine", "raises", "exits", "odd", "nan"]
    conversations = [talk(how, facts={"how": how}) for how in hows]
    done = lead(endpoint, Scripted(tokenizer, ["a<|im_end|>"] * 2), agent, conversations)
    errors = dict(zip(hows, [trajectory.error for trajectory in done], strict=True))
    assert errors.pop("fine") is None
    assert errors["raises"].startswith("ValueError: broken agent (") and "SystemExit: 3" in errors["exits"]
    assert "not 'a text'" in errors["odd"] and "not nan" in errors["nan"]
    assert trajectory_metrics(done)["agent/failed"] == 4
    with pytest.raises(AgentError, match="got no turn"):
        lead(endpoint, Scripted(tokenizer, []), lambda task: None)


def test_an_asynchronous_agent_may_block_and_is_cancelled_with_its_conversation(endpoint, tokenizer):
    ended = threading.Event()

    async def agent(task):
        ask(task, task.messages)  # a plain client in an asynchronous function: blocks nobody else
        if task.facts["slow"]:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
        return 1

    pair = [talk(f"{slow}", facts={"slow": slow}, limits=Limits(seconds=1.5)) for slow in (False, True)]
    done = lead(endpoint, Scripted(tokenizer, ["a<|im_end|>"]), agent, pair)
    assert done[0].fields == {"agent_result": {"score": 1.0}} and "longer than 1.5 s" in done[1].error
    assert ended.wait(30)


def test_requests_of_a_conversation_that_is_over_are_given_up_and_refused(endpoint, tokenizer):
    statuses, asked = [], threading.Event()

    def agent(task):
        def late():
            asked.set()
            for _ in range(2):  # under way when the conversation ends, and begun after it
                try:
                    ask(task, USER)
                except Refused as refused:
                    statuses.append((refused.status, refused.error["code"]))

        ask(task, task.messages)
        thread = threading.Thread(target=late)
        thread.start()
        asked.wait()
        threads.append(thread)
        slow.wait()

    threads, slow = [], threading.Event()

    class Slow(Scripted):
        async def __call__(self, prompt_ids, params, **where):
            if self.at:
                slow.set()
                await asyncio.sleep(60)
            return await super().__call__(prompt_ids, params, **where)

    (done,) = lead(endpoint, Slow(tokenizer, ["a<|im_end|>"]), agent)
    assert done.error is None and done.metrics["requests_cut_off"] == 1
    threads[0].join(30)
    assert statuses == [(410, "session_closed")] * 2


def test_an_engine_that_fails_ends_everything_and_not_one_conversation(endpoint, tokenizer):
    def agent(task):
        ask(task, task.messages)

    script = Scripted(tokenizer, [RolloutError("all replicas are lost")])
    with pytest.raises(RolloutError, match="all replicas are lost"):
        lead(endpoint, script, agent, [talk("one"), talk("two")], fatal=(RolloutError,))


def test_sixty_four_conversations_over_a_real_engine_get_what_each_gets_alone(endpoint, tokenizer, make_folder):
    folder = make_folder(vocab_size=len(tokenizer), eos_token_id=1, max_position_embeddings=512)
    engine = create_engine("embedded", str(folder), EngineOptions(max_num_seqs=16))
    engine.load_hf(str(folder))

    def agent(task):
        with client(task) as http:
            history = list(task.messages)
            for turn in range(2):
                body = {"messages": history, "max_tokens": 6}
                answer = http.post(f"{task.base_url}/chat/completions", json=body).raise_for_status().json()
                history = go_on(history, answer, f"turn {turn}")

    conversations = [talk(f"{number}", seed=number, params=sampling(max_new_tokens=200)) for number in range(64)]
    done = lead(endpoint, EngineGenerate(engine), agent, conversations)
    between = ids_of(tokenizer, "\n<|im_start|>user\nturn 0<|im_end|>\n<|im_start|>assistant\n")
    for conversation, trajectory in zip(conversations, done, strict=True):
        context = encode_prompt(tokenizer, USER)
        for turn in range(2):
            params = sampling(max_new_tokens=6)
            (alone,) = engine.generate([Request("r", context, params, turn_seed(conversation.seed, turn))])
            close = [] if alone.token_ids[-1] == 1 else [1]
            context = [*context, *alone.token_ids, *(close + between if turn == 0 else [])]
        assert list(trajectory.prompt_ids) + list(trajectory.response_ids) == context
        written = [p for p, mask in zip(trajectory.log_probs, trajectory.response_mask, strict=True) if mask]
        assert written[-len(alone.log_probs) :] == pytest.approx(alone.log_probs, abs=1e-5)
    engine.shutdown()


def test_an_agent_is_looked_for_before_anything_starts(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def lead(task): ...\ndef other(): ...\n")
    assert load_agent(f"{file}:lead").__name__ == "lead"
    for name, told in (
        (f"{file}", "names no function"),
        (f"{file}:led", r"no function called 'led'; there are \['lead', 'other'\]"),
        (f"{file}:other", "must take one argument, an AgentTask"),
        (f"{tmp_path}/none.py:lead", "there is no file"),
        ("megarl.none.lead", "No module named"),
    ):
        with pytest.raises(ConfigError, match=told):
            load_agent(name)
