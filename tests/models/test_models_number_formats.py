"""Blockwise FP8 against transformers' quantizer, a loop in numpy, and the error bounds of the format."""

import json
import types

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.expected_errors import raises
from support.mxfp4_folders import quantize_experts
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.models import ParallelLayout, WeightMap, read_model_config
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.models.number_formats import (
    FP8_DTYPE,
    BlockwiseFP8,
    dequantize_blocks,
    dequantize_mxfp4,
    quantize_blocks,
    scales_shape,
)

HF_QUANTIZER = types.SimpleNamespace(
    quantization_config=types.SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
)
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)
"""Values of the codes 0 to 126 by their exponent and mantissa; 127 is NaN."""


def matrix(rows, columns, dtype=torch.float32, seed=0):
    """Weights whose blocks have very different magnitudes, one of which is all zeros."""
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-12, 12, (-(-rows // 128), -(-columns // 128)), generator=generator).double()
    scales.view(-1)[scales.numel() // 2] = 0.0
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * spread).to(dtype)


def to_e4m3(values):
    """Round to the nearest value of a code, ties to the even code."""
    table, wanted = E4M3[:127], np.abs(values).astype(np.float64)
    above = np.searchsorted(table, wanted).clip(1, 126)
    below = above - 1
    to_below, to_above = wanted - table[below], table[above] - wanted
    code = np.where((to_below < to_above) | ((to_below == to_above) & (below % 2 == 0)), below, above)
    return (np.sign(values) * table[code]).astype(np.float32)


def loop(weights):
    """Codes as float32, and scales, by a loop over blocks."""
    values = weights.float().numpy()
    rows, columns = values.shape
    codes, scales = np.zeros_like(values), np.ones((-(-rows // 128), -(-columns // 128)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            largest = np.abs(values[block]).max()
            if largest > 0:
                factor = np.float32(1) / largest * np.float32(448)
                codes[block] = to_e4m3(np.clip(values[block] * factor, -448, 448))
                scales[i, j] = np.float32(1) / factor
    return codes, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (127, 300), (129, 128), (640, 130)])
def test_codes_and_scales_equal_those_of_a_loop_over_blocks(shape, dtype):
    weights = matrix(*shape, dtype)
    quantized = quantize_blocks(weights)
    codes, scales = loop(weights)
    assert quantized.codes.dtype == FP8_DTYPE and quantized.codes.shape == weights.shape
    assert np.array_equal(quantized.codes.float().numpy(), codes)
    assert np.array_equal(quantized.scales.numpy(), scales)
    assert quantized.scales.shape == scales_shape(weights.shape)
    assert quantized.finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantization_and_its_inverse_equal_those_of_transformers_bit_for_bit(dtype):
    weights = matrix(512, 768, dtype)
    theirs = Fp8Quantize(HF_QUANTIZER).convert({"a.weight": weights})
    ours = quantize_blocks(weights)
    assert torch.equal(ours.codes.view(torch.uint8), theirs["a.weight"].view(torch.uint8))
    assert torch.equal(ours.scales, theirs["a.weight_scale_inv"])
    restored = Fp8Dequantize(HF_QUANTIZER)._dequantize_one(ours.codes, ours.scales, dtype)
    dequantize_blocks(ours, weights)
    assert torch.equal(weights, restored)


def test_large_matrices_are_quantized_in_strips_with_the_same_result(monkeypatch):
    weights = matrix(700, 300)
    whole = quantize_blocks(weights)
    monkeypatch.setattr("megarl.models.number_formats._STRIP_ELEMENTS", 2 * 128 * 300)
    strips = quantize_blocks(weights)
    assert torch.equal(strips.codes.float(), whole.codes.float()) and torch.equal(strips.scales, whole.scales)
    dequantize_blocks(strips, one := torch.empty_like(weights))
    monkeypatch.undo()
    dequantize_blocks(whole, other := torch.empty_like(weights))
    assert torch.equal(one, other)


def test_the_error_of_a_weight_is_at_most_half_a_step_of_its_code():
    weights = matrix(300, 300)
    dequantize_blocks(quantize_blocks(weights), rounded := torch.empty_like(weights))
    largest = quantize_blocks(weights).scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :300]
    # three bits of mantissa, and steps of 2**-9 below 2**-6
    bound = torch.maximum(weights.abs() * 2**-4, largest * 2**-10) * (1 + 1e-6)
    assert ((rounded - weights).abs() <= bound).all()


def test_quantized_weights_are_quantized_to_themselves():
    weights = matrix(256, 256, torch.float32)
    dequantize_blocks(quantize_blocks(weights), once := torch.empty_like(weights))
    dequantize_blocks(quantize_blocks(once), twice := torch.empty_like(weights))
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0.0)


def test_values_too_small_for_a_scale_become_zero():
    weights = torch.full((128, 256), 1e-40)
    weights[0, 200] = 2.0**-99
    quantized = quantize_blocks(weights)
    assert quantized.scales[0, 0] == 1.0 and not quantized.codes[:, :128].float().any()
    assert quantized.codes[0, 200].float() == 448.0 and quantized.finite


@pytest.mark.parametrize("damage", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_reported(damage):
    weights = matrix(300, 200)
    weights[299, 199] = damage
    assert not quantize_blocks(weights).finite


def test_dequantization_is_codes_times_scales():
    codes = torch.tensor([[1.0, -448.0], [0.0625, 2.0]]).to(FP8_DTYPE)
    out = torch.empty(2, 2)
    dequantize_blocks(BlockwiseFP8(codes, torch.tensor([[0.5]]), torch.tensor(True)), out)
    assert out.tolist() == [[0.5, -224.0], [0.03125, 1.0]]


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
    ("change", "code", "named"),
    [
        (lambda tensor: tensor[:3], "model.tensor-shape", "4 experts"),
        (lambda tensor: tensor[..., :1, :], "model.mxfp4-layout", "16 bytes"),
        (lambda tensor: tensor.to(torch.int32), "model.mxfp4-layout", "is I32"),
    ],
    ids=["experts", "blocks", "dtype"],
)
def test_damaged_blocks_are_named(folder, tmp_path, change, code, named):
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_blocks"] = change(tensors[f"{name}_blocks"]).contiguous()
    if len(tensors[f"{name}_blocks"]) == 3:
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:3].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    with raises(code, tmp_path / "model.safetensors", name, named):
        HFReader(tmp_path)


def test_a_missing_scale_names_the_tensor_of_the_first_expert(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text(encoding="utf-8"))), encoding="utf-8"
    )
    with raises("model.missing-tensor", tmp_path, "'model.layers.0.mlp.experts.0.down_proj.weight'"):
        HFReader(tmp_path)
