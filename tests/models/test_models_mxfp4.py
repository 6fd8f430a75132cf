"""Experts in MXFP4 have transformers' values, in whole folders and in every shard; damaged folders are named."""

import json

import pytest
import torch
import transformers
from mxfp4_folders import quantize_experts
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.base.errors import ModelError
from megarl.models import ParallelLayout, WeightMap, read_model_config
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.models.number_formats import dequantize_mxfp4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model with several blocks per row."""
    path = tmp_path_factory.mktemp("mxfp4")
    config = transformers.GptOssConfig(
        vocab_size=50,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(config).save_pretrained(path)
    quantize_experts(path)
    return path


def test_all_bytes_and_scales_have_transformers_values():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    expected = convert_moe_packed_tensors(blocks[None], scales[None])[0].t()
    ours = dequantize_mxfp4(blocks, scales)
    assert ours.dtype is expected.dtype is torch.bfloat16
    assert torch.equal(ours.view(torch.int16), expected.contiguous().view(torch.int16))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_has_the_values_of_transformers(folder, ranks):
    """Two ranks have half of the columns of each matrix, with whole and divided blocks."""
    quantization = transformers.Mxfp4Config(dequantize=True)
    model = transformers.GptOssForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.bfloat16
    )
    expected = model.state_dict()
    weight_map, reader = WeightMap(read_model_config(folder)), HFReader(folder)
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        up, down = (expected[f"{experts}.{name}_proj"].transpose(1, 2) for name in ("gate_up", "down"))
        for rank in range(ranks):
            ours = dict(load_local(reader, weight_map.rollout_params(ranks, rank), torch.bfloat16))
            assert torch.equal(ours[f"{experts}.w13_weight"], up.chunk(ranks, 1)[rank])
            assert torch.equal(ours[f"{experts}.w2_weight"], down.chunk(ranks, 2)[rank])
    whole = dict(load_local(reader, weight_map.rollout_params(1, 0), torch.bfloat16))
    assert torch.equal(whole["model.layers.1.mlp.experts.w2_weight_bias"], expected[f"{experts}.down_proj_bias"])
    assert torch.equal(whole["model.layers.1.self_attn.sinks"], expected["model.layers.1.self_attn.sinks"])


def test_a_bfloat16_run_reads_what_a_float32_run_reads(folder):
    params = WeightMap(read_model_config(folder)).megatron_params(ParallelLayout(), 0)
    single, half = (dict(load_local(HFReader(folder), params, dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert all(torch.equal(single[name], half[name].float()) for name in single)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor[:3], "shape .* 4 experts"),
        (lambda tensor: tensor[..., :1, :], "MXFP4 has U8, and 16 bytes for each scale"),
        (lambda tensor: tensor.to(torch.int32), "is I32 .* MXFP4 has U8"),
    ],
    ids=["experts", "blocks", "dtype"],
)
def test_damaged_blocks_are_named(folder, tmp_path, change, message):
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_blocks"] = change(tensors[f"{name}_blocks"]).contiguous()
    if len(tensors[f"{name}_blocks"]) == 3:
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:3].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=message):
        HFReader(tmp_path)


def test_a_missing_scale_names_the_tensor_of_the_first_expert(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())))
    with pytest.raises(ModelError, match=r"lacks tensor 'model.layers.0.mlp.experts.0.down_proj.weight'"):
        HFReader(tmp_path)
