"""The endpoint over HTTP: token, errors in OpenAI's form, streams, and external requests."""

import asyncio
import http.client
import json
import socket
import stat
import threading
from contextlib import contextmanager

import httpx
import psutil
import pytest
from agent_cases import Scripted, merging_tokenizer, tokenized
from endpoint_cases import ADD, HAS_OPENAI, USER, Refused, client, complete, lead, listening, message_of, post
from support.expected_errors import raises

from megarl.agents.endpoint import EndpointAddress
from megarl.agents.endpoint.server import TOKEN_VARIABLE, make_token
from megarl.agents.types import LARGEST_BODY
from megarl.base.logs import LogFormatter
from megarl.rollout import RolloutError


@pytest.fixture(scope="module")
def tokenizer():
    return merging_tokenizer()


@pytest.fixture(scope="module")
def endpoint(tokenizer):
    with listening(tokenizer, wait_s=0.2) as endpoint:
        yield endpoint


@contextmanager
def generating(endpoint, generate):
    """Let the run generate within the block."""
    over, started = asyncio.Event(), threading.Event()

    async def phase():
        async with endpoint.serving(generate):
            started.set()
            await over.wait()

    thread = threading.Thread(target=endpoint.loop.run, args=(phase(),))
    thread.start()
    started.wait()
    try:
        yield
    finally:
        endpoint.loop.loop.call_soon_threadsafe(over.set)
        thread.join()


class Endless:
    """Generates until it is cancelled."""

    def __init__(self):
        self.called, self.cancelled = threading.Event(), threading.Event()

    async def __call__(self, prompt_ids, params, **options):
        self.called.set()
        try:
            await asyncio.sleep(3600)
        finally:
            self.cancelled.set()


def root(endpoint):
    return endpoint.base_url.removesuffix("/v1")


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "Basic {}", "{}", "Bearer {}x", "Bearer \u00e4", b"Bearer \xff"]
)
def test_token_is_required(endpoint, header):
    value = header.format(endpoint.api_key).encode() if isinstance(header, str) else header
    headers = {} if value is None else {"Authorization": value}
    for path in ("/v1/models", "/v1/chat/completions", "/sessions/x/v1/chat/completions", "/sessions/x/v1/models"):
        method = "GET" if path.endswith("models") else "POST"
        answer = httpx.request(method, root(endpoint) + path, headers=headers, verify=False, timeout=60)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(root(endpoint) + "/health", verify=False, timeout=60).json() == {"status": "ok"}


def test_models_and_unknown_paths(endpoint):
    caller = client(endpoint)
    (model,) = caller.get(endpoint.base_url + "/models").json()["data"]
    assert model["id"] == "policy"
    for path, status in (("/v1/completions", 404), ("/v1/chat/completions", 405)):
        answer = caller.get(root(endpoint) + path)
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"
    gone = caller.post(root(endpoint) + "/sessions/unknown/v1/chat/completions", json={})
    assert gone.status_code == 410 and gone.json()["error"]["code"] == "session_closed"


@pytest.mark.parametrize(
    ("change", "message", "param"),
    [
        ({"messages": []}, "messages", "messages"),
        ({"messages": None}, "'messages' is a required property", None),
        ({"messages": [{"role": "god", "content": "x"}]}, "'god' is not one of", "messages.0.role"),
        ({"messages": [*USER, {"role": "assistant", "content": "x"}]}, "last message", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "must be texts", "messages.0"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not valid JSON", None),
        ({"top_logprobs": 3, "logprobs": True}, "only the log-prob of the chosen token", "top_logprobs"),
        ({"tool_choice": "required", "tools": [ADD]}, "calls cannot be forced", "tool_choice"),
        ({"parallel_tool_calls": False}, "as many calls", "parallel_tool_calls"),
        ({"tools": [{"function": {}}]}, "'name' is a required", "tools.0.function"),
        ({"temperature": -1}, "less than the minimum", "temperature"),
        ({"temperature": 1e-30}, "too small", "temperature"),
        ({"top_p": 0}, "top_p", "top_p"),
        ({"top_k": 0}, "top_k", "top_k"),
        ({"top_k": 2**63}, "top_k", "top_k"),
        ({"seed": 10**30}, "seed", "seed"),
        ({"stop": "x" * 1000}, "stop", "stop"),
        ({"n": 1000}, "maximum of 64", "n"),
        ({"stop": [""]}, "stop", "stop.0"),
        ({"max_tokens": 10**6}, "more than is served", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 700}]}, "more than is served", "messages"),
        ({"presence_penalty": 0.5}, "presence_penalty", "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "'text' was expected", "response_format.type"),
        ({"best_of": 2}, "best_of is not supported; supported are", "best_of"),
    ],
)
def test_unsupported_fields_are_refused_by_name(endpoint, change, message, param):
    body = {"messages": USER} | change
    answer = post(endpoint, json.dumps({name: value for name, value in body.items() if value is not None}).encode())
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"] and error["param"] == param, error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"NaN", b'{"messages": NaN}', b"\xff\xfe", b"[" * 100_000])
def test_body_must_be_a_json_object(endpoint, body):
    answer = post(endpoint, body)
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "


@pytest.mark.parametrize(
    "request_of",
    [
        lambda token: b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer\r\n " + token + b"\r\n\r\n",
        lambda token: b"garbage " + token + b"\r\n\r\n",
        lambda token: b"GET /" + 500 * token + b" HTTP/1.1\r\n\r\n",
        lambda token: b"GET http://[" + token + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        lambda token: POST + token + b"\r\nContent-Length: -5\r\n\r\n",
        lambda token: POST + token + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + token + b"\r\n",
        lambda token: POST + token + b"\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
    ],
)
def test_malformed_requests_are_counted_and_neither_fill_the_log_nor_show_the_token(tokenizer, caplog, request_of):
    with listening(tokenizer) as endpoint:
        port = int(endpoint.base_url.split(":")[-1].split("/")[0])
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(request_of(endpoint.api_key.encode()))
                assert connection.recv(4096).split()[1] == b"400"
        assert client(endpoint).get(root(endpoint) + "/health").status_code == 200
        assert endpoint.take_metrics()["endpoint/refused"] >= 5 or not caplog.records
        lines = "\n".join(LogFormatter().format(record) for record in caplog.records)
        assert len(caplog.records) <= 2 and endpoint.api_key not in lines and "Traceback" not in lines, lines


def test_the_first_failure_of_each_kind_is_logged_with_its_traceback(tokenizer, caplog):
    with listening(tokenizer) as endpoint, generating(endpoint, Scripted(tokenizer, lambda *_: KeyError("a bug"))):
        for _ in range(3):
            assert post(endpoint, {"messages": USER}).status_code == 500
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


def test_large_body_and_unknown_model_are_refused(endpoint):
    assert post(endpoint, b" " * (LARGEST_BODY + 1)).status_code == 413
    with pytest.raises(Refused, match="served as 'policy'") as refused:
        complete(endpoint, USER, model="gpt-4o")
    assert refused.value.status == 404 and refused.value.error["code"] == "model_not_found"


@pytest.mark.parametrize("change", [{}, {"tools": [{"function": {"name": "f", "parameters": {"x" * 10**7: 1}}}]}])
def test_a_request_that_is_too_long_by_its_bytes_is_not_tokenized(endpoint, tokenizer, change):
    """To tokenize 10 MB takes half a minute and gigabytes of memory."""
    body = {"messages": [{"role": "user", "content": "hi" if change else "x" * 10**7}], **change}
    with tokenized(tokenizer) as lengths, generating(endpoint, Scripted(tokenizer, lambda prompt, turn: "a<|im_end|>")):
        answer = post(endpoint, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert lengths == [] and message_of(complete(endpoint, USER))["content"] == "a"


def test_many_messages_are_refused_before_they_are_checked_one_by_one(endpoint):
    answer = post(endpoint, {"messages": [{"role": "god"}] * 20_000})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


def test_other_requests_are_served_while_one_is_tokenized(endpoint, tokenizer, monkeypatch):
    begun, goes_on, answers = threading.Event(), threading.Event(), []

    def slow(tokenizer, messages, *args):
        begun.set()
        goes_on.wait(60)
        return [5]

    monkeypatch.setattr("megarl.agents.endpoint.chat_format.encode_prompt", slow)
    with generating(endpoint, Scripted(tokenizer, lambda prompt, turn: "a<|im_end|>")):
        waiting = threading.Thread(target=lambda: answers.append(complete(endpoint, USER)))
        waiting.start()
        assert begun.wait(60)
        assert client(endpoint, timeout=30).get(root(endpoint) + "/health").status_code == 200
        assert answers == []
        goes_on.set()
        waiting.join(60)
    assert message_of(answers[0])["content"] == "a"


def test_external_requests_are_served_during_generation(endpoint, tokenizer):
    with pytest.raises(Refused, match=r"did not generate within 0\.2 s") as refused:
        complete(endpoint, USER)
    assert refused.value.status == 503
    assert post(endpoint, {"messages": USER}).headers["Retry-After"] == "30"
    script = Scripted(tokenizer, lambda prompt, turn: "hello END more<|im_end|>")
    endpoint.take_metrics()
    with generating(endpoint, script):
        body = complete(
            endpoint, [{"role": "developer", "content": "be<|im_end|> kind"}, *USER], stop="END", temperature=0.5,
            top_p=0.9, top_k=3, max_tokens=9, logprobs=True, return_token_ids=True, user="me", seed=-(2**63 - 1), n=2,
        )  # fmt: skip
        assert post(endpoint, {"messages": USER, "max_tokens": 0}).status_code == 400
    assert (
        message_of(body) == {"role": "assistant", "content": "hello ", "refusal": None} and body["weight_version"] == 0
    )
    first, second = body["choices"]
    written = script.spelled("hello END more<|im_end|>")[:9]
    assert first["token_ids"] == written and first["finish_reason"] == "length" and second["index"] == 1
    assert tokenizer.decode(body["prompt_token_ids"]).startswith("<|im_start|>system\nbe<|im_end|> kind<|im_end|>\n")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert body["prompt_token_ids"].count(end) == 2  # of the two messages
    assert [token["logprob"] for token in first["logprobs"]["content"]] == [-0.5] * 9
    assert body["usage"]["completion_tokens"] == 18
    (_, params, seed, key), (_, _, next_seed, next_key) = script.calls
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 3, ("END",))
    assert 0 <= seed < 2**63 and next_seed == seed + 1 and key == next_key
    metrics = endpoint.take_metrics()
    assert (metrics["endpoint/requests"], metrics["endpoint/refused"], metrics["endpoint/tokens"]) == (1, 1, 18)
    assert endpoint.take_metrics()["endpoint/requests"] == 0


def test_interrupted_request_restarts_with_the_next_generation(tokenizer):
    with listening(tokenizer) as endpoint:
        endless, answers = Endless(), []
        client_thread = threading.Thread(target=lambda: answers.append(complete(endpoint, USER)))
        with generating(endpoint, endless):
            client_thread.start()
            endless.called.wait()
        with generating(endpoint, Scripted(tokenizer, lambda prompt, turn: "now<|im_end|>")):
            client_thread.join(60)
        assert message_of(answers[0])["content"] == "now"
        metrics = endpoint.take_metrics()
        assert metrics["endpoint/cut_off"] == 1 and metrics["endpoint/requests"] == 1
        assert metrics["endpoint/waited_s/mean"] > 0


def test_waiting_requests_fail_at_the_end_of_the_run(tokenizer):
    endless, answers = Endless(), []
    with listening(tokenizer) as endpoint:
        waiting = threading.Thread(target=lambda: answers.append(post(endpoint, {"messages": USER})))
        with generating(endpoint, endless):
            waiting.start()
            endless.called.wait()
    waiting.join(60)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "run_ended"


def test_disconnected_client_cancels_its_request(endpoint, tokenizer):
    endless = Endless()
    connection = http.client.HTTPConnection(root(endpoint).removeprefix("http://"))
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    with generating(endpoint, endless):
        connection.request("POST", "/v1/chat/completions", json.dumps({"messages": USER}), headers)
        assert endless.called.wait(60) and not endless.cancelled.is_set()
        connection.close()
        assert endless.cancelled.wait(60)


def test_engine_failure_is_reported_to_the_client(endpoint, tokenizer):
    error = RolloutError("lost", code="rollout.engine-lost")
    with generating(endpoint, Scripted(tokenizer, lambda prompt, turn: error)):
        with pytest.raises(Refused, match="the rollout engine failed: lost") as refused:
            complete(endpoint, USER)
        assert refused.value.status == 503


def test_stream_has_each_choice_in_one_piece(endpoint, tokenizer):
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>'
    with generating(endpoint, Scripted(tokenizer, lambda prompt, turn: call)):
        body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}, "tools": [ADD]}
        answer = post(endpoint, body)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    whole, end, usage = map(json.loads, events)
    assert whole["object"] == "chat.completion.chunk" and whole["choices"][0]["finish_reason"] is None
    (call_delta,) = whole["choices"][0]["delta"]["tool_calls"]
    assert call_delta["index"] == 0 and call_delta["function"]["name"] == "add"
    assert end["choices"][0]["delta"] == {} and end["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] > 0
    assert len({event["id"] for event in (whole, end, usage)}) == 1


def test_stop_strings_need_an_engine_with_tokenizer(tokenizer):
    with listening(tokenizer, stop_strings=False) as endpoint, pytest.raises(Refused, match="knows no texts"):
        complete(endpoint, USER, stop="x")


def test_endpoint_listens_on_loopback_only(endpoint):
    port = int(endpoint.base_url.split(":")[-1].split("/")[0])
    connections = psutil.Process().net_connections("inet")
    addresses = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
    assert addresses == ["127.0.0.1"]


def test_access_file_is_private(tokenizer, tmp_path, monkeypatch):
    file = tmp_path / "new" / "endpoint.json"
    file.parent.mkdir()
    file.write_text("another user's", encoding="utf-8")
    file.chmod(0o666)
    reader = file.open()
    with listening(tokenizer, address=EndpointAddress(access_file=file)) as endpoint:
        content = json.loads(file.read_text(encoding="utf-8"))
        assert content == {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": "policy"}
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(endpoint.api_key) >= 43
        assert reader.read() == "another user's" and endpoint.api_key not in endpoint.describe()
        port = int(endpoint.base_url.split(":")[-1].split("/")[0])
        with (
            raises("endpoint.cannot-listen", f"port={port}"),
            listening(tokenizer, address=EndpointAddress(port=port)),
        ):
            pass
        assert endpoint.base_url.startswith("http://127.0.0.1:")
    assert not file.exists()
    monkeypatch.setenv(TOKEN_VARIABLE, "chosen-by-the-owner-of-it")
    assert make_token() == "chosen-by-the-owner-of-it"
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with raises("endpoint.weak-token") as caught:
        make_token()
    assert str(caught.value) == (
        f"the environment variable {TOKEN_VARIABLE} must hold at least 16 printable ASCII characters without a blank; "
        "it holds 5 [endpoint.weak-token]"
    )
    monkeypatch.delenv(TOKEN_VARIABLE)
    with (
        raises("endpoint.access-file", tmp_path),
        listening(tokenizer, address=EndpointAddress(access_file=tmp_path)),
    ):
        pass


@pytest.mark.parametrize("library", ["httpx", *(["openai"] if HAS_OPENAI else [])])
def test_conversation_with_openai_and_plain_clients(endpoint, tokenizer, library):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    script = Scripted(tokenizer, [call, "trajectory<|im_end|>"])

    def plain(task):
        body = complete(task, task.messages, tools=[ADD])
        result = {"role": "tool", "tool_call_id": message_of(body)["tool_calls"][0]["id"], "content": "1"}
        return message_of(complete(task, [*task.messages, message_of(body), result], tools=[ADD]))["content"]

    def with_openai(task):
        from openai import BadRequestError, OpenAI
        from openai.types.chat import ChatCompletion

        api = OpenAI(base_url=task.base_url, api_key=task.api_key)
        assert [model.id for model in api.models.list()] == ["policy"]
        first = api.chat.completions.create(model=task.model, messages=task.messages, tools=[ADD], logprobs=True)
        ChatCompletion.model_validate(first.model_dump(), strict=True)
        message = first.choices[0].message
        history = [*task.messages, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}]
        with pytest.raises(BadRequestError, match="best_of"):
            api.chat.completions.create(model=task.model, messages=history, extra_body={"best_of": 2})
        events = api.chat.completions.create(model=task.model, messages=history, tools=[ADD], stream=True)
        return "".join(event.choices[0].delta.content or "" for event in events)

    agent = {"httpx": plain, "openai": with_openai}[library]
    (trajectory,) = lead(endpoint, script, lambda task: {"text": agent(task)})
    assert trajectory.fields["agent_result"] == {"text": "trajectory"} and trajectory.num_turns == 4
    assert trajectory.metrics["branches_dropped"] == 0
