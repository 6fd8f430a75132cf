"""Ends of sequences in jobs: files that disagree, and the token that fine-tuning trained."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from support.expected_errors import raises
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megarl.config import GenerateConfig
from megarl.config.build import build
from megarl.data.tokenizers import load_tokenizer
from megarl.trainer.jobs.generate import run as generate
from megarl.trainer.jobs.supervised_jobs import run as fine_tune
from megarl.trainer.phases.end_tokens import policy_end_tokens

pytestmark = pytest.mark.usefixtures("forked_workers")
QUESTION = "What is 1 + 2?"


@pytest.fixture
def folder(arithmetic, tmp_path):
    return shutil.copytree(arithmetic / "model", tmp_path / "model")


def name_end(folder, token):
    """Name an end of a sequence in ``config.json``, and in no generation config."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"eos_token_id": token}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").unlink(missing_ok=True)


def test_a_disagreement_is_named_with_every_file_and_the_remedy(folder):
    tokenizer, warnings = load_tokenizer(str(folder)), list[str]()
    name_end(folder, tokenizer.eos_token_id)
    assert policy_end_tokens(str(folder), tokenizer, warnings.append) == (tokenizer.eos_token_id,) and not warnings
    name_end(folder, 7)
    assert set(policy_end_tokens(str(folder), tokenizer, warnings.append)) == {7, tokenizer.eos_token_id}
    (text,) = warnings
    for part in ("config.json: 7", f"tokenizer: {tokenizer.eos_token_id}", "generation_config.json", "eos_token_id=["):
        assert part in text


def test_an_end_beyond_the_vocabulary_is_refused(folder):
    name_end(folder, 10**6)
    with raises("tokenizer.end-token-id", folder, 1000000, 267, "config.json", "tokenizer_path"):
        policy_end_tokens(str(folder), load_tokenizer(str(folder)), print)


def test_generation_stops_at_the_token_that_the_tokenizer_alone_names(folder, tmp_path, capfd):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        first = int(AutoModelForCausalLM.from_pretrained(folder)(**prompt).logits[0, -1].argmax())
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    tokenizer.save_pretrained(folder)
    name_end(folder, tokenizer.pad_token_id)
    values: dict[str, Any] = {
        "data": {"prompts": [QUESTION], "max_prompt_length": 32, "max_response_length": 6},
        "actor_rollout_ref": {
            "model": {"path": str(folder)},
            "rollout": {"dtype": "float32", "val_kwargs": {"temperature": 0.0}},
        },
        "trainer": {"experiment_name": "x", "device": "cpu", "n_gpus_per_node": 1},
    }
    (tmp_path / "run").mkdir()
    file = generate(build(GenerateConfig, values, str(tmp_path / "run")), tmp_path / "run")
    (row,) = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    assert row["responses"] == [""]  # the end alone
    assert "different ends of a sequence" in "".join(capfd.readouterr())


def test_an_export_of_fine_tuning_names_the_token_that_was_trained(folder, sft_config, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    name_end(folder, 7)
    (tmp_path / "run").mkdir()
    config = sft_config(
        {
            "model.path": str(folder),
            "trainer.total_training_steps": 1,
            "trainer.save_freq": 1,
            "trainer.default_local_dir": str(tmp_path / "checkpoints"),
            "trainer.hf_export_dir": str(tmp_path / "hf"),
        }
    )
    fine_tune(config, tmp_path / "run")
    for path in (tmp_path / "hf", tmp_path / "checkpoints" / "global_step_1" / "sft" / "huggingface"):
        assert GenerationConfig.from_pretrained(path).eos_token_id == [tokenizer.eos_token_id, 7]
    assert policy_end_tokens(str(tmp_path / "hf"), load_tokenizer(str(folder)), pytest.fail)
