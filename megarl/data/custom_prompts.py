"""User code for prompts, as verl calls it: data sets with verl's constructor, and collate functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megarl.base.errors import ConfigError, DataError
from megarl.data.columns import COLUMNS
from megarl.data.dataset import RESERVED, Sample, collate_prompts, no_room, pad_id
from megarl.data.protocol import DataProto
from megarl.data.rows.schema import RowSchema, check_row
from megarl.data.tokenization import SYSTEM_COLUMN, TOOLS_COLUMN, PromptEncoder, PromptReader, truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RAW_PROMPT = "raw_prompt"
_PADDED = ("dummy_tensor", "input_ids", "position_ids", "raw_prompt_ids", "full_prompts")
"""Entries of verl's samples for its padded batches; megarl encodes the messages itself."""


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
        if encoder.vocabulary.limit is not None or prompt_room is not None:  # the model may refuse a row
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
        required = (self.reward_fn_key, "reward_model")
        check_row(
            f"data.custom_cls: {self.name}", item, values, RowSchema(self.reader.key, required, (), self.reward_fn_key)
        )
        prompt = self.reader.read(values, location)
        ids = self.encoder.encode(prompt, location)
        if len(ids) > self.max_prompt_length and self.truncation == "error":
            raise DataError(
                f"{location}: the prompt has {self.encoder.describe(len(ids))} tokens, at most "
                f"{self.max_prompt_length} are allowed; let the class drop it, raise data.max_prompt_length, or set "
                "data.truncation=left, right or middle",
                code="data.prompt-too-long",
            )
        dropped = (self.reader.key, SYSTEM_COLUMN, TOOLS_COLUMN, *RESERVED, *_PADDED)
        entries = {name: value for name, value in sample.items() if name not in dropped and name not in COLUMNS}
        facts = {"data_source": sample[self.reward_fn_key], "extra_info": sample.get("extra_info") or {}, "index": item}
        tools = {TOOLS_COLUMN: prompt.tools} if TOOLS_COLUMN in sample else {}
        ids = truncate(ids, self.max_prompt_length, self.truncation)
        if self.prompt_room is not None and len(ids) > self.prompt_room:
            raise no_room(location, len(ids), self.prompt_room)
        return {"prompt_ids": ids, RAW_PROMPT: prompt.messages, **entries, **facts, **tools}

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
        for name in _PADDED:
            rows.pop(name, None)
        kept = ("prompt_ids", RAW_PROMPT, "index", "data_source", "reward_model", "extra_info")
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
