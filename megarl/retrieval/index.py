"""Documents ranked by BM25; the ranking itself is the library ``bm25s``."""

from __future__ import annotations

from collections.abc import Sequence

import bm25s

from megarl.errors import DataError
from megarl.retrieval.corpus import Document

_WORD = r"(?u)\b\w+\b"  # single letters and digits too, which the library would leave out


class BM25Index:
    """Ranks documents by the words that they share with a query (Lucene's variant of BM25).

    Words are lower-cased; English stop words count for nothing.

    Args:
        documents: the corpus, held in memory.
        k1: how soon more occurrences of a word stop counting.
        b: how much long documents are held back, 0 to 1.

    Raises:
        DataError: no document has a word that counts.
    """

    def __init__(self, documents: Sequence[Document], k1: float = 1.5, b: float = 0.75) -> None:
        self.documents = list(documents)
        words = _words([document.contents for document in self.documents])
        if not any(words):
            raise DataError(f"none of the {len(self.documents)} documents has a word to index")
        self._ranking = bm25s.BM25(k1=k1, b=b)
        self._ranking.index(words, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[Document, float]]]:
        """The best documents for each query with their scores, best first.

        A document without a word of the query is never among them, so there may be fewer than ``topk``.

        Args:
            queries: plain text.
            topk: most documents per query.
        """
        if not queries:
            return []
        count = min(topk, len(self.documents))
        found, scores = self._ranking.retrieve(_words(queries), k=count, show_progress=False)
        return [
            [(self.documents[int(at)], float(score)) for at, score in zip(row, row_scores, strict=True) if score > 0]
            for row, row_scores in zip(found, scores, strict=True)
        ]


def _words(texts: Sequence[str]) -> list[list[str]]:
    return bm25s.tokenize(list(texts), token_pattern=_WORD, stopwords="en", return_ids=False, show_progress=False)
