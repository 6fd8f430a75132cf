"""Rows of files to batches of prompts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from megarl.data.columns import COLUMNS
from megarl.data.lengths import measured
from megarl.data.prompts import (
    SYSTEM_COLUMN,
    TOOLS_COLUMN,
    PromptEncoder,
    PromptForm,
    check_truncation,
    truncate,
)
from megarl.data.protocol import DataProto
from megarl.data.row_dataset import RowDataset, Sample, pad_id
from megarl.data.rows import Rows
from megarl.data.sequences import attention_mask_of, pad_left
from megarl.data.token_counts import PromptLengths
from megarl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_OPTIONAL = ("ability", "extra_info", "agent_name")
_MADE = ("uid", "index", "raw_prompt", "num_turns", "agent_error", "weight_version")
"""Columns of a batch that no file may bring."""


class RLHFDataset(RowDataset):
    """Prompts with what their answers are scored by.

    With ``truncation="error"`` or with filtering, every prompt is measured when the data set is built, so that a row
    that is too long stops the run before it begins and not hours later.

    Args:
        files: paths or patterns (see :class:`megarl.data.rows.Rows`).
        tokenizer: Hugging Face tokenizer with a chat template.
        max_prompt_length: longest prompt, in tokens, template included.
        prompt_key: column of the chat messages.
        truncation: what happens to a longer prompt: ``error``, or cut it at its ``left``, ``right`` or ``middle``.
        filter_overlong_prompts: drop longer prompts instead, and count them.
        apply_chat_template_kwargs: extra arguments for the chat template.
        reward_fn_key: column with the name of the data source, by which rows are scored and reported.
        system_prompt: system message of the rows that have none.
        tool_schemas: of the tools that rows may name in the column ``tools``, by name.
        max_samples: rows to keep, drawn with ``sample_seed``, or with None the first; -1 = all.
        sample_seed: of that draw.
        workers: processes that measure; None = as many as are worth it.
        cache_dir: folder for what makes large files quick to open.

    Attributes:
        dropped: prompts that were filtered out.

    Raises:
        DataError: a file, column or row is malformed, a prompt is too long, or no prompt is left.
    """

    scored: ClassVar[bool] = True
    """Whether rows need what answers are scored by."""

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int,
        prompt_key: str = "prompt",
        truncation: str = "error",
        filter_overlong_prompts: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        reward_fn_key: str = "data_source",
        system_prompt: str | None = None,
        tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
        max_samples: int = -1,
        sample_seed: int | None = None,
        workers: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        check_truncation(truncation)
        self.reward_fn_key = reward_fn_key
        required = (reward_fn_key, "reward_model") if self.scored else ()
        source = Rows(files, prompt_key, required, (), _OPTIONAL, reward_fn_key, cache_dir)
        super().__init__(source, max_samples, sample_seed)
        self.form = PromptForm(prompt_key, system_prompt, tool_schemas or {})
        self.encoder = PromptEncoder(tokenizer, apply_chat_template_kwargs)
        self.max_prompt_length = max_prompt_length
        self.truncation = truncation
        self.dropped = 0
        self._carried = self._columns_to_carry()
        if filter_overlong_prompts or truncation == "error":
            self._measure(filter_overlong_prompts, workers)

    def __getitem__(self, item: int) -> Sample:
        """One row: ``prompt_ids`` (list of token ids) and the non-tensor columns; ``index`` counts dropped rows too."""
        row = int(self._rows[item])
        values, where = self.source[row], self.source.where(row)
        prompt = self.form.read(values, where)
        sample = {
            "prompt_ids": truncate(self.encoder.encode(prompt, where), self.max_prompt_length, self.truncation),
            "raw_prompt": prompt.messages,
            **{name: values[name] for name in self._carried},
            "data_source": values.get(self.reward_fn_key),
            "extra_info": values.get("extra_info") or {},
            "index": row,
        }
        return sample | ({TOOLS_COLUMN: prompt.tools} if TOOLS_COLUMN in self.source.columns else {})

    def collate(self, samples: Sequence[Sample]) -> DataProto:
        """Samples as a batch: ``prompts`` ``[b, P]`` and ``attention_mask`` ``[b, P]``, P the longest among them."""
        prompt_ids = [sample["prompt_ids"] for sample in samples]
        tensors = {"prompts": pad_left(prompt_ids, pad_id(self.encoder.tokenizer))}
        tensors["attention_mask"] = attention_mask_of(
            [len(ids) for ids in prompt_ids], [0] * len(samples), tensors["prompts"].shape[1], 0
        )
        names = [name for name in samples[0] if name != "prompt_ids"]
        return DataProto.from_dict(tensors, {name: [sample[name] for sample in samples] for name in names})

    def _columns_to_carry(self) -> list[str]:
        """Columns of the files that rows bring along: all but what the prompt is made of."""
        used = (self.form.key, SYSTEM_COLUMN, TOOLS_COLUMN)
        taken = [name for name in self.source.columns if name not in used and (name in COLUMNS or name in _MADE)]
        if taken:
            logger.warning("columns %s are left out: batches have columns of these names", ", ".join(taken))
        return [name for name in self.source.columns if name not in (*used, *taken)]

    def _measure(self, drop: bool, workers: int | None) -> None:
        all_lengths = measured(self.source, PromptLengths(self.encoder, self.form), workers)[:, 0]
        lengths = all_lengths[self._rows]
        too_long = lengths > self.max_prompt_length
        if not too_long.any():
            return
        if not drop:
            row = int(self._rows[too_long.argmax()])
            raise DataError(
                f"{self.source.where(row)}: the prompt has {all_lengths[row]} tokens, at most {self.max_prompt_length} "
                f"are allowed ({too_long.sum()} of {len(lengths)} prompts are too long, the longest has "
                f"{lengths.max()}); raise data.max_prompt_length, set data.truncation=left, right or middle, or "
                "data.filter_overlong_prompts=True"
            )
        self._rows, self.dropped = self._rows[~too_long], int(too_long.sum())
        if not len(self):
            raise DataError(
                f"all {self.dropped} prompts are longer than {self.max_prompt_length} tokens (the shortest has "
                f"{lengths.min()}), so none is left; raise data.max_prompt_length"
            )
        logger.warning(
            "dropped %d of %d prompts: longer than %d tokens", self.dropped, len(lengths), self.max_prompt_length
        )
