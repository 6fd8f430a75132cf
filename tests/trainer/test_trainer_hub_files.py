"""Models and data of the Hugging Face Hub: a real client against a server of this test, in other processes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.expected_errors import raises

from megarl.base.hub_names import is_data_url, is_model_name
from megarl.trainer.jobs.hub_files import download_data, with_hub_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESOLVE = """
import json, sys
from megarl.config import TrainConfig
from megarl.config.build import build
from megarl.config.keys import value_at
from megarl.trainer.jobs.hub_files import with_hub_files
config = with_hub_files(build(TrainConfig, json.loads(sys.argv[1])), lambda line: print(line, file=sys.stderr))
print(json.dumps([value_at(config, path) for path in sys.argv[2:]]))
"""
FILES: dict[str, dict[str, bytes]] = {
    "models/own/tiny": {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "modeling_own.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
    },
    "datasets/own/sums": {"data/a.parquet": b"a", "data/b.parquet": b"b", "README.md": b"text"},
}


class Hub(BaseHTTPRequestHandler):
    """The Hub's addresses for the files of a repository."""

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def log_message(self, *_):
        """Stay silent."""

    def _answer(self, *, body):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[0] == "api":
            repository = "/".join(parts[1:4])
            if repository not in FILES:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
            if "tree" in parts:
                entries = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in FILES[repository].items()
                ]
                return self._send(200, json.dumps(entries).encode(), {}, body)
            siblings = [{"rfilename": name} for name in FILES[repository]]
            info = {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings, "tags": []}
            return self._send(200, json.dumps(info).encode(), {}, body)
        kind, rest = ("datasets", parts[1:]) if parts[0] == "datasets" else ("models", parts)
        content = FILES[f"{kind}/{rest[0]}/{rest[1]}"]["/".join(rest[4:])]  # owner/name/resolve/revision/file
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self._send(200, content, headers, body)

    def _send(self, code, content, headers, body):
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


VALUES = {
    "data": {"train_files": ["hf://datasets/own/sums/data/*.parquet", "here.parquet"]},
    "actor_rollout_ref": {"model": {"path": "own/tiny"}},
    "trainer": {"experiment_name": "hub"},
}
KEYS = ("actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path", "data.train_files")


def resolve(folder, values, **environment):
    environ = {**os.environ, "HF_HOME": str(folder), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
    environ.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in environment else None
    command = [sys.executable, "-c", RESOLVE, json.dumps(values), *KEYS]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


def test_download_then_cache(endpoint, tmp_path):
    first = resolve(tmp_path, VALUES, HF_ENDPOINT=endpoint)
    assert first.returncode == 0, first.stderr
    model, tokenizer, files = json.loads(first.stdout)
    assert model == tokenizer and sorted(os.listdir(model)) == ["config.json", "model.safetensors"]
    assert [Path(file).name for file in files] == ["a.parquet", "b.parquet", "here.parquet"]
    assert Path(files[1]).read_bytes() == b"b"
    assert "actor_rollout_ref.model.path: own/tiny of the Hugging Face Hub" in first.stderr
    offline = resolve(tmp_path, VALUES, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert json.loads(offline.stdout) == json.loads(first.stdout), offline.stderr


@pytest.mark.parametrize(
    ("environment", "changes", "named"),
    [
        ({"HF_HUB_OFFLINE": "1"}, {}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {}, ""),
        ({}, {"actor_rollout_ref": {"model": {"path": "own/missing"}}}, "(RepositoryNotFoundError"),
    ],
)
def test_a_model_that_cannot_be_had_is_named(endpoint, tmp_path, environment, changes, named):
    values = VALUES | changes
    result = resolve(tmp_path, values, **{"HF_ENDPOINT": endpoint, **environment})
    name = values["actor_rollout_ref"]["model"]["path"]
    assert result.returncode == 1 and f"actor_rollout_ref.model.path={name}: " in result.stderr
    assert named in result.stderr and result.stderr.endswith("[hub.download-failed]\n")


def test_nothing_is_downloaded_if_the_hub_is_off(train_config):
    config = train_config({"actor_rollout_ref.model.path": "own/tiny", "hub.enable": False})
    assert with_hub_files(config, lambda line: pytest.fail(line)) is config


def test_local_paths_are_no_names_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "own" / "tiny").mkdir(parents=True)
    assert is_model_name("own/tiny") and is_model_name("own/tiny@v1.0")
    monkeypatch.chdir(tmp_path)
    assert not is_model_name("own/tiny")
    assert not any(map(is_model_name, ("tiny", "/own/tiny", "./own/tiny", "a/b/c", "~/tiny")))
    assert is_data_url("hf://datasets/a/b/c.parquet") and not is_data_url("a/b/c.parquet")
    with raises("hub.data-url") as caught:
        download_data("hf://a/b", "data.train_files")
    assert str(caught.value) == (
        "data.train_files=hf://a/b: write hf://datasets/owner/name/file, with a file or a pattern [hub.data-url]"
    )
