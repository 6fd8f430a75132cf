"""The chat endpoint of an agent runner: requests and conversations share one event loop."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import logging
import resource
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from aiohttp import web

from megarl.agents.endpoint.chat_format import ChatFormat
from megarl.agents.endpoint.external_requests import ExternalRequestLimits, ExternalRequests
from megarl.agents.endpoint.request import MODEL
from megarl.agents.endpoint.server import ChatServer, make_token, write_access_file
from megarl.agents.endpoint.session import Session
from megarl.agents.event_loop import EventLoopThread
from megarl.agents.tools.calling import PARSERS
from megarl.agents.types import Conversation, Generate, GenerateWithImages, SessionAccess
from megarl.base.errors import ConfigError
from megarl.base.ports import bypass_proxies
from megarl.base.redaction import remember_secret
from megarl.config.schema.rollout import EndpointConfig, MultiTurnConfig, TrainingRolloutConfig
from megarl.models import read_model_config
from megarl.rollout.image_reader import image_reader
from megarl.rollout.interface import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import GenerationJobConfig, RolloutConfig
    from megarl.config.schema.rollout import SGLangConfig

logger = logging.getLogger(__name__)

_KEY = "actor_rollout_ref.rollout.endpoint"
_STOP_S = 10.0
_MAX_OPEN_FILES = 65536
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the user's choice, not bound here


@dataclass(frozen=True)
class EndpointAddress:
    """Listening address of the endpoint, and the file that announces it.

    Attributes:
        port: listening port; 0 = any free port.
        access_file: file with base URL and token for clients; None = no file.
    """

    host: str = "127.0.0.1"
    port: int = 0
    access_file: Path | None = None


class Endpoint:
    """Serves the current policy over OpenAI's chat API; a context manager for the duration of the run.

    Requests and conversations share one event loop, so no locks are needed.

    Args:
        token: bearer token; empty = of the environment, or a random one.

    Raises:
        ConfigError: the token in the environment is unusable.
    """

    def __init__(
        self,
        chat: ChatFormat,
        limits: ExternalRequestLimits,
        address: EndpointAddress,
        loop: EventLoopThread,
        token: str = "",
    ) -> None:
        self._chat, self._limits, self._address, self.loop = chat, limits, address, loop
        self._token = token or make_token()
        remember_secret(self._token)
        self._sessions: dict[str, Session] = {}
        self._external: ExternalRequests
        self._runner: web.AppRunner
        self._root = ""

    def __enter__(self) -> Self:
        """Start listening.

        Raises:
            ConfigError: the address is unusable, or the access file cannot be written.
        """
        _raise_open_file_limit()
        try:
            self.loop.run(self._listen())
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
        """Base URL of external requests."""
        return f"{self._root}/v1"

    @property
    def api_key(self) -> str:
        """Bearer token of all requests."""
        return self._token

    def describe(self) -> str:
        """Return a log line with the base URL and the path of the access file."""
        return f"chat endpoint: {self.base_url}, access by {self._address.access_file or 'the token'}"

    def serving(self, generate: GenerateWithImages) -> AbstractAsyncContextManager[None]:
        """Serve external requests within the block."""
        return self._external.serving(generate)

    @asynccontextmanager
    async def session(self, conversation: Conversation, generate: Generate) -> AsyncIterator[SessionAccess]:
        """Open a session for one conversation, under an unguessable address."""
        name = secrets.token_urlsafe(16)
        async with Session(conversation, generate, self._chat) as session:
            self._sessions[name] = session
            try:
                yield SessionAccess(session, f"{self._root}/sessions/{name}/v1", self._token, MODEL)
            finally:
                del self._sessions[name]

    def take_metrics(self) -> dict[str, float]:
        """Return the ``endpoint/*`` metrics of external requests since the last call."""
        return self._external.take_metrics()

    async def _listen(self) -> None:
        self._external = ExternalRequests(self._chat, self._limits)
        server = ChatServer(self._token, self._external, self._sessions, self._chat)
        # A disconnected client cancels its request. No access log: requests are private.
        self._runner = web.AppRunner(
            server.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, logger=server.log
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._address.host, self._address.port, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            raise _no_address(self._address, error) from error
        host, port = self._runner.addresses[0][:2]
        host = _LOOPBACK.get(host, host)
        bypass_proxies(host, self._address.host)
        self._root = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _end(self) -> None:
        self._external.close()
        await self._runner.cleanup()

    def _close(self) -> None:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            self.loop.run(self._end(), _STOP_S)


def _raise_open_file_limit() -> None:
    """Raise the limit of open files: each conversation needs two sockets in this process, and shells allow few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def build_endpoint(
    config: GenerationJobConfig,
    tokenizer: PreTrainedTokenizerBase,
    loop: EventLoopThread,
    token: str = "",
    address: EndpointAddress | None = None,
) -> Endpoint | None:
    """Build the run's endpoint, not yet listening; None if the run serves none.

    Args:
        token: see :class:`Endpoint`.
        address: listening address; None = the configured one.

    Raises:
        ModelError: the model's folder has no usable configuration.
        ConfigError: ``multi_turn.format`` is unknown, or the token in the environment is unusable.
    """
    policy, data = config.actor_rollout_ref, config.data
    rollout = policy.rollout
    if not rollout.serves_endpoint:
        return None
    endpoint: EndpointConfig = rollout.endpoint
    multi_turn: MultiTurnConfig = rollout.multi_turn
    longest = read_model_config(policy.model.path).max_position_embeddings
    tokens = min(data.max_prompt_length + data.max_response_length, longest)
    chat = ChatFormat(
        copy.deepcopy(tokenizer),  # requests come at any time, and tokenizers are not thread-safe
        PARSERS[multi_turn.format],
        data.apply_chat_template_kwargs,
        stop_strings=_supports_stop_strings(rollout, policy.model.path),
        max_tokens=tokens,
        reader=image_reader(config),
    )
    keys = rollout if isinstance(rollout, TrainingRolloutConfig) else rollout.val_kwargs
    sampling = SamplingParams.of(keys, data.max_response_length)
    limits = ExternalRequestLimits(sampling, tokens, endpoint.wait_s)
    return Endpoint(chat, limits, address or endpoint_address(endpoint), loop, token)


def endpoint_address(keys: EndpointConfig) -> EndpointAddress:
    """Read the listening address."""
    return EndpointAddress(keys.host, keys.port, Path(keys.access_file) if keys.access_file else None)


def check_endpoint(config: GenerationJobConfig) -> None:
    """Check the endpoint's address, access file and token before any process starts.

    Raises:
        ConfigError: the address is unusable or in use, the access file cannot be written, or the token is unusable.
    """
    rollout = config.actor_rollout_ref.rollout
    if not rollout.serves_endpoint:
        return
    address = endpoint_address(rollout.endpoint)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.create_server((address.host, address.port), family=family):
            pass
    except OSError as error:
        raise _no_address(address, error) from error
    if address.access_file is not None and address.access_file.is_dir():
        text = f"{_KEY}.access_file={address.access_file} is a folder; name a file"
        raise ConfigError(text, code="endpoint.access-file")
    make_token()


def _no_address(address: EndpointAddress, error: OSError) -> ConfigError:
    keys = f"{_KEY}.host={address.host}, {_KEY}.port={address.port}"
    return ConfigError(f"{keys}: cannot listen there: {error.strerror or error}", code="endpoint.cannot-listen")


def _supports_stop_strings(rollout: RolloutConfig, model_path: str) -> bool:
    """Whether the engine supports stop strings, which require a tokenizer in the engine."""
    sglang: SGLangConfig = rollout.engine_kwargs.sglang
    if rollout.name == "sglang" and sglang.stop_strings is not None:
        return bool(sglang.stop_strings)
    return (Path(model_path) / "tokenizer_config.json").is_file()
