"""The HTTP side: paths, the token, limits of a body, and answers in OpenAI's form."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from megarl.rollout.endpoint.access import is_token
from megarl.rollout.endpoint.answer import Answer, completion_body, completion_events
from megarl.rollout.endpoint.errors import ApiError
from megarl.rollout.endpoint.outside import Outside
from megarl.rollout.endpoint.request import MODEL, ChatRequest, parse_request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

LARGEST_BODY = 32 * 2**20
_OPEN = "/health"  # load balancers have no token


class Answers(Protocol):
    """Whoever answers chat completions."""

    async def answer(self, request: ChatRequest) -> Answer:
        """Raises :class:`ApiError` where it does not."""


class ChatServer:
    """The application that an aiohttp runner serves.

    ``POST /v1/chat/completions`` and ``GET /v1/models``, for requests from outside and, under ``/sessions/<id>``, for
    those of a conversation; ``GET /health`` needs no token.

    Args:
        token: that requests must bear.
        outside: answers requests that belong to no conversation.
        sessions: of the conversations under way, by their ids; read at each request.
        tokenizer: of the policy.
    """

    def __init__(
        self,
        token: str,
        outside: Outside,
        sessions: Mapping[str, Answers],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._token, self._outside, self._sessions, self._tokenizer = token, outside, sessions, tokenizer
        self.app = web.Application(middlewares=[self._guard], client_max_size=LARGEST_BODY)
        for prefix in ("", "/sessions/{session}"):
            self.app.router.add_post(f"{prefix}/v1/chat/completions", self._complete)
            self.app.router.add_get(f"{prefix}/v1/models", self._models)
        self.app.router.add_get(_OPEN, self._health)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Lets nobody in without the token, and answers every error in OpenAI's form."""
        try:
            if request.path != _OPEN and not is_token(self._token, request.headers.get("Authorization")):
                raise ApiError(401, "the Authorization header bears no valid token", code="invalid_api_key")
            return await handler(request)
        except ApiError as error:
            told = error
        except web.HTTPRequestEntityTooLarge:
            told = ApiError(413, f"the body is longer than {LARGEST_BODY} bytes")
        except web.HTTPException as error:
            told = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        except Exception as error:
            logger.exception("a request to the chat endpoint failed")
            told = ApiError(500, f"{type(error).__name__}: {error}")
        if "session" not in request.match_info:
            self._outside.count(told)
        return web.json_response(told.body(), status=told.status, headers=told.headers())

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        answers = self._answers(http)
        request = parse_request(await http.read())
        body = completion_body(await answers.answer(request), request, self._tokenizer)
        if not request.stream:
            return web.json_response(body)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(http)
        for event in completion_events(body, request):
            await stream.write(event)
        await stream.write_eof()
        return stream

    def _answers(self, http: web.Request) -> Answers:
        name = http.match_info.get("session")
        if name is None:
            return self._outside
        if name not in self._sessions:
            raise ApiError(410, "there is no such conversation, or it is over", code="session_closed")
        return self._sessions[name]

    async def _models(self, http: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(text=json.dumps({"status": "ok"}), content_type="application/json")
