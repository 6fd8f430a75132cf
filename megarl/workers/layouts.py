"""From a role's configuration to its layout, and whether the role's model fits; imports no torch."""

from __future__ import annotations

import math

from megarl.config import MegatronConfig
from megarl.errors import ConfigError
from megarl.models import ModelConfig, ParallelLayout, check_layout


def layout_of(megatron: MegatronConfig) -> ParallelLayout:
    """The layout of a role whose sizes are complete."""
    return ParallelLayout(
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        dp=megatron.data_parallel_size or 1,
        cp=megatron.context_parallel_size,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size or 0,
        vpp=megatron.virtual_pipeline_model_parallel_size or 1,
        first_stage_layers=megatron.num_layers_in_first_pipeline_stage,
        last_stage_layers=megatron.num_layers_in_last_pipeline_stage,
        embedding_as_layer=megatron.account_for_embedding_in_pipeline_split,
        loss_as_layer=megatron.account_for_loss_in_pipeline_split,
    )


def check_role(model: ModelConfig, megatron: MegatronConfig, field: str) -> None:
    """Checks a role's layout and what it is to compute again against the model that it will hold.

    Args:
        model: the model.
        megatron: the role's configuration, its sizes complete.
        field: the configuration's key, such as ``actor_rollout_ref.actor.megatron``.

    Raises:
        ConfigError: names the key, its value and the valid choices.
    """
    layout = layout_of(megatron)
    check_layout(model, layout, field)
    if megatron.recompute_granularity == "full":
        _check_groups(model.num_layers, layout, megatron, field)
    elif megatron.recompute_granularity == "selective":
        _check_modules(model, megatron, field)


def _check_groups(num_layers: int, layout: ParallelLayout, megatron: MegatronConfig, field: str) -> None:
    chunks, group = layout.chunk_sizes(num_layers), megatron.recompute_num_layers or 1
    common = math.gcd(*chunks)
    if megatron.recompute_method != "block" and common % group:
        valid = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ConfigError(
            f"{field}.recompute_num_layers={group} must divide the layers of each pipeline chunk, "
            f"{sorted(set(chunks))}; valid for this layout: {valid}"
        )


def _check_modules(model: ModelConfig, megatron: MegatronConfig, field: str) -> None:
    absent: set[str] = set()
    if model.experts is None:
        absent |= {"moe", "moe_act"}
    elif all(model.experts.layers):
        absent |= {"mlp"}
    if model.latent is None:
        absent |= {"mla_up_proj"}
    wrong = [name for name in megatron.recompute_modules if name in absent]
    if wrong:
        known = ("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj")
        valid = ", ".join(name for name in known if name not in absent)
        raise ConfigError(
            f"{field}.recompute_modules={wrong}, but {model.architecture} has none; valid for this model: {valid}"
        )
