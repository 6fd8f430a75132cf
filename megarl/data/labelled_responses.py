"""Data set of KTO: single responses, desirable or undesirable, with a mismatched prompt and response for the KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megarl.base.errors import DataError
from megarl.data.columns import attention_mask_of, pad_left, pad_right
from megarl.data.dataset import Sample, pad_id
from megarl.data.protocol import DataProto
from megarl.data.supervised_datasets import PAIR_COLUMNS, PairDataset
from megarl.data.tokenization import truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KTO_COLUMNS = ("kto_sequence", "kl_sequence")


class LabelledResponses(PairDataset):
    """Prompts with one desirable or undesirable response each, from labelled rows or from preference pairs.

    A pair gives two rows, one after the other: its better response is desirable, its worse one is not. Sequences are
    those of :class:`PairDataset`.

    Args:
        label_key: column of labels, true or 1 = desirable, false or 0 = undesirable; None = the rows are pairs.
        answer_keys: the column of the labelled response, or the columns of the better and the worse response.

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
        shift, pad = mismatch_shift(prompts), pad_id(self.encoder.tokenizer)
        others = [responses[row - shift] for row in range(len(samples))]
        own = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        side = "left" if self.truncation == "left" else "right"
        pairs = list(zip(prompts, others, strict=True))
        mismatched = [truncate(prompt + other, self.max_length, side) for prompt, other in pairs]
        tensors = {KTO_COLUMNS[0]: pad_left(own, pad), KTO_COLUMNS[1]: pad_right(mismatched, pad)}
        widths = (tensors[name].shape[1] for name in KTO_COLUMNS)
        tensors["attention_mask"] = attention_mask_of([*map(len, own)], [*map(len, mismatched)], *widths)
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
