"""The client of a teacher's servers against a real HTTP server: retries, refusals, order, and the API key."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from support.expected_errors import raises

from megarl.base.errors import TeacherError
from megarl.base.ports import held_port
from megarl.config.schema.distillation import TeacherServerConfig
from megarl.rollout.sglang import teacher
from megarl.rollout.sglang.teacher import TeacherServers, TokenRow

KEY = "distillation.teacher_models.t.server"
ROWS = [TokenRow([1, 2, 3][: n % 3 + 1], list(range(n, n + n % 5))) for n in range(20)]


class OpenRequests:
    """Counts the open requests of one or several servers."""

    def __init__(self):
        self._lock, self._now, self.most = threading.Lock(), 0, 0

    def add(self, change):
        with self._lock:
            self._now += change
            self.most = max(self.most, self._now)


class Server(ThreadingHTTPServer):
    """Answers in SGLang's format: the log-prob of a token is minus its id. The first answers are errors.

    With ``together`` no request is answered before as many are open.
    """

    request_queue_size, daemon_threads = 1024, True

    def __init__(self, failures, wait_s=0.0, together=1, open_requests=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.open_requests = open_requests or OpenRequests()
        self.together = threading.Barrier(together)
        self.failures, self.wait_s = failures, wait_s
        self.lock, self.requests, self.keys = threading.Lock(), 0, set[str]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        fields, server = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        server.open_requests.add(1)
        with server.lock:
            server.requests += 1
            server.keys.add(self.headers["Authorization"])
            status = server.failures.pop(0) if server.failures else 200
        time.sleep(server.wait_s)
        server.together.wait(120)
        server.open_requests.add(-1)
        body = [answer(*part) for part in zip(fields["input_ids"], fields["logprob_start_len"], strict=True)]
        text = json.dumps(body if status == 200 else {"error": {"message": "no"}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # the client may have given up
            self.wfile.write(text)

    def log_message(self, *args):
        pass


def answer(ids, start):
    entries = [[None if n == 0 else -float(token), token, None] for n, token in enumerate(ids[start:])]
    return {"text": "", "meta_info": {"input_token_logprobs": entries, "output_token_logprobs": []}}


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(teacher, "_FIRST_WAIT_S", 0.01)
    servers = []

    def build(*args, **kwargs):
        servers.append(Server(*args, **kwargs))
        return servers[-1]

    yield build
    for server in servers:
        server.shutdown()
        server.server_close()


def client(servers, **changes):
    return TeacherServers(KEY, TeacherServerConfig(urls=servers, **changes))


def assert_graded(servers):
    grades = servers.grade(ROWS)
    assert [grade.log_probs.tolist() for grade in grades] == [[-float(token) for token in row.response] for row in ROWS]
    servers.close()


def test_rows_are_graded_in_order_by_concurrent_requests(start):
    both = OpenRequests()
    one, two = (start([], 0.05, open_requests=both) for _ in range(2))
    one.together = two.together = threading.Barrier(2)  # a request is answered when another one is open
    servers = client([one.url, two.url], rows_per_request=3, max_concurrent=4)
    assert_graded(servers)
    assert (one.requests, two.requests, servers.retries) == (3, 3, 0)  # 16 rows have a response
    assert 2 <= both.most <= 4


def test_one_client_holds_hundreds_of_requests_open(start):
    """The server answers none before all are open: connections and threads of the client are no limit."""
    count = 512
    server = start([], together=count)
    servers = client([server.url], rows_per_request=1, max_concurrent=count, max_attempts=1)
    rows = [TokenRow([1], [n + 1]) for n in range(2 * count)]
    assert [grade.log_probs.tolist() for grade in servers.grade(rows)] == [[-float(n + 1)] for n in range(2 * count)]
    assert (server.open_requests.most, server.requests) == (count, 2 * count)
    servers.close()


def test_failed_requests_are_repeated(start):
    server = start([503, 500, 429])
    servers = client([server.url], rows_per_request=4)
    assert_graded(servers)
    assert servers.retries == 3


def test_a_dead_server_is_passed_over(start):
    with held_port("127.0.0.1") as port:  # nobody listens there
        servers = client([f"http://127.0.0.1:{port}", start([]).url])
        assert_graded(servers)
    assert servers.retries >= 1


def test_the_last_failure_names_url_and_key(start):
    server = start([503] * 9)
    servers = client([server.url], max_attempts=3, rows_per_request=99)
    with raises("teacher.unavailable", f"{KEY}.urls", f"{server.url}/generate", "status 503", "3 attempts"):
        servers.grade(ROWS)
    assert server.requests == 3
    servers.close()
    slow = start([], 1.0)
    servers = client([slow.url], max_attempts=1, timeout_s=0.1)
    with pytest.raises(TeacherError) as caught:
        servers.grade(ROWS[:2])
    assert str(caught.value) == (
        f"{KEY}.urls: {slow.url} did not answer within {KEY}.timeout_s=0.1; gave up after 1 attempt. Start the server, "
        "then start or resume the run [teacher.unavailable]"
    )
    servers.close()


def test_a_refused_request_is_not_repeated(start):
    server = start([400])
    servers = client([server.url], rows_per_request=99)
    with raises("teacher.request-refused", f"{KEY}.urls", f"{server.url}/generate", "status 400"):
        servers.grade(ROWS)
    assert server.requests == 1
    servers.close()


def test_other_tokens_than_those_sent_are_an_error(start, monkeypatch):
    monkeypatch.setitem(globals(), "answer", lambda ids, start, right=answer: right(ids[:-1], start))
    servers = client([start([]).url])
    with raises("teacher.malformed-answer", f"{KEY}.urls", "log-prob"):
        servers.grade(ROWS)
    servers.close()


HONEST = [[None, 2], [-1.0, 3], [-2.0, 4]]
TOP = [None, [[-1.0, 5], [-2.0, 6]], [[-1.5, 7], [-2.5, 8]]]
WRONG_NUMBERS = [float("nan"), float("inf"), float("-inf"), 0.5, None, "x", [1.0], {}, 10**400]
WRONG_TOPS = [
    *([[number, 5], [-2.0, 6]] for number in WRONG_NUMBERS),
    *([[-1.0, token], [-2.0, 6]] for token in (6, -1, 2**31, 10**30, 5.5, None, "5")),
    [[-0.1, 5], [-0.1, 6]],
    [[-1.0, 5]],
    [[-1.0], [-2.0]],
    None,
    5,
]


LIES: list[Any] = [
    *({"input_token_logprobs": [HONEST[0], [number, 3], HONEST[2]]} for number in WRONG_NUMBERS),
    *({"input_token_logprobs": tokens} for tokens in (None, 5, "ab", {}, HONEST[:1], [5, 5, 5], [[], [], []])),
    *({"input_token_logprobs": HONEST, "input_top_logprobs": [*TOP[:1], top, TOP[2]]} for top in WRONG_TOPS),
    *({"input_token_logprobs": HONEST, "input_top_logprobs": top} for top in (None, 5, "ab", {}, TOP[:2])),
    {"input_token_logprobs": HONEST, "input_top_logprobs_val_flat_b64": "?"},
    {},
    None,
    [],
]


def test_a_server_that_lies_is_an_error(start, monkeypatch):
    servers, row = client([start([]).url]), TokenRow([2], [3, 4])
    bodies = [{"meta_info": meta_info} for meta_info in LIES]
    for body in [*bodies, None, 5, "text", []]:
        monkeypatch.setitem(globals(), "answer", lambda ids, start, body=body: body)
        with raises("teacher.malformed-answer", f"{KEY}.urls"):
            pytest.fail(f"{body} is graded: {servers.grade([row], topk=2)}")
    servers.close()


def test_an_honest_server_may_round(start, monkeypatch):
    rounded = {"input_token_logprobs": [HONEST[0], [1e-6, 3], [-0.0, 4]], "input_top_logprobs": TOP}
    monkeypatch.setitem(globals(), "answer", lambda ids, start: {"meta_info": rounded})
    servers = client([start([]).url])
    (grade,) = servers.grade([TokenRow([2], [3, 4])], topk=2)
    assert grade.log_probs.tolist() == pytest.approx([1e-6, 0.0]) and grade.top_ids.tolist() == [[5, 6], [7, 8]]
    servers.close()


def arrays(ids, values, dtype="float32"):
    """Top tokens as SGLang returns them with ``return_flat_raw_top_logprobs_b64``."""
    name = "input_top_logprobs_{}_flat_b64"
    fields = {name.format("idx"): ids.astype(np.int32), name.format("val"): values.astype(dtype)}
    encoded = {key: base64.b64encode(array.tobytes()).decode() for key, array in fields.items()}
    return encoded | {f"{key}_dtype": str(array.dtype) for key, array in fields.items()}


def test_damaged_arrays_of_top_tokens_are_an_error(start, monkeypatch):
    ids, values = np.arange(8).reshape(4, 2), -1 - np.arange(8.0).reshape(4, 2)
    row, plain = TokenRow([1, 2], [3, 4, 5]), answer
    cases = [arrays(ids, values), arrays(ids[:2], values), arrays(ids, values, "float64"), arrays(ids[:, :1], values)]
    for number, fields in enumerate(cases):

        def with_top(ids, start, fields=fields):
            body = plain(ids, start)
            return {**body, "meta_info": {**body["meta_info"], **fields}}

        monkeypatch.setitem(globals(), "answer", with_top)
        servers = client([start([]).url])
        if number:
            with raises("teacher.malformed-answer", "3 log-probs"):
                servers.grade([row], topk=2)
        else:
            (grade,) = servers.grade([row], topk=2)
            assert (grade.top_ids == ids[1:]).all() and (grade.top_log_probs == values[1:]).all()
        servers.close()


def test_api_key_comes_from_the_environment(start, monkeypatch):
    server = start([])
    with raises("teacher.api-key-unset", f"{KEY}.api_key_env=NO_SUCH_KEY"):
        client([server.url], api_key_env="NO_SUCH_KEY")
    monkeypatch.setenv("TEACHER_KEY", "secret")
    assert_graded(client([server.url], api_key_env="TEACHER_KEY"))
    assert server.keys == {"Bearer secret"}
