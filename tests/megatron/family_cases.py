"""Tiny models of each family, their reference results of transformers, and the engine's results in each process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_cases import Setup, engine, micro_batches, policy_loss, value_loss
from support.distributed import Place
from tiny_models import TEMPERATURE, Row, policy_reference, save_model, value_reference
from torch import Tensor

from megarl.megatron import OutputOptions, PolicyOutputs
from megarl.megatron.layers.moe import ExpertRouter

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
LINEAR = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "initializer_range": 0.1,
}
"""Queries and keys are normed after a convolution: with larger weights transformers' gradients amplify rounding too."""
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"family": "mistral", "head_dim": 12},
    "llama_yarn": {"family": "llama", "rope_parameters": YARN},
    "mixtral": {"family": "mixtral", "num_local_experts": 4},
    "qwen2_moe": {
        "family": "qwen2_moe",
        "num_experts": 4,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
        **EXPERTS,
    },
    "qwen3_moe": {"family": "qwen3_moe", "num_experts": 4, "norm_topk_prob": True, **EXPERTS},
    "deepseek_v2": {
        "family": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
        **LATENTS,
        "num_experts_per_tok": 3,
        "q_lora_rank": None,
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        **LATENTS,
    },
    "deepseek_dense": {"family": "deepseek_v3", **LATENTS, "first_k_dense_replace": 2},
    "glm4_moe": {
        "family": "glm4_moe",
        "head_dim": 12,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        **EXPERTS,
    },
    "olmo2": {"family": "olmo2", "head_dim": 12},
    "olmo3": {
        "family": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "olmo_critic": {"family": "olmo3", "sliding_window": 4, "critic": "SequenceClassification"},
    "olmoe": {"family": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "gemma3": {
        "family": "gemma3_text",
        "tied": True,
        "head_dim": 12,
        "query_pre_attn_scalar": 10,
        "num_hidden_layers": 4,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma_critic": {
        "family": "gemma3_text",
        "head_dim": 12,
        "sliding_window": 4,
        "critic": "SequenceClassification",
    },
    "qwen3_next": {
        "family": "qwen3_next",
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
        "num_experts": 4,
        "shared_expert_intermediate_size": 40,
        **LINEAR,
        **EXPERTS,
    },
    "qwen3_next_dense": {
        "family": "qwen3_next",
        "num_experts": 0,
        "layer_types": ["linear_attention", "full_attention"],
        **LINEAR,
    },
    "qwen3_next_critic": {
        "family": "qwen3_next",
        "num_experts": 0,
        "layer_types": ["full_attention", "linear_attention"],
        "critic": "SequenceClassification",
        **LINEAR,
    },
    "qwen3_5": {
        "family": "qwen3_5_text",
        "rope_parameters": {**YARN, "partial_rotary_factor": 0.25},
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        **LINEAR,
    },
    "qwen3_5_moe": {
        "family": "qwen3_5_moe_text",
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "shared_expert_intermediate_size": 40,
        **LINEAR,
        **EXPERTS,
    },
    "gpt_oss": {
        "family": "gpt_oss",
        "head_dim": 12,
        "num_hidden_layers": 4,
        "sliding_window": 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.0,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "gpt_oss_critic": {
        "family": "gpt_oss",
        "head_dim": 12,
        "sliding_window": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "critic": "TokenClassification",
    },
    "token_critic": {"family": "mistral", "critic": "TokenClassification"},
    "expert_critic": {"family": "qwen3_moe", "num_experts": 4, **EXPERTS, "critic": "SequenceClassification"},
}


class Study(NamedTuple):
    """Results of a model for some rows.

    ``outputs`` are log-probs and entropies, or values, row after row. ``routing`` has the weights ``[tokens, experts]``
    of each expert layer, 0 for unselected experts, with tokens in the order of computation.
    """

    outputs: list[tuple[Tensor, ...]]
    routing: list[Tensor]
    grads: dict[str, Tensor]
    metrics: dict[str, float]


def reference(path: Path, settings: dict[str, Any], rows: list[Row]) -> Study:
    """Results of transformers and autograd, with gradients by checkpoint name."""
    return results_of(save_model(path, **settings), settings["family"], rows, critic="critic" in settings)


def results_of(model: Any, family: str, rows: list[Row], *, critic: bool = False) -> Study:
    """Results of a model of transformers, with gradients by checkpoint name."""
    routing: dict[Any, list[Tensor]] = {}

    def note(module: Any, inputs: Any, outputs: Any) -> None:
        _, weights, chosen = outputs
        dense = torch.zeros(len(chosen), module.num_experts).scatter(1, chosen, weights)
        routing.setdefault(module, []).append(dense.detach())

    for module in model.modules():
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
            module.register_forward_hook(note)
    outputs, loss, metrics = [], torch.zeros(()), {"nll": 0.0, "entropy": 0.0}
    for row in rows:
        if critic:
            values = value_reference(model, row)
            outputs.append((values.detach(),))
            loss = loss + ((values - row.returns).square() * row.weights).sum()
        else:
            log_probs, entropy = policy_reference(model, row)
            outputs.append((log_probs.detach(), entropy.detach()))
            parts = {"nll": -(log_probs * row.weights).sum(), "entropy": (entropy * row.weights).sum()}
            loss = loss + parts["nll"] - 0.3 * parts["entropy"]
            metrics = {name: metrics[name] + part.item() for name, part in parts.items()}
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    layers = [torch.cat(parts) for parts in routing.values()]
    return Study(outputs, layers, in_checkpoint_names(grads, family), {"loss": loss.item()} if critic else metrics)


def in_checkpoint_names(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Split transformers' two expert tensors per layer into three per expert, as in its files and ours."""
    if family == "gpt_oss":
        return dict(by_expert(tensors))
    block, gate, up, down = ("mlp", "gate_proj", "up_proj", "down_proj")
    if family == "mixtral":
        block, gate, up, down = ("block_sparse_moe", "w1", "w3", "w2")
    result = {}
    for name, tensor in tensors.items():
        name = name.replace(".mlp.", f".{block}.")
        base, last = name.rsplit(".", 1)
        if not base.endswith(".experts"):
            result[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = zip((gate, up), expert.chunk(2), strict=True) if last == "gate_up_proj" else [(down, expert)]
            result |= {f"{base}.{number}.{part}.weight": values for part, values in parts}
    return result


def by_expert(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Split the tensors of all experts of a layer into one per expert, with outputs before inputs."""
    for name, tensor in tensors.items():
        base, _, last = name.partition(".experts.")
        if last:
            module, part = (last.removesuffix("_bias"), "bias") if last.endswith("_bias") else (last, "weight")
            for number, expert in enumerate(tensor):
                yield f"{base}.experts.{number}.{module}.{part}", expert.t()
        else:
            yield name, tensor


def study(place: Place, path: Path, setup: Setup, rows: list[Row]) -> Study | None:
    """Results of one rank's engine for the rows of its data-parallel rank; outputs are empty before the last stage."""
    with engine(place, path, setup) as built:
        routing: dict[Any, list[Tensor]] = {}
        handles = []
        for chunk in built.chunks:
            routers = [module for module in chunk.modules() if isinstance(module, ExpertRouter)]
            handles += [
                router.register_forward_hook(lambda m, i, o: routing.setdefault(m, []).append(o[0]))
                for router in routers
            ]
        dp = built.runtime.coordinate.dp
        mine = micro_batches(rows, setup, dp, setup.layout.dp)
        answers = built.forward(mine, OutputOptions(temperature=TEMPERATURE, with_entropy=not setup.value_head)) or []
        for handle in handles:
            handle.remove()
        outputs = []
        for micro_batch, answer in zip(mine, answers, strict=bool(answers)):
            flat = (answer.log_probs, answer.entropy) if isinstance(answer, PolicyOutputs) else (answer.values,)
            outputs += zip(*(micro_batch.split(values) for values in flat), strict=True)
        options = OutputOptions() if setup.value_head else OutputOptions(TEMPERATURE, with_entropy=True)
        metrics = built.forward_backward(mine, value_loss if setup.value_head else policy_loss, options)
        params = built.weights.parameters()
        grads = {n: p.main_grad.clone() if p.requires_grad else torch.zeros_like(p) for n, p in params.items()}
        return Study(outputs, [torch.cat(parts) for parts in routing.values()], grads, metrics)
