"""The endpoint as the driver has it: a thread with an event loop, for requests and for conversations."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import resource
import secrets
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from aiohttp import web

from megarl.errors import ConfigError
from megarl.rollout.agents.loop import Conversation, Generate
from megarl.rollout.endpoint.access import make_token, write_access_file
from megarl.rollout.endpoint.outside import Outside, OutsideLimits
from megarl.rollout.endpoint.request import MODEL
from megarl.rollout.endpoint.server import ChatServer
from megarl.rollout.endpoint.session import Session
from megarl.rollout.endpoint.translation import ChatFormat

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_KEY = "actor_rollout_ref.rollout.endpoint"
_STOP_S = 10.0
_MOST_FILES = 65536
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Address:
    """Where the endpoint listens, and how clients learn of it.

    Attributes:
        host: to listen at.
        port: to listen at; 0 = any free one.
        access_file: file that tells clients; None = none.
    """

    host: str = "127.0.0.1"
    port: int = 0
    access_file: Path | None = None


@dataclass(frozen=True)
class SessionAccess:
    """How a program reaches a conversation's endpoint.

    Attributes:
        session: answers its requests.
        base_url: for a client of OpenAI's interface.
        api_key: the token.
    """

    session: Session
    base_url: str
    api_key: str


class Endpoint:
    """Serves the current policy over OpenAI's chat interface; used as ``with``, for as long as the run lasts.

    Whatever generates runs in the endpoint's own event loop (:meth:`run`): requests and conversations meet there and
    nowhere else, so that nothing has to be locked.

    Args:
        chat: how the policy is talked to.
        limits: of requests from outside.
        address: where to listen.

    Raises:
        ConfigError: the token that the environment sets is unusable.
    """

    def __init__(self, chat: ChatFormat, limits: OutsideLimits, address: Address) -> None:
        self._chat, self._limits, self._address = chat, limits, address
        self._token = make_token()
        self._sessions: dict[str, Session] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="chat-endpoint")
        self._outside: Outside
        self._runner: web.AppRunner
        self._root = ""

    def __enter__(self) -> Self:
        """Listens.

        Raises:
            ConfigError: the address cannot be listened at, or the file cannot be written.
        """
        _allow_many_connections()
        self._thread.start()
        try:
            self.run(self._listen())
            if self._address.access_file is not None:
                write_access_file(self._address.access_file, self.base_url, self._token, MODEL)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._address.access_file is not None:
            self._address.access_file.unlink(missing_ok=True)
        self._close()

    @property
    def base_url(self) -> str:
        """For requests from outside."""
        return f"{self._root}/v1"

    @property
    def api_key(self) -> str:
        """The token that requests must bear."""
        return self._token

    def describe(self) -> str:
        """Where it is, and where the token is told."""
        return f"chat endpoint: {self.base_url}, access by {self._address.access_file or 'the token'}"

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine in the endpoint's event loop, as ``asyncio.run`` does in its own."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # the wait was interrupted; where the work itself failed, this does nothing
            raise

    def serving(self, generate: Generate) -> AbstractAsyncContextManager[None]:
        """Requests from outside are answered within the block."""
        return self._outside.serving(generate)

    @asynccontextmanager
    async def session(self, conversation: Conversation, generate: Generate) -> AsyncIterator[SessionAccess]:
        """A conversation that a program leads by requests to an address that nobody can guess."""
        name = secrets.token_urlsafe(16)
        async with Session(conversation, generate, self._chat) as session:
            self._sessions[name] = session
            try:
                yield SessionAccess(session, f"{self._root}/sessions/{name}/v1", self._token)
            finally:
                del self._sessions[name]

    def take_metrics(self) -> dict[str, float]:
        """``endpoint/*`` of requests from outside since the last call."""
        return self._outside.take_metrics()

    async def _listen(self) -> None:
        self._outside = Outside(self._chat, self._limits)
        server = ChatServer(self._token, self._outside, self._sessions, self._chat.tokenizer)
        # A client that hangs up gives its request up. What is asked is nobody's business: no access log.
        self._runner = web.AppRunner(server.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._address.host, self._address.port, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            at = f"{_KEY}.host={self._address.host}, {_KEY}.port={self._address.port}"
            raise ConfigError(f"{at}: cannot listen there: {error.strerror or error}") from error
        host, port = self._runner.addresses[0][:2]
        host = _ANYWHERE.get(host, host)
        self._root = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _end(self) -> None:
        self._outside.close()
        await self._runner.cleanup()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    def _close(self) -> None:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()


def _allow_many_connections() -> None:
    """Each conversation has two ends of a connection in this process: files, of which shells allow few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
