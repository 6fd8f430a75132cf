"""Engines whose memory is predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_cases import Setup
from family_cases import EXPERTS, LATENTS, LINEAR
from tiny_models import Row, rows_of

from megarl.config import MegatronConfig
from megarl.megatron import OptimizerOptions, OverlapOptions, RecomputeOptions
from megarl.models import ParallelLayout, read_model_config
from megarl.models.adapters import LoraOptions
from megarl.ops.plan.job import PlannedPass, PlannedRole
from megarl.ops.plan.pass_activations import FLOAT32, INT64, end_bytes, kept_by_layers, padded_vocab, tokens_on_rank
from megarl.ops.plan.states import RankStates, StateCounter

WIDE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"family": "qwen2", **WIDE},
    "tied": {"family": "qwen2", "tied": True, **WIDE},
    "qk_norm": {"family": "qwen3", **WIDE},
    "critic": {"family": "qwen2", "critic": True, **WIDE},
    "output_norms": {"family": "olmo2", **WIDE},
    "window": {"family": "olmo3", "sliding_window": 16, **WIDE},
    "all_norms": {"family": "gemma3_text", "tied": True, "head_dim": 16, "sliding_window": 16, **WIDE},
    "experts": {"family": "qwen3_moe", "num_experts": 4, "norm_topk_prob": True, **WIDE, **EXPERTS},
    "sinks": {
        "family": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        **WIDE,
        "intermediate_size": 48,
    },
    "linear": {"family": "qwen3_5_text", "full_attention_interval": 2, **WIDE, **LINEAR},
    "latent": {"family": "deepseek_v3", "n_group": 2, "topk_group": 1, "n_shared_experts": 1, **WIDE, **LATENTS},
}
ROWS = rows_of([(20, 44)] * 8)
"""Sequences of one length, so that all micro-batches are equal."""


class Case(NamedTuple):
    """An engine with two rows per micro-batch."""

    model: str
    setup: Setup


def _case(model: str, recompute: RecomputeOptions | None = None, **others: Any) -> Case:
    layout = {name: others.pop(name) for name in list(others) if name in ParallelLayout._fields}
    distributed = others.pop("distributed", True)
    adam = OptimizerOptions(lr=1e-3, use_distributed_optimizer=distributed)
    setup = Setup(ParallelLayout(**layout), optimizer=adam, recompute=recompute, rows_per_micro_batch=2, **others)
    return Case(model, setup)


CASES = {
    "one": _case("dense"),
    "one_bfloat16": _case("dense", dtype=torch.bfloat16),
    "one_bfloat16_plain_optimizer": _case("dense", dtype=torch.bfloat16, distributed=False),
    "qk_norm": _case("qk_norm"),
    "tp2_sequence_parallel": _case("dense", tp=2, sequence_parallel=True),
    "pp2_tied": _case("tied", pp=2, dtype=torch.bfloat16),
    "pp2vpp2": _case("dense", pp=2, vpp=2),
    "pp2_uneven": _case("dense", pp=2, first_stage_layers=3),
    "cp2": _case("dense", cp=2),
    "dp2_bfloat16": _case("dense", dp=2, dtype=torch.bfloat16),
    "dp2_plain_optimizer": _case("dense", dp=2, distributed=False),
    "dp2_overlap": _case("dense", dp=2, overlap=OverlapOptions(grad_reduce=True, param_gather=True)),
    "full_uniform_two": _case("dense", RecomputeOptions(num_layers=2)),
    "full_block": _case("dense", RecomputeOptions(method="block", num_layers=2)),
    "selective_attention": _case("dense", RecomputeOptions("selective")),
    "selective_mlp_norms": _case("dense", RecomputeOptions("selective", modules=("core_attn", "mlp", "layernorm"))),
    "critic": _case("critic", value_head=True),
    "experts": _case("experts"),
    "experts_bfloat16": _case("experts", dtype=torch.bfloat16),
    "experts_ep2": _case("experts", ep=2, dp=2),
    "experts_tp2_etp1_ep2": _case("experts", tp=2, etp=1, ep=2, sequence_parallel=True, dtype=torch.bfloat16),
    "experts_recomputed": _case("experts", RecomputeOptions("selective", modules=("moe",))),
    "sinks": _case("sinks"),
    "sinks_bfloat16_ep2": _case("sinks", ep=2, dp=2, dtype=torch.bfloat16),
    "sinks_tp2_etp1": _case("sinks", tp=2, etp=1, sequence_parallel=True),
    "sinks_cp2": _case("sinks", cp=2),
    "sinks_core_attention": _case("sinks", RecomputeOptions("selective")),
    "latent": _case("latent"),
    "linear": _case("linear"),
    "linear_bfloat16": _case("linear", dtype=torch.bfloat16),
    "linear_tp2": _case("linear", tp=2, sequence_parallel=True),
    "linear_core_attention": _case("linear", RecomputeOptions("selective")),
    "output_norms": _case("output_norms"),
    "output_norms_tp2": _case("output_norms", tp=2, sequence_parallel=True),
    "output_norms_cp2": _case("output_norms", cp=2),
    "output_norms_core_attention": _case("output_norms", RecomputeOptions("selective")),
    "window": _case("window"),
    "all_norms": _case("all_norms"),
    "window_cp2": _case("window", cp=2),
    "adapters_tp2_bfloat16": _case("dense", tp=2, dtype=torch.bfloat16, lora=LoraOptions(4, 8.0)),
    "adapters_critic_dp2": _case("critic", dp=2, value_head=True, lora=LoraOptions(4, 8.0)),
    "dora_tp2_bfloat16": _case("dense", tp=2, dtype=torch.bfloat16, lora=LoraOptions(4, 8.0, kind="dora")),
    "dora_experts_ep2": _case("experts", ep=2, dp=2, lora=LoraOptions(4, 8.0, kind="dora")),
    "latent_tp2": _case("latent", tp=2, sequence_parallel=True),
}


class Expected(NamedTuple):
    """Planned bytes of one rank, as :class:`engine_memory.Measured`."""

    parameters: int
    weights: int
    gradients: int
    main_weights: int
    moments: int
    saved: int


def planned_role(path: Path, setup: Setup) -> PlannedRole:
    layout, recompute = setup.layout, setup.recompute
    assert setup.optimizer is not None
    megatron = MegatronConfig(
        sequence_parallel=setup.sequence_parallel,
        use_distributed_optimizer=setup.optimizer.use_distributed_optimizer,
        overlap_grad_reduce=setup.overlap.grad_reduce,
        overlap_param_gather=setup.overlap.param_gather,
        recompute_granularity=recompute.granularity if recompute else None,
        recompute_method=recompute.method if recompute else None,
        recompute_num_layers=recompute.num_layers if recompute else None,
        recompute_modules=list(recompute.modules) if recompute else [],
        dtype=str(setup.dtype).removeprefix("torch."),
    )
    model = read_model_config(path)
    return PlannedRole("actor", "megatron", model, layout, megatron, setup.value_head, True, (), lora=setup.lora)


def planned_pass(setup: Setup, rows: list[Row], updates: bool = True) -> PlannedPass:
    """Return the planned pass of equal micro-batches of the rows."""
    count = setup.rows_per_micro_batch
    tokens = sum(len(row.prompt) + len(row.response) for row in rows[:count])
    outputs = sum(len(row.response) for row in rows[:count])
    number = len(rows) // setup.layout.dp // count
    return PlannedPass("update", updates, tokens, outputs, number, 1, len(rows), True, longest=tokens // count)


def saved_bytes(role: PlannedRole, planned: PlannedPass, stage: int) -> int:
    """Return the bytes that autograd keeps alive at the peak of a CPU update of equal lengths."""
    tokens = tokens_on_rank(role, planned)._replace(mixed_lengths=False)
    layers, recomputed = kept_by_layers(role, tokens, stage, planned.micro_batches, fused=False)
    last = stage == role.layout.pp - 1 and not role.value_head
    per_target = INT64 + 1 + 7 * FLOAT32  # target column, its rank, and the results of the forward
    per_output = padded_vocab(role) // role.layout.tp * role.dtype_bytes + per_target
    return layers + max(end_bytes(role, tokens, stage) + (tokens.outputs * per_output if last else 0), recomputed)


def expected(path: Path, setup: Setup, rows: list[Row], rank: int) -> Expected:
    role, planned = planned_role(path, setup), planned_pass(setup, rows)
    states: RankStates = StateCounter(role).of(rank)
    saved = saved_bytes(role, planned, setup.layout.coordinate(rank).pp)
    return Expected(states.parameters, states.weights, states.gradients, states.main_weights, states.moments, saved)
