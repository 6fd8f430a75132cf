"""SGLang behind its HTTP server: one that this process starts and ends, or one that somebody else did."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO, Any
from urllib.parse import urlsplit

import psutil

from megarl.errors import ConfigError
from megarl.logs import log_of
from megarl.ports import free_port
from megarl.rollout.interface import EngineLost, RolloutError
from megarl.rollout.sglang.backend import CALLS, CLOSE_S, Loop, Outcome
from megarl.rollout.sglang.environment import environment
from megarl.rollout.sglang.options import SGLangOptions
from megarl.rollout.sglang.server_args import decodes

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOG_TAIL = 4000
"""Characters of a server's last words that an error repeats."""

_LOOK_S = 0.2


class HttpServer:
    """A client of a running server.

    Args:
        url: of the server, such as ``http://10.0.0.3:30000``.
        loop: where requests run.
        process: of the server, if this process started it.
    """

    def __init__(self, url: str, loop: Loop, process: subprocess.Popen[bytes] | None = None) -> None:
        self.url, self._loop, self._process = url.rstrip("/"), loop, process
        self._lost: str | None = None
        self._client: Any = None
        host = urlsplit(self.url).hostname
        self.ranks_host = None if host in LOOPBACK else host

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """See :class:`Backend`."""
        status, answer = await self._send("POST", "/generate", payload)
        if status != 200 or not isinstance(answer, dict):
            raise RolloutError(f"SGLang refused a request ({status}): {_message(answer)}")
        return answer

    async def abort(self, rid: str) -> None:
        """See :class:`Backend`."""
        await self._send("POST", "/abort_request", {"rid": rid})

    async def call(self, method: str, **fields: Any) -> Outcome:
        """See :class:`Backend`."""
        status, answer = await self._send("POST", CALLS[method].path, _sendable(fields))
        success = status == 200 and not (isinstance(answer, dict) and answer.get("success") is False)
        ranks = answer.get("ranks") if isinstance(answer, dict) else None
        return Outcome(success, _message(answer), ranks or ())

    async def has(self, method: str) -> bool:
        """See :class:`Backend`. The server's own description of itself says so."""
        status, answer = await self._send("GET", "/openapi.json")
        return status == 200 and CALLS[method].path in answer.get("paths", {})

    async def loaders(self) -> list[str]:
        """See :class:`Backend`."""
        return list((await self.facts()).get("custom_weight_loader") or [])

    async def facts(self) -> Mapping[str, Any]:
        """The server's arguments and state.

        Raises:
            RolloutError: it does not tell.
        """
        status, answer = await self._send("GET", "/server_info")
        if status != 200 or not isinstance(answer, dict):
            raise RolloutError(f"SGLang at {self.url} does not tell its arguments ({status}): {_message(answer)}")
        return answer

    def failure(self) -> str | None:
        """See :class:`Backend`."""
        if self._process is not None and self._process.poll() is not None:
            return f"the server at {self.url} ended with code {self._process.returncode}"
        return self._lost

    def close(self) -> None:
        """See :class:`Backend`."""
        if self._process is not None:
            _end(self._process)

    async def disconnect(self) -> None:
        """Closes connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _send(self, verb: str, path: str, fields: Any = None) -> tuple[int, Any]:
        """Status and body, parsed if it is JSON."""
        import aiohttp

        if self._client is None:
            # As many connections as requests, each for as long as it takes. None is used again: the server closes idle
            # ones after seconds, and a request that meets such an end cannot know whether it was read.
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
            )
        try:
            async with self._client.request(verb, self.url + path, json=fields) as response:
                text = await response.text()
                return response.status, _parsed(text)
        except aiohttp.ClientError as error:
            self._lost = f"the server at {self.url} does not answer: {type(error).__name__}: {error}"
            raise EngineLost(self._lost) from None


def attach(url: str, folder: str, options: SGLangOptions, loop: Loop) -> HttpServer:
    """A client of a server that somebody else started.

    Raises:
        ConfigError: the server is not what the options say.
        RolloutError: it does not answer.
    """
    server = HttpServer(url, loop)
    try:
        facts = loop.call(server.facts(), options.start_timeout_s, f"asking {url} for its arguments")
        _check_facts(url, facts, folder, options)
        if server.ranks_host is None and facts.get("nnodes", 1) > 1:
            # It is here, with ranks elsewhere: they know this host by the address at which they met.
            server.ranks_host = str(facts["dist_init_addr"]).rpartition(":")[0].strip("[]")
    except BaseException:
        loop.call(server.disconnect(), CLOSE_S, "closing connections")
        raise
    return server


def _check_facts(url: str, facts: Mapping[str, Any], folder: str, options: SGLangOptions) -> None:
    expected = {"tp_size": options.tensor_parallel_size, "skip_tokenizer_init": not decodes(folder, options)}
    for name, value in expected.items():
        if facts.get(name, value) != value:
            raise ConfigError(f"the SGLang server at {url} runs with {name}={facts[name]}, the options say {value}")
    if options.seeded and not facts.get("enable_deterministic_inference"):
        raise ConfigError(
            f"the SGLang server at {url} does not run with --enable-deterministic-inference, without which it has no "
            "seeds: set rollout.engine_kwargs.sglang.deterministic=false to do without"
        )


def start_server(folder: str, max_model_len: int, options: SGLangOptions, loop: Loop) -> HttpServer:
    """Starts a server and waits until it is ready.

    Raises:
        RolloutError: it does not get ready; its last words are repeated.
    """
    options = dataclasses.replace(options, port=options.port or free_port(options.host))
    order = {"folder": os.path.abspath(folder), "max_model_len": max_model_len, "options": _plain(options)}
    with _output() as log:
        begins = log.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl.rollout.sglang.serve", json.dumps(order)],
            env=os.environ | environment(options),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        server = HttpServer(f"http://{options.host}:{options.port}", loop, process)
        try:
            loop.call(_ready(server), options.start_timeout_s, "starting its server")
        except BaseException as error:
            server.close()
            loop.call(server.disconnect(), CLOSE_S, "closing connections")
            if isinstance(error, RolloutError):
                raise RolloutError(f"{error}\n{_tail(log, begins)}") from None
            raise
    return server


async def _ready(server: HttpServer) -> None:
    while True:
        if server._process is not None and server._process.poll() is not None:
            raise RolloutError(f"the SGLang server ended with code {server._process.returncode} while it started:")
        try:
            status, _ = await server._send("GET", "/health")
            if status == 200:
                return
        except RolloutError:
            # It does not listen yet.
            server._lost = None
        await asyncio.sleep(_LOOK_S)


def _plain(options: SGLangOptions) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


def _sendable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no bytes; SGLang takes base64 for them."""

    def value(of: Any) -> Any:
        if isinstance(of, bytes):
            return base64.b64encode(of).decode()
        return [value(part) for part in of] if isinstance(of, list) else of

    return {name: value(of) for name, of in fields.items() if of is not None}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _message(answer: Any) -> str:
    if isinstance(answer, dict):
        error = answer.get("error")
        return str(answer.get("message") or (error.get("message") if isinstance(error, dict) else error) or answer)
    return str(answer)


def _output() -> IO[bytes]:
    """Where the server's output goes: to this process's own log, where it has one."""
    path = log_of(1)
    return open(path, "a+b") if path else tempfile.TemporaryFile()


def _tail(log: IO[bytes], begins: int) -> str:
    log.seek(begins)
    return log.read().decode(errors="replace")[-LOG_TAIL:]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        for child in family:
            if child.is_running():
                child.send_signal(signal.SIGKILL)
        process.kill()
        psutil.wait_procs(family, timeout=30)
    process.wait(timeout=30)
