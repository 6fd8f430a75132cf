"""Experts that a file stacks: MXFP4 becomes bfloat16, and checkpoints with another order of rows are refused."""

import json

import pytest
import torch
import transformers
from checkpoints import SETTINGS, run, tensors_of
from support.expected_errors import raises
from support.mxfp4_folders import quantize_experts
from tiny_models import save_model

from megarl.convert.open import open_torch_dist
from megarl.models import read_model_config


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mxfp4")
    save_model(folder, **{**SETTINGS["gpt_oss"], "hidden_size": 64, "intermediate_size": 96})
    quantize_experts(folder)
    return folder


def test_mxfp4_converts_to_the_values_of_transformers(quantized, tmp_path):
    quantization = transformers.Mxfp4Config(dequantize=True)
    expected = transformers.GptOssForCausalLM.from_pretrained(
        quantized, quantization_config=quantization, dtype=torch.bfloat16
    ).state_dict()
    run("hf-to-megatron", quantized, tmp_path / "role", "--max-shard-size", "50KB")
    run("megatron-to-hf", tmp_path / "role", tmp_path / "out", "--max-shard-size", "90KB")
    run("verify", quantized, tmp_path / "role")
    run("verify", tmp_path / "out", quantized)
    converted = tensors_of(tmp_path / "out")
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))


def test_a_torch_dist_checkpoint_with_stacked_experts_is_refused(quantized):
    with raises("convert.torch-dist-experts", quantized, "GptOssForCausalLM"):
        open_torch_dist(quantized, read_model_config(quantized), quantized)
