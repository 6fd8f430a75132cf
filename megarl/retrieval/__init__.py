"""Retrieval: a BM25 index over a corpus, a server for it, and a client for any server with Search-R1's API.

``corpus`` reads documents, ``index`` ranks them, ``server`` answers over HTTP, ``client`` asks, ``command`` is
``megarl retrieval-server``.
"""

from megarl.retrieval.client import Hit, RetrievalClient, RetrievalError, RetrievalOptions

__all__ = ["Hit", "RetrievalClient", "RetrievalError", "RetrievalOptions"]
