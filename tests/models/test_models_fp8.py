"""Blockwise FP8 against transformers' quantizer, a loop in numpy, and the error bounds of the format."""

import types

import numpy as np
import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from megarl.models.number_formats import FP8_DTYPE, BlockwiseFP8, dequantize_blocks, quantize_blocks, scales_shape

HF_QUANTIZER = types.SimpleNamespace(
    quantization_config=types.SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
)


def matrix(rows, columns, dtype=torch.float32, seed=0):
    """Weights whose blocks have very different magnitudes, one of which is all zeros."""
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-12, 12, (-(-rows // 128), -(-columns // 128)), generator=generator).double()
    scales.view(-1)[scales.numel() // 2] = 0.0
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * spread).to(dtype)


E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)
"""Values of the codes 0 to 126 by their exponent and mantissa; 127 is NaN."""


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
