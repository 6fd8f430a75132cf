"""SGLang behind its HTTP server: one that this process starts and ends, or a running one.

As a program (``python -m megarl.rollout.sglang.http``) it is the server. It equals ``python -m sglang.launch_server``,
but reads its arguments as JSON from its input and ends with its parent process. The API key is among them; on a command
line every user of the machine could read it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import importlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import psutil

from megarl.base.child_process import die_with_parent, kill_process_tree
from megarl.base.errors import ConfigError
from megarl.base.json_text import parse_json
from megarl.base.logs import output_log
from megarl.base.ports import bypass_proxies, held_port
from megarl.base.processes import READ_ERRORS, descendants
from megarl.models import read_model_config
from megarl.rollout.interface import EngineLost, RequestRefused, RolloutError
from megarl.rollout.sglang.backend import CLOSE_S, CONTROL_CALLS, ControlResult, RequestLoop, stopped_processes
from megarl.rollout.sglang.options import (
    IMAGE_SETTINGS,
    KEY,
    ROUTES_ARGUMENT,
    WHOLE_TOWERS,
    RankRendezvous,
    SGLangOptions,
    decodes,
    environment,
    image_arguments,
    needs_shim,
    server_args,
)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOG_TAIL = 4000
"""Characters of a server's output that an error repeats."""

_POLL_S = 0.2
_KILL_S = 30.0
_INVALID = (400, 413, 422)
"""HTTP statuses that blame the request."""


class HttpBackend:
    """Client of a server; ``process`` is that of the server if this process started it."""

    def __init__(
        self, url: str, api_key: str, loop: RequestLoop, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.url, self._loop, self._process = url.rstrip("/"), loop, process
        self._authorization = {"Authorization": f"Bearer {api_key}"}
        self._lost: str | None = None
        self._client: Any = None
        host = urlsplit(self.url).hostname
        self.ranks_host = None if host in LOOPBACK else host

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        status, body = await self.send("POST", "/generate", payload)
        if status != 200 or not isinstance(body, dict):
            text = f"SGLang refused a request ({status}): {_message(body)}"
            if status in _INVALID:
                raise RequestRefused(text, code="sglang.request-refused")
            raise RolloutError(text, code="sglang.request-failed")
        return body

    async def abort(self, rid: str) -> None:
        await self.send("POST", "/abort_request", {"rid": rid})

    async def call(self, method: str, **fields: Any) -> ControlResult:
        status, body = await self.send("POST", CONTROL_CALLS[method].path, _sendable(fields))
        success = status == 200 and not (isinstance(body, dict) and body.get("success") is False)
        ranks = body.get("ranks") if isinstance(body, dict) else None
        return ControlResult(success, _message(body), ranks or ())

    async def has(self, method: str) -> bool:
        """Reads the server's OpenAPI description."""
        status, body = await self.send("GET", "/openapi.json")
        return status == 200 and CONTROL_CALLS[method].path in body.get("paths", {})

    async def loaders(self) -> list[str]:
        return list((await self.server_info()).get("custom_weight_loader") or [])

    async def server_info(self) -> Mapping[str, Any]:
        """Return the server's arguments and state; a RolloutError if it does not report them."""
        status, body = await self.send("GET", "/server_info")
        if status != 200 or not isinstance(body, dict):
            raise RolloutError(
                f"SGLang at {self.url} does not report its arguments ({status}): {_message(body)}",
                code="sglang.no-server-info",
            )
        return body

    async def answers_strangers(self) -> bool:
        """Return whether the server answers requests without the key."""
        status, _ = await self.send("GET", "/server_info", headers={})
        return status not in (401, 403)

    async def ask_scheduler(self) -> None:
        """The server's state has a part of the scheduler."""
        await self.server_info()

    def stopped(self) -> list[int]:
        """Empty for a server that was already running."""
        if self._process is None:
            return []
        with contextlib.suppress(*READ_ERRORS):
            server = psutil.Process(self._process.pid)
            return stopped_processes([server, *descendants(server)])
        return []

    def failure(self) -> str | None:
        if self._process is not None and self._process.poll() is not None:
            return f"the server at {self.url} ended with code {self._process.returncode}"
        return self._lost

    def close(self) -> None:
        if self._process is not None:
            kill_process_tree(self._process, _KILL_S)

    async def disconnect(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def send(
        self, verb: str, path: str, fields: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send a request; return status and body, parsed if it is JSON. ``headers`` replace the one with the key.

        Raises:
            EngineLost: the server does not answer.
        """
        import aiohttp

        if self._client is None:
            # One connection per request, without limit and timeout. Connections are not reused: the server closes idle
            # ones after seconds, and a request on such a connection cannot know whether it was read.
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
            )
        try:
            headers = self._authorization if headers is None else headers
            async with self._client.request(verb, self.url + path, json=fields, headers=headers) as response:
                text = (await response.read()).decode(errors="replace")
                return response.status, _parsed(text)
        except aiohttp.ClientError as error:
            self._lost = f"the server at {self.url} does not answer: {type(error).__name__}: {error}"
            raise EngineLost(self._lost, code="sglang.no-answer") from None


def attach(url: str, folder: str, options: SGLangOptions, loop: RequestLoop) -> HttpBackend:
    """Return a client of a running server.

    Raises:
        ConfigError: the server does not match the options, or does not demand an API key.
        RolloutError: it does not answer, or refuses the key.
    """
    if not options.api_key:
        raise ConfigError(
            f"the SGLang server at {url} needs an API key; name its variable in {KEY}.api_key_env",
            code="sglang.no-api-key-env",
        )
    server = HttpBackend(url, options.api_key, loop)
    try:
        if loop.call(server.answers_strangers(), options.start_timeout_s, f"asking {url} without its key"):
            raise ConfigError(
                f"the SGLang server at {url} answers without an API key, and its weight endpoints execute code of "
                f"their senders: start it with --api-key, and name the variable with the key in {KEY}.api_key_env",
                code="sglang.unprotected-server",
            )
        info = loop.call(server.server_info(), options.start_timeout_s, f"reading the arguments of {url}")
        _check_server_info(url, info, folder, options)
        if server.ranks_host is None and info.get("nnodes", 1) > 1:
            # The server is local with ranks on other hosts, which know this host by its rendezvous address.
            server.ranks_host = str(info["dist_init_addr"]).rpartition(":")[0].strip("[]")
    except BaseException:
        loop.call(server.disconnect(), CLOSE_S, "closing connections")
        raise
    return server


def _check_server_info(url: str, info: Mapping[str, Any], folder: str, options: SGLangOptions) -> None:
    expected: dict[str, Any] = {
        "tp_size": options.tensor_parallel_size,
        "skip_tokenizer_init": not decodes(folder, options),
    }
    if read_model_config(folder).vision is not None:
        expected |= image_arguments(options) | ({WHOLE_TOWERS: False} if options.trained_tower else {})
        if not options.image_options and info.get(IMAGE_SETTINGS):
            expected[IMAGE_SETTINGS] = None
    for name, value in expected.items():
        if info.get(name, value) != value:
            raise ConfigError(
                f"the SGLang server at {url} runs with {name}={info[name]}, the options have {value}",
                code="sglang.server-mismatch",
            )
    if options.return_routes and not info.get(ROUTES_ARGUMENT):
        raise ConfigError(
            f"the SGLang server at {url} does not run with --enable-return-routed-experts, which "
            "actor_rollout_ref.actor.router_replay.mode=R3 needs: add it, or set R2",
            code="sglang.server-without-routes",
        )
    if options.seeded and not info.get("enable_deterministic_inference"):
        raise ConfigError(
            f"the SGLang server at {url} does not run with --enable-deterministic-inference, which seeds "
            "need: add it, or set rollout.engine_kwargs.sglang.deterministic=false",
            code="sglang.server-not-deterministic",
        )


def start_server(folder: str, max_model_len: int, options: SGLangOptions, loop: RequestLoop) -> HttpBackend:
    """Start a server and wait until it is ready.

    Raises:
        RolloutError: it does not get ready; the message has the end of its output.
    """
    api_key = options.api_key or secrets.token_hex(32)
    with contextlib.ExitStack() as stack:
        # Held until the server listens, whose libraries take seconds to import.
        port = options.port or stack.enter_context(held_port(options.host))
        options = dataclasses.replace(options, api_key=api_key, port=port)
        job = {"folder": os.path.abspath(folder), "max_model_len": max_model_len, "options": vars(options)}
        log = stack.enter_context(_output())
        start = log.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl.rollout.sglang.http"],
            env=os.environ | environment(options),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it may have ended; `_ready` reports that
            process.stdin.write(json.dumps(job).encode())
        server = HttpBackend(f"http://{options.host}:{options.port}", api_key, loop, process)
        try:
            loop.call(_ready(server), options.start_timeout_s, "starting its server")
        except BaseException as error:
            server.close()
            loop.call(server.disconnect(), CLOSE_S, "closing connections")
            if isinstance(error, RolloutError):
                log.seek(start)
                output = log.read().decode(errors="replace")[-LOG_TAIL:]
                raise RolloutError(f"{error.text}\n{output}", code=error.code) from None
            raise
    return server


async def _ready(server: HttpBackend) -> None:
    while True:
        if server._process is not None and server._process.poll() is not None:
            raise RolloutError(
                f"the SGLang server ended with code {server._process.returncode} while it started:",
                code="sglang.start-failed",
            )
        try:
            status, _ = await server.send("GET", "/health")
            if status == 200:
                return
        except RolloutError:
            # The server does not listen yet.
            server._lost = None
        await asyncio.sleep(_POLL_S)


def _sendable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Encode bytes in base64, as SGLang expects in JSON."""

    def encode(value: Any) -> Any:
        if isinstance(value, bytes):
            return base64.b64encode(value).decode()
        return [encode(part) for part in value] if isinstance(value, list) else value

    return {name: encode(value) for name, value in fields.items() if value is not None}


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text


def _message(body: Any) -> str:
    if isinstance(body, dict):
        error = body.get("error")
        return str(body.get("message") or (error.get("message") if isinstance(error, dict) else error) or body)
    return str(body)


def _output() -> IO[bytes]:
    """Open the file for the server's output: this process's log file, if any."""
    path = output_log(1)
    return Path(path).open("a+b") if path else tempfile.TemporaryFile()


def main() -> None:
    """Serve until the process is ended."""
    job = json.loads(sys.stdin.buffer.read())
    die_with_parent(os.getppid())
    options = SGLangOptions(**job["options"])
    bypass_proxies(options.host)  # the server calls itself
    rendezvous = RankRendezvous(options)
    os.environ.update(rendezvous.variables)
    arguments = server_args(job["folder"], job["max_model_len"], options) | rendezvous.arguments
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    if needs_shim(options):
        importlib.import_module("megarl.rollout.sglang.forks").fork_this_process()
    # A warm-up would generate without weights.
    arguments |= {"host": options.host, "port": options.port, "api_key": options.api_key, "skip_server_warmup": True}
    launch_server(ServerArgs(**arguments))


if __name__ == "__main__":
    main()
