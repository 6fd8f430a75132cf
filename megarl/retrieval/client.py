"""Asks a retrieval server with Search-R1's API; queries that come at the same time travel in one request."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.errors import MegarlError


class RetrievalError(MegarlError):
    """The server cannot be reached, or its answer makes no sense: never an empty result."""


class Hit(NamedTuple):
    """One document that was found.

    Attributes:
        contents: its text; the first line is its title.
        score: how well it fits; 0.0 where the server does not tell.
        id: its name; empty where it has none.
    """

    contents: str
    score: float = 0.0
    id: str = ""

    @property
    def title(self) -> str:
        """First line."""
        return self.contents.partition("\n")[0]

    @property
    def text(self) -> str:
        """What follows the title."""
        return self.contents.partition("\n")[2]


@dataclass(frozen=True)
class RetrievalOptions:
    """How a server is asked.

    Attributes:
        url: where requests go, ``/retrieve`` included.
        topk: documents per query.
        timeout_s: seconds that one request may take.
        retries: further attempts after a request that failed.
        max_batch: queries per request.
    """

    url: str
    topk: int = 3
    timeout_s: float = 30.0
    retries: int = 3
    max_batch: int = 512


class RetrievalClient:
    """Finds documents for queries. Usable from one event loop after the other.

    While a request is under way further queries gather, and go in the next one: many conversations that search at the
    same time make few requests.

    Args:
        options: server, and how it is asked.
    """

    def __init__(self, options: RetrievalOptions) -> None:
        self.options = options
        self.requests = 0
        self._waiting: list[tuple[str, asyncio.Future[list[Hit]]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def search(self, query: str) -> list[Hit]:
        """The documents for a query, best first.

        Raises:
            RetrievalError: the server could not be asked, after all retries.
        """
        loop = asyncio.get_running_loop()
        if self._sender is None or self._sender.done() or self._sender.get_loop() is not loop:
            self._waiting = []  # whatever an event loop that is gone has left
            self._sender = loop.create_task(self._send_all())
        future: asyncio.Future[list[Hit]] = loop.create_future()
        self._waiting.append((query, future))
        return await future

    async def _send_all(self) -> None:
        """Sends what is waiting until nothing is."""
        await asyncio.sleep(0)  # let those who are about to search join
        while self._waiting:
            batch, self._waiting = self._waiting[: self.options.max_batch], self._waiting[self.options.max_batch :]
            try:
                self.requests += 1
                found = await asyncio.to_thread(self.retrieve, [query for query, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(RetrievalError(str(error)))
                continue
            for (_, future), hits in zip(batch, found, strict=True):
                if not future.done():
                    future.set_result(hits)

    def retrieve(self, queries: Sequence[str]) -> list[list[Hit]]:
        """The documents for each query, best first; blocks.

        Raises:
            RetrievalError: the server could not be asked, after all retries.
        """
        options, cause = self.options, ""
        body = json.dumps({"queries": list(queries), "topk": options.topk, "return_scores": True}).encode()
        for attempt in range(options.retries + 1):
            if attempt:
                time.sleep(min(0.2 * 2 ** (attempt - 1), 5.0))
            try:
                return self._read(self._post(body), len(queries))
            except urllib.error.HTTPError as error:
                cause = f"status {error.code}: {error.read(300).decode(errors='replace')}"
                if error.code < 500 and error.code not in (408, 429):
                    break  # asking again would change nothing
            except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, cut off
                cause = f"{type(error).__name__}: {error}"
        raise RetrievalError(
            f"retriever.url={options.url} did not answer {len(queries)} queries ({cause}); is the server running, "
            "and is the address right?"
        )

    def _post(self, body: bytes) -> Any:
        request = urllib.request.Request(self.options.url, body, {"Content-Type": "application/json"})
        # without proxies: the server is on this machine or inside the cluster
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=self.options.timeout_s) as response:
            content = response.read()
        try:
            return json.loads(content)
        except ValueError as error:
            raise self._nonsense(f"is not JSON: {content[:200]!r}") from error

    def _read(self, answer: Any, queries: int) -> list[list[Hit]]:
        rows = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(rows, list) or len(rows) != queries or not all(isinstance(row, list) for row in rows):
            raise self._nonsense(f"has no list 'result' with an entry for each of {queries} queries: {answer!r:.200}")
        return [[self._hit(entry) for entry in row] for row in rows]

    def _hit(self, entry: Any) -> Hit:
        document = entry.get("document", entry) if isinstance(entry, dict) else None
        if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
            raise self._nonsense(f"has a document without 'contents': {entry!r:.200}")
        return Hit(document["contents"], float(entry.get("score") or 0.0), str(document.get("id", "")))

    def _nonsense(self, what: str) -> RetrievalError:
        return RetrievalError(f"retriever.url={self.options.url}: the answer {what}")
