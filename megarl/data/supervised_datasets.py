"""Data sets of supervised training: prompts with responses (SFT), preference pairs, and labelled responses (KTO)."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megarl.base.errors import DataError
from megarl.data.columns import pad_right, padded_pair
from megarl.data.dataset import RowDataset, Sample, pad_id, require_eos
from megarl.data.lengths import ConversationLengths, PairLengths, measure_lengths
from megarl.data.protocol import DataProto
from megarl.data.rows.reader import Rows
from megarl.data.tokenization import (
    ConversationEncoder,
    PromptEncoder,
    PromptReader,
    ResponseEncoder,
    truncate,
)
from megarl.data.tokenizers import cut_middle, measured_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PAIR_COLUMNS = ("chosen", "rejected")
KTO_COLUMNS = ("kto_sequence", "kl_sequence")
Messages = Sequence[Mapping[str, Any]]


class SFTDataset(RowDataset):
    """Prompts with the responses to train on, in the columns of the reinforcement-learning job.

    Arguments without an explanation here are those of :class:`megarl.data.RLHFDataset`.

    A response is the tokens of its text and the end-of-sequence token. A response with text of others (tool or search
    results) is a list of pieces ``{role, content}``, concatenated without a template. Pieces of the ``assistant`` are
    trained on, other pieces are context (``response_mask`` 0). Pieces are tokenized one by one, as in a rollout.
    Truncation cuts the complete sequence at its left (the prompt's start) or its right (the response's end). It refuses
    whole conversations that are several times too long by their length.

    Args:
        max_length: longest prompt plus response, in tokens.
        response_key: column of the response's text or pieces.
        messages_key: column of whole conversations, which are read instead of prompts and responses; every assistant
            message is trained on. None = prompts and responses.
        truncation: treatment of a longer row: ``error``, ``left`` or ``right``.

    Raises:
        DataError: a file, column or row is malformed, a row is too long, or truncation leaves no prompt or response.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        prompt_key: str = "prompt",
        response_key: str = "response",
        messages_key: str | None = None,
        truncation: str = "error",
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        apply_chat_template: bool = True,
        system_prompt: str | None = None,
        max_samples: int = -1,
        sample_seed: int | None = None,
        workers: int | None = None,
        cache_dir: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if truncation == "middle":
            text = "data.truncation=middle would cut prompt and response at their boundary; set left or right"
            raise DataError(text, code="data.truncation-middle")
        require_eos(tokenizer)
        responses = () if messages_key else (response_key,)
        source = Rows(files, messages_key or prompt_key, text_columns=responses, cache_dir=cache_dir)
        reader = PromptReader(messages_key or prompt_key, system_prompt, template_texts=apply_chat_template)
        encoder = PromptEncoder(tokenizer, apply_chat_template_kwargs, vocab_size=vocab_size, max_tokens=max_length)
        super().__init__(source, reader, encoder, truncation, max_samples, sample_seed)
        self.responses = ResponseEncoder(tokenizer, response_key, vocab_size, max_length)
        self.conversations = (
            ConversationEncoder(tokenizer, self.reader, max_length, apply_chat_template_kwargs, vocab_size)
            if messages_key
            else None
        )
        self.max_length = max_length
        self.check_vocabulary()
        self._check_lengths(workers)

    def __getitem__(self, item: int) -> Sample:
        """Return a row: ``prompt_ids``, ``response_ids``, ``response_mask`` (1 = trained), and ``index``."""
        row = int(self._rows[item])
        values, location = self.source[row], self.source.location(row)
        if self.conversations is not None:
            prompt, (response, mask) = self.conversations.encode(values, location)
        else:
            prompt = self.encoder.encode(self.reader.read(values, location), location)
            ((response, mask),) = self.responses.encode([values], [location])
        sequence = prompt + response
        kept = truncate(sequence, self.max_length, self.truncation)
        cut_left = len(sequence) - len(kept) if self.truncation == "left" else 0
        boundary = len(prompt) - cut_left
        kept_mask = mask[: len(kept) - boundary]
        return {
            "prompt_ids": kept[:boundary],
            "response_ids": kept[boundary:],
            "response_mask": kept_mask,
            "index": row,
        }

    @property
    def end_token(self) -> int | None:
        """Token that ends a trained response: the tokenizer's, or the one with which the template ends a turn.

        None if the template ends the last turn of the first row without a special token.
        """
        tokenizer = self.encoder.tokenizer
        if self.conversations is None:
            return int(tokenizer.eos_token_id)
        row = int(self._rows[0])
        response = self.conversations.encode(self.source[row], self.source.location(row)).response
        added = tokenizer.added_tokens_decoder
        trained = (token for token, mask in zip(reversed(response.ids), reversed(response.mask), strict=True) if mask)
        after = itertools.dropwhile(lambda token: not tokenizer.decode([token]).strip(), trained)
        last = next(after, None)
        return last if last in added and added[last].special else None

    def collate(self, samples: Sequence[Sample]) -> DataProto:
        """Collate samples to a batch: ``prompts``, ``responses``, ``attention_mask``, and ``response_mask``."""
        prompt_ids, response_ids = ([sample[key] for sample in samples] for key in ("prompt_ids", "response_ids"))
        tensors = padded_pair(prompt_ids, response_ids, pad=pad_id(self.encoder.tokenizer))
        tensors["response_mask"] = pad_right([sample["response_mask"] for sample in samples])
        return DataProto.from_dict(tensors, {"index": [sample["index"] for sample in samples]})

    def _check_lengths(self, workers: int | None) -> None:
        """Measure every row, so that an unusable row stops the run at its start."""
        measure = (
            PairLengths(self.encoder, self.reader, self.responses)
            if self.conversations is None
            else ConversationLengths(self.conversations)
        )
        lengths = measure_lengths(self.source, self._rows, measure, workers)
        too_long = np.flatnonzero(lengths.sum(axis=1) > self.max_length)
        for row, (prompt, response) in zip(self._rows[too_long].tolist(), lengths[too_long].tolist(), strict=True):
            described = " + ".join(map(self.encoder.describe, (prompt, response)))
            problem = f"{self.source.location(row)}: prompt and response have {described} tokens"
            if self.truncation == "error":
                raise DataError(
                    f"{problem}, at most {self.max_length} together are allowed; raise data.max_length, or set "
                    "data.truncation to left or right",
                    code="data.sequence-too-long",
                )
            left_over = self.max_length - (prompt if self.truncation == "right" else response)
            if left_over < 1:
                lost = "response" if self.truncation == "right" else "prompt"
                raise DataError(
                    f"{problem}, and data.truncation={self.truncation} to {self.max_length} leaves no {lost}; "
                    "raise data.max_length",
                    code="data.truncation-leaves-nothing",
                )


class PairDataset(RowDataset):
    """Preference pairs: prompts with a better and a worse response, as complete sequences.

    Arguments without an explanation here are those of :class:`megarl.data.RLHFDataset`.

    A sequence equals a rollout's: the templated prompt up to the response, the response's tokens, and the
    end-of-sequence token. A reward model is therefore trained on the sequences that it will score.

    Args:
        max_length: longest sequence, in tokens.
        prompt_key: column of the prompt; None if the response columns contain complete conversations that end
            with the response.
        answer_keys: columns of the better and the worse response: texts, or lists of messages.
        margin_key: column of margins (numbers); None = no margins.
        truncation: treatment of a longer sequence: ``error``, ``left`` or ``right``.
        with_prompt_tokens: also return the number of prompt tokens of each sequence, for losses on the responses.

    Attributes:
        names: names of a row's sequences, one per answer column.
        label_key: column of labels; None = no labels.
        truncated: number of truncated sequences.

    Raises:
        DataError: a file, column or row is malformed, a sequence is too long, or truncation leaves no prompt or no
            response for a loss on the responses.
    """

    names: tuple[str, ...] = PAIR_COLUMNS
    label_key: str | None = None

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        prompt_key: str | None = "prompt",
        answer_keys: tuple[str, ...] = PAIR_COLUMNS,
        margin_key: str | None = None,
        truncation: str = "error",
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        apply_chat_template: bool = True,
        system_prompt: str | None = None,
        max_samples: int = -1,
        sample_seed: int | None = None,
        cache_dir: str | None = None,
        with_prompt_tokens: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        require_eos(tokenizer)
        numbers = [name for name in (margin_key, self.label_key) if name is not None]
        # for complete conversations, the better ones take the place of the prompts in the check of messages
        source = Rows(files, prompt_key or answer_keys[0], numbers, text_columns=answer_keys, cache_dir=cache_dir)
        reader = PromptReader(prompt_key or answer_keys[0], system_prompt, template_texts=apply_chat_template)
        encoder = PromptEncoder(tokenizer, apply_chat_template_kwargs, vocab_size=vocab_size, max_tokens=max_length)
        super().__init__(source, reader, encoder, truncation, max_samples, sample_seed)
        self.max_length = max_length
        self.prompt_key = prompt_key
        self.answer_keys = answer_keys
        self.margin_key = margin_key
        self.with_prompt_tokens = with_prompt_tokens
        self.truncated = self._check_rows()

    def __getitem__(self, item: int) -> Sample:
        """Return a row: ``chosen`` and ``rejected`` (token ids), ``margin`` if there are margins, and ``index``.

        With ``with_prompt_tokens`` also ``chosen_prompt_tokens`` and ``rejected_prompt_tokens``.
        """
        row = int(self._rows[item])
        values = self.source[row]
        sample: Sample = {"index": row}
        for name, (prompt, response) in self._sequences(values, row).items():
            sample[name] = truncate(prompt + response, self.max_length, self.truncation)
            if self.with_prompt_tokens:
                sample[f"{name}_prompt_tokens"] = self._prompt_tokens(len(prompt), len(response))
        if self.margin_key is not None:
            sample["margin"] = self._margin(values[self.margin_key], row)
        return sample

    def collate(self, samples: Sequence[Sample]) -> DataProto:
        """Collate rows to a batch: ``chosen``, ``rejected``, their ``attention_mask``, and optionally ``margins``."""
        chosen, rejected = ([sample[name] for sample in samples] for name in PAIR_COLUMNS)
        tensors = padded_pair(chosen, rejected, ("chosen", "rejected"), pad_id(self.encoder.tokenizer))
        if self.margin_key is not None:
            tensors["margins"] = torch.tensor([sample["margin"] for sample in samples], dtype=torch.float32)
        if self.with_prompt_tokens:
            for name in (f"{half}_prompt_tokens" for half in PAIR_COLUMNS):
                tensors[name] = torch.tensor([sample[name] for sample in samples])
        return DataProto.from_dict(tensors, {"index": [sample["index"] for sample in samples]})

    @property
    def end_token(self) -> int:
        """Token that ends a trained response."""
        return int(self.encoder.tokenizer.eos_token_id)

    def _sequences(self, values: Mapping[str, Any], row: int) -> dict[str, tuple[list[int], list[int]]]:
        """Token ids of prompt and response of both sequences, without truncation."""
        location, tokenizer = self.source.location(row), self.encoder.tokenizer
        sequences = {}
        for name, key in zip(self.names, self.answer_keys, strict=True):
            prompt, response = self._parts(values, key, location)
            response = cut_middle(tokenizer, response, measured_tokens(self.max_length))
            ids = tokenizer(response, add_special_tokens=False)["input_ids"]
            rendered = self.reader.read({**values, self.reader.key: prompt}, location)
            response_ids = [*ids, tokenizer.eos_token_id]
            self.encoder.vocabulary.check(response_ids, location)
            sequences[name] = self.encoder.encode(rendered, location), response_ids
        return sequences

    def _parts(self, values: Mapping[str, Any], key: str, location: str) -> tuple[Messages, str]:
        """Split a pair member into prompt messages and the text of the response."""
        value = values[key]
        if isinstance(value, str):
            if self.prompt_key is None:
                text = f"{location}: column {key!r} holds text, but data.conversations=true expects messages"
                raise DataError(text, code="data.not-messages")
            return values[self.prompt_key], value
        messages = list(value)
        shortest = 1 if self.prompt_key else 2
        if (
            len(messages) < shortest
            or messages[-1]["role"] != "assistant"
            or not isinstance(messages[-1]["content"], str)
        ):
            roles = [message["role"] for message in messages]
            text = f"{location}: column {key!r} must end with an assistant message after a prompt; roles {roles}"
            raise DataError(text, code="data.no-assistant-message")
        if self.prompt_key is None:
            return messages[:-1], messages[-1]["content"]
        if len(messages) > 1:
            raise DataError(
                f"{location}: column {key!r} holds {len(messages)} messages, a response is one; set "
                "data.conversations=true for complete conversations",
                code="data.several-messages",
            )
        return values[self.prompt_key], messages[0]["content"]

    def _prompt_tokens(self, prompt: int, response: int) -> int:
        cut = max(0, prompt + response - self.max_length) if self.truncation == "left" else 0
        return min(prompt - cut, self.max_length)

    def _check_length(self, name: str, prompt: int, response: int, location: str) -> None:
        described = " + ".join(map(self.encoder.describe, (prompt, response)))
        problem = f"{location}: the {name} sequence has {described} tokens (prompt + response), at most "
        if prompt + response > self.max_length and self.truncation == "error":
            raise DataError(
                f"{problem}{self.max_length} are allowed; raise data.max_length, or set data.truncation to left or "
                "right",
                code="data.sequence-too-long",
            )
        kept = self._prompt_tokens(prompt, response)
        if self.with_prompt_tokens and not 0 < kept < self.max_length:
            lost = "response" if kept > 0 else "prompt"
            raise DataError(
                f"{problem}{self.max_length} are kept, and data.truncation={self.truncation} leaves no {lost}; raise "
                "data.max_length",
                code="data.truncation-leaves-nothing",
            )

    def _margin(self, value: Any, row: int) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            location = self.source.location(row)
            raise DataError(f"{location}: {self.margin_key!r} is {value!r}, no finite number", code="data.not-number")
        return float(value)

    def _check_rows(self) -> int:
        """Build every sequence once, so that an unusable row stops the run at its start; count truncated sequences."""
        truncated = 0
        for row in self._rows.tolist():
            values = self.source[row]
            if self.margin_key is not None:
                self._margin(values[self.margin_key], row)
            for name, (prompt, response) in self._sequences(values, row).items():
                self._check_length(name, len(prompt), len(response), self.source.location(row))
                truncated += len(prompt) + len(response) > self.max_length
        if truncated:
            logger.warning(
                "%d of %d sequences are cut at their %s to %d tokens",
                truncated,
                len(self.names) * len(self._rows),
                self.truncation,
                self.max_length,
            )
        return truncated


class LabelledResponses(PairDataset):
    """Prompts with one desirable or undesirable response each, from labelled rows or from preference pairs.

    A pair gives two rows, one after the other: its better response is desirable, its worse one is not. Sequences are
    those of :class:`PairDataset`.

    Args:
        label_key: column of labels, true or 1 = desirable, false or 0 = undesirable; None = the rows are pairs.
        answer_keys: the labelled response's column, or the columns of the better and the worse response.

    Raises:
        DataError: a label is neither true nor false; see :class:`PairDataset` for the other errors.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        *,
        label_key: str | None = None,
        answer_keys: tuple[str, ...] = PAIR_COLUMNS,
        **options: Any,
    ) -> None:
        self.label_key = label_key
        self.names = PAIR_COLUMNS if label_key is None else ("response",)
        super().__init__(files, tokenizer, max_length, answer_keys=answer_keys, with_prompt_tokens=True, **options)

    def __len__(self) -> int:
        return len(self.names) * len(self._rows)

    def __getitem__(self, item: int) -> Sample:
        """Return a response: ``prompt_ids``, ``response_ids``, ``desirable``, and ``index`` of the row of the file."""
        row, member = int(self._rows[item // len(self.names)]), item % len(self.names)
        values = self.source[row]
        prompt, response = self._sequences(values, row)[self.names[member]]
        ids = truncate(prompt + response, self.max_length, self.truncation)
        boundary = self._prompt_tokens(len(prompt), len(response))
        desirable = member == 0 if self.label_key is None else self._label(values, row)
        return {"prompt_ids": ids[:boundary], "response_ids": ids[boundary:], "desirable": desirable, "index": row}

    def collate(self, samples: Sequence[Sample]) -> DataProto:
        """Collate responses to a batch: ``kto_sequence``, ``kl_sequence``, their prompt tokens, and ``desirable``.

        A ``kl_sequence`` is the prompt of its row with the response of another row, :func:`mismatch_shift` rows before.
        """
        prompts, responses = ([sample[key] for sample in samples] for key in ("prompt_ids", "response_ids"))
        shift = mismatch_shift(prompts)
        others = [responses[row - shift] for row in range(len(samples))]
        own = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        side = "left" if self.truncation == "left" else "right"
        pairs = list(zip(prompts, others, strict=True))
        mismatched = [truncate(prompt + other, self.max_length, side) for prompt, other in pairs]
        tensors = padded_pair(own, mismatched, KTO_COLUMNS, pad_id(self.encoder.tokenizer))
        tensors["kto_sequence_prompt_tokens"] = torch.tensor([*map(len, prompts)])
        tensors["kl_sequence_prompt_tokens"] = torch.tensor([self._prompt_tokens(*map(len, pair)) for pair in pairs])
        tensors["desirable"] = torch.tensor([int(sample["desirable"]) for sample in samples])
        return DataProto.from_dict(tensors, {"index": [sample["index"] for sample in samples]})

    def rows_of_files(self) -> list[int]:
        """Count the responses of each file."""
        return [len(self.names) * rows for rows in super().rows_of_files()]

    def numbers(self, path: str) -> np.ndarray:
        """Read a numeric column for all responses; see :meth:`RowDataset.numbers`."""
        return np.repeat(super().numbers(path), len(self.names))

    def _label(self, values: Mapping[str, Any], row: int) -> bool:
        assert self.label_key is not None
        value = values[self.label_key]
        if isinstance(value, bool | int | float) and value in (0, 1):
            return bool(value)
        location = self.source.location(row)
        raise DataError(
            f"{location}: column {self.label_key!r} (data.label_key) is {value!r}; a label is true or 1 for a "
            "desirable response, false or 0 for an undesirable one",
            code="data.label-value",
        )

    def _check_rows(self) -> int:
        """Check every label and sequence once; count truncated sequences."""
        if self.label_key is not None:
            for row in self._rows.tolist():
                self._label(self.source[row], row)
        return super()._check_rows()


def mismatch_shift(prompts: Sequence[Sequence[int]]) -> int:
    """Find the rotation of a batch's responses that gives every prompt the response to another prompt.

    Args:
        prompts: token ids of each row's prompt.

    Returns:
        The smallest number of rows to rotate by such that no row gets a response to its own prompt; without such a
        number, the one with the fewest such rows. 0 for a single row.
    """
    numbers: dict[tuple[int, ...], int] = {}
    ids = np.array([numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts])
    best, fewest = 0, len(ids)
    for shift in range(1, len(ids)):
        same = int((ids == np.roll(ids, shift)).sum())
        if same < fewest:
            best, fewest = shift, same
        if not same:
            break
    return best or min(1, len(ids) - 1)
