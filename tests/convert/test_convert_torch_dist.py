"""Checkpoints that Megatron-Core's own distributed checkpointing wrote, in several layouts and forms of names."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, run
from distributed import ProcessPool
from torch_dist_cases import Foreign, save_engine_torch_dist, save_torch_dist

from megarl.convert.torch_zip import locate_tensor
from megarl.errors import CheckpointError
from megarl.models import ParallelLayout

Model = Callable[[str], Path]
CASES = {
    "tp2": ("qwen2", Foreign(ParallelLayout(tp=2), prefix="model.")),
    "pp2 tied with optimizer": ("qwen2_tied", Foreign(ParallelLayout(pp=2), with_optimizer=True)),
    "tp2pp2 layer by layer": ("qwen3", Foreign(ParallelLayout(tp=2, pp=2), prefix="module.", per_layer=True)),
    "gate and up apart": ("llama", Foreign(ParallelLayout(tp=2), per_layer=True, apart=True)),
    "ep2": ("qwen3_moe", Foreign(ParallelLayout(dp=2, ep=2))),
    "ep2 apart": ("qwen3_moe", Foreign(ParallelLayout(dp=2, ep=2), per_layer=True, apart=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_reads_what_megatron_saved(case: str, model: Model, pool: ProcessPool, tmp_path: Path) -> None:
    name, foreign = CASES[case]
    source, folder = model(name), tmp_path / "iter_0000007"
    pool.run(save_torch_dist, foreign.layout.world_size, str(source), str(folder), foreign)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    run("megatron-to-hf", tmp_path, tmp_path / "out", "--model", source)
    assert_same(source, tmp_path / "out")
    run("verify", tmp_path, source)  # the config comes from the other side


@pytest.mark.parametrize(
    ("name", "layout"), [("deepseek_v2", ParallelLayout(dp=2, ep=2)), ("deepseek_v3", ParallelLayout(pp=2))]
)
def test_reads_latent_attention_and_shared_experts(
    name: str, layout: ParallelLayout, model: Model, pool: ProcessPool, tmp_path: Path
) -> None:
    pool.run(save_engine_torch_dist, 2, str(model(name)), str(tmp_path / "dist_ckpt"), layout)
    run("megatron-to-hf", tmp_path, tmp_path / "out", "--model", model(name))
    assert_same(model(name), tmp_path / "out")


def test_the_model_is_found_beside_the_checkpoint_or_in_its_arguments(
    model: Model, pool: ProcessPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = model("qwen2"), tmp_path / "actor" / "dist_ckpt"
    pool.run(save_torch_dist, 1, str(source), str(folder), Foreign(hf_checkpoint=str(source)))
    run("megatron-to-hf", tmp_path / "actor", tmp_path / "by_arguments")
    assert_same(source, tmp_path / "by_arguments")
    run("inspect", tmp_path / "actor")
    told = capsys.readouterr().out
    assert "torch_dist" in told and "503 of 512 rows" in told and f"config from       {source}" in told

    pool.run(save_torch_dist, 1, str(source), str(tmp_path / "plain"), Foreign())
    run("inspect", tmp_path / "plain", expect=1)
    assert "--model FOLDER" in capsys.readouterr().err
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").write_bytes((source / "config.json").read_bytes())
    run("inspect", tmp_path / "plain")


def test_a_model_of_another_shape_is_named(
    model: Model, pool: ProcessPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.run(save_torch_dist, 1, str(model("qwen2")), str(tmp_path / "ckpt"), Foreign())
    config = json.loads((model("qwen2") / "config.json").read_text())
    for field, value, told in (
        ("num_hidden_layers", 3, "lacks 'decoder.layers.2."),
        ("intermediate_size", 64, "'decoder.layers.0.mlp.linear_fc1.weight' has shape [128, 32]"),
        ("vocab_size", 600, "'embedding.word_embeddings.weight' has shape [600, 32]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
        run("megatron-to-hf", tmp_path / "ckpt", tmp_path / "out", "--model", tmp_path, expect=1)
        assert told in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("print('this must not be printed')",)


def test_pickles_with_code_are_refused(
    model: Model, pool: ProcessPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ckpt"
    pool.run(save_torch_dist, 1, str(model("qwen2")), str(folder), Foreign())
    torch.save({"args": _Evil()}, folder / "common.pt")  # never needed: only stripped of its classes and looked at
    run("megatron-to-hf", folder, tmp_path / "out", "--model", model("qwen2"))
    (folder / ".metadata").write_bytes(pickle.dumps(_Evil()))
    run("megatron-to-hf", folder, tmp_path / "other", "--model", model("qwen2"), expect=1)
    told = capsys.readouterr()
    assert "refused to load 'builtins.eval'" in told.err and "must not be printed" not in told.out


def archive(value: object) -> io.BytesIO:
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
def test_tensors_are_found_in_archives_without_loading_them(tensor: torch.Tensor) -> None:
    stream = archive(tensor)
    place = locate_tensor(stream)
    flat = torch.frombuffer(bytearray(stream.getvalue()[place.offset :]), dtype=torch.uint8)
    length = len(flat) // place.dtype.itemsize * place.dtype.itemsize
    assert place.dtype == tensor.dtype and place.shape == tuple(tensor.shape)
    assert torch.equal(flat[:length].view(place.dtype).as_strided(place.shape, place.stride), tensor.detach())


def test_archives_of_anything_else_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"refused to load .__builtin__\.eval"):
        locate_tensor(archive(_Evil()))
    with pytest.raises(CheckpointError, match="holds no tensor"):
        locate_tensor(archive({"a": 1}))
    whole = archive(torch.ones(100)).getvalue()
    with pytest.raises(CheckpointError, match="damaged"):
        locate_tensor(io.BytesIO(whole[: len(whole) // 2]))
