"""Configs and folders of models with images: published values, both forms of the file, the tower's tensors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.expected_errors import raises
from support.vision_families import FAMILIES, TEXTS, save_family, tensors_of, with_module_names
from support.vision_models import IMAGE

from megarl.models import ModelConfig, WeightMap, check_model_folder, parse_model_config
from megarl.models.carried_tensors import is_carried, unused_tensors, with_multi_token_layers
from megarl.models.hf_checkpoint import HFReader
from megarl.models.hf_folder import file_shapes, identify_model, name_in_file, nested_name, plain_name, stacked_parts
from megarl.models.model_config import Experts, Vision
from megarl.models.partition import Piece
from megarl.models.vision_tower import load_tower

PUBLISHED = Path(__file__).parents[1] / "ops" / "plan" / "models"
TOWER_OF_QWEN25 = "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel"


def published_qwen25(**sizes: Any) -> dict[str, Any]:
    """The flat form of Qwen2.5-VL-Instruct's ``config.json`` as published, of the given size."""
    raw: dict[str, Any] = json.loads((PUBLISHED / "Qwen2.5-VL-7B" / "config.json").read_text(encoding="utf-8"))
    return raw | sizes | {"vision_config": raw["vision_config"] | {"out_hidden_size": sizes["hidden_size"]}}


def published(name: str) -> ModelConfig:
    """A config as published."""
    return parse_model_config(json.loads((PUBLISHED / name / "config.json").read_text(encoding="utf-8")))


SIZES: dict[str, dict[str, Any]] = {
    "3B": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "72B": {
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
}


@pytest.mark.parametrize("size", SIZES)
def test_published_configs_of_qwen25(size):
    sizes = SIZES[size]
    config = parse_model_config(published_qwen25(**sizes))
    assert config.family == "qwen2_5_vl" and config.qkv_bias
    assert config.head_dim == config.rotary_dim == 128
    assert (config.num_layers, config.hidden_size) == (sizes["num_hidden_layers"], sizes["hidden_size"])
    assert (config.ffn_hidden_size, config.vocab_size) == (sizes["intermediate_size"], sizes["vocab_size"])
    assert config.tie_word_embeddings == (size == "3B")
    assert (config.rope_theta, config.rms_norm_eps, config.rope_scaling) == (1e6, 1e-6, None)
    assert config.vision == Vision(151655, 151656, TOWER_OF_QWEN25, "visual.", (16, 24, 24))
    assert config.vision.settings["out_hidden_size"] == sizes["hidden_size"]


def test_both_forms_of_a_config_are_one_model():
    flat = published_qwen25(**SIZES["7B"])
    whole = ("architectures", "model_type", "vision_config", "image_token_id", "tie_word_embeddings")
    # transformers 4.52 to 4.57 writes null in the section for fields of the whole model.
    section = {name: value for name, value in flat.items() if name not in whole} | {"image_token_id": None}
    section["rope_scaling"] = {"type": "default", "rope_type": "default", "mrope_section": [16, 24, 24]}
    nested = {name: flat[name] for name in whole} | {"text_config": section}
    assert parse_model_config(nested) == parse_model_config(flat)
    assert parse_model_config({**flat, **nested}) == parse_model_config(flat)
    assert parse_model_config(nested).settings["eos_token_id"] == 151645


def test_published_config_of_qwen3_vl():
    config = published("Qwen3-VL-8B")
    assert (config.family, config.qk_norm, config.qkv_bias, config.experts) == ("qwen3_vl", True, False, None)
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (36, 4096, 12288)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert (config.rope_theta, config.rotary_dim, config.rope_scaling) == (5e6, 128, None)
    assert (config.vocab_size, config.max_position_embeddings) == (151936, 262144)
    assert not config.tie_word_embeddings
    tower = "qwen3_vl.Qwen3VLVisionModel"
    assert config.vision == Vision(151655, 151656, tower, "visual.", (24, 20, 20), True, True, deepstack=3)


def test_published_config_of_qwen3_vl_with_experts():
    config = published("Qwen3-VL-30B-A3B")
    assert (config.family, config.num_layers, config.hidden_size) == ("qwen3_vl_moe", 48, 2048)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 4, 128)
    assert config.experts == Experts(count=128, per_token=8, ffn_hidden_size=768, layers=(True,) * 48)
    tower = "qwen3_vl_moe.Qwen3VLMoeVisionModel"
    assert config.vision == Vision(151655, 151656, tower, "visual.", (24, 20, 20), True, True, deepstack=3)
    shapes = file_shapes(WeightMap(config).hf_shapes(), stacked_parts(config))
    assert shapes["model.layers.47.mlp.experts.gate_up_proj"] == (128, 2048, 1536)
    assert shapes["model.layers.0.mlp.experts.down_proj"] == (128, 768, 2048)


def test_published_config_of_qwen35():
    layer_types = (["linear_attention"] * 3 + ["full_attention"]) * 16
    text = {
        "attention_bias": False,
        "attn_output_gate": True,
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": layer_types,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    }
    tower = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 5120}
    raw = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": tower,
    }
    config = parse_model_config(raw)
    assert (config.num_layers, config.hidden_size, config.head_dim, config.rotary_dim) == (64, 5120, 256, 64)
    assert config.linear is not None and sum(config.linear.layers) == 48
    assert config.vision == Vision(248056, 248057, "qwen3_5.Qwen3_5VisionModel", "visual.", (11, 11, 10), True, True)
    assert config.language_architecture == "Qwen3_5ForConditionalGeneration"
    without = with_multi_token_layers(raw, config, ["model.norm.weight"])
    assert without["text_config"] == text | {"mtp_num_hidden_layers": 0}
    assert with_multi_token_layers(raw, config, ["mtp.norm.weight"]) == raw


@pytest.mark.parametrize(
    ("code", "scaling"),
    [
        ("model.rotary-width", {"type": "mrope", "mrope_section": [16, 24, 23]}),
        ("model.field-value", {"type": "mrope", "mrope_section": [16, 48]}),
        ("model.field-missing", None),
        ("model.unsupported-setting", {"type": "mrope", "mrope_section": [16, 24, 24], "mrope_interleaved": True}),
    ],
)
def test_other_sections_are_refused(code, scaling):
    with raises(code, "mrope"):
        parse_model_config(published_qwen25(**SIZES["7B"]) | {"rope_scaling": scaling})


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_family(path, request.param)
    return path


def test_a_folder_of_each_family_is_complete(folder):
    checked = check_model_folder(folder)
    assert checked.config.vision.image_token == IMAGE
    assert unused_tensors(checked) == []
    tower = load_tower(checked.config, folder, torch.device("cpu"), torch.float32)
    stored = {plain_name(name): tensor for name, tensor in tensors_of(folder).items()}
    names = {name for name in stored if is_carried(checked.config, name)}
    assert names == {name for name in stored if is_carried(checked.config, name, scalar_head=True)}
    assert names == {f"visual.{name}" for name, _ in tower.named_parameters()}
    assert all(torch.equal(tensor, stored[f"visual.{name}"]) for name, tensor in tower.named_parameters())
    assert {name_in_file(checked.config, name) for name in stored} == tensors_of(folder).keys()


@pytest.mark.parametrize("gone", ["blocks.1.", "blocks.0.attn.qkv.bias", ""])
def test_a_tensor_of_the_tower_is_missed(folder, tmp_path, gone):
    copy = shutil.copytree(folder, tmp_path / "copy")
    tensors = tensors_of(folder)
    kept = {name: tensor for name, tensor in tensors.items() if not plain_name(name).startswith(f"visual.{gone}")}
    save_file(kept, copy / "model.safetensors")
    with raises("model.vision-tower", f"visual.{gone or 'blocks.0.'}", copy):
        check_model_folder(copy)


def test_the_tower_is_part_of_the_identity(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    tensors = tensors_of(folder)
    name = next(name for name in tensors if name.endswith("visual.blocks.1.attn.proj.bias"))
    save_file({**tensors, name: tensors[name] + 1}, copy / "model.safetensors")
    assert identify_model(copy).difference(identify_model(folder)) == "weights"


def test_stacked_experts_of_another_shape_are_refused(tmp_path):
    model = save_family(tmp_path, "qwen3_5_moe")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    save_file({**tensors, name: tensors[name].transpose(1, 2).contiguous()}, tmp_path / "model.safetensors")
    with raises("model.tensor-shape", plain_name(name), [4, 32, 48], [4, 48, 32]):
        check_model_folder(tmp_path)


@pytest.mark.parametrize("is_published", [True, False], ids=["published", "transformers"])
def test_experts_are_read_in_either_order_of_dimensions(tmp_path, is_published):
    model = save_family(tmp_path, "qwen3_vl_moe")
    if not is_published:
        with_module_names(tmp_path, model)
    whole = model.model.language_model.layers[1].mlp.experts
    expected = dict(zip(("gate", "up"), whole.gate_up_proj[2].chunk(2), strict=True), down=whole.down_proj[2])
    reader = HFReader(tmp_path)
    for name, matrix in expected.items():
        start, stop = (3, 5), (matrix.shape[0] - 1, matrix.shape[1])
        piece = Piece(f"model.layers.1.mlp.experts.2.{name}_proj.weight", start, stop, (0, 0))
        assert torch.equal(reader.read(piece), matrix[3:-1, 5:])


def test_square_experts_are_read_as_published_only(tmp_path, monkeypatch):
    """With as many inputs as outputs, the shape of a matrix does not tell the order of its dimensions."""
    monkeypatch.setitem(TEXTS["qwen3_vl_moe"], "moe_intermediate_size", 32)
    model = save_family(tmp_path, "qwen3_vl_moe")
    read = HFReader(tmp_path).read(Piece("model.layers.0.mlp.experts.3.down_proj.weight", (0, 0), (32, 32), (0, 0)))
    assert torch.equal(read, model.model.language_model.layers[0].mlp.experts.down_proj[3])
    with_module_names(tmp_path, model)
    with raises("model.tensor-shape", "experts.gate_up_proj", [4, 64, 32], [4, 32, 64]):
        check_model_folder(tmp_path)


def test_names_are_nested_and_back():
    pairs = {
        "model.layers.0.mlp.up_proj.weight": "model.language_model.layers.0.mlp.up_proj.weight",
        "visual.blocks.0.norm1.weight": "model.visual.blocks.0.norm1.weight",
        "lm_head.weight": "lm_head.weight",
        "mtp.fc.weight": "mtp.fc.weight",
        "score.weight": "score.weight",
    }
    for plain, nested in pairs.items():
        assert nested_name(plain) == nested
        assert plain_name(nested) == plain_name(plain) == plain
