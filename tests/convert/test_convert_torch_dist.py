"""Checkpoints written by Megatron-Core's distributed checkpointing, in several layouts and naming schemes."""

import argparse
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same, run
from support.expected_errors import raises
from torch.distributed.checkpoint import DefaultSavePlanner
from torch_dist_cases import SaveFormat, save_engine_torch_dist, save_torch_dist

from megarl.convert.saved_arguments import model_folders
from megarl.convert.stored import locate_tensor
from megarl.models import ParallelLayout

Model = Callable[[str], Path]
CASES = {
    "tp2": ("qwen2", SaveFormat(ParallelLayout(tp=2), prefix="model.")),
    "pp2 tied with optimizer": ("qwen2_tied", SaveFormat(ParallelLayout(pp=2), with_optimizer=True)),
    "tp2pp2 layer by layer": ("qwen3", SaveFormat(ParallelLayout(tp=2, pp=2), prefix="module.", per_layer=True)),
    "gate and up separate": ("llama", SaveFormat(ParallelLayout(tp=2), per_layer=True, separate=True)),
    "ep2": ("qwen3_moe", SaveFormat(ParallelLayout(dp=2, ep=2))),
    "ep2 separate": ("qwen3_moe", SaveFormat(ParallelLayout(dp=2, ep=2), per_layer=True, separate=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_reads_megatron_checkpoints(case, model, pool, tmp_path):
    name, save_format = CASES[case]
    source, folder = model(name), tmp_path / "iter_0000007"
    pool.run(save_torch_dist, save_format.layout.world_size, str(source), str(folder), save_format)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7", encoding="utf-8")
    run("megatron-to-hf", tmp_path, tmp_path / "out", "--model", source)
    assert_same(source, tmp_path / "out")
    run("verify", tmp_path, source)  # the config comes from the other checkpoint


@pytest.mark.parametrize(
    ("name", "layout"), [("deepseek_v2", ParallelLayout(dp=2, ep=2)), ("deepseek_v3", ParallelLayout(pp=2))]
)
def test_reads_latent_attention_and_shared_experts(name, layout, model, pool, tmp_path):
    pool.run(save_engine_torch_dist, 2, str(model(name)), str(tmp_path / "dist_ckpt"), layout)
    run("megatron-to-hf", tmp_path, tmp_path / "out", "--model", model(name))
    assert_same(model(name), tmp_path / "out")


def test_finds_the_model_next_to_the_checkpoint_or_in_its_arguments(model, pool, tmp_path, capsys):
    source, folder = model("qwen2"), tmp_path / "actor" / "dist_ckpt"
    pool.run(save_torch_dist, 1, str(source), str(folder), SaveFormat(hf_checkpoint=str(source)))
    run("megatron-to-hf", tmp_path / "actor", tmp_path / "by_arguments")
    assert_same(source, tmp_path / "by_arguments")
    run("inspect", tmp_path / "actor")
    report = capsys.readouterr().out
    assert "torch_dist" in report and "503 of 512 rows" in report and f"config from   {source}" in report

    pool.run(save_torch_dist, 1, str(source), str(tmp_path / "plain"), SaveFormat())
    run("inspect", tmp_path / "plain", expect=1)
    message = capsys.readouterr().err
    assert "--model FOLDER" in message and "[convert.unknown-model]" in message
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").write_bytes((source / "config.json").read_bytes())
    run("inspect", tmp_path / "plain")


def test_arguments_among_the_weights_name_the_model(tmp_path):
    """Megatron-Core 0.19 has no file of its own for them; the file of older versions comes first."""
    arguments = argparse.Namespace(hf_checkpoint="/models/by_object", tokenizer_model=None)
    state = {"common_state/shard_0_1": [{"args": arguments, "iteration": 7}], "weight": torch.zeros(2)}
    dcp.save(state, checkpoint_id=tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False))
    assert model_folders(tmp_path) == [Path("/models/by_object")]
    torch.save({"args": argparse.Namespace(hf_checkpoint="/models/by_file")}, tmp_path / "common.pt")
    assert model_folders(tmp_path) == [Path("/models/by_file")]


def test_a_shape_mismatch_is_reported(model, pool, tmp_path, capsys):
    pool.run(save_torch_dist, 1, str(model("qwen2")), str(tmp_path / "ckpt"), SaveFormat())
    config = json.loads((model("qwen2") / "config.json").read_text(encoding="utf-8"))
    for field, value, named in (
        ("num_hidden_layers", 3, "'decoder.layers.2."),
        ("intermediate_size", 64, "'decoder.layers.0.mlp.linear_fc1.weight' has shape [128, 32]"),
        ("vocab_size", 600, "'embedding.word_embeddings.weight' has shape [600, 32]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {field: value}), encoding="utf-8")
        run("megatron-to-hf", tmp_path / "ckpt", tmp_path / "out", "--model", tmp_path, expect=1)
        message = capsys.readouterr().err
        assert named in message and "[convert.config-mismatch]" in message
        assert not (tmp_path / "out").exists()


class _Evil:
    def __reduce__(self):
        return eval, ("print('this must not be printed')",)


def test_pickles_with_code_are_rejected(model, pool, tmp_path, capsys):
    folder = tmp_path / "ckpt"
    pool.run(save_torch_dist, 1, str(model("qwen2")), str(folder), SaveFormat())
    torch.save({"args": _Evil()}, folder / "common.pt")  # only read for hints, with all classes replaced
    run("megatron-to-hf", folder, tmp_path / "out", "--model", model("qwen2"))
    (folder / ".metadata").write_bytes(pickle.dumps(_Evil()))
    run("megatron-to-hf", folder, tmp_path / "other", "--model", model("qwen2"), expect=1)
    output = capsys.readouterr()
    assert "'builtins.eval'" in output.err and "[checkpoint.unsafe-pickle]" in output.err
    assert "must not be printed" not in output.out


def archive(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4),
        torch.arange(12, dtype=torch.bfloat16).view(3, 4).t(),
        torch.arange(40, dtype=torch.float16)[7:19].view(2, 6),
        torch.nn.Parameter(torch.ones(5)),
    ],
)
def test_tensors_are_located_in_archives_without_loading(tensor):
    stream = archive(tensor)
    saved = locate_tensor(stream)
    flat = torch.frombuffer(bytearray(stream.getvalue()[saved.offset :]), dtype=torch.uint8)
    length = len(flat) // saved.dtype.itemsize * saved.dtype.itemsize
    assert saved.dtype == tensor.dtype and saved.shape == tuple(tensor.shape)
    assert torch.equal(flat[:length].view(saved.dtype).as_strided(saved.shape, saved.stride), tensor.detach())


def test_archives_without_a_tensor_are_rejected():
    with raises("checkpoint.unsafe-pickle", "__builtin__.eval"):
        locate_tensor(archive(_Evil()))
    with raises("checkpoint.corrupt-file", "no tensor"):
        locate_tensor(archive({"a": 1}))
    content = archive(torch.ones(100)).getvalue()
    with raises("checkpoint.corrupt-file", "damaged"):
        locate_tensor(io.BytesIO(content[: len(content) // 2]))
