"""Random Hugging Face models of every family and of published sizes, for acceptance stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.base.ports import held_port
from megarl.megatron import MegatronEngine, MegatronOptions, init_runtime, shutdown_runtime
from megarl.models import LocalParam, ModelConfig, ParallelLayout, WeightMap, parse_model_config, read_model_config

VOCABULARY = 1000  # no power of two: the vocabulary is padded
_WIDTH = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENTS = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **_EXPERTS,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"num_experts": 4, "head_dim": 16, "norm_topk_prob": True, **_EXPERTS},
    "llama": {},
    "mistral": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"head_dim": 16, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 64, **_EXPERTS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {"topk_method": "group_limited_greedy", **_LATENTS},
    "deepseek_v3": _LATENTS,
    "glm4_moe": {
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        **_EXPERTS,
    },
    "qwen3_next": {"num_experts": 4, "shared_expert_intermediate_size": 64, **_LINEAR, **_EXPERTS},
}
"""Fields of a small model of each family, in addition to the common ones; in the order of the checks: the most used
families first, last the one whose first pass compiles a kernel."""

QWEN: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**QWEN, **_WIDTH, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "tie_word_embeddings": True},
    "0.5B": {**QWEN, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "1.5B": {**QWEN, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "7B": {**QWEN, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
}  # fmt: skip
"""``config.json`` of Qwen2.5 in published sizes."""


def random_family(family: str, folder: Path, device: torch.device) -> Any:
    """Save a small random model of a family in float32, and return transformers' model on the device."""
    import transformers

    name = "".join(word.capitalize() for word in family.split("_"))
    settings = {
        **_WIDTH,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        **FAMILIES[family],
    }
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**settings)
    # The text model of a multimodal one has a configuration of its own.
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, param in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key or "bias" in key:
                param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(folder)
    return model.eval().to(device)


def random_shape(shape: str, folder: Path, dtype: torch.dtype) -> None:
    """Save a model of a published size with random weights."""
    import transformers

    torch.manual_seed(5)
    config = transformers.Qwen2Config(**{k: v for k, v in SHAPES[shape].items() if k != "architectures"})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.Qwen2ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)


def checkpoint_tensors(
    model: ModelConfig, params: Iterable[LocalParam], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Assemble checkpoint tensors from those parameters of one rank that have a tensor."""
    shapes = WeightMap(model).hf_shapes()
    result: dict[str, Tensor] = {}
    for param in (param for param in params if param.name in tensors):
        local = tensors[param.name]
        for piece in param.pieces:
            source = tuple(slice(a, a + n) for a, n in zip(piece.at, piece.local_shape, strict=True))
            target = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
            whole = result.setdefault(piece.hf_name, local.new_zeros(shapes[piece.hf_name]))
            whole[target] = local[source].reshape(piece.shape)
    return result


class SingleRankEngine:
    """Context manager: an engine with one rank, from a folder or, with random weights, from a config's fields."""

    def __init__(self, source: Path | Mapping[str, Any], options: MegatronOptions, device: torch.device) -> None:
        self._source, self._options, self._device = source, options, device

    def __enter__(self) -> MegatronEngine:
        layout, source = ParallelLayout(), self._source
        config = read_model_config(source) if isinstance(source, Path) else parse_model_config(source)
        with held_port("127.0.0.1") as port:
            runtime = init_runtime(layout, 0, 1, "127.0.0.1", port, device=self._device.type)
        try:
            engine = MegatronEngine(config, layout, runtime, self._options)
            if isinstance(source, Path):
                engine.load_hf(source)
            else:
                with torch.no_grad():
                    for param in engine.weights.parameters().values():
                        param.normal_(std=0.02)
                engine.weights_changed()
            return engine
        except BaseException:
            shutdown_runtime()
            raise

    def __exit__(self, *_: object) -> None:
        shutdown_runtime()
