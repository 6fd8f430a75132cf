"""A corpus: one JSON object per line, as Search-R1 has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from megarl.errors import DataError


class Document(NamedTuple):
    """One document.

    Attributes:
        id: its name.
        contents: its text; the first line is its title.
    """

    id: str
    contents: str

    def as_json(self) -> dict[str, str]:
        """As the server gives it."""
        return {"id": self.id, "contents": self.contents}


def read_corpus(path: Path) -> list[Document]:
    """The documents of a JSONL file: ``{"id", "contents"}``, or ``{"id", "title", "text"}``.

    Raises:
        DataError: the file is not there, is empty, or a line is malformed; names the line.
    """
    if not path.is_file():
        raise DataError(f"there is no corpus {path}")
    documents = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                documents.append(_document(line, f"{path}:{number}", str(number - 1)))
    if not documents:
        raise DataError(f"the corpus {path} has no document")
    return documents


def _document(line: str, where: str, default_id: str) -> Document:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if isinstance(entry, dict):
        name = str(entry.get("id", entry.get("_id", default_id)))
        if isinstance(entry.get("contents"), str):
            return Document(name, entry["contents"])
        if isinstance(entry.get("text"), str):
            return Document(name, f"{entry.get('title') or ''}\n{entry['text']}")
    raise DataError(f"{where} must be an object with 'contents', or with 'title' and 'text'; got {line.strip():.120}")
