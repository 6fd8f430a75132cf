"""Retrieval server for search agents: BM25 over a JSONL corpus, with Search-R1's HTTP API.

    python tools/retrieval_server.py --corpus corpus.jsonl --port 8000

``POST /retrieve`` takes ``{"queries": [text, ...], "topk": n, "return_scores": bool}`` and returns
``{"result": [[{"document": {"id", "contents"}, "score": s}, ...], ...]}``, a list per query. Without ``return_scores``
the entries are the documents. ``GET /health`` returns the number of documents. Errors are ``{"error": text}``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import bm25s
from aiohttp import web

from megarl.base.errors import DataError, MegarlError

logger = logging.getLogger(__name__)

LARGEST_BODY = 64 * 2**20
MAX_TOPK = 1000
_KEEPALIVE_S = 60.0
_WORD = r"(?u)\b\w+\b"  # includes single letters and digits, unlike the library's default


class RequestError(Exception):
    """A malformed request, answered with status 400."""


class Document(NamedTuple):
    """One document of a corpus.

    Attributes:
        id: name of the document.
        contents: text; the first line is the title.
    """

    id: str
    contents: str

    def as_json(self) -> dict[str, str]:
        """Return the document as it appears in a response."""
        return {"id": self.id, "contents": self.contents}


def read_corpus(path: Path) -> list[Document]:
    """Read a JSONL corpus with lines ``{"id", "contents"}`` or ``{"id", "title", "text"}``.

    Raises:
        DataError: the file is missing or empty, or a line is malformed; names the line.
    """
    if not path.is_file():
        raise DataError(f"there is no corpus {path}", code="data.file-missing")
    documents = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                documents.append(_read_document(line, f"{path}:{number}", str(number - 1)))
    if not documents:
        raise DataError(f"the corpus {path} has no document", code="data.no-rows")
    return documents


def _read_document(line: str, position: str, default_id: str) -> Document:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{position} is not JSON: {error}", code="data.not-json") from error
    if isinstance(entry, dict):
        name = str(entry.get("id", entry.get("_id", default_id)))
        if isinstance(entry.get("contents"), str):
            return Document(name, entry["contents"])
        if isinstance(entry.get("text"), str):
            return Document(name, f"{entry.get('title') or ''}\n{entry['text']}")
    raise DataError(
        f"{position} must be an object with 'contents', or with 'title' and 'text'; got {line.strip():.120}",
        code="data.corpus-document",
    )


class BM25Index:
    """Ranks documents by BM25 (Lucene's variant, by the library ``bm25s``).

    Words are lower-cased, and English stop words are ignored.

    Args:
        documents: corpus, held in memory.
        k1: saturation of the term frequency.
        b: strength of the length normalization, 0 to 1.

    Raises:
        DataError: no document has an indexable word.
    """

    def __init__(self, documents: Sequence[Document], k1: float = 1.5, b: float = 0.75) -> None:
        self.documents = list(documents)
        words = _tokenize([document.contents for document in self.documents])
        if not any(words):
            text = f"none of the {len(self.documents)} documents has a word to index"
            raise DataError(text, code="data.corpus-words")
        self._ranking = bm25s.BM25(k1=k1, b=b)
        self._ranking.index(words, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[Document, float]]]:
        """Return the documents for each query with their scores, best first.

        A document without a common word is never returned, so there may be fewer than ``topk``.

        Args:
            queries: plain text.
            topk: maximum number of documents per query.
        """
        if not queries:
            return []
        count = min(topk, len(self.documents))
        indices, scores = self._ranking.retrieve(_tokenize(queries), k=count, show_progress=False)
        return [
            [(self.documents[int(at)], float(score)) for at, score in zip(row, row_scores, strict=True) if score > 0]
            for row, row_scores in zip(indices, scores, strict=True)
        ]


def _tokenize(texts: Sequence[str]) -> list[list[str]]:
    return bm25s.tokenize(list(texts), token_pattern=_WORD, stopwords="en", return_ids=False, show_progress=False)


class RetrievalServer:
    """HTTP server over an index; :meth:`serve_forever` serves until :meth:`shutdown`.

    Args:
        index: index to search.
        host: listening address.
        port: listening port; 0 = any free port, see :attr:`url`.
        topk: documents per query for requests without ``topk``.

    Raises:
        OSError: the address is not available.
    """

    def __init__(self, index: BM25Index, host: str = "127.0.0.1", port: int = 8000, topk: int = 3) -> None:
        self.index = index
        self.topk = topk
        self._socket = socket.create_server((host, port), backlog=1024)
        self.server_address: tuple[str, int] = self._socket.getsockname()[:2]
        self._search = ThreadPoolExecutor(1)  # one search at a time: the library does not promise thread safety
        self._loop = asyncio.new_event_loop()
        self._stop, self._stopped = asyncio.Event(), threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        self._search.shutdown()

    @property
    def url(self) -> str:
        """URL of retrieval requests."""
        return f"http://{self.server_address[0]}:{self.server_address[1]}/retrieve"

    def serve_forever(self) -> None:
        """Serve requests until :meth:`shutdown`."""
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._stopped.set()

    def request_shutdown(self) -> None:
        """Stop :meth:`serve_forever`, without waiting; safe in signal handlers and other threads."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def shutdown(self) -> None:
        """Stop :meth:`serve_forever` from another thread and wait for its end."""
        self.request_shutdown()
        self._stopped.wait()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, keepalive_timeout=_KEEPALIVE_S, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, self._socket, backlog=1024).start()
            await self._stop.wait()
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        path = request.path.rstrip("/")
        try:
            if request.method == "GET" and path == "/health":
                return web.json_response({"status": "ok", "documents": len(self.index.documents)})
            if request.method != "POST" or path != "/retrieve":
                return _error(404, f"there is no {request.method} {request.path}; POST /retrieve or GET /health")
            if (request.content_length or 0) > LARGEST_BODY:
                raise web.HTTPRequestEntityTooLarge(LARGEST_BODY, request.content_length or 0)
            body = await request.read()
            return web.json_response(await self._loop.run_in_executor(self._search, self._answer_json, body))
        except web.HTTPRequestEntityTooLarge:
            text = f"Content-Length is {request.content_length}, it must be a number up to {LARGEST_BODY}"
            response = _error(413, text)
            response.force_close()  # the rest of the body is never read
            return response
        except (ValueError, RequestError) as error:
            return _error(400, str(error))
        except Exception as error:
            logger.exception("a retrieval request failed")
            return _error(500, f"{type(error).__name__}: {error}")

    def _answer_json(self, body: bytes) -> dict[str, Any]:
        return self.answer(json.loads(body))

    def answer(self, request: Any) -> dict[str, Any]:
        """Return the response to the JSON of a request.

        Raises:
            RequestError: the request is malformed; names the field.
        """
        if not isinstance(request, Mapping):
            raise RequestError('the body must be a JSON object such as {"queries": ["..."], "topk": 3}')
        queries, topk = request.get("queries"), request.get("topk")
        topk = self.topk if topk is None else topk
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise RequestError(f"queries must be a list of texts, got {queries!r:.100}")
        if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
            raise RequestError(f"topk must be a whole number from 1 to {MAX_TOPK}, got {topk!r:.100}")
        rows = self.index.search(queries, topk)
        if not request.get("return_scores", False):
            return {"result": [[document.as_json() for document, _ in hits] for hits in rows]}
        return {"result": [[{"document": d.as_json(), "score": score} for d, score in hits] for hits in rows]}


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a corpus until SIGINT or SIGTERM; return the exit code."""
    args = _parser().parse_args(argv)
    try:
        documents = read_corpus(args.corpus)
        server = RetrievalServer(BM25Index(documents), args.host, args.port, args.topk)
    except (MegarlError, OSError) as error:
        print(f"retrieval_server: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.request_shutdown())
    print(f"serving {len(documents)} documents at {server.url}", flush=True)
    with server:
        server.serve_forever()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="retrieval_server",
        description="Serves POST /retrieve with the best documents of a corpus (BM25), like Search-R1's server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--corpus", type=Path, required=True, help='JSONL with "id" and "contents", or "title", "text"')
    parser.add_argument("--host", default="127.0.0.1", help="listening address; 0.0.0.0 accepts other machines")
    parser.add_argument("--port", type=int, default=8000, help="listening port; 0 = any free port, printed")
    parser.add_argument("--topk", type=int, default=3, help="documents per query for requests without topk")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
