"""JSON rows: one object per line, memory-mapped, with an index of line starts (8 bytes per line).

A column may have different types in different rows, and missing fields are not filled with nulls. A file with one JSON
list is also supported; it is kept in memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megarl.base.errors import DataError
from megarl.base.json_text import parse_json
from megarl.data.rows.cache import Cache, digest, file_identity
from megarl.data.rows.schema import RowSchema, check_names, check_row

MAX_LIST_BYTES = 256 * 2**20
_SAMPLE_ROWS = 256


class LineIndex(NamedTuple):
    """Line index of a file.

    Attributes:
        starts: start byte of each line with a row, and the end of the last line.
        columns: all column names, in order of appearance.
    """

    starts: np.ndarray
    columns: tuple[str, ...]


class JsonLinesSource:
    """Rows of one file of JSON lines.

    Args:
        cache: remembers successful checks; None = no cache.
    """

    def __init__(self, path: str, index: LineIndex, cache: Cache | None) -> None:
        self.path = path
        self.identity = file_identity(path)
        self.columns = index.columns
        self._starts = index.starts
        self._cache = cache
        with Path(path).open("rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if len(self) else b""

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, number: int) -> dict[str, Any]:
        """Return one row."""
        return dict(parse_json(self._text[self._starts[number] : self._starts[number + 1]]))

    def values(self, names: list[str], start: int, stop: int, *, has_bytes: bool = True) -> list[dict[str, Any]]:
        """Return the existing columns among ``names`` of the rows in ``[start, stop)``; JSON has no bytes."""
        rows = map(self.row, range(start, stop))
        return [{name: row[name] for name in names if name in row} for row in rows]

    def check(self, schema: RowSchema) -> None:
        """Check every row; a cached check is not repeated while the file is unchanged."""
        check_names(self.path, self.columns, schema)
        if self._cache is None:
            return self._check(schema)
        name = f"{Path(self.path).stem[:40]}-{digest(f'{self.path}|{schema}')}"

        def write(path: Path) -> None:
            self._check(schema)
            path.touch()

        self._cache.entry(name, f"{self.identity}|{schema}", ".checked", write)
        return None

    def _check(self, schema: RowSchema) -> None:
        for number in range(len(self)):
            check_row(self.path, number, self.row(number), schema)


class JsonListSource(JsonLinesSource):
    """Rows of a file with one JSON list, in memory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.identity = file_identity(path)
        if Path(path).stat().st_size > MAX_LIST_BYTES:
            raise DataError(
                f"{path}: a JSON list is read into memory and limited to {MAX_LIST_BYTES >> 20} MiB; write one object "
                "per line (JSONL), or parquet",
                code="data.json-list-size",
            )
        try:
            self._rows = parse_json(Path(path).read_bytes())
        except ValueError as error:
            raise DataError(f"{path}: is not JSON ({error})", code="data.not-json") from error
        for number, row in enumerate(self._rows):
            _check_object(path, f"row {number}", row)
        self.columns, self._cache = tuple(dict.fromkeys(name for row in self._rows for name in row)), None

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> dict[str, Any]:
        """Return one row."""
        return dict(self._rows[number])


def json_source(path: str, cache: Cache | None) -> JsonLinesSource:
    """Open the rows of a JSON file, with its line index in the cache if there is one.

    Raises:
        DataError: a line is not a JSON object; names it.
    """
    if _is_list(path):
        return JsonListSource(path)
    if cache is None:
        return JsonLinesSource(path, _read_index(path), None)
    name = f"{Path(path).stem[:40]}-{digest(str(Path(path).absolute()))}"
    index_file = cache.entry(name, file_identity(path), ".npz", lambda unfinished: _write_index(path, unfinished))
    with np.load(index_file) as stored:
        index = LineIndex(stored["starts"], tuple(stored["columns"].tolist()))
    return JsonLinesSource(path, index, cache)


def check_json_sample(path: str, schema: RowSchema) -> int:
    """Check the first rows of a JSON file; count all rows without parsing them.

    Raises:
        DataError: one of the first rows is malformed, or a required column is missing in all of them.
    """
    if _is_list(path):
        source = JsonListSource(path)
        source.check(schema)
        return len(source)
    rows, columns = 0, dict[str, None]()
    first = []
    for _, line, number in _lines(path):
        if rows < _SAMPLE_ROWS:
            first.append(_parse(path, line, number))
            columns.update(dict.fromkeys(first[-1]))
        rows += 1
    if rows:
        check_names(path, list(columns), schema)
    for number, row in enumerate(first):
        check_row(path, number, row, schema)
    return rows


def _is_list(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(1024).lstrip().startswith(b"[")


def _lines(path: str) -> Iterator[tuple[int, bytes, int]]:
    """Iterate over non-blank lines: start byte, text, and number from 1."""
    start = 0
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield start, line, number
            start += len(line)


def _read_index(path: str) -> LineIndex:
    starts, columns, end = [], dict[str, None](), 0
    for start, line, number in _lines(path):
        columns.update(dict.fromkeys(_parse(path, line, number)))
        starts.append(start)
        end = start + len(line)
    return LineIndex(np.array([*starts, end], dtype=np.int64), tuple(columns))


def _write_index(path: str, target: Path) -> None:
    index = _read_index(path)
    with target.open("wb") as file:
        np.savez(file, starts=index.starts, columns=np.array(index.columns, dtype=np.str_))


def _parse(path: str, line: bytes, number: int) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: is not JSON ({error})", code="data.not-json") from error
    return _check_object(path, f"line {number}", row)


def _check_object(path: str, location: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{path}, {location}: must be a JSON object, not {row!r:.80}", code="data.row-not-object")
    return row
