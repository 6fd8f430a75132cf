"""A vision tower survives training's exports and every conversion, bit for bit, in each family with images."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import _engine, assert_same, run, save_role
from safetensors.torch import save_file
from support.expected_errors import raises
from support.vision_families import FAMILIES, save_family, tensors_of, with_module_names
from support.vision_models import IMAGE, png
from torch_dist_cases import save_engine_torch_dist

from megarl.base.image_files import ImageProcessor
from megarl.convert.open import open_source
from megarl.megatron import MegatronEngine, MegatronOptions, init_runtime, shutdown_runtime
from megarl.megatron.checkpoint.sharded import begin_save
from megarl.models import ParallelLayout, read_model_config
from megarl.models.adapters import LoraOptions
from megarl.models.hf_folder import identify_model
from megarl.models.tower_class import TOWER
from megarl.trainer.jobs.frozen_policy import find_model


@pytest.fixture(params=FAMILIES)
def saved(request, tmp_path):
    """Folder of a model, and the model."""
    return tmp_path / "initial", save_family(tmp_path / "initial", request.param)


def logits(model, folder):
    """Logits of a prompt with a picture."""
    processor = ImageProcessor(str(folder))
    image = processor.read(png(56, 84), "test")
    ids = torch.tensor([[3, 122, *[IMAGE] * image.rows * image.columns, 123, 5, 7]])
    grid = torch.tensor([[1, 2 * image.rows, 2 * image.columns]])
    values = torch.from_numpy(processor.patches(image))
    kinds = (ids == IMAGE).long()
    with torch.no_grad():
        return model(input_ids=ids, pixel_values=values, image_grid_thw=grid, mm_token_type_ids=kinds).logits


def assert_loads(folder, model):
    """Assert that transformers finds exactly the model's tensors, with its bits, and computes the same."""
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    torch.testing.assert_close(logits(loaded, folder), logits(model, folder), rtol=0, atol=1e-6)
    assert (folder / "preprocessor_config.json").is_file()


def test_conversions_carry_the_tower(saved, tmp_path):
    folder, model = saved
    run("hf-to-megatron", folder, tmp_path / "role")
    run("megatron-to-hf", tmp_path / "role", tmp_path / "back", "--max-shard-size", "40KB")
    assert_same(folder, tmp_path / "back")
    assert_loads(tmp_path / "back", model)
    sections = [json.loads((path / "config.json").read_text(encoding="utf-8")) for path in (folder, tmp_path / "back")]
    for section in ("text_config", "vision_config"):
        assert sections[0][section] == sections[1][section]


@pytest.mark.parametrize("saved", ["qwen3_5"], indirect=True)
def test_verify_compares_towers(saved, tmp_path):
    folder, _ = saved
    run("hf-to-megatron", folder, tmp_path / "role")
    run("verify", folder, tmp_path / "role")
    tensors, other = tensors_of(folder), shutil.copytree(folder, tmp_path / "other")
    name = "model.visual.merger.norm.bias"
    save_file({**tensors, name: tensors[name] + 1}, other / "model.safetensors")
    run("verify", other, tmp_path / "role", expect=1)


def test_names_of_modules_are_the_same_model(saved, tmp_path):
    """Published folders of Qwen3.5 have these names and matrices, with the experts of a layer stacked."""
    folder, model = saved
    identity = identify_model(folder)
    shutil.copytree(folder, tmp_path / "modules")
    with_module_names(tmp_path / "modules", model)
    assert any(name.startswith("model.language_model.") for name in tensors_of(tmp_path / "modules"))
    if model.config.model_type != "qwen3_vl_moe":  # published with the dimensions of experts reversed
        assert identify_model(tmp_path / "modules").weights == identity.weights
    run("hf-to-megatron", tmp_path / "modules", tmp_path / "role")
    run("megatron-to-hf", tmp_path / "role", tmp_path / "back")
    assert_same(folder, tmp_path / "back")


def test_another_dtype_leaves_the_tower_unchanged(saved, tmp_path):
    folder, _ = saved
    run("hf-to-megatron", folder, tmp_path / "role")
    run("megatron-to-hf", tmp_path / "role", tmp_path / "half", "--dtype", "bfloat16")
    before, after = tensors_of(folder), tensors_of(tmp_path / "half")
    for name, tensor in after.items():
        assert tensor.dtype == (torch.float32 if "visual." in name else torch.bfloat16)
        assert "visual." not in name or torch.equal(tensor, before[name])


def export_and_save(place, model, folder, layout, value_head, trained_tower=False):
    """Export a model from a real engine, and save a checkpoint, as training does; a trained tower has changed."""
    engine = _engine(place, model, layout, value_head, trained_tower=trained_tower)
    try:
        engine.load_hf(model)
        with torch.no_grad():
            for name, parameter in engine.weights.parameters().items():
                if name.startswith(TOWER):
                    parameter.add_(0.5)
        engine.export_hf(Path(folder) / "trained", source=model)
        begin_save(engine, Path(folder) / "actor", copy_from=model).finish()
    finally:
        shutdown_runtime()


@pytest.mark.parametrize("saved", ["qwen2_5_vl", "qwen3_5_moe", "qwen3_vl_moe"], indirect=True)
def test_an_export_of_a_run_carries_the_tower(saved, pool, tmp_path):
    folder, model = saved
    pool.run(export_and_save, 2, str(folder), str(tmp_path), ParallelLayout(pp=2), False)
    assert_same(folder, tmp_path / "trained")
    assert_loads(tmp_path / "trained", model)


@pytest.mark.parametrize("saved", ["qwen2_5_vl", "qwen3_5"], indirect=True)
def test_a_critic_keeps_the_tower(saved, pool, tmp_path):
    folder, _ = saved
    pool.run(export_and_save, 2, str(folder), str(tmp_path), ParallelLayout(tp=2), True)
    run("megatron-to-hf", tmp_path / "actor", tmp_path / "converted")
    before = tensors_of(folder)
    for exported in (tmp_path / "trained", tmp_path / "converted"):
        after = tensors_of(exported)
        assert after.keys() == before.keys() - {"lm_head.weight"} | {"score.weight", "score.bias"}
        assert all(torch.equal(after[name], before[name]) for name in after.keys() & before.keys())
        config = read_model_config(exported)
        assert config.is_value_model and config.vision is not None and config.vision.image_token == IMAGE
        if hasattr(transformers, config.architecture):  # none for Qwen2.5-VL
            kind = getattr(transformers, config.architecture)
            _, info = kind.from_pretrained(exported, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"], info


def assert_changed(folder, tower):
    """Assert that a folder has the tensors of another one, and each tensor of its tower changed."""
    before, after = tensors_of(folder), tensors_of(tower)
    for name in before.keys() & after.keys():
        difference = after[name] - before[name]
        assert torch.equal(difference, before[name] + 0.5 - before[name] if "visual." in name else 0 * difference)


@pytest.mark.parametrize("saved", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
@pytest.mark.parametrize("value_head", [False, True])
def test_a_trained_tower_is_that_of_the_checkpoint(saved, pool, tmp_path, capsys, value_head):
    folder, model = saved
    pool.run(export_and_save, 2, str(folder), str(tmp_path), ParallelLayout(tp=2), value_head, True)
    capsys.readouterr()
    run("inspect", tmp_path / "actor")
    run("megatron-to-hf", tmp_path / "actor", tmp_path / "converted")
    printed = capsys.readouterr()
    assert "carried" not in printed.out + printed.err
    assert_same(tmp_path / "trained", tmp_path / "converted")
    assert_changed(folder, tmp_path / "converted")
    if not value_head:
        model.load_state_dict({n: t + 0.5 if ".visual." in n else t for n, t in model.state_dict().items()})
        assert_loads(tmp_path / "converted", model)
        evaluated = find_model(str(tmp_path / "actor"))
        evaluated.convert(tmp_path / "evaluated", print)
        assert_same(tmp_path / "converted", tmp_path / "evaluated")
        run("hf-to-megatron", tmp_path / "converted", tmp_path / "again")
        run("megatron-to-hf", tmp_path / "again", tmp_path / "back")
        assert_same(tmp_path / "converted", tmp_path / "back")


@pytest.mark.parametrize(
    ("saved", "start"), [("qwen2_5_vl", "visual."), ("qwen3_vl", "vision_model.")], indirect=["saved"]
)
def test_torch_dist_names_of_vision_models(saved, pool, tmp_path, start):
    """As Megatron-Bridge names them: a decoder below language_model, beside transformers' tower."""
    folder, _ = saved
    starts = {TOWER: start, "": "language_model."}
    pool.run(save_engine_torch_dist, 1, str(folder), str(tmp_path / "saved"), ParallelLayout(), starts)
    run("megatron-to-hf", tmp_path / "saved", tmp_path / "back", "--model", folder)
    assert_same(folder, tmp_path / "back")
    assert not open_source(tmp_path / "saved", folder).carried


@pytest.mark.parametrize("saved", ["qwen3_vl"], indirect=True)
def test_towers_with_layers_of_megatron_are_refused(saved, pool, tmp_path):
    folder, _ = saved
    starts = {TOWER + "blocks.": "vision_model.decoder.layers.", TOWER: "vision_model.", "": "language_model."}
    pool.run(save_engine_torch_dist, 1, str(folder), str(tmp_path / "saved"), ParallelLayout(), starts)
    with raises("convert.torch-dist-tower", "vision_model.decoder.layers."):
        open_source(tmp_path / "saved", folder)


@pytest.mark.parametrize("saved", ["qwen2_5_vl"], indirect=True)
def test_a_lost_tower_is_an_error(saved, pool, tmp_path):
    folder, model = saved
    pool.run(save_role, 1, str(folder), str(tmp_path / "actor"), ParallelLayout(), False)
    moved = folder.rename(tmp_path / "moved")
    run("megatron-to-hf", tmp_path / "actor", tmp_path / "without", expect=1)
    assert not (tmp_path / "without").exists()
    run("megatron-to-hf", tmp_path / "actor", tmp_path / "found", "--model", moved)
    assert_loads(tmp_path / "found", model)


def adapters_continued(place, model, folder, lora, target):
    """Export a model that continues from adapters in peft's format; with adapters off it is the base model."""
    runtime = init_runtime(ParallelLayout(), 0, 1, "127.0.0.1", place.port, device="cpu", timeout_s=60)
    config = read_model_config(model).with_trained_tower(bool(lora.tower_keys))
    engine = MegatronEngine(config, ParallelLayout(), runtime, MegatronOptions(lora=lora))
    try:
        engine.load_hf(model)
        base = engine.weights.to_host()
        engine.load_adapters(folder)
        engine.export_hf(target, source=model)
        with engine.adapters_off():
            assert all(
                torch.equal(param, base[name]) for name, param in engine.weights.stored().items() if name in base
            )
    finally:
        shutdown_runtime()


def adapters_saved(place, model, folder, lora):
    runtime = init_runtime(ParallelLayout(), 0, 1, "127.0.0.1", place.port, device="cpu", timeout_s=60)
    config = read_model_config(model).with_trained_tower(bool(lora.tower_keys))
    engine = MegatronEngine(config, ParallelLayout(), runtime, MegatronOptions(lora=lora))
    try:
        engine.load_hf(model)
        with torch.no_grad():
            for name, parameter in engine.weights.parameters().items():
                if name.endswith("lora_b"):
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
                elif not name.endswith("lora_a"):  # trained in full
                    parameter.add_(0.1)
        begin_save(engine, folder, copy_from=model).finish()
        engine.export_hf(Path(folder) / "merged", source=model)
    finally:
        shutdown_runtime()


@pytest.mark.parametrize(
    ("saved", "keys"),
    [
        *((family, {}) for family in FAMILIES),
        ("qwen2_5_vl", {"adapt_vision_tower": True}),
        ("qwen2_5_vl", {"freeze_vision_model": False}),
        ("qwen3_5", {"adapt_vision_tower": True, "kind": "dora"}),
        ("qwen3_vl_moe", {"adapt_vision_tower": True, "freeze_vision_projection": False}),
    ],
    indirect=["saved"],
)
def test_peft_loads_adapters(saved, pool, tmp_path, keys):
    import peft

    folder, model = saved
    has_experts = read_model_config(folder).experts is not None  # transformers has no modules of single experts
    targets = ("q_proj", "o_proj", "qkv")[: 2 + bool(keys)] if has_experts else ("all-linear",)
    lora = LoraOptions(rank=2, alpha=4.0, targets=targets, **keys)
    pool.run(adapters_saved, 1, str(folder), str(tmp_path / "actor"), lora)
    run("megatron-to-peft", tmp_path / "actor", tmp_path / "adapters")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft warns of tensors that are missing
        theirs = peft.PeftModel.from_pretrained(type(model).from_pretrained(folder), tmp_path / "adapters").eval()
    names = [name for name, _ in theirs.named_parameters() if "visual" in name]
    assert any("lora" in name for name in names) == lora.adapt_vision_tower
    assert any("modules_to_save" in name for name in names) != (
        lora.freeze_vision_model and lora.freeze_vision_projection
    )
    assert (logits(theirs, folder) - logits(model, folder)).abs().max() > 1e-2
    merged = theirs.merge_and_unload().state_dict()
    exported = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "actor" / "merged").state_dict()
    assert merged.keys() == exported.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=1e-6)
    # The same adapters from peft's own file.
    theirs = peft.PeftModel.from_pretrained(type(model).from_pretrained(folder), tmp_path / "adapters")
    theirs.save_pretrained(tmp_path / "saved")
    assert find_model(str(tmp_path / "actor")).config.vision.trained == bool(lora.tower_keys)
    pool.run(adapters_continued, 1, str(folder), str(tmp_path / "saved"), lora, tmp_path / "from_engine")
    for source in ("actor", "saved", "engine"):
        if source != "engine":
            run("megatron-to-hf", tmp_path / source, tmp_path / f"from_{source}", "--model", folder)
        ours, expected = tensors_of(tmp_path / f"from_{source}"), tensors_of(tmp_path / "actor" / "merged")
        assert ours.keys() == expected.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("saved", ["qwen2_5_vl"], indirect=True)
def test_a_tensor_under_two_names_is_refused(saved):
    folder, _ = saved
    tensors = tensors_of(folder)
    save_file({**tensors, "model.visual.merger.ln_q.weight": torch.ones(16)}, folder / "model.safetensors")
    with raises("model.tensor-twice", "model.visual.merger.ln_q.weight"):
        identify_model(folder)
