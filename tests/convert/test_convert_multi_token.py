"""Multi-token prediction layers survive training's exports and every conversion, bit for bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import _engine, add_multi_token_layer, assert_same, run, save_role, tensors_of

from megarl.megatron import shutdown_runtime
from megarl.megatron.checkpoint.role_state import HF_MODEL, RESUMABLE
from megarl.megatron.checkpoint.sharded import begin_save
from megarl.models import ParallelLayout, read_model_config
from megarl.models.carried_tensors import is_multi_token

Model = Callable[[str], Path]
LAYERS = {
    "deepseek_v3": ("model.layers.2.", {"num_nextn_predict_layers": 1}),
    "glm4_moe": ("model.layers.2.", {"num_nextn_predict_layers": 1}),
    "qwen3_next": ("mtp.layers.0.", {}),
    "qwen3_5_moe": ("mtp.layers.0.", {"mtp_num_hidden_layers": 1}),
}


@pytest.fixture(params=LAYERS)
def source(request, model, tmp_path):
    """Folder of a model with a multi-token prediction layer."""
    prefix, fields = LAYERS[request.param]
    folder = shutil.copytree(model(request.param), tmp_path / "initial")
    add_multi_token_layer(folder, prefix, **fields)
    return folder


def field_of(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("num_nextn_predict_layers", config.get("mtp_num_hidden_layers"))


def assert_carried(source, exported):
    """Assert that all tensors are there with their bits and dtypes, and that the real transformers loads them."""
    assert_same(source, exported)
    index = exported / "model.safetensors.index.json"
    if index.is_file():
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        assert placed.keys() == tensors_of(source).keys()
        assert all((exported / file).is_file() for file in placed.values())
    assert field_of(exported) == field_of(source)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        logits = [transformers.AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (source, exported)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)  # kernels depend on the alignment in the file


def export_and_save(place, model, folder, layout):
    """Export a model from a real engine, and save a checkpoint with its Hugging Face export, as training does."""
    engine = _engine(place, model, layout, value_head=False)
    try:
        engine.load_hf(model)
        engine.export_hf(Path(folder) / "trained", source=model)
        begin_save(engine, Path(folder) / "actor", (*RESUMABLE, HF_MODEL), copy_from=model).finish()
    finally:
        shutdown_runtime()


def test_exports_of_a_run_carry_the_layers(source, pool, tmp_path):
    pool.run(export_and_save, 2, str(source), str(tmp_path), ParallelLayout(pp=2))
    assert_carried(source, tmp_path / "trained")
    assert_carried(source, tmp_path / "actor" / "huggingface")


def test_conversions_carry_the_layers(source, tmp_path):
    run("hf-to-megatron", source, tmp_path / "role")
    run("megatron-to-hf", tmp_path / "role", tmp_path / "back", "--max-shard-size", "40KB")
    assert_carried(source, tmp_path / "back")


@pytest.mark.parametrize("name", ["deepseek_v3"])
def test_a_checkpoint_finds_the_layers_in_the_initial_folder_or_says_so(
    name,
    model,
    pool,
    tmp_path,
    capsys,
    caplog,
):
    source = shutil.copytree(model(name), tmp_path / "initial")
    extra = add_multi_token_layer(source, LAYERS[name][0], **LAYERS[name][1])
    pool.run(save_role, 1, str(source), str(tmp_path / "actor"), ParallelLayout(), False)
    run("megatron-to-hf", tmp_path / "actor", tmp_path / "out", "--max-shard-size", "40KB")
    assert_carried(source, tmp_path / "out")
    assert f"4 tensors of {source}" in capsys.readouterr().err
    run("inspect", tmp_path / "actor")
    assert f"4 tensors of {source}" in capsys.readouterr().out

    moved = source.rename(tmp_path / "moved")
    run("megatron-to-hf", tmp_path / "actor", tmp_path / "without")
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "megarl.models.carried_tensors"]
    assert f"{source} (--model FOLDER names another) has no weights of the multi-token" in warning
    assert "num_nextn_predict_layers=1" in warning
    assert field_of(tmp_path / "without") == 0
    assert tensors_of(tmp_path / "without").keys() == tensors_of(moved).keys() - extra.keys()
    run("megatron-to-hf", tmp_path / "actor", tmp_path / "found", "--model", moved, "--max-shard-size", "40KB")
    assert_carried(moved, tmp_path / "found")


def test_another_dtype_leaves_the_layers_unchanged(source, tmp_path):
    run("hf-to-megatron", source, tmp_path / "role")
    run("megatron-to-hf", tmp_path / "role", tmp_path / "half", "--dtype", "bfloat16")
    before, after = tensors_of(source), tensors_of(tmp_path / "half")
    assert after["model.norm.weight"].dtype == torch.bfloat16
    config = read_model_config(source)
    extra = [name for name in before if is_multi_token(config, name)]
    assert len(extra) == 4
    assert all(after[name].dtype == before[name].dtype and torch.equal(after[name], before[name]) for name in extra)
