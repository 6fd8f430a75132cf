"""Preference pairs: sequences of a row, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.base.errors import DataError
from megarl.data import PairDataset

QUESTION = [{"role": "user", "content": "a?"}]


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def rows(chosen: Any, rejected: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": QUESTION, "chosen": chosen, "rejected": rejected, **more}]


def texts(dataset: PairDataset, tokenizer: Any) -> list[str]:
    sample = dataset[0]
    return [tokenizer.decode(sample[name]) for name in ("chosen", "rejected")]


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (rows("yes", "no"), {}),
        (rows([answer("yes")], [answer("no")]), {}),
        (rows([*QUESTION, answer("yes")], [*QUESTION, answer("no")]), {"prompt_key": None}),
    ],
    ids=["texts", "messages", "conversations"],
)
def test_pair_sequence_equals_a_rollout(
    tokenizer: Any, write: Callable[..., str], made: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    dataset = PairDataset(write(made), tokenizer, 20, **options)
    ends = ("yes<|end|>", "no<|end|>")
    assert [text.replace(" ", "") for text in texts(dataset, tokenizer)] == [
        f"<|user|>a?<|end|><|assistant|>{end}" for end in ends
    ]


def test_pair_batch_has_complete_sequences_and_margins(tokenizer: Any, write: Callable[..., str]) -> None:
    made = [*rows("yes", "no", gap=0.5), *rows("y", "never", gap=2.0)]
    dataset = PairDataset(write(made), tokenizer, 20, margin_key="gap")
    batch = dataset.collate([dataset[0], dataset[1]])
    tensors = batch.tensors
    assert tensors["margins"].tolist() == [0.5, 2.0] and batch.non_tensor_batch["index"].tolist() == [0, 1]
    width = tensors["chosen"].shape[1]
    real = tensors["attention_mask"].bool()
    for row in range(2):
        assert tensors["chosen"][row][real[row, :width]].tolist() == dataset[row]["chosen"]
        assert tensors["rejected"][row][real[row, width:]].tolist() == dataset[row]["rejected"]


def test_long_pair_sequence_is_rejected_or_truncated(tokenizer: Any, write: Callable[..., str]) -> None:
    file = write(rows("yes", "never mind"))
    with pytest.raises(DataError, match=r"row 0: the rejected sequence has 16 tokens, at most 12 are allowed"):
        PairDataset(file, tokenizer, 12)
    dataset = PairDataset(file, tokenizer, 12, truncation="left")
    assert dataset.truncated == 1 and len(dataset[0]["rejected"]) == 12
    assert dataset[0]["rejected"][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (
            rows([*QUESTION, answer("yes")], "no"),
            {},
            "holds 2 messages, a response is one; set",
        ),
        (rows([answer("yes"), QUESTION[0]], "no"), {}, "must end with an assistant message"),
        (rows([answer("yes")], [answer("no")]), {"prompt_key": None}, "must end with an assistant message after"),
        (
            rows([*QUESTION, answer("yes")], "no"),
            {"prompt_key": None},
            "'rejected' holds text, but",
        ),
        (rows("yes", "no", gap=float("nan")), {"margin_key": "gap"}, "'gap' is nan, not a finite number"),
        (rows("yes", None), {}, "'rejected'"),
    ],
)
def test_malformed_pair_is_named(
    tokenizer: Any, write: Callable[..., str], made: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        PairDataset(write(made), tokenizer, 20, **options)
