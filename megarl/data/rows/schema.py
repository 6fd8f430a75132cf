"""Row schema: required columns and types, checked by the schema of a columnar file and by values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from megarl.base.errors import DataError

RLHF_COLUMNS = ("data_source", "reward_model")
MESSAGES_FORM = 'lists of {"role": string, "content": string}'
PROMPT_FORM = 'a text, or a list of chat messages {"role": string, "content": string}'
MEDIA = ("images", "videos", "audios", "image", "video", "audio", "multi_modal_data", "multi_modal_inputs")
"""Columns of images, videos and sounds; the first three and the last two are verl's names."""
_MEDIA_PROBLEM = (
    "is not empty, but this job does not read it: jobs that generate with a vision-language model read images, from "
    "data.image_key, and none reads video or sound; leave such rows out, or remove the column"
)
REWARD_MODEL_FORM = 'a struct with "ground_truth"'


@dataclass(frozen=True)
class RowSchema:
    """Required columns of every row.

    Attributes:
        prompt: column of the prompt, a text or chat messages; None = no prompt.
        required: columns that must exist without nulls.
        texts: columns that must exist without nulls and contain strings or messages.
        source: the required column with the name of the data source, a string.
        media: columns that must not exist or be empty: images, videos and sounds that are not read.
        parts: whether the content of a message may be a list of parts, texts and images.
    """

    prompt: str | None = None
    required: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    source: str = "data_source"
    media: tuple[str, ...] = MEDIA
    parts: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all required columns."""
        return tuple(dict.fromkeys((*self.required, *self.texts, *((self.prompt,) if self.prompt else ()))))


def check_names(path: str, names: Sequence[str], expected: RowSchema) -> None:
    """Check that a file has the required columns.

    Raises:
        DataError: a column is missing; names the file, the column and the nearest existing one.
    """
    for name in expected.names:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise DataError(f"{path} has no column {name!r}{hint}; it has {list(names)}", code="data.missing-column")


def check_schema(path: str, schema: pa.Schema, expected: RowSchema) -> None:
    """Check that a columnar file has the required columns with the right types.

    Raises:
        DataError: a column is missing or has a wrong type; names the file, the column and the required type.
    """
    check_names(path, schema.names, expected)
    type_ = schema.field(expected.prompt).type if expected.prompt else None
    if type_ is not None and not (_is_text(type_) or _holds_messages(type_, expected.parts)):
        text = f"{path}: column {expected.prompt!r} must be {PROMPT_FORM}, it is {type_}"
        raise DataError(text, code="data.column-type")
    if expected.source in expected.required and not _is_text(schema.field(expected.source).type):
        type_ = schema.field(expected.source).type
        raise DataError(f"{path}: column {expected.source!r} must hold strings, not {type_}", code="data.column-type")
    for name in expected.texts:
        type_ = schema.field(name).type
        if not (_is_text(type_) or _holds_messages(type_)):
            text = f"{path}: column {name!r} must hold strings or {MESSAGES_FORM}, not {type_}"
            raise DataError(text, code="data.column-type")
    if "reward_model" in expected.required:
        type_ = schema.field("reward_model").type
        if not pa.types.is_struct(type_) or type_.get_field_index("ground_truth") < 0:
            text = f"{path}: column 'reward_model' must be {REWARD_MODEL_FORM}, it is {type_}"
            raise DataError(text, code="data.column-type")


def check_batch(path: str, batch: pa.RecordBatch, first: int, expected: RowSchema) -> None:
    """Check rows of a columnar file for null values, and for prompts without messages, roles or contents.

    Args:
        first: number of the batch's first row in the file.

    Raises:
        DataError: a value is missing; names the file, the column and the row.
    """
    check_media(path, batch, first, expected.media)
    for name in expected.names:
        needed = PROMPT_FORM if name == expected.prompt else "a value"
        why = f"is null; every row needs {needed}"
        _refuse(path, name, pc.is_null(batch.column(name)), first, why, code="data.null-value")
    if expected.prompt and _is_text(batch.schema.field(expected.prompt).type):
        empty = pc.equal(pc.utf8_length(_decoded(batch.column(expected.prompt))), 0)
        _refuse(path, expected.prompt, empty, first, "is an empty text", code="data.empty-prompt")
    elif expected.prompt:
        prompts = batch.column(expected.prompt)
        empty = pc.equal(pc.list_value_length(prompts), 0)
        why = f"has no message; it must be {PROMPT_FORM}"
        _refuse(path, expected.prompt, empty, first, why, code="data.empty-prompt")
        messages, rows = pc.list_flatten(prompts), pc.list_parent_indices(prompts)
        for part in ("role", "content"):
            missing = pc.is_null(pc.struct_field(messages, part))
            why = f"has a message whose {part!r} is null; it must be a string"
            _refuse(path, expected.prompt, missing, first, why, rows, code="data.null-value")
    if "reward_model" in expected.required:
        missing = pc.is_null(pc.struct_field(batch.column("reward_model"), "ground_truth"))
        why = "has 'ground_truth' null; the reward function compares with it"
        _refuse(path, "reward_model", missing, first, why, code="data.null-value")


def check_media(path: str, batch: pa.RecordBatch, first: int, media: Sequence[str]) -> None:
    """Check that columns of images, videos or sounds are empty; arguments and errors as above."""
    for name in media:
        if name in batch.schema.names:
            column = batch.column(name)
            flags = pc.greater(pc.list_value_length(column), 0) if _is_list(column.type) else pc.is_valid(column)
            _refuse(path, name, flags, first, _MEDIA_PROBLEM, code="data.media-column")


def _refuse(path: str, column: str, flags: Any, first: int, why: str, rows: Any = None, *, code: str) -> None:
    index = pc.index(flags, True).as_py()
    if index >= 0:
        row = index if rows is None else rows[index].as_py()
        raise DataError(f"{path}: column {column!r}, row {first + row} {why}", code=code)


def check_row(path: str, number: int, row: Mapping[str, Any], expected: RowSchema) -> None:
    """Check one row of Python values.

    Raises:
        DataError: a value is missing or has a wrong type; names the file, the column and the row.
    """
    for name in expected.names:
        if problem := _value_problem(name, row.get(name), expected):
            raise DataError(f"{path}: column {name!r}, row {number} {problem.text}", code=problem.code)
    if media := next(filter(row.get, expected.media), None):
        raise DataError(f"{path}: column {media!r}, row {number} {_MEDIA_PROBLEM}", code="data.media-column")


def _value_problem(name: str, value: Any, expected: RowSchema) -> DataError | None:
    """Return the problem of a value, without file and row; None for a valid value."""
    if value is None:
        needed = PROMPT_FORM if name == expected.prompt else "a value"
        return DataError(f"is null; every row needs {needed}", code="data.null-value")
    if name == expected.prompt:
        if isinstance(value, str):
            return None if value else DataError("is an empty text", code="data.empty-prompt")
        return messages_problem(value, parts=expected.parts)
    if name in expected.texts and not isinstance(value, str) and messages_problem(value, empty=True):
        return DataError(f"must hold strings or {MESSAGES_FORM}, not {value!r:.80}", code="data.column-type")
    if name == expected.source and name in expected.required and not isinstance(value, str):
        return DataError(f"must hold strings, not {value!r:.80}", code="data.column-type")
    if name == "reward_model" and name in expected.required:
        if not isinstance(value, Mapping) or "ground_truth" not in value:
            return DataError(f"must be {REWARD_MODEL_FORM}, it is {value!r:.80}", code="data.column-type")
        if value["ground_truth"] is None:
            return DataError("has 'ground_truth' null; the reward function compares with it", code="data.null-value")
    return None


def messages_problem(value: Any, empty: bool = False, parts: bool = False) -> DataError | None:
    """Return the problem of a value that must be chat messages; None for valid messages.

    Args:
        empty: whether there may be no message.
        parts: whether a content may be a list.
    """
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return DataError(f"must be {PROMPT_FORM}, it is {value!r:.80}", code="data.column-type")
    if not value and not empty:
        return DataError(f"has no message; it must be {PROMPT_FORM}", code="data.empty-prompt")
    for message in value:
        for part in ("role", "content"):
            if message.get(part) is None:
                text = f"has a message whose {part!r} is null; it must be a string"
                return DataError(text, code="data.null-value")
            if not isinstance(message[part], (str, list) if parts and part == "content" else str):
                text = f"must be {PROMPT_FORM}, it has {part!r}: {message[part]!r:.80}"
                return DataError(text, code="data.column-type")
    return None


def _decoded(column: Any) -> Any:
    """The texts of a column that may be encoded as a dictionary, as pandas writes categories."""
    return column.cast(pa.large_string()) if pa.types.is_dictionary(column.type) else column


def _is_text(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):  # as pandas writes categories
        type_ = type_.value_type
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _holds_messages(type_: pa.DataType, parts: bool = False) -> bool:
    """Whether a column has chat messages; with ``parts``, a content may be a list of structs."""
    if not _is_list(type_) or not pa.types.is_struct(message := type_.value_type):
        return False
    if any(message.get_field_index(name) < 0 for name in ("role", "content")):
        return False
    content = message.field("content").type
    in_parts = parts and _is_list(content) and pa.types.is_struct(content.value_type)
    return _is_text(message.field("role").type) and (in_parts or _is_text(content))


def _is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_))
