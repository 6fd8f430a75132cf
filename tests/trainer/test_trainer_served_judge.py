"""The judge's model is the only one that its endpoint serves."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from support.expected_errors import raises

from megarl.base.ports import held_port
from megarl.ops.jobs.table import compose_job
from megarl.trainer.jobs.served_judge import with_served_judge


@contextmanager
def endpoint(*names):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/v1/models"
            body = json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def judged(url, *extra):
    config = compose_job("grpo", ["--model", "m", "--data", "d", "--reward", url, *extra])
    return with_served_judge(config).reward.judge.model  # type: ignore[union-attr]


def test_the_only_model_is_taken():
    with endpoint("grader") as url:
        assert judged(url) == "grader"


@pytest.mark.parametrize(("names", "code"), [(("a", "b"), "judge.several-models"), ((), "judge.no-answer")])
def test_an_endpoint_with_no_or_several_models_is_an_error(names, code):
    with endpoint(*names) as url, raises(code, url, *names):
        judged(url)


def test_a_silent_endpoint_is_an_error_and_a_named_model_asks_nobody():
    with held_port("127.0.0.1") as port:
        url = f"http://127.0.0.1:{port}/v1"
        with raises("judge.no-answer", url):
            judged(url)
        assert judged(url, "reward.judge.model=named") == "named"
