"""Data sets of prompts, their base class over the rows of files, and user code as verl calls it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from megarl.base.errors import ConfigError, DataError
from megarl.data.columns import COLUMNS, attention_mask_of, pad_left
from megarl.data.images import IMAGES, ImageReader
from megarl.data.lengths import PromptLengths, measure_lengths
from megarl.data.protocol import DataProto
from megarl.data.rows.reader import Rows
from megarl.data.rows.schema import MEDIA, RowSchema, check_row
from megarl.data.tokenization import (
    SYSTEM_COLUMN,
    TOOLS_COLUMN,
    Prompt,
    PromptEncoder,
    PromptReader,
    check_truncation,
    truncate,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Sample = dict[str, Any]

_OPTIONAL = ("ability", "extra_info", "agent_name")
RESERVED = (IMAGES, "uid", "index", "raw_prompt", "num_turns", "agent_error", "finish_reason", "weight_version")
"""Columns that megarl adds to a batch; a file must not contain them."""
VOCABULARY_ROWS = 8
"""Prompts in which a tokenizer must know something."""
RAW_PROMPT = "raw_prompt"
_PADDED = ("dummy_tensor", "input_ids", "position_ids", "raw_prompt_ids", "full_prompts")
"""Entries of verl's samples for its padded batches; megarl encodes the messages itself."""


class RowDataset(torch.utils.data.Dataset[Sample]):
    """A subset of the rows of files, in file order; see :func:`sample_rows`."""

    def __init__(
        self,
        source: Rows,
        reader: PromptReader,
        encoder: PromptEncoder,
        truncation: str,
        max_samples: int = -1,
        sample_seed: int | None = None,
    ) -> None:
        check_truncation(truncation)
        self.source, self.reader, self.encoder, self.truncation = source, reader, encoder, truncation
        self.dropped = 0
        self._rows = sample_rows(len(source), max_samples, sample_seed)

    def __len__(self) -> int:
        return len(self._rows)

    def check_vocabulary(self) -> None:
        """Check that the tokenizer knows the text of the first prompts; see :class:`PromptEncoder`."""
        rows = self._rows[:VOCABULARY_ROWS].tolist()
        if rows:
            prompts = [self.read(row) for row in rows]
            self.encoder.check_vocabulary(prompts, self.source.location(rows[0]))

    def read(self, row: int) -> Prompt:
        """Read the prompt of a row of the files."""
        return self.reader.read(self.source[row], self.source.location(row), self.source.folder(row))

    def rows_of_files(self) -> list[int]:
        """Count the kept rows of each file."""
        ends = np.cumsum([0, *self.source.rows_of_files()])
        counts: list[int] = np.diff(np.searchsorted(self._rows, ends)).tolist()
        return counts

    def numbers(self, path: str) -> np.ndarray:
        """Read a numeric column of all kept rows.

        Raises:
            DataError: the column does not exist, or a row has no number there.
        """
        column, *fields = path.split(".")
        if column not in self.source.columns:
            text = f"there is no column {column!r} to order rows by; there are {list(self.source.columns)}"
            raise DataError(text, code="data.missing-column")
        numbers = np.full(len(self.source), np.nan)
        for row, value in enumerate(self.source.scan(column)):
            for name in fields:
                value = value.get(name) if isinstance(value, Mapping) else None
            if isinstance(value, int | float):
                numbers[row] = value
        missing = np.flatnonzero(np.isnan(numbers[self._rows]))
        if len(missing):
            location = self.source.location(int(self._rows[missing[0]]))
            raise DataError(f"{location}: {path!r} is not a number; rows are ordered by it", code="data.not-number")
        kept: np.ndarray = numbers[self._rows]
        return kept


def sample_rows(rows: int, max_samples: int, seed: int | None) -> np.ndarray:
    """Choose the numbers of the rows to keep, ascending.

    Args:
        max_samples: rows to keep; -1 = all.
        seed: seed of the draw; None = keep the first rows.
    """
    if max_samples < 0 or max_samples >= rows:
        return np.arange(rows)
    if seed is None:
        return np.arange(max_samples)
    return np.sort(np.random.default_rng(seed).choice(rows, max_samples, replace=False))


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token id that pads batches; 0 for a tokenizer without a padding token."""
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def require_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError for a tokenizer without an end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer {tokenizer.name_or_path!r} has no eos_token; set it", code="tokenizer.no-eos-token")


def collate_prompts(samples: Sequence[Sample], pad: int) -> DataProto:
    """Collate samples with ``prompt_ids`` to a batch, left-padded; other entries become non-tensor columns."""
    prompt_ids = [sample["prompt_ids"] for sample in samples]
    tensors = {"prompts": pad_left(prompt_ids, pad)}
    tensors["attention_mask"] = attention_mask_of(
        [len(ids) for ids in prompt_ids], [0] * len(samples), tensors["prompts"].shape[1], 0
    )
    names = [name for name in samples[0] if name != "prompt_ids"]
    return DataProto.from_dict(tensors, {name: [sample[name] for sample in samples] for name in names})


class RLHFDataset(RowDataset):
    """Prompts with the data for their reward functions.

    With ``truncation="error"`` or with filtering, the data set measures every prompt when it is built, so that a prompt
    that is too long stops the run at its start. So it does if the tokenizer has tokens that the model lacks, if the
    longest prompt leaves no room for a response, or if prompts may have images. A prompt with images is never cut.

    Args:
        files: paths or patterns (see :class:`megarl.data.rows.Rows`).
        max_prompt_length: longest prompt, in tokens, including the template.
        prompt_key: column of the prompt: chat messages, or a text.
        truncation: treatment of a longer prompt: ``error``, or cut it at its ``left``, ``right`` or ``middle``.
        filter_overlong_prompts: drop and count longer prompts instead.
        apply_chat_template: whether a text is one user message for the template; False = it is tokenized as it is.
        reward_fn_key: column with the name of the data source, for reward functions and metrics.
        system_prompt: system message of rows without one.
        tool_schemas: schemas of the tools that rows may name in the column ``tools``, by name.
        max_samples: see :func:`sample_rows`.
        workers: processes that measure lengths; None = a number that suits the data set.
        cache_dir: folder for converted files and lengths.
        vocab_size: tokens of the model; None = unknown.
        prompt_room: longest prompt that leaves room for a response in the model's context; None = all do.
        images: reads the images of prompts; None = the model takes none.
        media: columns that must be empty, see :class:`megarl.data.rows.schema.RowSchema`.

    Attributes:
        dropped: number of prompts that were filtered out.

    Raises:
        DataError: a file, column or row is malformed, a prompt is too long, or no prompt is left.
    """

    scored: ClassVar[bool] = True
    """Whether rows need the columns of the reward functions."""

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int,
        prompt_key: str = "prompt",
        truncation: str = "error",
        filter_overlong_prompts: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        apply_chat_template: bool = True,
        reward_fn_key: str = "data_source",
        system_prompt: str | None = None,
        tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
        max_samples: int = -1,
        sample_seed: int | None = None,
        workers: int | None = None,
        cache_dir: str | None = None,
        vocab_size: int | None = None,
        prompt_room: int | None = None,
        images: ImageReader | None = None,
        media: Sequence[str] = MEDIA,
    ) -> None:
        self.reward_fn_key = reward_fn_key
        required = (reward_fn_key, "reward_model") if self.scored else ()
        parts = images is not None
        source = Rows(files, prompt_key, required, (), _OPTIONAL, reward_fn_key, cache_dir, media, parts)
        reader = PromptReader(prompt_key, system_prompt, tool_schemas or {}, apply_chat_template, images)
        encoder = PromptEncoder(
            tokenizer,
            apply_chat_template_kwargs,
            vocab_size=vocab_size,
            max_tokens=max_prompt_length,
            image_token=None if images is None else images.token,
        )
        super().__init__(source, reader, encoder, truncation, max_samples, sample_seed)
        self.max_prompt_length = max_prompt_length
        self.prompt_room = prompt_room
        self._passed_columns = self._select_columns(media)
        self.check_vocabulary()
        unchecked = parts or prompt_room is not None or self.encoder.vocabulary.limit is not None
        if filter_overlong_prompts or truncation == "error" or unchecked:
            self._check_lengths(filter_overlong_prompts, workers)
        if images is not None:
            self.reader = replace(reader, images=replace(images, was_checked=True))

    def __getitem__(self, item: int) -> Sample:
        """Return a row: ``prompt_ids`` (token ids) and the non-tensor columns; ``index`` also counts dropped rows."""
        row = int(self._rows[item])
        values, location = self.source[row], self.source.location(row)
        prompt = self.reader.read(values, location, self.source.folder(row))
        sample = {
            "prompt_ids": truncate(self.encoder.encode(prompt, location), self.max_prompt_length, self.truncation),
            "raw_prompt": prompt.messages,
            **{name: values[name] for name in self._passed_columns},
            "data_source": values.get(self.reward_fn_key),
            "extra_info": values.get("extra_info") or {},
            "index": row,
        }
        tools = {TOOLS_COLUMN: prompt.tools} if TOOLS_COLUMN in self.source.columns else {}
        return sample | tools | ({} if self.reader.images is None else {IMAGES: prompt.images})

    def collate(self, samples: Sequence[Sample]) -> DataProto:
        """Collate samples to a batch: ``prompts`` and ``attention_mask`` ``[b, P]``, P the longest prompt."""
        return collate_prompts(samples, pad_id(self.encoder.tokenizer))

    def _select_columns(self, media: Sequence[str]) -> list[str]:
        """Select the file columns that go into a batch: all except prompt columns, empty ones and reserved names."""
        used = (*self.reader.columns, *media)
        reserved = [name for name in self.source.columns if name not in used and (name in COLUMNS or name in RESERVED)]
        if reserved:
            logger.warning("columns %s are ignored: batches reserve these names", ", ".join(reserved))
        return [name for name in self.source.columns if name not in (*used, *reserved)]

    def _check_lengths(self, drop: bool, workers: int | None) -> None:
        measure = PromptLengths(self.encoder, self.reader)
        lengths, images = measure_lengths(self.source, self._rows, measure, workers).T
        too_long = lengths > self.max_prompt_length
        uncut = too_long & ((images > 0) | (self.truncation == "error"))
        if uncut.any() and not drop:
            first = int(uncut.argmax())
            tokens, longest = map(self.encoder.describe, (int(lengths[first]), int(lengths.max())))
            cut = "" if images[first] else "set data.truncation=left, right or middle, "
            never = "; a prompt with images is never cut" if images[first] else ""
            raise DataError(
                f"{self.source.location(int(self._rows[first]))}: the prompt has {tokens} tokens, at most "
                f"{self.max_prompt_length} are allowed ({too_long.sum()} of {len(lengths)} prompts are too long, the "
                f"longest has {longest}); raise data.max_prompt_length, {cut}or data.filter_overlong_prompts=True"
                f"{never}",
                code="data.prompt-too-long",
            )
        used = np.where(too_long, 0 if drop else self.max_prompt_length, lengths)
        if self.prompt_room is not None and used.max(initial=0) > self.prompt_room:
            row = int(self._rows[used.argmax()])
            raise no_room(self.source.location(row), int(used.max()), self.prompt_room)
        if not drop or not too_long.any():
            return
        self._rows, self.dropped = self._rows[~too_long], int(too_long.sum())
        if not len(self):
            raise DataError(
                f"all {self.dropped} prompts are longer than {self.max_prompt_length} tokens (the shortest has "
                f"{lengths.min()}), so none is left; raise data.max_prompt_length",
                code="data.all-prompts-too-long",
            )
        logger.warning(
            "dropped %d of %d prompts: longer than %d tokens", self.dropped, len(lengths), self.max_prompt_length
        )


def no_room(location: str, tokens: int, room: int) -> DataError:
    """Return the error of a prompt after which the longest response exceeds the context."""
    return DataError(
        f"{location}: the prompt has {tokens} tokens, and data.max_response_length leaves room for {room} in the "
        "context of the model (max_position_embeddings) or of its engine; lower data.max_response_length, or let "
        f"data.max_prompt_length={room} and data.filter_overlong_prompts=true drop longer prompts",
        code="data.no-response-room",
    )


def takes_verls_arguments(kind: type) -> bool:
    """Return whether a data set class is built from ``data_files, tokenizer, config, processor, max_samples``."""
    return {"data_files", "config"} <= inspect.signature(kind).parameters.keys()


class CustomPrompts(torch.utils.data.Dataset[Sample]):
    """Adapts a user's data set with verl's samples: checks them and encodes their prompts.

    A sample is a mapping with the prompt in ``raw_prompt`` or in the prompt column (chat messages or a text), and the
    columns of the reward functions. Its other entries become columns of the batch.

    Args:
        kind: map-style data set class, with verl's constructor.
        config: the section ``data``, for its ``config``.
        max_prompt_length: longest prompt, in tokens; ``truncation`` treats a longer one.
        reward_fn_key: entry with the name of the data source.
        media: entries that must be empty, see :class:`megarl.data.rows.schema.RowSchema`.

    Attributes:
        source: the user's data set.

    Raises:
        ConfigError: the class is no map-style data set, or its constructor fails.
    """

    def __init__(
        self,
        kind: type,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: Any,
        max_samples: int,
        *,
        reader: PromptReader,
        encoder: PromptEncoder,
        max_prompt_length: int,
        truncation: str,
        reward_fn_key: str,
        prompt_room: int | None = None,
        media: Sequence[str] = MEDIA,
    ) -> None:
        self.name = kind.__name__
        given = {"data_files": list(files), "tokenizer": tokenizer, "config": config, "processor": None}
        if max_samples > 0:  # classes of earlier versions of verl lack this argument
            given["max_samples"] = max_samples
        try:
            self.source: Any = kind(**given)
        except Exception as error:  # user code may raise any error
            raise ConfigError(
                f"data.custom_cls: {self.name}({', '.join(given)}) failed: {type(error).__name__}: {error}; a class "
                "with verl's constructor takes data_files, tokenizer, config, processor and max_samples",
                code="data.custom-class-failed",
            ) from error
        missing = [name for name in ("__len__", "__getitem__") if not hasattr(self.source, name)]
        if missing:
            text = f"data.custom_cls: {self.name} must have {' and '.join(missing)}"
            raise ConfigError(text, code="data.custom-class-methods")
        self.reader = reader
        self.encoder = encoder
        self.max_prompt_length = max_prompt_length
        self.truncation = truncation
        self.reward_fn_key = reward_fn_key
        self.prompt_room = prompt_room
        self.media = tuple(media)
        unchecked = reader.images is not None or encoder.vocabulary.limit is not None or prompt_room is not None
        if unchecked:  # the model may refuse a row
            for item in range(len(self)):
                self[item]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, item: int) -> Sample:
        """Return a sample with ``prompt_ids`` (token ids) and the non-tensor columns.

        Raises:
            DataError: the sample lacks an entry, or its prompt is too long or malformed.
        """
        entry, location = self.source[item], f"data.custom_cls: {self.name}, row {item}"
        if not isinstance(entry, Mapping):
            text = f"{location} is a {type(entry).__name__}, not a mapping"
            raise DataError(text, code="data.sample-not-mapping")
        sample = {name: _plain(value) for name, value in entry.items()}
        key = RAW_PROMPT if sample.get(RAW_PROMPT) is not None else self.reader.key
        values = {**sample, self.reader.key: sample.get(key)}
        required, parts = (self.reward_fn_key, "reward_model"), self.reader.images is not None
        schema = RowSchema(self.reader.key, required, (), self.reward_fn_key, self.media, parts)
        check_row(f"data.custom_cls: {self.name}", item, values, schema)
        prompt = self.reader.read(values, location)
        ids = self.encoder.encode(prompt, location)
        if len(ids) > self.max_prompt_length and (self.truncation == "error" or prompt.images):
            raise DataError(
                f"{location}: the prompt has {self.encoder.describe(len(ids))} tokens, at most "
                f"{self.max_prompt_length} are allowed; let the class drop it, raise data.max_prompt_length, or set "
                "data.truncation=left, right or middle, which cuts no prompt with images",
                code="data.prompt-too-long",
            )
        dropped = (*self.reader.columns, SYSTEM_COLUMN, TOOLS_COLUMN, *self.media, *RESERVED, *_PADDED)
        entries = {name: value for name, value in sample.items() if name not in dropped and name not in COLUMNS}
        facts = {"data_source": sample[self.reward_fn_key], "extra_info": sample.get("extra_info") or {}, "index": item}
        tools = {TOOLS_COLUMN: prompt.tools} if TOOLS_COLUMN in sample else {}
        ids = truncate(ids, self.max_prompt_length, self.truncation)
        if self.prompt_room is not None and len(ids) > self.prompt_room:
            raise no_room(location, len(ids), self.prompt_room)
        images = {} if self.reader.images is None else {IMAGES: prompt.images}
        return {"prompt_ids": ids, RAW_PROMPT: prompt.messages, **entries, **facts, **tools, **images}

    def collate(self, samples: Sequence[Sample]) -> DataProto:
        """Collate samples to a batch: ``prompts`` and ``attention_mask`` ``[b, P]``, P the longest prompt."""
        return collate_prompts(samples, pad_id(self.encoder.tokenizer))


class CustomCollate:
    """Collates samples with a user's function in verl's form, and adds the tokens of the prompts.

    Args:
        function: takes the samples of a batch, and returns a mapping of columns: tensors, arrays or lists with one
            entry per sample, in the same order.
        pad: token id that pads prompts.
    """

    def __init__(self, function: Callable[[list[Sample]], Any], pad: int) -> None:
        self.function = function
        self.pad = pad

    def __call__(self, samples: Sequence[Sample]) -> DataProto:
        """Collate samples to a batch.

        Raises:
            DataError: the function returns no mapping, a column of another length, or changes a prompt.
        """
        columns = self.function([dict(sample) for sample in samples])
        if not isinstance(columns, Mapping):
            problem = f"data.collate_fn returned a {type(columns).__name__}, not a mapping of columns"
            raise DataError(problem, code="data.collate-not-mapping")
        rows = {name: [_plain(value) for value in values] for name, values in columns.items()}
        for name, values in rows.items():
            if len(values) != len(samples):
                text = f"column {name!r} has {len(values)} entries for {len(samples)} samples"
                problem = f"data.collate_fn: {text}; return one entry per sample, in the same order"
                raise DataError(problem, code="data.collate-length")
        for name in ("prompt_ids", RAW_PROMPT):
            if rows.pop(name, None) not in (None, [sample[name] for sample in samples]):
                problem = f"data.collate_fn changed {name}; change prompts in the data set (data.custom_cls)"
                raise DataError(problem, code="data.collate-changed-prompt")
        for name in (IMAGES, *_PADDED):  # the images are those of the prompt
            rows.pop(name, None)
        kept = ("prompt_ids", RAW_PROMPT, IMAGES, "index", "data_source", "reward_model", "extra_info")
        return collate_prompts(
            [
                {**{name: sample[name] for name in kept if name in sample}, **{n: rows[n][i] for n in rows}}
                for i, sample in enumerate(samples)
            ],
            self.pad,
        )


def _plain(value: Any) -> Any:
    """Plain lists and numbers for arrays and tensors, which verl's samples hold."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value
