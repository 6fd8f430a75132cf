"""Sample records, dumps, and values per token."""

import base64
import io
import json
import math
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as pil
from support.vision_models import png

from megarl.base.image_tokens import Image, RemoteFile, image_key
from megarl.base.redaction import remember_secrets
from megarl.data import DataProto, attention_mask_of, pad_left, pad_right
from megarl.data.tokenizers import load_tokenizer
from megarl.tracking.token_columns import TokenValues
from megarl.trainer.records.sample_records import (
    describe_samples,
    dump_samples,
    evenly_spaced,
    rows_of_groups,
    samples_with_tokens,
    stored_samples,
)

FIELDS = ("input", "output", "gts", "step", "data_source", "response_length", "advantage", "masked", "tokens")
"""Fields of a record, which a reward function may also return."""


def test_describe_samples_of_a_scored_batch(arithmetic, tmp_path):
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
            **{f"reward_extra_{name}": ["mine", math.nan] for name in FIELDS},
            "data_source": ["sums", "sums"],
            "uid": ["0", "1"],
            "finish_reason": ["stop", "length"],
        },
    )
    samples = describe_samples(batch, tokenizer, step=7)
    own = [{f"reward_extra_{name}": value for name in FIELDS} for value in ("mine", math.nan)]
    for sample, fields in zip(samples, own, strict=True):
        for name, value in fields.items():
            assert sample.pop(name) is value
    assert "What is 2 + 2?" in samples[0].pop("input")
    assert samples == [
        {
            "output": "4", "gts": "4", "score": 1.0, "step": 7,
            "data_source": "sums", "response_length": 2, "finish_reason": "stop", "parsed": 4,
        },
        {
            "input": "3 + 3", "output": "6 or so", "gts": "6", "score": None, "step": 7,
            "data_source": "sums", "response_length": lengths[1][1], "finish_reason": "length", "parsed": None,
        },
    ]  # fmt: skip
    remember_secrets({"judge": {"api_key": "6 or so"}})
    try:
        masked = describe_samples(batch, tokenizer, step=7)[1]
    finally:
        remember_secrets({})
    assert (masked["input"], masked["output"]) == ("3 + 3", "*******"), "of equal length, since spans point into it"
    dump_samples(tmp_path / "new" / "folder", 7, samples)
    lines = (tmp_path / "new" / "folder" / "7.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == samples


def test_values_that_are_not_json_are_written_as_text(tmp_path):
    dump_samples(tmp_path, 1, [{"output": "é\n", "gts": Path("x"), "score": 1.0}])
    assert (tmp_path / "1.jsonl").read_text(encoding="utf-8") == '{"output": "é\\n", "gts": "x", "score": 1.0}\n'


def test_every_line_is_strict_json(tmp_path):
    numbers = {"a": math.nan, "b": [math.inf, (-math.inf, 0.5)], "c": {"d": np.float64("nan")}, "e": np.float32("inf")}
    dump_samples(tmp_path, 1, [{"output": "é", **numbers}])

    def refuse(constant):
        raise AssertionError(constant)

    (line,) = (tmp_path / "1.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line, parse_constant=refuse) == {
        "output": "é", "a": "NaN", "b": ["Infinity", ["-Infinity", 0.5]], "c": {"d": "NaN"}, "e": "inf",
    }  # fmt: skip


@pytest.mark.parametrize("length", [0, 1, 5, 16, 17, 33, 1000])
def test_evenly_spaced(length):
    chosen = evenly_spaced(range(length), 16)
    assert len(chosen) == min(length, 16)
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(range(length))
    gaps = [b - a for a, b in pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_masked_spans_of_tool_tokens(arithmetic):
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


def test_token_values_of_a_sample(arithmetic):
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
            "response_mask": generated.bool() & (torch.arange(width) < torch.tensor(lengths[1])[:, None]),
            "generated_mask": generated,
        },
        {"reward_model": [{"ground_truth": "3"}] * 2, "reward_failed": [False, False]},
    )
    samples = samples_with_tokens(batch, tokenizer, step=3)
    for row, (sample, length) in enumerate(zip(samples, lengths[1], strict=True)):
        tokens = TokenValues.decode(sample["tokens"], len(sample["output"]))
        assert tokens is not None and len(tokens.characters) == sample["response_length"] == length
        assert set(tokens.columns) == {"advantage", "difference", "mask", "log_prob"}, "what the batch has"
        np.testing.assert_allclose(tokens.columns["log_prob"], old[row, :length], rtol=1e-3)
        difference = ((old - engine) * generated)[row, :length]
        np.testing.assert_allclose(tokens.columns["difference"], difference, rtol=1e-3, atol=1e-6)
        assert tokens.columns["advantage"].tolist() == numbers[row, :length].tolist()
        assert tokens.columns["mask"].tolist() == generated[row, :length].tolist()
        kept = [number for at, number in enumerate(numbers[row, :length].tolist()) if generated[row, at]]
        assert sample["advantage"] == pytest.approx(sum(kept) / len(kept)), "mean over the trained tokens"
    assert samples[0]["output"] == "12 é", "the end of the answer writes nothing"


def test_ambiguous_tokens_have_no_values(arithmetic, monkeypatch):
    monkeypatch.setattr("megarl.trainer.records.sample_records.characters_per_token", lambda ids, tokenizer: None)
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


@pytest.mark.parametrize(
    ("uids", "count", "expected"),
    [
        ("abab", 2, [0, 2]),
        ("abab", 4, [0, 2, 1, 3]),
        ("aabbccdd", 5, [0, 1, 4, 5]),
        ("aaaa", 3, [0, 1, 2]),
        ("abcd", 2, [0, 2]),
        ("aab", 16, [0, 1, 2]),
        ("", 16, []),
    ],
)
def test_samples_of_the_report_are_whole_groups(uids, count, expected):
    assert rows_of_groups(list(uids), count) == expected


class Meeting(RemoteFile):
    """A file whose read ends when another thread reads one, too."""

    def __init__(self, data, barrier):
        self.bytes, self.barrier = data, barrier

    def __len__(self):
        return len(self.bytes)

    def read(self):
        self.barrier.wait(60.0)
        return self.bytes


def test_thumbnails_of_several_samples_are_made_at_the_same_time():
    barrier, files = threading.Barrier(2), [png(20, 20, seed) for seed in (1, 2)]
    images = [Image(Meeting(file, barrier), 1, 1, image_key(file)) for file in files]
    samples = [{"images": [(f"{image.key:x}", image)]} for image in images]
    for sample, image in zip(stored_samples(samples, thumbnails=True), images, strict=True):
        assert sample["images"] == [f"{image.key:x}"] == list(sample["thumbnails"])


def test_samples_with_images_have_digests_and_a_thumbnail_each(arithmetic, tmp_path):
    """Three prompts: two pictures, one of them damaged; one picture, and two in later turns; none."""
    tokenizer = load_tokenizer(str(arithmetic / "model"))
    seen, damaged, later = Image.of(png(320, 200), 2, 3), Image.of(png(56, 56)[:-2000], 1, 2), Image.of(png(8, 8), 1, 1)
    text, answer = tokenizer("3 + 3").input_ids, tokenizer("6").input_ids
    turns = [*later.token_ids, *seen.token_ids, *answer]
    prompts = [[*text, *seen.token_ids, *damaged.token_ids], [*seen.token_ids, *text], text]
    lengths, responses = [len(ids) for ids in prompts], [answer, turns, answer]
    widths = max(lengths), len(turns)
    batch = DataProto.from_dict(
        {
            "prompts": pad_left(prompts, tokenizer.pad_token_id),
            "responses": pad_right(responses, tokenizer.pad_token_id),
            "attention_mask": attention_mask_of(lengths, list(map(len, responses)), *widths),
            "token_level_scores": torch.zeros(3, len(turns)),
        },
        {
            "reward_model": [{"ground_truth": "6"}] * 3,
            "reward_failed": [False] * 3,
            "reward_extra_images": [5] * 3,
            "images": [(seen, damaged), (seen, later, seen), ()],
        },
    )
    samples = describe_samples(batch, tokenizer, step=1)
    assert [sample["input"] for sample in samples] == ["3 + 3<image><image>", "<image>3 + 3", "3 + 3"]
    assert [sample["output"] for sample in samples] == ["6", "<image><image>6", "6"]
    digests = [[f"{image.key:x}" for image in images] for images in ((seen, damaged), (seen,))]
    dump_samples(tmp_path, 1, samples)
    lines = [json.loads(line) for line in (tmp_path / "1.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line.get("images") for line in lines] == [*digests, None]
    assert [line.get("later_images") for line in lines] == [None, [f"{image.key:x}" for image in (later, seen)], None]
    assert all("thumbnails" not in line and line["reward_extra_images"] == 5 for line in lines)
    first, second, third = stored_samples(samples, thumbnails=True)
    assert second.pop("thumbnails").keys() == {f"{later.key:x}"}, "an image has one thumbnail"
    assert [second, third] == lines[1:]
    (digest,) = first["thumbnails"]
    small = base64.b64decode(first["thumbnails"][digest])
    assert digest == digests[0][0] and pil.open(io.BytesIO(small)).size == (100, 160)
