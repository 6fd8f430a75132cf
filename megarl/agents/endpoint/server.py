"""HTTP server of the chat endpoint: routes, bearer token, body limit, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import secrets
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from megarl.agents.endpoint.chat_format import ChatFormat, completion_body, completion_events
from megarl.agents.endpoint.external_requests import ExternalRequests
from megarl.agents.endpoint.request import MODEL, ApiError, parse_request
from megarl.agents.endpoint.session import Session
from megarl.agents.event_loop import in_tokenizer_thread
from megarl.agents.types import LARGEST_BODY
from megarl.base.errors import ConfigError

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "MEGARL_ENDPOINT_TOKEN"
"""Environment variable of the driver that sets the token, for clients that need it in advance."""
_MIN_TOKEN_LENGTH = 16
_PUBLIC_PATH = "/health"  # load balancers have no token


class FirstOfEachKind(logging.Filter):
    """Logs the first failure of each kind only, since clients could fill the disk.

    A malformed request is logged without its text, which may contain the token, and counted.

    Args:
        external: counts malformed requests.
    """

    def __init__(self, external: ExternalRequests) -> None:
        super().__init__()
        self._external = external
        self._seen: set[tuple[type[BaseException] | None, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        kind, error, trace = record.exc_info or (None, None, None)
        if kind is not None and issubclass(kind, HttpProcessingError | web.RequestPayloadError):
            self._external.count(ApiError(400, "malformed"))
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = "a client sent a malformed request (%s); more are counted", (kind.__name__,)
            record.exc_info = record.exc_text = trace = None
        frames = traceback.extract_tb(trace)[-1:]
        failure = kind, f"{frames[0].filename}:{frames[0].lineno}" if frames else ""
        if error is not None and failure in self._seen:
            return False
        self._seen.add(failure)
        return True


class ChatServer:
    """The aiohttp application of the endpoint.

    Routes: ``POST /v1/chat/completions`` and ``GET /v1/models``, for external requests and, under ``/sessions/<id>``,
    for the requests of a conversation; ``GET /health`` needs no token.

    Args:
        external: serves requests outside of conversations.
        sessions: open sessions by id, looked up at each request.
    """

    def __init__(
        self,
        token: str,
        external: ExternalRequests,
        sessions: Mapping[str, Session],
        chat: ChatFormat,
    ) -> None:
        self._token, self._external, self._sessions, self._chat = token, external, sessions, chat
        self.log = logging.Logger(f"{__name__}.requests")
        self.log.parent = logger
        self.log.addFilter(FirstOfEachKind(external))
        self.app = web.Application(middlewares=[self._guard])
        for prefix in ("", "/sessions/{session}"):
            self.app.router.add_post(f"{prefix}/v1/chat/completions", self._complete)
            self.app.router.add_get(f"{prefix}/v1/models", self._models)
        self.app.router.add_get(_PUBLIC_PATH, self._health)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Check the token, and report every error in OpenAI's form."""
        try:
            if request.path != _PUBLIC_PATH and not is_authorized(self._token, request.headers.get("Authorization")):
                raise ApiError(401, "the Authorization header bears no valid token", code="invalid_api_key")
            response: web.StreamResponse = await handler(request)
            return response
        except ApiError as error:
            failure = error
        except web.HTTPRequestEntityTooLarge:
            failure = ApiError(413, f"the body is longer than {LARGEST_BODY} bytes")
        except web.RequestPayloadError as error:
            failure = ApiError(400, f"the body cannot be read: {error}")
        except web.HTTPException as error:
            failure = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        except Exception as error:
            self.log.exception("a request to the chat endpoint failed")
            failure = ApiError(500, f"{type(error).__name__}: {error}")
        if "session" not in request.match_info:
            self._external.count(failure)
        return web.json_response(failure.body(), status=failure.status, headers=failure.headers())

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        completer = self._completer(http)
        request = await asyncio.to_thread(parse_request, await _body(http))
        completion = await completer.complete(request)
        body = await in_tokenizer_thread(
            partial(completion_body, completion, request, self._chat.tokenizer, self._chat.image_token)
        )
        if not request.stream:
            return web.json_response(body)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(http)
        for event in completion_events(body, request):
            await stream.write(event)
        await stream.write_eof()
        return stream

    def _completer(self, http: web.Request) -> Session | ExternalRequests:
        name = http.match_info.get("session")
        if name is None:
            return self._external
        if name not in self._sessions:
            raise ApiError(410, "there is no such conversation, or it is over", code="session_closed")
        return self._sessions[name]

    async def _models(self, http: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(text=json.dumps({"status": "ok"}), content_type="application/json")


async def _body(http: web.Request) -> bytearray:
    """Read the body of a request, which ``http.read`` would store until the response is complete."""
    content = bytearray()
    async for chunk in http.content.iter_any():
        content += chunk
        if len(content) > LARGEST_BODY:
            raise web.HTTPRequestEntityTooLarge(LARGEST_BODY, len(content))
    return content


def make_token() -> str:
    """Return the token of the environment, or 32 random bytes.

    Raises:
        ConfigError: the environment's token is too short, or not usable in a header.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        return secrets.token_urlsafe(32)
    if len(token) < _MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the environment variable {TOKEN_VARIABLE} must hold at least {_MIN_TOKEN_LENGTH} printable ASCII "
            f"characters without a blank; it holds {len(token)}",
            code="endpoint.weak-token",
        )
    return token


def is_authorized(token: str, header: str | None) -> bool:
    """Return whether an ``Authorization`` header has the token; compares in constant time."""
    scheme, _, credentials = (header or "").partition(" ")
    same = hmac.compare_digest(credentials.strip().encode("utf-8", "surrogateescape"), token.encode())
    return scheme.lower() == "bearer" and same


def write_access_file(path: Path, base_url: str, token: str, model: str) -> None:
    """Write ``base_url``, ``api_key`` and ``model`` as JSON, readable by the owner only.

    Raises:
        ConfigError: the file cannot be written.
    """
    content = json.dumps({"base_url": base_url, "api_key": token, "model": model}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        # A new file with these permissions from the start: a process with the old file open cannot read it.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        key = "actor_rollout_ref.rollout.endpoint.access_file"
        raise ConfigError(f"{key}={path} cannot be written: {error}", code="endpoint.access-file") from error
