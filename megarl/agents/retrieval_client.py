"""Client of a retrieval server with Search-R1's API; concurrent queries share one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp

from megarl.base.errors import MegarlError
from megarl.base.json_text import parse_json

SEARCH_URL = "actor_rollout_ref.rollout.multi_turn.search.url"
"""Key of the address."""


class RetrievalError(MegarlError):
    """The server is unreachable or its response is malformed; never reported as an empty result."""


class Hit(NamedTuple):
    """One retrieved document; the first line of its contents is the title."""

    contents: str

    @property
    def title(self) -> str:
        """First line of the contents."""
        return self.contents.partition("\n")[0]

    @property
    def text(self) -> str:
        """Contents after the title."""
        return self.contents.partition("\n")[2]


@dataclass(frozen=True)
class RetrievalOptions:
    """Server address and request options.

    Attributes:
        url: full URL of the requests, including ``/retrieve``.
        max_batch: maximum number of queries per request.
    """

    url: str
    topk: int = 3
    timeout_s: float = 30.0
    retries: int = 3
    max_batch: int = 512


class RetrievalClient:
    """Retrieves documents for queries, in batches.

    Queries that arrive during a request wait and are sent together in the next one, so many searching conversations
    need few requests. The client can be used from several event loops, one after another.
    """

    def __init__(self, options: RetrievalOptions) -> None:
        self.options = options
        self.requests = 0
        self._waiting: list[tuple[str, asyncio.Future[list[Hit]]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def search(self, query: str) -> list[Hit]:
        """Return the documents for a query, best first.

        Raises:
            RetrievalError: the request failed after all retries.
        """
        loop = asyncio.get_running_loop()
        if self._sender is None or self._sender.done() or self._sender.get_loop() is not loop:
            self._waiting = []  # discard queries of a closed event loop
            self._sender = loop.create_task(self._send_all())
        future: asyncio.Future[list[Hit]] = loop.create_future()
        self._waiting.append((query, future))
        return await future

    async def _send_all(self) -> None:
        """Send batches until no query is waiting."""
        await asyncio.sleep(0)  # let concurrent searches join the first batch
        while self._waiting:
            batch, self._waiting = self._waiting[: self.options.max_batch], self._waiting[self.options.max_batch :]
            try:
                self.requests += 1
                results = await self.retrieve([query for query, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), hits in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(hits)

    async def retrieve(self, queries: Sequence[str]) -> list[list[Hit]]:
        """Return the documents for each query, best first, with one request.

        Raises:
            RetrievalError: the request failed after all retries.
        """
        options, cause = self.options, ""
        for attempt in range(options.retries + 1):
            if attempt:
                await asyncio.sleep(min(0.2 * 2 ** (attempt - 1), 5.0))
            try:
                status, content = await self._post(queries)
            except (OSError, aiohttp.ClientError) as error:  # refused, reset, timed out, incomplete
                cause = f"{type(error).__name__}: {error}"
                continue
            if status == 200:
                return self._parse(content, len(queries))
            cause = f"status {status}: {content[:300].decode(errors='replace')}"
            if status < 500 and status not in (408, 429):
                break  # a retry would give the same result
        raise RetrievalError(
            f"{SEARCH_URL}={options.url} did not answer {len(queries)} queries ({cause}); is the server running, "
            "and is the address right?",
            code="tool.retriever-unreachable",
        )

    async def _post(self, queries: Sequence[str]) -> tuple[int, bytes]:
        body = {"queries": list(queries), "topk": self.options.topk, "return_scores": True}
        timeout = aiohttp.ClientTimeout(total=self.options.timeout_s)
        # no proxy (trust_env=False): the server is on this machine or inside the cluster
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.post(self.options.url, json=body) as response,
        ):
            return response.status, await response.read()

    def _parse(self, content: bytes, queries: int) -> list[list[Hit]]:
        try:
            answer = parse_json(content)
        except ValueError as error:
            raise self._malformed(f"is not JSON: {content[:200]!r}") from error
        rows = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(rows, list) or len(rows) != queries or not all(isinstance(row, list) for row in rows):
            raise self._malformed(f"has no list 'result' with an entry for each of {queries} queries: {answer!r:.200}")
        return [[self._hit(entry) for entry in row] for row in rows]

    def _hit(self, entry: Any) -> Hit:
        document = entry.get("document", entry) if isinstance(entry, dict) else None
        if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
            raise self._malformed(f"has a document without 'contents': {entry!r:.200}")
        return Hit(document["contents"])

    def _malformed(self, problem: str) -> RetrievalError:
        return RetrievalError(f"{SEARCH_URL}={self.options.url}: the answer {problem}", code="tool.retriever-answer")
