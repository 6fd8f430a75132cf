"""Parquet files in the schema that RL data sets for verl have, read and checked; imports no torch.

A row has ``prompt`` (a list of chat messages ``{role, content}``), ``data_source``, ``reward_model`` (a struct with
``ground_truth``), and where it likes ``ability`` and ``extra_info``. Rows are counted from 0 within their file.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megarl.errors import DataError

RLHF_COLUMNS = ("data_source", "reward_model")
MESSAGES_FORM = 'lists of {"role": string, "content": string}'
PROMPT_FORM = 'a list of chat messages {"role": string, "content": string}'
REWARD_MODEL_FORM = 'a struct with "ground_truth"'


def check_parquet(
    files: str | Sequence[str],
    required_columns: Sequence[str],
    field: str,
    prompt_key: str | None = None,
    text_columns: Sequence[str] = (),
) -> int:
    """Check files by their schema and row count alone, without reading a row.

    Args:
        files: path or paths.
        required_columns: columns that each file must have.
        field: configuration key that named the files, for messages.
        prompt_key: column that must hold chat messages, if any.
        text_columns: columns that must hold strings, or messages.

    Returns:
        Rows of all files together.

    Raises:
        DataError: a file is missing or no parquet file, a column is missing or of the wrong type, or there is no row.
    """
    paths = [files] if isinstance(files, str) else list(files)
    if not paths:
        raise DataError(f"{field} is empty; name at least one parquet file")
    rows = 0
    for path in paths:
        try:
            with _open(path) as reader:
                check_columns(path, reader.schema_arrow, required_columns, prompt_key, text_columns)
                rows += reader.metadata.num_rows
        except DataError as error:
            raise DataError(f"{field}: {error}") from error.__cause__
    if rows == 0:
        raise DataError(f"{field}: there is no row in {', '.join(map(str, paths))}")
    return rows


def check_columns(
    path: str, schema: pa.Schema, required: Sequence[str], prompt_key: str | None, text_columns: Sequence[str] = ()
) -> None:
    """Check that a file has its columns, and that prompts, reward models, data sources and texts have the right type.

    Raises:
        DataError: names the file and the column, and says what would be right.
    """
    for name in (*required, *text_columns, *((prompt_key,) if prompt_key else ())):
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise DataError(f"{path}: there is no column {name!r}{hint}; there are {schema.names}")
    if prompt_key and not _holds_messages(schema.field(prompt_key).type):
        found = schema.field(prompt_key).type
        raise DataError(f"{path}: column {prompt_key!r} must be {PROMPT_FORM}, it is {found}")
    if "data_source" in required and not _is_text(schema.field("data_source").type):
        raise DataError(f"{path}: column 'data_source' must hold strings, it holds {schema.field('data_source').type}")
    for name in text_columns:
        found = schema.field(name).type
        if not (_is_text(found) or _holds_messages(found)):
            raise DataError(f"{path}: column {name!r} must hold strings or {MESSAGES_FORM}, it holds {found}")
    if "reward_model" in required:
        found = schema.field("reward_model").type
        if not pa.types.is_struct(found) or found.get_field_index("ground_truth") < 0:
            raise DataError(f"{path}: column 'reward_model' must be {REWARD_MODEL_FORM}, it is {found}")


def _open(path: str) -> pq.ParquetFile:
    if not Path(path).is_file():
        raise DataError(f"{path}: there is no such file; name an existing parquet file")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({error})") from error


def _is_text(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):  # as pandas writes categories
        type_ = type_.value_type
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def _holds_messages(type_: pa.DataType) -> bool:
    if not (pa.types.is_list(type_) or pa.types.is_large_list(type_)):
        return False
    message = type_.value_type
    return pa.types.is_struct(message) and all(
        message.get_field_index(name) >= 0 and _is_text(message.field(name).type) for name in ("role", "content")
    )


class ParquetRows:
    """Rows of one or several parquet files by one running number, checked when they are read.

    Args:
        files: path or paths, in order.
        prompt_key: column of the chat messages.
        required: other columns that must be there and must not be null.
        text_columns: columns that must be there, not be null, and hold strings or messages.
        optional: columns to read where a file has them; None for a row elsewhere.

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
    ) -> None:
        self.files = [files] if isinstance(files, str) else list(files)
        self._wanted = tuple(dict.fromkeys((prompt_key, *required, *text_columns, *optional)))
        self._tables = [self._read(path, prompt_key, required, text_columns) for path in self.files]
        self._ends = list(accumulate(table.num_rows for table in self._tables))
        if not len(self):
            raise DataError(f"there is no row in {', '.join(map(str, self.files)) or 'an empty list of files'}")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Columns of one row as Python values.

        Raises:
            IndexError: the row is outside the files.
        """
        file, own = self._locate(row)
        values = self._tables[file].slice(own, 1).to_pylist()[0]
        return {name: values.get(name) for name in self._wanted}

    def column(self, name: str) -> list[Any]:
        """One column of all rows as Python values; None for the rows of files that do not have it."""
        columns = [
            table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows
            for table in self._tables
        ]
        return [value for column in columns for value in column]

    def where(self, row: int) -> str:
        """File and row within it, for messages."""
        file, own = self._locate(row)
        return f"{self.files[file]}, row {own}"

    def _locate(self, row: int) -> tuple[int, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is outside a data set of {len(self)}")
        file = bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)

    def _read(self, path: str, prompt_key: str, required: Sequence[str], text_columns: Sequence[str]) -> pa.Table:
        with _open(path) as reader:
            check_columns(path, reader.schema_arrow, required, prompt_key, text_columns)
            present = [name for name in self._wanted if name in reader.schema_arrow.names]
            try:
                table = reader.read(columns=present).combine_chunks()
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path}: cannot be read ({error})") from error
        _check_values(path, table, prompt_key, (*required, *text_columns))
        return table


def _check_values(path: str, table: pa.Table, prompt_key: str, required: Sequence[str]) -> None:
    """Refuse null values and prompts without a message or with half a message."""
    for name in (prompt_key, *required):
        form = PROMPT_FORM if name == prompt_key else "a value"
        _refuse(path, name, pc.is_null(table.column(name)), f"is null; every row needs {form}")
    for prompts in table.column(prompt_key).chunks:  # one, or none where there is no row
        _refuse(
            path, prompt_key, pc.equal(pc.list_value_length(prompts), 0), f"has no message; it must be {PROMPT_FORM}"
        )
        messages, rows = pc.list_flatten(prompts), pc.list_parent_indices(prompts)
        for part in ("role", "content"):
            missing = pc.is_null(pc.struct_field(messages, part))
            _refuse(path, prompt_key, missing, f"has a message whose {part!r} is null; it must be a string", rows)
    if "reward_model" in required:
        for models in table.column("reward_model").chunks:
            missing = pc.is_null(pc.struct_field(models, "ground_truth"))
            _refuse(path, "reward_model", missing, "has 'ground_truth' null; the reward function compares with it")


def _refuse(path: str, column: str, flags: Any, why: str, rows: Any = None) -> None:
    first = pc.index(flags, True).as_py()
    if first >= 0:
        row = first if rows is None else rows[first].as_py()
        raise DataError(f"{path}: column {column!r}, row {row} {why}")
