"""Data sets: parquet rows to batches of prompts, and of prompts with their responses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from megarl.data.parquet import RLHF_COLUMNS, ParquetRows
from megarl.data.prompts import PromptEncoder, check_truncation, clean_messages, truncate
from megarl.data.protocol import DataProto
from megarl.data.sequences import attention_mask_of, pad_left, pad_right
from megarl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Sample = dict[str, Any]
LEARNED_ROLE = "assistant"
"""Who speaks what supervised fine-tuning learns."""


class RLHFDataset(torch.utils.data.Dataset):
    """Prompts with what their answers are scored by.

    With ``truncation="error"`` or with filtering, every prompt is measured when the data set is built, so that a row
    that is too long stops the run before it begins and not hours later.

    Args:
        files: parquet file or files (see ``megarl.data.parquet``).
        tokenizer: Hugging Face tokenizer with a chat template.
        max_prompt_length: longest prompt, in tokens, template included.
        prompt_key: column of the chat messages.
        truncation: what happens to a longer prompt: ``error``, or cut it at its ``left`` or ``right``.
        filter_overlong_prompts: drop longer prompts instead, and count them.
        apply_chat_template_kwargs: extra arguments for the chat template.

    Attributes:
        dropped: prompts that were filtered out.

    Raises:
        DataError: a file, column or row is malformed, a prompt is too long, or no prompt is left.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int,
        prompt_key: str = "prompt",
        truncation: str = "error",
        filter_overlong_prompts: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_truncation(truncation)
        self.source = ParquetRows(files, prompt_key, RLHF_COLUMNS, optional=("ability", "extra_info", "agent_name"))
        self.encoder = PromptEncoder(tokenizer, apply_chat_template_kwargs)
        self.max_prompt_length = max_prompt_length
        self.prompt_key = prompt_key
        self.truncation = truncation
        self.dropped = 0
        self._rows = np.arange(len(self.source))
        if filter_overlong_prompts or truncation == "error":
            self._measure(filter_overlong_prompts)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> Sample:
        """One row: ``prompt_ids`` (list of token ids) and the non-tensor columns; ``index`` counts dropped rows too."""
        row = int(self._rows[item])
        values = self.source[row]
        messages = clean_messages(values[self.prompt_key])
        ids = self.encoder.encode(messages, self.source.where(row))
        return {
            "prompt_ids": truncate(ids, self.max_prompt_length, self.truncation),
            "raw_prompt": messages,
            "data_source": values["data_source"],
            "ability": values["ability"],
            "reward_model": values["reward_model"],
            "extra_info": values["extra_info"] or {},
            "agent_name": values["agent_name"],
            "index": row,
        }

    def collate(self, samples: Sequence[Sample]) -> DataProto:
        """Samples as a batch: ``prompts`` ``[b, P]`` and ``attention_mask`` ``[b, P]``, P the longest among them."""
        prompt_ids = [sample["prompt_ids"] for sample in samples]
        tensors = {"prompts": pad_left(prompt_ids, _pad_id(self.encoder.tokenizer))}
        tensors["attention_mask"] = attention_mask_of(
            [len(ids) for ids in prompt_ids], [0] * len(samples), tensors["prompts"].shape[1], 0
        )
        names = [name for name in samples[0] if name != "prompt_ids"]
        return DataProto.from_dict(tensors, {name: [sample[name] for sample in samples] for name in names})

    def _measure(self, drop: bool) -> None:
        lengths = np.array(self.encoder.lengths(self.source, self.prompt_key))
        too_long = lengths > self.max_prompt_length
        if not too_long.any():
            return
        if not drop:
            row = int(too_long.argmax())
            raise DataError(
                f"{self.source.where(row)}: the prompt has {lengths[row]} tokens, at most {self.max_prompt_length} are "
                f"allowed ({too_long.sum()} of {len(lengths)} prompts are too long, the longest has {lengths.max()}); "
                "raise data.max_prompt_length, set data.truncation=left or right, or data.filter_overlong_prompts=True"
            )
        self._rows, self.dropped = np.flatnonzero(~too_long), int(too_long.sum())
        if not len(self):
            raise DataError(
                f"all {self.dropped} prompts are longer than {self.max_prompt_length} tokens (the shortest has "
                f"{lengths.min()}), so none is left; raise data.max_prompt_length"
            )
        logger.warning(
            "dropped %d of %d prompts: longer than %d tokens", self.dropped, len(lengths), self.max_prompt_length
        )


class Spoken(NamedTuple):
    """Token ids of a response, and which of them are learned."""

    ids: list[int]
    mask: list[int]


class SFTDataset(torch.utils.data.Dataset):
    """Prompts with the responses to learn, in the columns that the reinforcement-learning job has.

    A response is its text's tokens and the end-of-sequence token. Where others speak in it (a tool, a search), it is a
    list of pieces ``{role, content}``, one behind the other without a template between them: what the ``assistant``
    says is learned, the rest is context (``response_mask`` 0). Pieces are tokenized one by one, as a rollout does.
    Truncation cuts the whole sequence, at its left (the oldest part of the prompt) or its right (the end of the
    response).

    Args:
        files: parquet file or files with chat messages and the response's text.
        tokenizer: Hugging Face tokenizer with a chat template and an end-of-sequence token.
        max_length: longest prompt plus response, in tokens.
        prompt_key: column of the chat messages.
        response_key: column of the response's text or pieces.
        truncation: what happens to a longer row: ``error``, ``left`` or ``right``.
        apply_chat_template_kwargs: extra arguments for the chat template.

    Attributes:
        dropped: always 0; a row that truncation would leave without prompt or response is an error.

    Raises:
        DataError: a file, column or row is malformed, or a row is too long.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        prompt_key: str = "prompt",
        response_key: str = "response",
        truncation: str = "error",
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_truncation(truncation)
        if tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token; set eos_token")
        self.source = ParquetRows(files, prompt_key, text_columns=(response_key,))
        self.encoder = PromptEncoder(tokenizer, apply_chat_template_kwargs)
        self.max_length = max_length
        self.prompt_key = prompt_key
        self.response_key = response_key
        self.truncation = truncation
        self.dropped = 0
        self._check_rows()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, item: int) -> Sample:
        """One row: ``prompt_ids``, ``response_ids``, ``response_mask`` (1 = learned), and ``index``."""
        values, where = self.source[item], self.source.where(item)
        prompt = self.encoder.encode(values[self.prompt_key], where)
        response, mask = self._responses([values[self.response_key]], item)[0]
        sequence = prompt + response
        kept = truncate(sequence, self.max_length, self.truncation)
        cut_left = len(sequence) - len(kept) if self.truncation == "left" else 0
        boundary = len(prompt) - cut_left
        learned = mask[: len(kept) - boundary]
        return {"prompt_ids": kept[:boundary], "response_ids": kept[boundary:], "response_mask": learned, "index": item}

    def collate(self, samples: Sequence[Sample]) -> DataProto:
        """Samples as a batch: ``prompts``, ``responses``, ``attention_mask``, and ``response_mask``."""
        prompt_ids, response_ids = ([sample[key] for sample in samples] for key in ("prompt_ids", "response_ids"))
        pad = _pad_id(self.encoder.tokenizer)
        tensors = {"prompts": pad_left(prompt_ids, pad), "responses": pad_right(response_ids, pad)}
        tensors["response_mask"] = pad_right([sample["response_mask"] for sample in samples])
        tensors["attention_mask"] = attention_mask_of(
            [len(ids) for ids in prompt_ids],
            [len(ids) for ids in response_ids],
            tensors["prompts"].shape[1],
            tensors["responses"].shape[1],
        )
        return DataProto.from_dict(tensors, {"index": [sample["index"] for sample in samples]})

    def _responses(self, responses: Sequence[str | Sequence[Mapping[str, str]]], first: int = 0) -> list[Spoken]:
        """Tokens and mask of the responses of consecutive rows."""
        tokenizer = self.encoder.tokenizer
        pieces = [self._pieces(response, self.source.where(first + row)) for row, response in enumerate(responses)]
        texts = [piece["content"] for row in pieces for piece in row]
        encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
        spoken = []
        for row in pieces:
            ids, mask = [], []
            for piece in row:
                said = next(encoded)
                ids += said
                mask += [int(piece["role"] == LEARNED_ROLE)] * len(said)
            spoken.append(Spoken([*ids, tokenizer.eos_token_id], [*mask, 1]))
        return spoken

    @staticmethod
    def _pieces(response: str | Sequence[Mapping[str, str]], where: str) -> list[Mapping[str, str]]:
        if isinstance(response, str):
            return [{"role": LEARNED_ROLE, "content": response}]
        pieces = list(response)
        if any(piece["role"] is None or piece["content"] is None for piece in pieces):
            raise DataError(f"{where}: a piece of the response has no role or no content; each needs both as strings")
        if not any(piece["role"] == LEARNED_ROLE for piece in pieces):
            roles = [piece["role"] for piece in pieces]
            raise DataError(
                f"{where}: no piece of the response is the {LEARNED_ROLE}'s, which is learned; roles {roles}"
            )
        return pieces

    def _check_rows(self) -> None:
        """Measure every row, so that one that cannot be used stops the run before it begins."""
        prompts = self.encoder.lengths(self.source, self.prompt_key)
        responses = [len(spoken.ids) for spoken in self._responses(self.source.column(self.response_key))]
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            if prompt + response <= self.max_length:
                continue
            found = f"{self.source.where(row)}: prompt and response have {prompt} + {response} tokens"
            if self.truncation == "error":
                raise DataError(
                    f"{found}, at most {self.max_length} together are allowed; raise data.max_length, or set "
                    "data.truncation to left or right"
                )
            left_over = self.max_length - (prompt if self.truncation == "right" else response)
            if left_over < 1:
                lost = "response" if self.truncation == "right" else "prompt"
                raise DataError(
                    f"{found}, and data.truncation={self.truncation} to {self.max_length} leaves no {lost}; "
                    "raise data.max_length"
                )


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
