"""Role checkpoints of megarl: engines and the converter read each other's files, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from checkpoints import SETTINGS, assert_same, load_role, run, save_role, tensors_of
from safetensors.torch import save_file
from support.valid_layouts import paired_layouts
from support.whole_tensors import whole_tensors
from tiny_models import model_config

from megarl.models import ParallelLayout

Model = Callable[[str], Path]
CORRECTION_BIAS = "e_score_correction_bias"
SAVED = ("qwen2", "qwen2_tied", "qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "token_critic", "qwen3_5_moe")


def save_cases():
    """Models, each in the next of the layouts that combine all parallel sizes."""
    for number, name in enumerate(SAVED):
        layouts = paired_layouts(model_config(**SETTINGS[name]), 4)
        for layout in layouts[number % 2 :: 3]:
            yield pytest.param(name, layout, id=f"{name} {layout.describe()}")


@pytest.mark.parametrize("name", SETTINGS)
def test_every_family_round_trips(name, model, tmp_path):
    source = model(name)
    run("hf-to-megatron", source, tmp_path / "role", "--max-shard-size", "50KB")
    assert len(list((tmp_path / "role").glob("*.distcp"))) > 1
    run("megatron-to-hf", tmp_path / "role", tmp_path / "back", "--max-shard-size", "70KB")
    assert_same(source, tmp_path / "back")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    run("verify", source, tmp_path / "role")


@pytest.mark.parametrize(("name", "layout"), save_cases())
def test_engine_checkpoints_convert_back_to_their_source(name, layout, model, pool, tmp_path):
    source, critic = model(name), "critic" in SETTINGS[name]
    role = tmp_path / "global_step_3" / ("critic" if critic else "actor")
    pool.run(save_role, layout.world_size, str(source), str(role), layout, critic)
    run("megatron-to-hf", tmp_path / "global_step_3", tmp_path / "out")
    assert_same(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "layout"), [("qwen2_tied", ParallelLayout(tp=2, pp=2)), ("qwen3_moe", ParallelLayout(dp=2, ep=2))]
)
def test_engines_load_converted_weights(name, layout, model, pool, tmp_path):
    source = model(name)
    run("hf-to-megatron", source, tmp_path / "role")
    local = pool.run(load_role, layout.world_size, str(source), str(tmp_path / "role"), layout)
    expected = tensors_of(source)
    loaded = whole_tensors(source, layout, local)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def critic(model, pool, tmp_path_factory):
    """Train-ready critic from a tied language model: its head has no bias, and its config has no head."""
    folder = tmp_path_factory.mktemp("run") / "critic"
    pool.run(save_role, 2, str(model("qwen2_tied")), str(folder), ParallelLayout(tp=2), True)
    return folder


def test_critics_convert_to_token_classification(critic, tmp_path):
    import transformers

    run("megatron-to-hf", critic, tmp_path / "out")
    loaded = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    written = tensors_of(tmp_path / "out")
    assert loaded.config.architectures == ["Qwen2ForTokenClassification"] and loaded.num_labels == 1
    assert torch.equal(loaded.score.weight, written["score.weight"]) and written["score.weight"].any()
    assert loaded.score.bias.item() == 0.0
    run("verify", critic, tmp_path / "out")


def test_a_stripped_critic_equals_its_language_model(critic, model, tmp_path):
    run("megatron-to-hf", critic, tmp_path / "out", "--value-head", "strip")
    assert_same(model("qwen2_tied"), tmp_path / "out")
    run("verify", model("qwen2_tied"), tmp_path / "out")


def test_a_stripped_model_without_output_layer_is_the_base_model(model, tmp_path):
    import transformers

    run("hf-to-megatron", model("reward_model"), tmp_path / "role")
    run("megatron-to-hf", tmp_path / "role", tmp_path / "out", "--value-head", "strip")
    loaded, report = transformers.AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(loaded).__name__ == "Qwen2Model" and not report["missing_keys"] and not report["unexpected_keys"]


@pytest.mark.parametrize(("name", "head"), [("qwen2", "lm_head.weight"), ("reward_model", "score.weight")])
@pytest.mark.parametrize("is_base_model", [True, False])
def test_a_folder_without_head_can_be_inspected_but_not_converted(name, head, is_base_model, model, tmp_path, capsys):
    folder = copytree(model(name), tmp_path / "bare")
    tensors = tensors_of(folder)
    del tensors[head]
    save_file(tensors, folder / "model.safetensors")
    if is_base_model:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2Model"]}), encoding="utf-8")
        head = "lm_head.weight"  # the head of the corresponding full model
    run("inspect", folder)
    assert f"none: {head} absent" in capsys.readouterr().out
    run("verify", folder, folder)
    run("verify", model(name), folder, expect=1)
    assert f"missing in {folder}: 1" in capsys.readouterr().out
    run("hf-to-megatron", folder, tmp_path / "role", expect=1)
    assert f"lacks {head}, which every engine needs" in capsys.readouterr().err


def test_dtype_casts_all_but_float32_weights(model, tmp_path):
    source = model("deepseek_v3")
    run("hf-to-megatron", source, tmp_path / "role", "--dtype", "bfloat16")
    run("megatron-to-hf", tmp_path / "role", tmp_path / "out")
    written = tensors_of(tmp_path / "out")
    for name, tensor in tensors_of(source).items():
        kept = name.endswith(CORRECTION_BIAS)
        assert torch.equal(written[name], tensor if kept else tensor.bfloat16()), name
    run("verify", source, tmp_path / "out", expect=1)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_correction_bias_keeps_the_dtype_of_its_checkpoint(model, pool, tmp_path, stored):
    """Through the converter, and loaded by an engine, which computes with it in float32."""
    source = copytree(model("deepseek_v3"), tmp_path / "source")
    tensors = tensors_of(source)
    biases = {name: tensor.to(stored) for name, tensor in tensors.items() if name.endswith(CORRECTION_BIAS)}
    assert len(biases) > 0 and all(bias.any() for bias in biases.values())
    save_file(tensors | biases, source / "model.safetensors")
    run("hf-to-megatron", source, tmp_path / "role")
    run("megatron-to-hf", tmp_path / "role", tmp_path / "out")
    assert_same(source, tmp_path / "out")
    layout = ParallelLayout(pp=2)
    loaded = pool.run(load_role, layout.world_size, str(source), str(tmp_path / "role"), layout)
    assert {t.dtype for rank in loaded for name, t in rank.items() if "expert_bias" in name} == {torch.float32}
    whole = whole_tensors(source, layout, loaded)
    assert all(torch.equal(whole[name], bias.float()) for name, bias in biases.items())
