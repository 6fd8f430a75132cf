"""Folders of peft: every setting is supported or refused, and copies of base weights are those of the base model."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.expected_errors import raises

from megarl.base.errors import ConfigError
from megarl.convert.open import open_source
from megarl.models import ParallelLayout, WeightMap, read_model_config
from megarl.models.adapters import AdapterMap, LoraOptions
from megarl.models.hf_folder import read_header
from megarl.models.peft_folder import AdapterFolder

Folder = Callable[..., Path]
# Settings that shift weights, add parameters or change the adapters' function, with such a value.
REFUSED: dict[str, Any] = {
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "fan_in_fan_out": True,
    "bias": "all",
    "lora_bias": True,
    "loftq_config": {"loftq_bits": 4},
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "ensure_weight_tying": True,
    "target_parameters": ["experts.down_proj"],
    "trainable_token_indices": [1],
    "layer_replication": [[0, 2]],
    "alora_invocation_tokens": [1],
    "arrow_config": {"top_k": 3},
    "corda_config": {"corda_method": "ipm"},
    "lora_ga_config": {"direction": "ArB2r"},
    "velora_config": {"num_groups": 2},
    "monteclora_config": {"monteclora_n": 2},
    "kasa_config": {"beta": 1e-4},
    "peft_type": "LOHA",
    "lora_of_next_year": 1,
}
UNSUPPORTED = "adapter.unsupported-setting"


@pytest.fixture(scope="module")
def saved(real_model_folder, tmp_path_factory):
    """Saves new adapters of peft and returns their folder."""

    def save(**settings):
        import peft
        import transformers

        base = real_model_folder("qwen2")
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        folder = tmp_path_factory.mktemp("adapters")
        settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **settings}
        peft.get_peft_model(model, peft.LoraConfig(**settings)).save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def plain(saved):
    return saved(lora_dropout=0.1)


def with_settings(folder, copy, **settings):
    shutil.copytree(folder, copy)
    config = json.loads((copy / "adapter_config.json").read_text(encoding="utf-8"))
    (copy / "adapter_config.json").write_text(json.dumps(config | settings), encoding="utf-8")
    return copy


def check_for_training(folder, base, targets=("q_proj",)):
    adapters = AdapterMap(WeightMap(read_model_config(base)), LoraOptions(rank=2, alpha=4.0, targets=targets))
    adapters.check_layout(ParallelLayout())
    opened = AdapterFolder(folder)
    opened.check(adapters)
    opened.check_base(base)


def test_settings_of_the_installed_peft_are_known(plain, real_model_folder, tmp_path):
    import peft

    written = json.loads((plain / "adapter_config.json").read_text(encoding="utf-8"))
    assert len(written) > 20
    # Settings that peft does not write, and null in each that has no meaning without a value.
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)} - written.keys()
    nulls = {name: None for name in REFUSED if name in written}
    other = with_settings(plain, tmp_path / "nulls", **{**dict.fromkeys(names), **nulls, "peft_type": "LORA"})
    for folder in (plain, other):
        check_for_training(folder, real_model_folder("qwen2"))
        assert open_source(folder).adapters is not None


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_changes_the_model_is_refused(name, plain, real_model_folder, tmp_path):
    folder = with_settings(plain, tmp_path / "changed", **{name: REFUSED[name]})
    code = {"peft_type": "adapter.not-lora", "lora_of_next_year": "adapter.unknown-setting"}.get(name, UNSUPPORTED)
    with raises(code, folder, f"{name}=", error=ConfigError):
        check_for_training(folder, real_model_folder("qwen2"))
    with raises(code, folder, f"{name}="):
        open_source(folder)


@pytest.mark.parametrize("initialization", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_of_a_shifted_base_are_refused(initialization, saved, real_model_folder):
    folder = saved(init_lora_weights=initialization)
    with raises(UNSUPPORTED, folder, "init_lora_weights=", f"'{initialization}'"):
        check_for_training(folder, real_model_folder("qwen2"))
    with raises(UNSUPPORTED, folder, "init_lora_weights=", f"'{initialization}'"):
        open_source(folder)


@pytest.mark.parametrize("initialization", ["gaussian", "orthogonal", False])
def test_other_initial_values_leave_the_base_unchanged(initialization, saved, real_model_folder):
    check_for_training(saved(init_lora_weights=initialization), real_model_folder("qwen2"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_output_layer_must_be_that_of_the_base(dtype, saved, real_model_folder, tmp_path):
    """Peft saves the base weight of an adapted output layer; a model in bfloat16 is copied in float32."""
    targets = ("q_proj", "lm_head")
    folder, base = saved(target_modules=list(targets)), shutil.copytree(real_model_folder("qwen2"), tmp_path / "base")
    tensors, file = load_file(base / "model.safetensors"), folder / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, base / "model.safetensors")
    stored = "base_model.model.lm_head.base_layer.weight"
    assert stored in read_header(file)
    adapters = load_file(file)
    save_file({**adapters, stored: tensors["lm_head.weight"].to(dtype).float()}, file)
    check_for_training(folder, base, targets)
    source = open_source(folder, base)
    assert source.tensors.keys() == tensors.keys() and source.adapters is not None

    changed = tensors["lm_head.weight"].to(dtype).float()
    changed[-1, -1] += 1.0
    save_file({**adapters, stored: changed}, file)
    with raises("adapter.changed-base", folder, stored, base):
        check_for_training(folder, base, targets)
    with raises("adapter.changed-base", folder, stored, base):
        open_source(folder, base)


def test_resized_embeddings_are_refused(plain, real_model_folder, tmp_path):
    folder = shutil.copytree(plain, tmp_path / "resized")
    name, file = "base_model.model.model.embed_tokens.weight", folder / "adapter_model.safetensors"
    save_file({**load_file(file), name: torch.zeros(51, 32)}, file)
    with raises("adapter.changed-base", folder, name):
        check_for_training(folder, real_model_folder("qwen2"))
    with raises("adapter.changed-base", folder, name):
        open_source(folder)
