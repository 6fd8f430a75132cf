"""Names of multi-token prediction layers, and exports without their weights."""

import json
import logging

import pytest
import torch
from reference_weights import tiny_config
from safetensors.torch import save_file

from megarl.models import ParallelLayout, WeightMap, parse_model_config
from megarl.models.carried_tensors import announced_layers, is_multi_token
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.models.hf_writer import HFWriter
from tests.models.test_models_hf_writer import export, load_all, save_model


@pytest.fixture
def folder(tmp_path, request):
    """A model that announces two layers after its last one, and has one tensor of each."""
    name = getattr(request, "param", "num_nextn_predict_layers")
    path = tmp_path / "initial"
    path.mkdir()
    config = tiny_config(layers=2)
    raw = config.raw | {name: 2}
    tensors = save_model(path, config)
    extra = {f"model.layers.{layer}.enorm.weight": torch.randn(3).half() for layer in (2, 3)}
    save_file({**tensors, **extra, "model.other": torch.zeros(1)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return path


@pytest.mark.parametrize("folder", ["num_nextn_predict_layers", "num_mtp_layers"], indirect=True)
def test_layers_after_the_last_one_and_under_mtp_are_recognized(folder):
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = parse_model_config(raw)
    assert announced_layers(config) == f"{list(raw)[-1]}=2"
    names = ["model.layers.2.a", "model.layers.3.a", "mtp.fc.weight"]
    others = ["model.layers.1.a", "model.layers.4.a", "model.layers.20.a", "model.mtp.a", "lm_head.weight"]
    assert [name for name in names + others if is_multi_token(config, name)] == names
    assert not is_multi_token(tiny_config(layers=2), "model.layers.2.a")


def test_an_export_takes_the_layers_and_nothing_else(folder, tmp_path):
    export(folder, tmp_path / "out", ParallelLayout(2, 2, 1), torch.bfloat16, max_shard_bytes=500)
    before, after = load_all(folder), load_all(tmp_path / "out")
    assert after.keys() == before.keys() - {"model.other"}
    for layer in (2, 3):
        name = f"model.layers.{layer}.enorm.weight"
        assert after[name].dtype == torch.float16 and torch.equal(after[name], before[name])
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["num_nextn_predict_layers"] == 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())


@pytest.mark.parametrize("damage", ["gone", "truncated"])
def test_without_the_initial_weights_the_export_announces_no_layers_and_warns(folder, tmp_path, caplog, damage):
    reader = HFReader(folder)
    weight_map = WeightMap(reader.config)
    params = weight_map.export_params(ParallelLayout(), 0)
    local = dict(load_local(reader, params, torch.float32))
    if damage == "gone":
        folder.rename(tmp_path / "elsewhere")
    else:
        (folder / "model.safetensors").write_bytes(b"cut")
    caplog.set_level(logging.WARNING)
    with HFWriter(tmp_path / "out", reader.config, weight_map.hf_shapes(), copy_from=folder) as writer:
        for param in params:
            writer.add(param, local[param.name])
    (record,) = caplog.records
    assert f"{folder} has no weights of the multi-token prediction layers" in record.getMessage()
    assert "num_nextn_predict_layers=2" in record.getMessage()
    assert ("truncated" in record.getMessage()) == (damage == "truncated")
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["num_nextn_predict_layers"] == 0
    assert load_all(tmp_path / "out").keys() == weight_map.hf_shapes().keys()
