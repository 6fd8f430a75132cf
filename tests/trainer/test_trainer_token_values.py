"""Token values out of a step's batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.data import DataProto, attention_mask_of, pad_left, pad_right
from megarl.tracking.report.tokens import TokenValues
from megarl.trainer.session import load_tokenizer
from megarl.trainer.token_values import samples_with_tokens


def test_every_token_of_an_answer_has_its_values(arithmetic: Path) -> None:
    tokenizer = load_tokenizer(str(arithmetic / "model"))
    responses = [[*tokenizer("12 é").input_ids, tokenizer.eos_token_id], tokenizer("7").input_ids]
    lengths = [1, 1], [len(ids) for ids in responses]
    width = max(lengths[1])
    old, engine = torch.rand(2, width) - 1, torch.rand(2, width) - 1
    generated = torch.ones(2, width, dtype=torch.int64)
    generated[0, 1] = 0
    numbers = torch.arange(2 * width).view(2, width).float()
    batch = DataProto.from_dict(
        {
            "prompts": pad_left([[5], [6]], tokenizer.pad_token_id),
            "responses": pad_right(responses, tokenizer.pad_token_id),
            "attention_mask": attention_mask_of(*lengths, 1, width),
            "token_level_scores": torch.zeros(2, width),
            "old_log_probs": old,
            "rollout_log_probs": engine,
            "advantages": numbers,
            "response_mask": generated.bool(),
            "generated_mask": generated,
        },
        {"reward_model": [{"ground_truth": "3"}] * 2, "reward_failed": [False, False]},
    )
    samples = samples_with_tokens(batch, tokenizer, step=3)
    for row, (sample, length) in enumerate(zip(samples, lengths[1], strict=True)):
        tokens = TokenValues.decoded(sample["tokens"], len(sample["output"]))
        assert tokens is not None and len(tokens.characters) == sample["response_length"] == length
        assert set(tokens.columns) == {"advantage", "difference", "mask", "log_prob"}, "what the batch has"
        np.testing.assert_allclose(tokens.columns["log_prob"], old[row, :length], rtol=1e-3)
        difference = ((old - engine) * generated)[row, :length]
        np.testing.assert_allclose(tokens.columns["difference"], difference, rtol=1e-3, atol=1e-6)
        assert tokens.columns["advantage"].tolist() == numbers[row, :length].tolist()
        assert tokens.columns["mask"].tolist() == generated[row, :length].tolist()
    assert samples[0]["output"] == "12 é", "the end of the answer writes nothing"


def test_answers_whose_tokens_cannot_be_told_apart_have_none(arithmetic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.trainer.token_values.characters_per_token", lambda ids, tokenizer: None)
    tokenizer = load_tokenizer(str(arithmetic / "model"))
    batch = DataProto.from_dict(
        {
            "prompts": torch.tensor([[5]]),
            "responses": torch.tensor([[6]]),
            "attention_mask": torch.ones(1, 2, dtype=torch.int64),
            "token_level_scores": torch.zeros(1, 1),
        },
        {"reward_model": [{"ground_truth": "3"}], "reward_failed": [False]},
    )
    (sample,) = samples_with_tokens(batch, tokenizer, step=1)
    assert "tokens" not in sample and sample["response_length"] == 1
