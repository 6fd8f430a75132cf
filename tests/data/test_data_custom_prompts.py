"""User data sets with verl's constructor, and collate functions in verl's form."""

from collections import defaultdict

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from support.expected_errors import raises

from megarl.data import RLHFDataset
from megarl.data.dataset import CustomCollate, CustomPrompts, takes_verls_arguments
from megarl.data.tokenization import PromptEncoder, PromptReader

CONFIG = OmegaConf.create({"prompt_key": "prompt", "max_prompt_length": 9})


class LikeVerl(torch.utils.data.Dataset):
    """Constructor and samples as verl's RLHFDataset has them."""

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        assert isinstance(data_files, list) and processor is None
        assert config.get("nothing", 7) == 7 and config.max_prompt_length == config["max_prompt_length"]
        self.rows = [row for file in data_files for row in pq.read_table(file).to_pylist()]
        self.rows = self.rows[:max_samples] if max_samples > 0 else self.rows
        self.prompt_key = config.get("prompt_key", "prompt")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        row = dict(self.rows[item])
        row["raw_prompt"] = row[self.prompt_key]
        row["dummy_tensor"] = torch.tensor([0], dtype=torch.uint8)
        row["index"] = row["extra_info"]["index"]
        return row | {"tools_kwargs": {}, "difficulty": np.float32(0.5)}


class OlderVersion(LikeVerl):
    """Without max_samples, and with messages in an array."""

    def __init__(self, data_files, tokenizer, config, processor=None):
        super().__init__(data_files, tokenizer, config, processor)

    def __getitem__(self, item):
        row = super().__getitem__(item)
        return row | {"raw_prompt": np.array(row["raw_prompt"]), "input_ids": torch.zeros(9), "attention_mask": 1}


def collate_as_verl(samples):
    """Stacks tensors, and puts everything else into arrays of objects."""
    columns = defaultdict(list)
    for sample in samples:
        for name, value in sample.items():
            columns[name].append(value)
    return {
        name: torch.stack(values)
        if isinstance(values[0], torch.Tensor)
        else np.fromiter(values, dtype=object, count=len(values))
        for name, values in columns.items()
    }


def built(kind, path, tokenizer, max_samples=-1, **changes):
    options = {
        "reader": PromptReader(),
        "encoder": PromptEncoder(tokenizer),
        "max_prompt_length": 9,
        "truncation": "error",
        "reward_fn_key": "data_source",
    }
    return CustomPrompts(kind, [path], tokenizer, CONFIG, max_samples, **{**options, **changes})


@pytest.mark.parametrize("kind", [LikeVerl, OlderVersion])
def test_batch_equals_that_of_the_own_data_set(write, question_rows, tokenizer, kind):
    path = write(question_rows(4))
    own, theirs = RLHFDataset(path, tokenizer, 9), built(kind, path, tokenizer)
    assert len(theirs) == 4
    a, b = own.collate([own[i] for i in (3, 1)]), theirs.collate([theirs[i] for i in (3, 1)])
    assert a.batch["prompts"].equal(b.batch["prompts"])
    assert a.batch["attention_mask"].equal(b.batch["attention_mask"])
    for name in ("raw_prompt", "data_source", "reward_model", "extra_info", "index", "ability"):
        assert a.non_tensor_batch[name].tolist() == b.non_tensor_batch[name].tolist(), name
    assert b.non_tensor_batch["difficulty"].tolist() == [0.5, 0.5]
    assert not {"dummy_tensor", "input_ids", "attention_mask", "prompt"} & set(b.non_tensor_batch)


def test_max_samples_are_passed_on(write, question_rows, tokenizer):
    path = write(question_rows(4))
    assert len(built(LikeVerl, path, tokenizer, max_samples=3)) == 3
    with raises("data.custom-class-failed", "OlderVersion", "max_samples", "TypeError"):
        built(OlderVersion, path, tokenizer, max_samples=3)


def test_a_token_that_the_model_lacks_is_named_at_the_start(write, question_rows, tokenizer):
    rows, size = question_rows(2), tokenizer.convert_tokens_to_ids("Z")
    encoder = PromptEncoder(tokenizer, vocab_size=size)
    assert len(built(LikeVerl, write(rows), tokenizer, encoder=encoder)) == 2
    rows[1]["prompt"][0]["content"] = "Z"
    with raises("tokenizer.beyond-vocabulary", "LikeVerl, row 1", f"token {size} "):
        built(LikeVerl, write(rows), tokenizer, encoder=encoder)


def test_a_prompt_that_leaves_no_room_for_a_response_is_named_at_the_start(write, question_rows, tokenizer):
    path = write(question_rows(3))
    assert len(built(LikeVerl, path, tokenizer, prompt_room=6)) == 3
    with raises("data.no-response-room", "LikeVerl, row 2", "6 tokens", "room for 5"):
        built(LikeVerl, path, tokenizer, prompt_room=5)


def test_constructors_are_told_apart():
    assert takes_verls_arguments(LikeVerl) and takes_verls_arguments(OlderVersion)
    assert not takes_verls_arguments(RLHFDataset)


def with_entries(**entries):
    class Changed(LikeVerl):
        def __getitem__(self, item):
            return {k: v for k, v in (super().__getitem__(item) | entries).items() if v != "absent"}

    return Changed


@pytest.mark.parametrize(
    ("entries", "code", "values"),
    [
        ({"raw_prompt": "absent", "prompt": "absent"}, "data.null-value", ("Changed", "'prompt'")),
        (
            {"raw_prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "data.column-type",
            ("'content'",),
        ),
        ({"reward_model": "absent"}, "data.null-value", ("'reward_model'",)),
        ({"reward_model": {"ground_truth": None}}, "data.null-value", ("'ground_truth'",)),
        ({"data_source": 3}, "data.column-type", ("'data_source'",)),
        ({"raw_prompt": "x" * 10}, "data.prompt-too-long", ("13 tokens", "at most 9", "data.truncation")),
    ],
)
def test_malformed_samples_are_named(write, question_rows, tokenizer, entries, code, values):
    with raises(code, "row 1", *values):
        built(with_entries(**entries), write(question_rows(2)), tokenizer)[1]


def test_long_prompt_is_cut_as_configured(write, question_rows, tokenizer):
    dataset = built(with_entries(raw_prompt="xyz" * 4), write(question_rows(1)), tokenizer, truncation="left")
    assert tokenizer.decode(dataset[0]["prompt_ids"]) == "yzxyzxyz"[1:] + "<|end|><|assistant|>"


def test_megabytes_of_a_prompt_are_not_tokenized(write, question_rows, tokenizer, tokenized):
    kind, path = with_entries(raw_prompt="0123456789" * 30_000), write(question_rows(1))
    options = {"encoder": PromptEncoder(tokenizer, max_tokens=9)}
    dataset = built(kind, path, tokenizer, truncation="left", **options)
    assert tokenizer.decode(dataset[0]["prompt_ids"]) == "3456789<|end|><|assistant|>"
    with raises("data.prompt-too-long", "row 0", "at least", "at most 9"):
        built(kind, path, tokenizer, **options)[0]
    assert max(tokenized) < 20_000


def test_collate_function_of_verl_changes_nothing(write, question_rows, tokenizer):
    for dataset in (
        RLHFDataset(write(question_rows(3)), tokenizer, 9),
        built(LikeVerl, write(question_rows(3)), tokenizer),
    ):
        samples = [dataset[i] for i in range(3)]
        plain, collated = dataset.collate(samples), CustomCollate(collate_as_verl, tokenizer.pad_token_id)(samples)
        assert plain.batch["prompts"].equal(collated.batch["prompts"])
        assert set(plain.non_tensor_batch) == set(collated.non_tensor_batch)
        for name in plain.non_tensor_batch:
            assert plain.non_tensor_batch[name].tolist() == collated.non_tensor_batch[name].tolist(), name


def test_collate_function_adds_and_drops_columns(write, question_rows, tokenizer):
    def collate(samples):
        return {"length": torch.tensor([len(s["prompt_ids"]) for s in samples]), "extra_info": [{"a": 1}] * 2}

    dataset = RLHFDataset(write(question_rows(2)), tokenizer, 9)
    batch = CustomCollate(collate, 0)([dataset[0], dataset[1]])
    assert batch.non_tensor_batch["length"].tolist() == [4, 5]
    assert batch.non_tensor_batch["extra_info"].tolist() == [{"a": 1}] * 2
    assert "ability" not in batch.non_tensor_batch and batch.non_tensor_batch["index"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("collate", "code", "value"),
    [
        (lambda samples: samples, "data.collate-not-mapping", "list"),
        (lambda samples: {"a": [1]}, "data.collate-length", "column 'a'"),
        (lambda samples: {"raw_prompt": [[], []]}, "data.collate-changed-prompt", "raw_prompt"),
        (lambda samples: collate_as_verl(samples[::-1]), "data.collate-changed-prompt", "prompt_ids"),
    ],
)
def test_malformed_collate_function(write, question_rows, tokenizer, collate, code, value):
    dataset = RLHFDataset(write(question_rows(2)), tokenizer, 9)
    with raises(code, "data.collate_fn", value):
        CustomCollate(collate, 0)([dataset[0], dataset[1]])
