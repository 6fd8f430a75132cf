"""``megarl retrieval-server``: serves a corpus until it is told to stop."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import MegarlError
from megarl.retrieval.corpus import read_corpus
from megarl.retrieval.index import BM25Index
from megarl.retrieval.server import RetrievalServer


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        documents = read_corpus(arguments.corpus)
        server = RetrievalServer(BM25Index(documents), arguments.host, arguments.port, arguments.topk)
    except (MegarlError, OSError) as error:
        print(f"megarl retrieval-server: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        # from a thread of its own: `shutdown` waits for the loop, which runs in this one
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"serving {len(documents)} documents at {server.url}", flush=True)
    with server:
        server.serve_forever()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl retrieval-server",
        description="Answers POST /retrieve with the best documents of a corpus (BM25), as Search-R1's server does.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--corpus", type=Path, required=True, help='JSONL with "id" and "contents", or "title", "text"')
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 lets other machines ask")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at; 0 = any free one, printed")
    parser.add_argument("--topk", type=int, default=3, help="documents per query where a request does not say")
    return parser
