import json
import shutil

import numpy as np
import pytest
import torch
from reference_weights import megatron_reference, rollout_reference
from safetensors.torch import load_file, save_file
from support.expected_errors import raises

from megarl.models import ParallelLayout, Piece, WeightMap
from megarl.models.hf_checkpoint import HFReader, load_local


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_checkpoint_is_read_into_every_rank(family, tied, real_model_folder):
    folder = real_model_folder(family, tied)
    checkpoint = {name: t.numpy() for name, t in load_file(folder / "model.safetensors").items()}
    reader = HFReader(folder)
    weight_map, layout = WeightMap(reader.config), ParallelLayout(2, 2, 1)
    for rank in range(layout.world_size):
        reference = megatron_reference(checkpoint, reader.config, layout, rank, padded=64)
        local = dict(load_local(reader, weight_map.megatron_params(layout, rank), torch.float32))
        assert local.keys() == reference.keys()
        for name, tensor in local.items():
            np.testing.assert_array_equal(tensor.numpy(), reference[name], err_msg=name)
    reference = rollout_reference(checkpoint, reader.config, 2, 1)
    for name, tensor in load_local(reader, weight_map.rollout_params(2, 1), torch.float32):
        np.testing.assert_array_equal(tensor.numpy(), reference[name], err_msg=name)


def test_only_the_elements_of_the_rank_are_read(real_model_folder, monkeypatch):
    reader = HFReader(real_model_folder())
    read = []
    original = HFReader.read
    monkeypatch.setattr(HFReader, "read", lambda self, piece: read.append(original(self, piece)) or read[-1])
    layout = ParallelLayout(tp=2, pp=2)
    params = WeightMap(reader.config).megatron_params(layout, 0)
    held = {name: tensor.numel() for name, tensor in load_local(reader, params, torch.float32)}
    assert sum(t.numel() for t in read) == sum(held.values())  # rank 0's half of the vocabulary has no padding
    assert sum(t.numel() for t in read) < sum(np.prod(s) for s in WeightMap(reader.config).hf_shapes().values()) / 3


def test_weights_are_converted_to_the_requested_dtype(real_model_folder):
    reader = HFReader(real_model_folder())
    full = load_file(real_model_folder() / "model.safetensors")
    params = WeightMap(reader.config).rollout_params(1, 0)
    local = dict(load_local(reader, params, torch.bfloat16))
    assert torch.equal(local["model.norm.weight"], full["model.norm.weight"].bfloat16())


def test_only_the_head_may_be_missing(real_model_folder):
    reader = HFReader(real_model_folder())
    params = WeightMap(reader.config, value_head=True).megatron_params(ParallelLayout(), 0)
    names = [name for name, _ in load_local(reader, params, torch.float32, optional=("score.weight",))]
    assert len(names) == len(params) - 1 and "output_layer.weight" not in names
    with raises("model.missing-tensor", "'score.weight'"):
        list(load_local(reader, params, torch.float32))


def test_value_model_has_a_score_and_no_output_layer(real_model_folder, tmp_path):
    folder = shutil.copytree(real_model_folder(), tmp_path / "value")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["score.weight"] = torch.randn(1, 32)
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**raw, "architectures": ["Qwen2ForSequenceClassification"]}), encoding="utf-8"
    )
    reader = HFReader(folder)
    params = WeightMap(reader.config, value_head=True).megatron_params(ParallelLayout(tp=2), 1)
    assert torch.equal(dict(load_local(reader, params, torch.float32))["output_layer.weight"], tensors["score.weight"])


def test_rectangles_outside_the_file_are_rejected(real_model_folder):
    reader = HFReader(real_model_folder())
    assert reader.read(Piece("model.norm.weight", (3,), (7,), (0,))).shape == (4,)
    with raises("model.tensor-shape", "'model.norm.weight'", [32], [33]):
        reader.read(Piece("model.norm.weight", (3,), (33,), (0,)))
    with raises("model.missing-tensor", "'model.other'"):
        reader.read(Piece("model.other", (0,), (1,), (0,)))
