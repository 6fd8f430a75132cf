"""Random access to the rows of several files, checks of data files, and expansion of file patterns."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from megarl.base.errors import DataError
from megarl.data.rows.cache import Cache
from megarl.data.rows.columnar import (
    HF_STATE,
    ColumnarSource,
    open_parquet,
    parquet_bytes,
    parquet_source,
    saved_dataset_source,
)
from megarl.data.rows.json_lines import JsonLinesSource, check_json_sample, json_source
from megarl.data.rows.schema import MEDIA, RowSchema, check_media, check_schema

SMALL_BYTES = 64 * 2**20
"""Data sets up to this size are kept in memory; larger ones are memory-mapped."""
_JSON = (".jsonl", ".json", ".ndjson")
_HF_SPLITS = "dataset_dict.json"
_SCAN = 4096
_MEDIA_ROWS = 64  # images are large


def expand_files(files: str | Sequence[str]) -> list[str]:
    """Expand paths and patterns to files, in the given order.

    ``~`` and ``$NAME`` are expanded. A pattern (``*``, ``?``, ``[...]``, ``**`` for any folders) is replaced by its
    matches, sorted. A folder of Hugging Face ``datasets`` counts as a file.

    Raises:
        DataError: a pattern matches nothing, a path does not exist, is a folder of another kind, or is remote.
    """
    paths = [files] if isinstance(files, str) else list(files)
    return [file for path in paths for file in _expand(str(path))]


def _expand(pattern: str) -> list[str]:
    if "://" in pattern:
        raise DataError(
            f"{pattern}: only files of this machine's file systems are supported; copy the file to one, or set "
            "hub.enable=true for a file of the Hugging Face Hub (hf://datasets/owner/name/file)",
            code="data.remote-path",
        )
    path = os.path.expanduser(os.path.expandvars(pattern))
    if not os.path.exists(path) and glob.has_magic(path):
        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            raise DataError(f"{pattern} matches no file; name existing files", code="data.pattern-no-match")
        return [_checked(file, file) for file in matches]
    return [_checked(path, pattern)]


def _checked(path: str, named: str) -> str:
    """Return a path to a file or a Hugging Face ``datasets`` folder; raise DataError for any other path."""
    target = Path(path)
    if target.is_file():
        return path
    if not target.exists():
        raise DataError(f"{named}: there is no such file; name a parquet or JSONL file", code="data.file-missing")
    if (target / HF_STATE).is_file():
        return path
    if (target / _HF_SPLITS).is_file():
        splits = sorted(str(state.parent) for state in target.glob(f"*/{HF_STATE}"))
        raise DataError(f"{named} holds several splits; name one of {', '.join(splits)}", code="data.several-splits")
    text = f"{named} is a folder, but not one of Hugging Face datasets; name its files, as {named}/*.parquet"
    raise DataError(text, code="data.unknown-folder")


def check_files(
    files: str | Sequence[str],
    required_columns: Sequence[str],
    field: str,
    prompt_key: str | None = None,
    text_columns: Sequence[str] = (),
    source_key: str = "data_source",
    media: Sequence[str] = MEDIA,
    parts: bool = False,
) -> int:
    """Check the schema of data files, and the first rows of JSON; return the number of all rows.

    Args:
        field: configuration key of the files, for messages.
        prompt_key: column that must contain chat messages, if any.
        text_columns: columns that must contain strings or messages.
        media, parts: see :class:`megarl.data.rows.schema.RowSchema`.

    Raises:
        DataError: a file is missing or of an unknown format, a column is missing or of the wrong type, or there is no
            row.
    """
    schema = RowSchema(prompt_key, tuple(required_columns), tuple(text_columns), source_key, tuple(media), parts)
    if not files:
        raise DataError(f"{field} is empty; name at least one parquet or JSONL file", code="data.no-file-named")
    try:
        paths = expand_files(files)
        rows = sum(_check_file(path, schema) for path in paths)
    except DataError as error:
        raise DataError(f"{field}: {error.text}", code=error.code) from error.__cause__
    if rows == 0:
        raise DataError(f"{field}: there is no row in {', '.join(paths)}", code="data.no-rows")
    return rows


def _check_file(path: str, schema: RowSchema) -> int:
    if Path(path).is_dir():
        source = saved_dataset_source(path)
        check_schema(path, source.schema, schema)
        return len(source)
    if path.endswith(_JSON):
        return check_json_sample(path, schema)
    with open_parquet(path) as reader:
        check_schema(path, reader.schema_arrow, schema)
        if media := [name for name in schema.media if name in reader.schema_arrow.names]:
            first = 0
            for batch in reader.iter_batches(_MEDIA_ROWS, columns=media):
                check_media(path, batch, first, media)
                first += len(batch)
        return int(reader.metadata.num_rows)


class Rows:
    """Rows of one or several files with a common row number, all checked when opened.

    Args:
        files: paths or patterns, in order: parquet, JSON lines, or folders of ``datasets.save_to_disk``.
        required: other columns that must exist without nulls.
        text_columns: columns that must exist without nulls and contain strings or messages.
        optional: columns of every row, None if the file does not have them.
        source_key: the required column with the name of the data source.
        cache_dir: folder for converted files, see :class:`megarl.data.rows.cache.Cache`.
        media, parts: see :class:`megarl.data.rows.schema.RowSchema`.

    Attributes:
        columns: names of all files' columns, and the optional columns.

    Raises:
        DataError: a file or column is missing or malformed, a value is null, a prompt has no message, or there are no
            rows at all. The message names file, column and row.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        prompt_key: str,
        required: Sequence[str] = (),
        text_columns: Sequence[str] = (),
        optional: Sequence[str] = (),
        source_key: str = "data_source",
        cache_dir: str | None = None,
        media: Sequence[str] = MEDIA,
        parts: bool = False,
    ) -> None:
        self.files = expand_files(files)
        self.cache = Cache(cache_dir)
        self._optional = tuple(optional)
        self._open()
        schema = RowSchema(prompt_key, tuple(required), tuple(text_columns), source_key, tuple(media), parts)
        for source in self._sources:
            source.check(schema)
        if not len(self):
            raise DataError(f"there is no row in {', '.join(self.files) or '[]'}", code="data.no-rows")

    def _open(self) -> None:
        plain = [path for path in self.files if not Path(path).is_dir()]  # folders are always memory-mapped
        sizes = (Path(path).stat().st_size if path.endswith(_JSON) else parquet_bytes(path) for path in plain)
        small = sum(sizes) <= SMALL_BYTES
        self._sources = [_source(path, None if small else self.cache) for path in self.files]
        self._ends = list(accumulate(map(len, self._sources)))
        names = (name for source in self._sources for name in source.columns)
        self.columns = tuple(dict.fromkeys((*names, *self._optional)))

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "cache": self.cache, "_optional": self._optional}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reopen the files in another process, without checks; memory-mapped pages are shared."""
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return all columns of one row as Python values, None for columns that its file does not have.

        Raises:
            IndexError: the row is outside the files.
        """
        file, number = self._locate(row)
        return dict.fromkeys(self.columns) | self._sources[file].row(number)

    @property
    def identity(self) -> str:
        """Fingerprint of all files' content."""
        return "||".join(source.identity for source in self._sources)

    def rows_of_files(self) -> list[int]:
        """Count the rows of each file."""
        return [len(source) for source in self._sources]

    def slice(self, names: Sequence[str], start: int, stop: int, *, has_bytes: bool = True) -> list[dict[str, Any]]:
        """Return columns of the rows in ``[start, stop)``, None for columns that a file does not have.

        Args:
            has_bytes: whether to read binary values, such as embedded images; False = as if there were none.
        """
        rows: list[dict[str, Any]] = []
        while start < stop:
            file, number = self._locate(start)
            end = min(stop, self._ends[file])
            rows += self._sources[file].values(list(names), number, number + end - start, has_bytes=has_bytes)
            start = end
        return [dict.fromkeys(names) | values for values in rows]

    def select(self, names: Sequence[str], numbers: Sequence[int], *, has_bytes: bool = True) -> list[dict[str, Any]]:
        """Return columns of some rows, as :meth:`slice` does."""
        rows: list[dict[str, Any]] = []
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
            (_, first), *others = run
            rows += self.slice(names, first, first + 1 + len(others), has_bytes=has_bytes)
        return rows

    def scan(self, name: str) -> Iterator[Any]:
        """Iterate over one column of all rows in small blocks; None if a file lacks it."""
        for start in range(0, len(self), _SCAN):
            for values in self.slice([name], start, min(start + _SCAN, len(self))):
                yield values[name]

    def first_rows(self, name: str) -> dict[Any, int]:
        """Map each value of a column to its first row; empty if no file has the column."""
        first: dict[Any, int] = {}
        if any(name in source.columns for source in self._sources):
            for row, value in enumerate(self.scan(name)):
                first.setdefault(value, row)
        return first

    def location(self, row: int) -> str:
        """Name file and row number within the file, for messages."""
        file, number = self._locate(row)
        return f"{self.files[file]}, row {number}"

    def folder(self, row: int) -> str:
        """Return the folder of a row's file, for paths in the row."""
        path = self.files[self._locate(row)[0]]
        return path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))

    def _locate(self, row: int) -> tuple[int, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is outside a data set of {len(self)}")
        file = bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)


def _source(path: str, cache: Cache | None) -> ColumnarSource | JsonLinesSource:
    if Path(path).is_dir():
        return saved_dataset_source(path)
    return json_source(path, cache) if path.endswith(_JSON) else parquet_source(path, cache)
