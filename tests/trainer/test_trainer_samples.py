"""Answers as people read them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megarl.data import DataProto, attention_mask_of, pad_left, pad_right
from megarl.trainer.samples import describe_samples, dump_samples, evenly
from megarl.trainer.session import load_tokenizer


def test_a_scored_batch_in_words(arithmetic: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(arithmetic / "model"))
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False),
        tokenizer("3 + 3").input_ids,
    ]
    responses = [[*tokenizer("4").input_ids, tokenizer.eos_token_id], tokenizer("6 or so").input_ids]
    lengths = [len(ids) for ids in prompts], [len(ids) for ids in responses]
    widths = max(lengths[0]), max(lengths[1])
    scores = torch.zeros(2, widths[1])
    scores[0, 1] = 1.0
    batch = DataProto.from_dict(
        {
            "prompts": pad_left(prompts, tokenizer.pad_token_id),
            "responses": pad_right(responses, tokenizer.pad_token_id),
            "attention_mask": attention_mask_of(*lengths, *widths),
            "token_level_scores": scores,
        },
        {
            "reward_model": [{"ground_truth": "4"}, {"ground_truth": "6"}],
            "reward_failed": [False, True],
            "reward_extra_parsed": [4, None],
            "data_source": ["sums", "sums"],
            "uid": ["0", "1"],
        },
    )
    samples = describe_samples(batch, tokenizer, step=7)
    assert "What is 2 + 2?" in samples[0].pop("input")
    assert samples == [
        {"output": "4", "gts": "4", "score": 1.0, "step": 7, "data_source": "sums", "response_length": 2, "parsed": 4},
        {
            "input": "3 + 3", "output": "6 or so", "gts": "6", "score": None, "step": 7,
            "data_source": "sums", "response_length": lengths[1][1], "parsed": None,
        },
    ]  # fmt: skip
    dump_samples(tmp_path / "new" / "folder", 7, samples)
    lines = (tmp_path / "new" / "folder" / "7.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == samples


def test_what_is_not_json_is_written_as_text(tmp_path: Path) -> None:
    dump_samples(tmp_path, 1, [{"output": "é\n", "gts": Path("x"), "score": 1.0}])
    assert (tmp_path / "1.jsonl").read_text(encoding="utf-8") == '{"output": "é\\n", "gts": "x", "score": 1.0}\n'


@pytest.mark.parametrize("length", [0, 1, 5, 16, 17, 33, 1000])
def test_evenly_spread(length: int) -> None:
    chosen = evenly(range(length), 16)
    assert len(chosen) == min(length, 16)
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(range(length))
    gaps = [b - a for a, b in pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_what_a_tool_wrote_is_told_by_its_characters(arithmetic: Path) -> None:
    tokenizer = load_tokenizer(str(arithmetic / "model"))
    turns = [("What? é", 1), (" 12 says", 0), (" so 3", 1), ("é.", 0)]
    ids = [(token, mask) for text, mask in turns for token in tokenizer(text).input_ids]
    responses = torch.tensor([[*(token for token, _ in ids), tokenizer.eos_token_id]] * 2)
    batch = DataProto.from_dict(
        {
            "prompts": torch.tensor([[5]] * 2),
            "responses": responses,
            "attention_mask": torch.ones(2, 1 + responses.shape[1], dtype=torch.int64),
            "generated_mask": torch.tensor([[*(mask for _, mask in ids), 1]] * 2),
            "token_level_scores": torch.zeros(2, responses.shape[1]),
        },
        {"reward_model": [{"ground_truth": "3"}] * 2, "reward_failed": [False, True], "agent_error": [None, "lost"]},
    )
    good, lost = describe_samples(batch, tokenizer, step=1)
    assert [good["output"][begin:end] for begin, end in good["masked"]] == [" 12 says", "é."]
    assert lost["agent_error"] == "lost" and "masked" not in lost
