"""Helpers of the conversion tests: models, checkpoints of real engines, and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from family_cases import MODELS
from safetensors.torch import load_file, save_file
from support.distributed import Place
from torch import Tensor

from megarl.convert.command import main
from megarl.megatron import MegatronEngine, MegatronOptions, OptimizerOptions, init_runtime, shutdown_runtime
from megarl.megatron.checkpoint.sharded import begin_save, load_sharded
from megarl.models import ParallelLayout, read_model_config

SETTINGS: dict[str, dict[str, Any]] = {
    **MODELS,
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2"},
    "qwen2_tied": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3"},
    "reward_model": {"family": "qwen2", "critic": "SequenceClassification"},
}


def run(*arguments: object, expect: int = 0) -> None:
    """Run one command line of the tool in this process."""
    assert main([str(argument) for argument in arguments]) == expect


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return all weights of a Hugging Face folder, read by the safetensors library."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same(first: Path, second: Path) -> None:
    """Assert that two folders hold the same tensors, bit for bit."""
    a, b = tensors_of(first), tensors_of(second)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


def _engine(
    place: Place,
    model: str,
    layout: ParallelLayout,
    value_head: bool,
    optimizer: OptimizerOptions | None = None,
    trained_tower: bool = False,
) -> MegatronEngine:
    runtime = init_runtime(layout, place.rank, place.world_size, "127.0.0.1", place.port, device="cpu", timeout_s=60)
    config = read_model_config(model).with_trained_tower(trained_tower)
    return MegatronEngine(config, layout, runtime, MegatronOptions(value_head=value_head, optimizer=optimizer))


def save_role(place: Place, model: str, folder: str, layout: ParallelLayout, value_head: bool = False) -> None:
    """Save a model from a real engine, as training does."""
    engine = _engine(place, model, layout, value_head)
    try:
        engine.load_hf(model)
        head = engine.weights.named().get("output_layer.weight")
        if value_head and head is not None and not head.any():
            with torch.no_grad():
                head.copy_(torch.linspace(-1, 1, head.numel()).view(head.shape))
        begin_save(engine, folder, copy_from=model).finish()
    finally:
        shutdown_runtime()


def load_role(place: Place, model: str, folder: str, layout: ParallelLayout) -> dict[str, Tensor]:
    """Load a checkpoint into a training engine filled with NaN, and return its parameters."""
    engine = _engine(place, model, layout, False, OptimizerOptions(lr=1e-3, total_steps=5))
    try:
        local: Any = engine.weights.named()
        with torch.no_grad():
            for param in local.values():
                param.fill_(float("nan"))
        load_sharded(engine, folder, ["model"])
        return {name: param.detach().clone() for name, param in engine.weights.named().items()}
    finally:
        shutdown_runtime()


def add_multi_token_layer(folder: Path, prefix: str, **fields: Any) -> dict[str, Tensor]:
    """Add tensors of a multi-token prediction layer to a folder, as a second file with an index; return them.

    Args:
        folder: of a model in one file.
        prefix: start of the tensors' names.
        **fields: fields of ``config.json`` that announce the layer.
    """
    generator = torch.Generator().manual_seed(11)
    shapes = {"eh_proj.weight": (32, 64), "enorm.weight": (32,), "self_attn.o_proj.weight": (32, 24)}
    extra = {prefix + name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    extra[prefix + "mlp.gate.e_score_correction_bias"] = torch.randn(8, generator=generator)
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model-00001-of-00002.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    save_file(extra, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    placed = {**names, **dict.fromkeys(extra, "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed}), encoding="utf-8"
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    return extra
