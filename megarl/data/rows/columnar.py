"""Columnar rows: parquet files, and the Arrow files of Hugging Face ``datasets``.

Parquet files cannot be memory-mapped by row. A large file is converted once to an Arrow file of small batches in the
cache and then mapped: only used pages are in memory, and the system may drop them. A small file is kept in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.base.errors import DataError
from megarl.base.json_text import parse_json
from megarl.data.rows.cache import Cache, digest, file_identity
from megarl.data.rows.schema import RowSchema, check_batch, check_schema

HF_STATE = "state.json"
"""File that describes a folder of ``Dataset.save_to_disk``."""
_BATCH_ROWS = 1024  # a row is read from its batch without the others; larger batches mean fewer objects


class ColumnarSource:
    """Rows of one file, in record batches."""

    def __init__(self, path: str, schema: pa.Schema, batches: list[pa.RecordBatch], identity: str) -> None:
        self.path = path
        self.identity = identity
        self.columns = tuple(schema.names)
        self.schema = schema
        self._chats = [field.name for field in schema if _has_nested_fields(field.type)]
        self._batches = [batch for batch in batches if batch.num_rows]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, number: int) -> dict[str, Any]:
        """Return one row as Python values."""
        batch, offset = self._locate(number)
        return self._rows(self._batches[batch].slice(offset, 1))[0]

    def values(self, names: list[str], start: int, stop: int, *, has_bytes: bool = True) -> list[dict[str, Any]]:
        """Return the existing columns among ``names`` of the rows in ``[start, stop)``.

        Args:
            has_bytes: whether to read binary values; False = leave them out, and their fields in structs.
        """
        present = [name for name in names if name in self.columns]
        if not has_bytes:
            present = [field.name for field in _without_bytes(map(self.schema.field, present))]
        rows: list[dict[str, Any]] = []
        while start < stop:
            batch, offset = self._locate(start)
            part = self._batches[batch].select(present).slice(offset, stop - start)
            part = part if has_bytes else part.cast(pa.schema(_without_bytes(part.schema)))
            # a batch without columns has no length
            rows += self._rows(part) if present else [{} for _ in range(min(stop, self._ends[batch]) - start)]
            start = self._ends[batch]
        return rows

    def check(self, schema: RowSchema) -> None:
        """Check types, then all values, batch by batch."""
        check_schema(self.path, self.schema, schema)
        first = 0
        for batch, end in zip(self._batches, self._ends, strict=True):
            check_batch(self.path, batch, first, schema)
            first = end

    def _rows(self, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        """Convert rows to Python values; messages and tools without the nulls of fields that only other rows have."""
        rows: list[dict[str, Any]] = batch.to_pylist()
        for name in set(self._chats) & set(batch.schema.names):
            for row in rows:
                row[name] = row[name] and [
                    entry and {key: _without_nulls(value) for key, value in entry.items()} for entry in row[name]
                ]
        return rows

    def _locate(self, number: int) -> tuple[int, int]:
        batch = bisect_right(self._ends, number)
        return batch, number - (self._ends[batch - 1] if batch else 0)


def _has_nested_fields(type_: pa.DataType) -> bool:
    """Whether a column has chat messages or tools with structs in them, such as the arguments of calls."""
    if not (pa.types.is_list(type_) or pa.types.is_large_list(type_)) or not pa.types.is_struct(type_.value_type):
        return False
    fields = {field.name: field.type for field in type_.value_type}
    return not fields.keys().isdisjoint(("role", "function")) and any(map(pa.types.is_nested, fields.values()))


def _without_bytes(fields: Iterable[pa.Field]) -> list[pa.Field]:
    """Remove binary fields, also in structs and lists."""
    return [field.with_type(kind) for field in fields if (kind := _type_without_bytes(field.type)) is not None]


def _type_without_bytes(type_: pa.DataType) -> pa.DataType | None:
    if pa.types.is_binary(type_) or pa.types.is_large_binary(type_):
        return None
    if pa.types.is_struct(type_):
        return pa.struct(_without_bytes(type_))
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        kind = _type_without_bytes(type_.value_type)
        return None if kind is None else (pa.list_ if pa.types.is_list(type_) else pa.large_list)(kind)
    return type_


def _without_nulls(value: Any) -> Any:
    """Drop null fields, which Arrow adds to a struct if another row has the field."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def open_parquet(path: str) -> pq.ParquetFile:
    """Open a parquet file without reading rows; raise DataError if it is none."""
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file ({error})", code="data.unreadable-file") from error


def parquet_bytes(path: str) -> int:
    """Approximate bytes of a file's rows in memory; errors as in :func:`open_parquet`."""
    with open_parquet(path) as reader:
        groups = range(reader.metadata.num_row_groups)
        return sum(int(reader.metadata.row_group(group).total_byte_size) for group in groups)


def parquet_source(path: str, cache: Cache | None) -> ColumnarSource:
    """Open the rows of a parquet file: mapped from the cache, or in memory if ``cache`` is None."""
    identity = file_identity(path)
    if cache is None:
        with open_parquet(path) as reader:
            return ColumnarSource(path, _plain(reader.schema_arrow), list(_batches(path, reader)), identity)
    name = f"{Path(path).stem[:40]}-{digest(str(Path(path).absolute()))}"
    converted = cache.entry(name, identity, ".arrow", lambda unfinished: _convert(path, unfinished))
    reader = pa.ipc.open_file(pa.memory_map(str(converted)))
    batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    return ColumnarSource(path, reader.schema, batches, identity)


def saved_dataset_source(folder: str) -> ColumnarSource:
    """Map the rows of a folder of ``Dataset.save_to_disk``.

    Raises:
        DataError: a file is missing or malformed.
    """
    batches, schema, identities = [], None, []
    for path in saved_dataset_files(folder):
        try:
            reader = pa.ipc.open_stream(pa.memory_map(path))
            batches += list(reader)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a readable Arrow file ({error})", code="data.unreadable-file") from error
        schema = reader.schema if schema is None else schema
        identities.append(file_identity(path))
    assert schema is not None
    return ColumnarSource(folder, schema, batches, "|".join(identities))


def saved_dataset_files(folder: str) -> list[str]:
    """List the Arrow files of a folder of ``Dataset.save_to_disk``, in order.

    Raises:
        DataError: the folder's description is malformed, or lists no file.
    """
    try:
        state = parse_json((Path(folder) / HF_STATE).read_text(encoding="utf-8"))
        files = [str(Path(folder) / file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{folder}/{HF_STATE} is no file of datasets.save_to_disk ({error!r})"
        raise DataError(text, code="data.unreadable-file") from error
    if not files:
        raise DataError(f"{folder} has no row", code="data.no-rows")
    return files


def _convert(path: str, target: Path) -> None:
    with open_parquet(path) as reader:
        schema = _plain(reader.schema_arrow)
        with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in _batches(path, reader):
                writer.write_batch(batch)


def _batches(path: str, reader: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Read a file's rows in small batches, without dictionary encoding."""
    schema = _plain(reader.schema_arrow)
    try:
        for batch in reader.iter_batches(_BATCH_ROWS):
            yield batch if batch.schema.equals(schema) else batch.cast(schema)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read ({error})", code="data.unreadable-file") from error


def _plain(schema: pa.Schema) -> pa.Schema:
    """Replace dictionary-encoded columns of a schema by their value types."""
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema
    ]
    return pa.schema(fields)
