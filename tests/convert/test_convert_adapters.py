"""Checkpoints of low-rank adapters: in peft's format, merged for transformers, and continued from."""

import json
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from engine_cases import Setup, engine, in_parts, refusal
from safetensors.torch import load_file, save_file
from support.expected_errors import raises
from tiny_models import policy_reference, rows, save_model

from megarl.base.errors import CheckpointError
from megarl.convert.command import main
from megarl.convert.open import open_source
from megarl.megatron.checkpoint.sharded import load_sharded
from megarl.models import ParallelLayout
from megarl.models.adapters import LoraOptions
from tests.megatron.test_megatron_lora import ADAM, adapted_step, check_log_probs, log_probs, peft_model, saved_name

DORA = LoraOptions(rank=2, alpha=2.0, targets=("linear_qkv", "down_proj", "lm_head"), rank_stabilized=True, kind="dora")


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory):
    """A folder with a base model, a checkpoint of its adapters, the engine's export, both conversions; log-probs."""
    folder = tmp_path_factory.mktemp("adapters")
    save_model(folder / "base", "llama", initializer_range=0.12)
    setup = Setup(ParallelLayout(tp=2, pp=2), sequence_parallel=True, optimizer=ADAM, lora=DORA)
    answers = pool.run(adapted_step, 4, folder / "base", setup, rows(1), folder)
    for kind in ("peft", "hf"):
        assert main([f"megatron-to-{kind}", str(folder / "checkpoint"), str(folder / kind)]) == 0
    return folder, answers[-1].trained


def test_merged_folder_equals_the_engines_export(trained):
    folder, outputs = trained
    merged, exported = (load_file(folder / name / "model.safetensors") for name in ("hf", "merged"))
    assert merged.keys() == exported.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    check_log_probs(folder / "hf", outputs, rows(1))


def test_peft_loads_the_folder(trained):
    """Peft's log-probs are the trained engine's, and peft's merged weights are the exported ones."""
    folder, outputs = trained
    theirs = read_by_peft(folder / "peft")
    config = theirs.peft_config["default"]
    assert (config.task_type, config.r, config.lora_alpha, config.use_rslora) == ("CAUSAL_LM", 2, 2, True)
    tensors = load_file(folder / "peft" / "adapter_model.safetensors")
    held = {saved_name(name): value for name, value in theirs.state_dict().items() if ".lora_" in name}
    assert held.keys() == tensors.keys(), "target_modules names exactly the modules with adapters"
    check_outputs(theirs, outputs)
    check_merged(theirs.merge_and_unload(), folder / "hf")


def continued_log_probs(place, folder, setup):
    with engine(place, folder / "base", setup) as built:
        built.load_adapters(folder / "peft")
        start = built.copy_weights()
        outputs = log_probs(built, setup, rows(1))
        for param in built.weights.parameters().values():
            param.data.mul_(2)
        with built.swapped_weights(start):
            reference = log_probs(built, setup, rows(1))
        changed = log_probs(built, setup, rows(1))
        return outputs, reference, changed


@pytest.mark.parametrize(
    ("rank_stabilized", "kind", "targets"),
    [
        (False, "lora", ["all-linear"]),
        (True, "lora", ["all-linear"]),
        (False, "dora", ["all-linear"]),
        (False, "lora", ["q_proj", "lm_head"]),  # peft adds a copy of the output layer's weight to the file
    ],
)
def test_folder_of_peft_is_read(
    pool,
    trained,
    tmp_path,
    rank_stabilized,
    kind,
    targets,
):
    """Adapters that peft has saved train in the engine at TP=2, and convert to peft's merged weights."""
    folder, _ = trained
    lora = LoraOptions(rank=3, alpha=4.0, rank_stabilized=rank_stabilized, kind=kind, targets=tuple(targets))
    torch.manual_seed(7)
    peft_targets = targets[0] if targets == ["all-linear"] else targets
    theirs = peft_model(folder / "base", lora, peft_targets, init_lora_weights=False)
    theirs.save_pretrained(tmp_path / "peft")
    setup = Setup(ParallelLayout(tp=2), optimizer=ADAM, lora=lora)
    outputs = pool.run(imported_log_probs, 2, folder / "base", tmp_path / "peft", setup)[0]
    check_outputs(theirs, outputs)
    assert main(["megatron-to-hf", str(tmp_path / "peft"), str(tmp_path / "merged")]) == 0
    check_merged(theirs.merge_and_unload(), tmp_path / "merged")


def imported_log_probs(place, base, adapters, setup):
    with engine(place, base, setup) as built:
        built.load_adapters(adapters)
        return log_probs(built, setup, rows(1))


def read_by_peft(folder):
    """The model of a folder in peft's format, with its base model; tensors that do not fit fail."""
    import peft
    import transformers

    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    base = transformers.AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"], dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft warns of tensors that are missing
        return peft.PeftModel.from_pretrained(base, folder).eval()


def check_outputs(model, outputs):
    with torch.no_grad():
        for part, row in zip(in_parts(outputs, rows(1)), rows(1), strict=True):
            assert (part - policy_reference(model, row)[0]).abs().max() < 1e-5


def check_merged(model, folder):
    exported, theirs = load_file(folder / "model.safetensors"), model.state_dict()
    assert exported.keys() <= theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_training_continues_from_a_folder_in_another_layout(pool, trained):
    """The reference can be the first adapter, while the adapters change."""
    folder, outputs = trained
    setup = Setup(ParallelLayout(tp=2), optimizer=ADAM, lora=DORA)
    start, reference, changed = pool.run(continued_log_probs, 2, folder, setup)[0]
    torch.testing.assert_close(start, outputs, rtol=0, atol=1e-5)
    assert torch.equal(start, reference)
    assert (changed - start).abs().max() > 1e-2


def other_weights(base, folder):
    """A copy of a model folder with one changed tensor."""
    file = shutil.copytree(base, folder) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] += 0.01
    save_file(tensors, file)
    return folder


def restored(place, base, checkpoint, setup):
    with engine(place, base, setup) as built:
        load_sharded(built, checkpoint)


@pytest.mark.parametrize(
    ("changes", "code", "values"),
    [
        ({}, "resume.other-base-model", ["weights"]),
        ({"lora": None}, "resume.other-adapters", ["lora_rank=2", "lora_rank=0"]),
        ({"lora": replace(DORA, alpha=4.0)}, "resume.other-adapters", ["lora_alpha=2.0", "4.0"]),
        ({"lora": replace(DORA, kind="lora")}, "resume.other-adapters", ["lora.type=dora", "lora"]),
    ],
)
def test_checkpoint_of_another_base_is_rejected(
    pool,
    trained,
    tmp_path,
    changes,
    code,
    values,
):
    folder, _ = trained
    base = other_weights(folder / "base", tmp_path / "other")
    setup = Setup(ParallelLayout(), optimizer=ADAM, lora=DORA)._replace(**changes)
    message = pool.run(refusal, 1, restored, base, folder / "checkpoint", setup)[0]
    assert message.endswith(f"[{code}]") and all(value in message for value in values), message


def test_base_model_elsewhere_is_identified(trained, tmp_path):
    """The same weights in another folder, in several files, are the same base model."""
    import transformers

    folder, _ = trained
    copy = tmp_path / "copy"
    transformers.AutoModelForCausalLM.from_pretrained(folder / "base").save_pretrained(copy, max_shard_size="20KB")
    assert (copy / "model.safetensors.index.json").is_file()
    assert open_source(folder / "checkpoint", copy).adapters.base == copy
    with raises("convert.other-base-model", tmp_path / "other", "weights", error=CheckpointError):
        open_source(folder / "checkpoint", other_weights(folder / "base", tmp_path / "other"))
    gone = shutil.copytree(folder / "peft", tmp_path / "peft")
    config = json.loads((gone / "adapter_config.json").read_text(encoding="utf-8"))
    (gone / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "/nowhere"}), encoding="utf-8"
    )
    with raises("convert.base-model-missing") as caught:
        open_source(gone)
    text = f"{gone}: its base model /nowhere does not exist here; pass its folder: --model FOLDER"
    assert str(caught.value) == f"{text} [convert.base-model-missing]"
