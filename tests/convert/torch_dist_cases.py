"""Checkpoints as Megatron-LM, slime and verl write them: a stock GPT model saved by Megatron's checkpointing."""

from __future__ import annotations

import argparse
import multiprocessing
import queue
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from support.distributed import Place

from megarl.megatron import MegatronEngine, MegatronOptions, init_runtime, shutdown_runtime
from megarl.megatron.layers.activations import SwiGLU
from megarl.megatron.layers.lora import global_naming
from megarl.megatron.runtime import cuda_on_cpu
from megarl.models import ModelFolder, ParallelLayout, WeightMap, read_model_config
from megarl.models.hf_checkpoint import HFReader, load_local
from megarl.models.hf_folder import tensor_entries
from megarl.models.tower_class import TOWER


class SaveFormat(NamedTuple):
    """Format in which another program saves a model."""

    layout: ParallelLayout = ParallelLayout()
    prefix: str = ""
    per_layer: bool = False  # one tensor per layer instead of one for all layers
    with_optimizer: bool = False
    separate: bool = False  # separate tensors for gate and up, and for every expert
    hf_checkpoint: str = ""  # in the saved arguments, as slime writes it


def save_torch_dist(place: Place, model: str, folder: str, save_format: SaveFormat) -> None:
    """Save a Hugging Face folder's weights from a stock Megatron model; every rank calls it."""
    layout = save_format.layout
    runtime = init_runtime(layout, place.rank, place.world_size, "127.0.0.1", place.port, device="cpu", timeout_s=60)
    try:
        with cuda_on_cpu.active():
            module = _stock_model(HFReader(model), layout, runtime.coordinate.pp, save_format)
            _fill(module, HFReader(model), layout, place.rank)
            metadata = {"non_homogeneous_layers": save_format.per_layer, "singleton_local_shards": save_format.separate}
            state: dict[str, Any] = dict(module.sharded_state_dict(prefix=save_format.prefix, metadata=metadata))
            if save_format.with_optimizer:
                state["optimizer"] = _moments(module, save_format.prefix, metadata)
            if save_format.hf_checkpoint:
                state["args"] = argparse.Namespace(hf_checkpoint=save_format.hf_checkpoint)
            state |= {"iteration": 7, "checkpoint_version": 3.0}
            _save(state, folder)
    finally:
        shutdown_runtime()


def save_engine_torch_dist(
    place: Place, model: str, folder: str, layout: ParallelLayout, starts: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Save from the model of megarl's engine, for architectures whose stock layers need CUDA kernels.

    Args:
        starts: starts of names to replace; with that of a tower, the tower is saved too.
    """
    config = read_model_config(model).with_trained_tower(TOWER in starts)
    reader = HFReader(ModelFolder(Path(model), config, tensor_entries(Path(model))))
    runtime = init_runtime(layout, place.rank, place.world_size, "127.0.0.1", place.port, device="cpu", timeout_s=60)
    try:
        (module,) = MegatronEngine(config, layout, runtime, MegatronOptions()).chunks
        with cuda_on_cpu.active():
            _fill(module, reader, layout, place.rank)
            for part in module.modules():
                if isinstance(part, SwiGLU):  # Megatron reads the state of every part of an MLP; this one has none
                    part.sharded_state_dict = lambda *names, **options: {}
            state: dict[str, Any] = dict(module.sharded_state_dict())
            for entry in state.values():
                start = next((start for start in starts if entry.key.startswith(start)), "")
                entry.key = starts.get(start, "") + entry.key.removeprefix(start)
            _save(state, folder)
    finally:
        shutdown_runtime()


def _save(state: dict[str, Any], folder: str) -> None:
    """Save a state; Megatron's writer starts processes, which pool workers may not do, and a server for their results.

    The server would be for saves in the background: this process waits for its own results.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    Path(folder).mkdir(parents=True, exist_ok=True)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(state, folder)


def _stock_model(reader: HFReader, layout: ParallelLayout, stage: int, save_format: SaveFormat) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = reader.config
    settings: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_dim,
        "qk_layernorm": model.qk_norm,
        "add_qkv_bias": model.qkv_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
    }
    if model.experts is not None:
        settings |= {
            "num_moe_experts": model.experts.count,
            "moe_ffn_hidden_size": model.experts.ffn_hidden_size,
            "moe_layer_freq": [int(has) for has in model.experts.layers],
            "moe_router_topk": model.experts.per_token,
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
        }
    config = TransformerConfig(**settings)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    return GPTModel(
        config,
        spec,
        vocab_size=WeightMap(model).padded_vocab(layout.tp),
        max_sequence_length=128,
        pre_process=stage == 0,
        post_process=stage == layout.pp - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type="rope",
    )


def _fill(module: Any, reader: HFReader, layout: ParallelLayout, rank: int) -> None:
    """Set this rank's weights; vocabulary padding becomes 7, so that leftovers are visible."""
    weight_map = WeightMap(reader.config)
    experts = reader.config.experts
    first = 0
    if experts is not None:
        first = layout.expert_coordinate(rank).ep * (experts.count // layout.ep)
    rename = global_naming(module, first)
    params = {rename(name): param for name, param in module.named_parameters()}
    with torch.no_grad():
        for param in params.values():
            param.fill_(7.0)
        for local in weight_map.megatron_params(layout, rank):
            for name, tensor in load_local(reader, [local], torch.float32):
                covered = torch.zeros(local.shape, dtype=torch.bool)
                for piece in local.pieces:
                    covered[tuple(slice(a, a + n) for a, n in zip(piece.at, piece.shape, strict=True))] = True
                params[name].copy_(torch.where(covered, tensor, params[name]))


def _moments(module: Any, prefix: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return values with the shapes and names of an optimizer's first moments."""
    state = module.sharded_state_dict(prefix=f"optimizer.state.exp_avg.{prefix}", metadata=metadata)
    return {key: value for key, value in state.items() if "_extra_state" not in key}
