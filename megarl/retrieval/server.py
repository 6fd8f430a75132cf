"""The retrieval server: POST ``/retrieve``, answered as Search-R1's server does."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megarl.retrieval.index import BM25Index

logger = logging.getLogger(__name__)

_LONGEST_BODY = 64 * 2**20
_MOST_DOCUMENTS = 1000


class RequestError(Exception):
    """A request that makes no sense; answered with status 400."""


class RetrievalServer(ThreadingHTTPServer):
    """Serves an index; :meth:`serve_forever` answers requests, each in a thread.

    ``POST /retrieve`` takes ``{"queries": [text, ...], "topk": n, "return_scores": bool}`` and answers
    ``{"result": [[{"document": {"id", "contents"}, "score": s}, ...], ...]}``, a list per query; without
    ``return_scores`` the entries are the documents themselves. ``GET /health`` tells the number of documents.

    Args:
        index: what is searched.
        host: to listen at.
        port: to listen at; 0 = any free one, see :attr:`url`.
        topk: documents per query where a request does not say.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, index: BM25Index, host: str = "127.0.0.1", port: int = 8000, topk: int = 3) -> None:
        super().__init__((host, port), _Handler)
        self.index = index
        self.topk = topk
        self._one_at_a_time = threading.Lock()  # the library does not say that searching is thread-safe

    @property
    def url(self) -> str:
        """Where requests go."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/retrieve"

    def answer(self, request: Any) -> dict[str, Any]:
        """The answer to a request's JSON.

        Raises:
            RequestError: it is malformed; says how.
        """
        if not isinstance(request, Mapping):
            raise RequestError('the body must be a JSON object such as {"queries": ["..."], "topk": 3}')
        queries, topk = request.get("queries"), request.get("topk")
        topk = self.topk if topk is None else topk
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise RequestError(f"queries must be a list of texts, got {queries!r:.100}")
        if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= _MOST_DOCUMENTS:
            raise RequestError(f"topk must be a whole number from 1 to {_MOST_DOCUMENTS}, got {topk!r:.100}")
        with self._one_at_a_time:
            found = self.index.search(queries, topk)
        if not request.get("return_scores", False):
            return {"result": [[document.as_json() for document, _ in hits] for hits in found]}
        return {"result": [[{"document": d.as_json(), "score": score} for d, score in hits] for hits in found]}


class _Handler(BaseHTTPRequestHandler):
    server: RetrievalServer
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that an idle connection is kept

    def do_POST(self) -> None:
        """``/retrieve``."""
        told = self.headers.get("Content-Length") or ""
        if not told.isdecimal() or int(told) > _LONGEST_BODY:
            self.close_connection = True  # whatever follows cannot be told from the next request
            self._send(413, {"error": f"Content-Length is {told!r:.40}, it must be a number up to {_LONGEST_BODY}"})
            return
        body = self.rfile.read(int(told))
        if self.path.rstrip("/") != "/retrieve":
            self._send(404, {"error": f"there is no {self.path}; POST /retrieve"})
            return
        try:
            self._send(200, self.server.answer(json.loads(body)))
        except (ValueError, RequestError) as error:
            self._send(400, {"error": str(error)})
        except Exception as error:
            logger.exception("a request failed")
            self._send(500, {"error": f"{type(error).__name__}: {error}"})

    def do_GET(self) -> None:
        """``/health``."""
        if self.path.rstrip("/") == "/health":
            self._send(200, {"status": "ok", "documents": len(self.server.index.documents)})
        else:
            self._send(404, {"error": f"there is no {self.path}; POST /retrieve or GET /health"})

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are told at debug level only: there are thousands."""
        logger.debug(format, *args)

    def _send(self, status: int, content: Mapping[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
