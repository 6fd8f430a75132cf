"""Checkpoints of low-rank adapters: in peft's format, merged for transformers, and continued from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Place, ProcessPool
from engine_cases import Setup, engine, in_parts, refusal
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_megatron_lora import ADAM, adapted_step, check_log_probs, log_probs
from tiny_models import policy_reference, rows, save_model
from torch import Tensor

from megarl.base.errors import CheckpointError
from megarl.convert.command import main
from megarl.convert.open import open_source
from megarl.megatron.checkpoint import load_sharded
from megarl.models import ParallelLayout
from megarl.models.adapters import LoraOptions

LORA = LoraOptions(rank=2, alpha=2.0, targets=("linear_qkv", "down_proj", "lm_head"), rank_stabilized=True)


@pytest.fixture(scope="module")
def trained(pool: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A folder with a base model, a checkpoint of its adapters, the engine's export, both conversions; log-probs."""
    folder = tmp_path_factory.mktemp("adapters")
    save_model(folder / "base", "llama", initializer_range=0.12)
    setup = Setup(ParallelLayout(tp=2, pp=2), sequence_parallel=True, optimizer=ADAM, lora=LORA)
    answers = pool.run(adapted_step, 4, folder / "base", setup, rows(1), folder)
    for kind in ("peft", "hf"):
        assert main([f"megatron-to-{kind}", str(folder / "checkpoint"), str(folder / kind)]) == 0
    return folder, answers[-1].trained


def test_merged_folder_equals_the_engines_export(trained: tuple[Path, Tensor]) -> None:
    folder, outputs = trained
    merged, exported = (load_file(folder / name / "model.safetensors") for name in ("hf", "merged"))
    assert merged.keys() == exported.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    check_log_probs(folder / "hf", outputs, rows(1))


def test_adapters_follow_pefts_format(trained: tuple[Path, Tensor]) -> None:
    """A plain application of peft's specification: ``W x + alpha / sqrt(r) * B A x`` for each target module."""
    import transformers

    folder, outputs = trained
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    with safe_open(folder / "peft" / "adapter_model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert (config["peft_type"], config["task_type"], config["bias"]) == ("LORA", "CAUSAL_LM", "none")
    assert (config["r"], config["lora_alpha"], config["use_rslora"], config["use_dora"]) == (2, 2, True, False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        config["base_model_name_or_path"], dtype=torch.float32
    ).eval()
    scale, read = config["lora_alpha"] / config["r"] ** 0.5, set()
    for name, module in model.named_modules():
        if any(name == target or name.endswith(f".{target}") for target in config["target_modules"]):
            a, b = (f"base_model.model.{name}.lora_{part}.weight" for part in "AB")
            assert tensors[a].shape == (2, module.in_features) and tensors[b].shape == (module.out_features, 2)
            read |= {a, b}
            module.register_forward_hook(
                lambda _, x, y, a=tensors[a], b=tensors[b]: y + scale * torch.nn.functional.linear(x[0] @ a.T, b)
            )
    assert read == tensors.keys(), "target_modules names exactly the modules with adapters"
    with torch.no_grad():
        for part, row in zip(in_parts(outputs, rows(1)), rows(1), strict=True):
            assert (part - policy_reference(model, row)[0]).abs().max() < 1e-5


def continued_log_probs(place: Place, folder: Path, setup: Setup) -> Any:
    with engine(place, folder / "base", setup) as built:
        built.load_adapters(folder / "peft")
        start = built.copy_adapters()
        outputs = log_probs(built, setup, rows(1))
        for param in built.weights.parameters().values():
            param.data.mul_(2)
        with built.swapped_adapters(start):
            reference = log_probs(built, setup, rows(1))
        changed = log_probs(built, setup, rows(1))
        return outputs, reference, changed


def test_training_continues_from_a_folder_in_another_layout(pool: ProcessPool, trained: tuple[Path, Tensor]) -> None:
    """The reference can be the first adapter, while the adapters change."""
    folder, outputs = trained
    setup = Setup(ParallelLayout(tp=2), optimizer=ADAM, lora=LORA)
    start, reference, changed = pool.run(continued_log_probs, 2, folder, setup)[0]
    torch.testing.assert_close(start, outputs, rtol=0, atol=1e-5)
    assert torch.equal(start, reference)
    assert (changed - start).abs().max() > 1e-2


def other_weights(base: Path, folder: Path) -> Path:
    """A copy of a model folder with one changed tensor."""
    file = shutil.copytree(base, folder) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] += 0.01
    save_file(tensors, file)
    return folder


def restored(place: Place, base: Path, checkpoint: Path, setup: Setup) -> None:
    with engine(place, base, setup) as built:
        load_sharded(built, checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "its weights differ"),
        ({"lora": None}, "was saved with lora_rank=2, this run has lora_rank=0"),
        ({"lora": LORA.__class__(rank=2, alpha=4.0)}, "lora_alpha=2.0, this run has 4.0"),
    ],
)
def test_checkpoint_of_another_base_is_rejected(
    pool: ProcessPool, trained: tuple[Path, Tensor], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder, _ = trained
    base = other_weights(folder / "base", tmp_path / "other")
    setup = Setup(ParallelLayout(), optimizer=ADAM, lora=LORA)._replace(**changes)
    assert message in pool.run(refusal, 1, restored, base, folder / "checkpoint", setup)[0]


def test_base_model_elsewhere_is_identified(trained: tuple[Path, Tensor], tmp_path: Path) -> None:
    """The same weights in another folder, in several files, are the same base model."""
    import transformers

    folder, _ = trained
    copy = tmp_path / "copy"
    transformers.AutoModelForCausalLM.from_pretrained(folder / "base").save_pretrained(copy, max_shard_size="20KB")
    assert (copy / "model.safetensors.index.json").is_file()
    assert open_source(folder / "checkpoint", copy).adapters.base == copy
    with pytest.raises(CheckpointError, match="its weights differ"):
        open_source(folder / "checkpoint", other_weights(folder / "base", tmp_path / "other"))
    gone = shutil.copytree(folder / "peft", tmp_path / "peft")
    config = json.loads((gone / "adapter_config.json").read_text())
    (gone / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/nowhere"}))
    with pytest.raises(CheckpointError, match="pass its folder: --model"):
        open_source(gone)
