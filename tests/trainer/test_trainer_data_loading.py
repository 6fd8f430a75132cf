"""Data loading from the configuration: mixtures, curricula, user classes."""

from __future__ import annotations

import contextlib
import json
import shutil
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.expected_errors import raises

from megarl.base.errors import ModelError
from megarl.config.problems import InvalidConfigError
from megarl.data.tokenizers import load_tokenizer
from megarl.trainer.jobs.early_checks import check_rows
from megarl.trainer.jobs.preflight import check_train
from megarl.trainer.jobs.supervised_jobs import FineTuning
from megarl.trainer.phases.data_loading import prompt_loader, validation_loader

OWN = """
import json
from megarl.data import RLHFDataset

class Backwards:
    def __init__(self, data_source, data_config):
        self.rows, self.sizes = len(data_source), []
        assert data_config.train_batch_size == 8
    def __len__(self):
        return self.rows
    def __iter__(self):
        return iter(range(self.rows)[::-1])
    def update(self, batch):
        self.sizes.append(len(batch))
    def state_dict(self):
        return {"sizes": self.sizes}
    def load_state_dict(self, state):
        self.sizes = state["sizes"]

class Shouting(RLHFDataset):
    def __getitem__(self, item):
        return super().__getitem__(item) | {"ability": "SHOUTING"}
"""

VERLS = """
import pyarrow.parquet as pq
import torch

class Prompts(torch.utils.data.Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.rows = [row for file in data_files for row in pq.read_table(file).to_pylist()]
        self.rows = self.rows[:max_samples] if max_samples > 0 else self.rows
        self.key = config.get("prompt_key", "prompt")
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, item):
        row = dict(self.rows[item])
        row["raw_prompt"] = row.pop(self.key)
        return {**row, "dummy_tensor": torch.tensor([0]), "source_row": item}

class Strided(torch.utils.data.Sampler):
    def __init__(self, data_source, data_config):
        assert type(data_source).__name__ == "Prompts"
        self.rows, self.step = len(data_source), data_config.get("seed") or data_config["train_batch_size"]
    def __len__(self):
        return self.rows
    def __iter__(self):
        return iter(sorted(range(self.rows), key=lambda row: row % self.step))

def collate_fn(samples):
    return {name: [sample[name] for sample in samples] for name in samples[0] if name != "ability"}
"""


@pytest.fixture(scope="module")
def tokenizer(arithmetic):
    return load_tokenizer(str(arithmetic / "model"))


@pytest.fixture
def sets(arithmetic, tmp_path):
    """The training rows in two sets, the first of them in two files; a mixture of them, 3 to 1."""
    rows = pq.read_table(arithmetic / "data" / "train.parquet").to_pylist()
    for name, part in (("a1", rows[:20]), ("a2", rows[20:30]), ("b", rows[30:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / f"{name}.parquet")
    small = {"files": f"{tmp_path}/a*.parquet", "weight": 3}
    return {"data.train_files": [], "data.mixture": {"small": small, "large": {"files": [f"{tmp_path}/b.parquet"]}}}


def indices(batch):
    return [int(row) for row in batch.non_tensor_batch["index"]]


def test_code_in_a_model_folder_is_not_run_even_if_the_user_would_agree(arithmetic, tmp_path, monkeypatch):
    """On a terminal, transformers asks whether to run the code of a tokenizer that is no class of its own."""
    folder = tmp_path / "model"
    shutil.copytree(arithmetic / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"model_type": "unheard_of"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer |= {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "evil.py").write_text(
        f"open({str(tmp_path / 'executed')!r}, 'w')\nclass EvilTokenizer: ...\n", encoding="utf-8"
    )
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    with contextlib.suppress(ModelError):  # it may fall back on the generic class of tokenizer.json
        load_tokenizer(str(folder))
    assert not (tmp_path / "executed").exists()


def test_mixture_loader(train_config, tokenizer, sets):
    config = train_config(sets)
    check_train(config)
    source = prompt_loader(config, tokenizer)
    assert len(source) == 90 // 8
    batch = next(iter(source))
    assert sum(row < 30 for row in indices(batch)) == 6
    assert source.metrics()["data/small/share"] == 0.75
    state = json.loads(json.dumps(source.state_dict()))
    again = prompt_loader(config, tokenizer)
    again.load_state_dict(state)
    assert indices(next(iter(again))) != indices(batch)


def test_sft_mixture_loader(sft_config, arithmetic):
    file = str(arithmetic / "data" / "sft.parquet")
    mixture = {"one": {"files": file}, "other": {"files": [file, file], "weight": {1: 1, 3: 3}}}
    config = sft_config({"data.train_files": [], "data.mixture": mixture})
    job = FineTuning(config)
    job.check()
    batches = iter(job.training_loader())
    assert [sum(row < 120 for row in indices(next(batches))) for _ in range(3)] == [4, 3, 2]


@pytest.mark.parametrize(
    ("changes", "path", "code"),
    [
        ({"data.train_files": []}, "data.train_files", "data.no-train-files"),
        ({"data.mixture": {"a": {"files": "x"}}}, "data.mixture", "data.files-and-mixture"),
        ({"data.train_files": [], "data.mixture": {"a": 3}}, "data.mixture.a", "data.mixture-entry"),
        (
            {"data.train_files": [], "data.mixture": {"a": {"files": "x", "w": 1}}},
            "data.mixture.a.w",
            "data.mixture-unknown-key",
        ),
        ({"data.train_files": [], "data.mixture": {"a": {}}}, "data.mixture.a.files", "data.mixture-files"),
        (
            {"data.train_files": [], "data.mixture": {"a": {"files": "x"}}, "data.curriculum": {"column": "c"}},
            "data.curriculum.column",
            "data.curriculum-with-mixture",
        ),
        ({"data.sampler": {"class_path": "a.py"}}, "data.sampler.class_name", "data.custom-class-incomplete"),
        ({"data.custom_cls": {"name": "A"}}, "data.custom_cls.name", "data.custom-class-incomplete"),
        (
            {"data.sampler": {"class_path": "a.py", "class_name": "A"}, "data.curriculum": {"column": "c"}},
            "data.sampler.class_path",
            "data.two-orders",
        ),
    ],
)
def test_contradicting_data_keys_are_errors(train_config, changes, path, code):
    with pytest.raises(InvalidConfigError) as caught:
        train_config(changes)
    assert (path, code) in {(problem.path, problem.code) for problem in caught.value.problems}


def test_mixture_errors_come_before_any_process(train_config, sets):
    sets["data.mixture"]["small"]["weight"] = "much"
    with raises("data.mixture-weight", "data.mixture.small.weight: "):
        check_train(train_config(sets))
    sets["data.mixture"]["small"] = {"files": "nowhere.parquet"}
    with raises("data.file-missing", "data.mixture.small.files: nowhere.parquet"):
        check_rows(train_config(sets))


def test_curriculum_order(train_config, tokenizer):
    source = prompt_loader(train_config({"data.curriculum": {"column": "extra_info.index"}}), tokenizer)
    first = [row for batch in source for row in indices(batch)]
    assert first == list(range(88))
    assert [row for batch in source for row in indices(batch)] != first
    with raises("data.not-number", "data.curriculum.column=extra_info.split: ", "row "):
        prompt_loader(train_config({"data.curriculum": {"column": "extra_info.split"}}), tokenizer)


def test_user_dataset_and_sampler_classes(train_config, tokenizer, tmp_path):
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    own = {
        "data.sampler": {"class_path": f"{tmp_path}/own.py", "class_name": "Backwards"},
        "data.custom_cls": {"path": f"{tmp_path}/own.py", "name": "Shouting"},
    }
    config = train_config(own)
    check_train(config)
    source = prompt_loader(config, tokenizer)
    batch = next(iter(source))
    source.update(batch)
    assert indices(batch) == list(range(89, 81, -1)) and set(batch.non_tensor_batch["ability"]) == {"SHOUTING"}
    assert source.state_dict()["order"] == {"sampler": {"sizes": [8]}}
    for key, name in (("data.sampler", "class_name"), ("data.custom_cls", "name")):
        with raises("config.user-code-class", key, "'Nobody'"):
            check_train(train_config({**own, key: {**own[key], name: "Nobody"}}))


def test_verls_dataset_sampler_and_collate_function(train_config, tokenizer, tmp_path):
    (tmp_path / "verls.py").write_text(VERLS, encoding="utf-8")
    verls = {
        "data.custom_cls": {"path": f"{tmp_path}/verls.py", "name": "Prompts"},
        "data.sampler": {"class_path": f"{tmp_path}/verls.py", "class_name": "Strided"},
        "data.collate_fn": f"{tmp_path}/verls.py:collate_fn",
        "data.val_max_samples": 5,
        "data.seed": 4,
    }
    config = train_config(verls)
    check_train(config)
    plain = train_config({"data.shuffle": False, "data.val_max_samples": 5})
    source, own = prompt_loader(config, tokenizer), prompt_loader(plain, tokenizer)
    rows = sorted(range(90), key=lambda row: row % 4)[:8]
    batch = next(iter(source))
    assert indices(batch) == batch.non_tensor_batch["source_row"].tolist() == rows
    assert "ability" not in batch.non_tensor_batch
    reference = {row: ids for b in own for row, ids in zip(indices(b), b.non_tensor_batch["raw_prompt"], strict=True)}
    assert batch.non_tensor_batch["raw_prompt"].tolist() == [reference[row] for row in rows]
    held_out = next(iter(validation_loader(config, tokenizer)))
    assert held_out.non_tensor_batch["source_row"].tolist() == [0, 1, 2, 3, 4]
    mixed = {**verls, "data.sampler": {}, "data.curriculum": {"column": "source_row"}}
    with raises("data.custom-class-order", "data.curriculum.column", "data.custom_cls"):
        prompt_loader(train_config(mixed), tokenizer)


def test_files_of_a_custom_dataset_are_its_own(train_config, tokenizer, tmp_path):
    (tmp_path / "verls.py").write_text(VERLS, encoding="utf-8")
    keys = {"data.custom_cls": {"path": f"{tmp_path}/verls.py", "name": "Prompts"}, "data.train_files": "nowhere.bin"}
    check_train(train_config(keys))
    with raises("data.custom-class-failed", "Prompts(", "FileNotFound"):
        prompt_loader(train_config(keys), tokenizer)
    with raises("config.user-code-signature", "data.collate_fn", "Prompts"):
        check_train(train_config({**keys, "data.collate_fn": f"{tmp_path}/verls.py:Prompts"}))


def test_max_samples_limits_rows(train_config, tokenizer):
    config = train_config({"data.train_max_samples": 16, "data.val_max_samples": 3, "data.shuffle": False})
    assert [indices(batch) for batch in prompt_loader(config, tokenizer)] == [[*range(8)], [*range(8, 16)]]
    assert [len(batch) for batch in validation_loader(config, tokenizer)] == [3]


def test_the_context_of_model_and_engine_limits_prompts(train_config, tokenizer):
    longest = max(len(row) for row in prompt_rows(train_config(), tokenizer))
    room = 512 - longest  # of the 512 positions of the task's model
    changes: dict[str, Any] = {"data.max_prompt_length": 500, "data.max_response_length": room}
    assert prompt_rows(train_config(changes), tokenizer)
    with raises("data.no-response-room", f" {longest} tokens", f" {longest - 1} "):
        prompt_loader(train_config(changes | {"data.max_response_length": room + 1}), tokenizer)
    engine = {"name": "sglang", "engine_kwargs.sglang.server_args": {"max_total_tokens": longest + 5}}
    changes = {"data.max_response_length": 6, **{f"actor_rollout_ref.rollout.{key}": engine[key] for key in engine}}
    with raises("data.no-response-room", f" {longest} tokens", f" {longest - 1} "):
        prompt_loader(train_config(changes), tokenizer)


def prompt_rows(config, tokenizer):
    dataset = prompt_loader(config, tokenizer).dataset
    return [dataset[item]["prompt_ids"] for item in range(len(dataset))]  # type: ignore[arg-type]
