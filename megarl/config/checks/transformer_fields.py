"""Check `megatron.override_transformer_config` against the installed Megatron-Core's ``TransformerConfig``.

The tables classify every field of Megatron-Core 0.16 and 0.19: supported, owned by megarl, or rejected. A test fails if
the installed release has another field. Names, types and defaults of the installed release are read from its source:
importing Megatron takes seconds and needs GPU libraries, and a misspelt name should be an error at once.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.problems import Problem, format_value

SUPPORTED = frozenset(
    {
        "apply_rope_fusion",
        "attention_backend",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "clone_scatter_output_in_embedding",
        "deallocate_pipeline_outputs",
        "disable_bf16_reduced_precision_matmul",
        "gradient_accumulation_fusion",
        "moe_aux_loss_coeff",
        "moe_permute_fusion",
        "moe_router_bias_update_rate",
        "moe_router_load_balancing_type",
        "moe_z_loss_coeff",
        "overlap_p2p_comm",
    }
)
"""Fields that the user may set, each with a test."""
BALANCE_RATES = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate")
"""Supported fields that balance experts: numbers of at least 0."""
BALANCING_TYPES = ("none", "seq_aux_loss")
"""Values of `moe_router_load_balancing_type`."""

_MODEL = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels qk_layernorm add_qkv_bias
    add_bias_linear normalization layernorm_epsilon gated_linear_unit activation_func softmax_scale num_moe_experts
    moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk
    moe_router_pre_softmax multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    rope_type rotary_base rotary_percent rotary_interleaved rotary_scaling_factor original_max_position_embeddings
    max_position_embeddings mscale mscale_all_dim beta_fast beta_slow cache_mla_latents
    moe_router_score_function moe_router_num_groups moe_router_group_topk moe_router_topk_limited_devices
    moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_apply_probs_on_input moe_latent_size
    layernorm_zero_centered_gamma apply_residual_connection_post_layernorm glu_linear_offset softmax_type
    activation_func_clamp_value qk_l2_norm attention_output_gate window_size window_attn_skip_freq no_rope_freq
    mrope_section is_hybrid_model
"""
KEYS_OF_SECTION = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    sequence_parallel recompute_granularity recompute_method recompute_num_layers recompute_modules
"""
"""Fields that are keys of the section itself, separated by spaces."""


def _by_name(reasons: dict[str, str]) -> dict[str, str]:
    """Reason of each field, from the fields of each reason."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}


OWNED: dict[str, str] = {
    **{name: f"is the key {name} of this section" for name in KEYS_OF_SECTION.split()},
    **_by_name(
        {
            "the model's config.json sets it": _MODEL,
            "is num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage": (
                "pipeline_model_parallel_layout"
            ),
            "is the key dtype of this section": "params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype",
            "weights are read from the model's folder": """
                init_method output_layer_init_method embedding_init_method init_method_std embedding_init_method_std
                perform_initialization use_cpu_initialization init_model_with_meta_device
            """,
            "losses are divided by counts over the whole mini-batch": "calculate_per_token_loss",
            "micro-batches differ in their numbers of tokens": """
                variable_seq_lengths cuda_graph_scope cuda_graph_modules cuda_graph_impl enable_cuda_graph
                external_cuda_graph cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
                cuda_graph_warmup_steps
            """,
            "the token dispatcher is all-to-all": """
                moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
                moe_deepep_num_sms moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
                moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_permute_fusion_into_hybridep
                moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape moe_ncclep_zero_copy
            """,
            "dropout is off: log-probs must be equal in every pass": "hidden_dropout attention_dropout",
            "attention computes its softmax in float32": "attention_softmax_in_fp32",
            "the router computes in float32": "moe_router_dtype",
            "the router selects the experts with the highest scores": """
                moe_router_quantile_balancing_ema moe_router_force_load_balancing moe_router_force_biased
                moe_input_jitter_eps
            """,
            "every token reaches all of its experts": """
                moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_token_dropping
                moe_expert_rank_capacity_factor
            """,
            "megarl uses Transformer Engine's layers if it can, else torch's": """
                transformer_impl use_te_activation_func moe_grouped_gemm moe_use_legacy_grouped_gemm
                use_transformer_engine_op_fuser
            """,
            "megarl sets it while it runs": """
                timers finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func no_sync_func
                grad_sync_func param_sync_func experimental_attention_variant_loss_scale_func _cpu_offloading_context
            """,
            "a batch of messages would mix up the two directions between two stages": "batch_p2p_comm batch_p2p_sync",
            "the interleaved schedule takes as many micro-batches at a time as there are stages": (
                "microbatch_group_size_per_vp_stage"
            ),
        }
    ),
}
"""Fields that megarl sets from another source, by name, with that source."""

REJECTED: dict[str, str] = _by_name(
    {
        "megarl trains in float32 or bfloat16 (key dtype) and does not pad micro-batches, as FP8 and FP4 need": """
            fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
            fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention fp8_output_proj
            tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
            activation_func_fp8_input_store moe_router_padding_for_fp8 moe_router_padding_for_quantization fp4
            fp4_recipe fp4_param fp4_quantizer_factory quant_recipe use_kitchen use_kitchen_attention
            kitchen_attention_backend disable_parameter_transpose_cache
        """,
        "set router_replay.mode of the actor": "moe_enable_routing_replay",
        "megarl's router replaces Megatron's": "moe_router_fusion moe_per_layer_logging",
        "megarl has no such model family": """
            apply_query_key_layer_scaling use_fused_weighted_squared_relu
            experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
            dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_indexer_topk_freq dsa_indexer_skip_topk_offset
            dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
            dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 linear_attention_freq linear_conv_kernel_dim
            linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads mamba_state_dim
            mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path mamba_training_ssm_states_dtype
            heterogeneous_block_specs hetereogenous_dist_checkpoint use_mup mup_width_mult mup_base_hidden_size
            mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power
        """,
        "megarl does not train the layers of multi-token prediction (MTP)": """
            mtp_num_layers mtp_loss_scaling_factor mtp_standalone mtp_use_repeated_layer mtp_detach_heads
            mtp_hybrid_override_pattern
        """,
        "megarl does not clip attention logits": "qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit",
        "the residual stream has the key dtype's format, as in the engine": "fp32_residual_connection",
        "it concerns kernels that megarl does not use": """
            masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm cross_entropy_loss_fusion
            cross_entropy_fusion_impl fused_residual_rmsnorm
        """,
        "megarl has no setup or test of it; recompute_granularity and the offload keys of this section save memory": """
            cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
            cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers fine_grained_activation_offloading
            offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
            activation_offload_fraction fine_grained_offloading_max_inflight_offloads moe_paged_stash
            moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu
            distribute_saved_activations moe_layer_recompute num_microbatches_with_partial_activation_checkpoints
            mlp_chunks_for_training
        """,
        "megarl has no setup or test of this overlap of communication and computation": """
            tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
            tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
            tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
            overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
            overlap_dispatch_backward_with_experts_wgrad high_priority_a2a_comm_stream moe_shared_expert_overlap
            defer_embedding_wgrad_compute wgrad_deferral_limit overlap_p2p_comm_warmup_flush
            async_tensor_model_parallel_allreduce
        """,
        "megarl has no setup or test of this division of a model": """
            tensor_parallel_num_weight_shards gtp_weight_remat_size expert_tensor_parallel_num_weight_shards
            expert_gtp_weight_remat_size hierarchical_context_parallel_sizes hybrid_context_parallel
            max_seqlen_per_dp_cp_rank cp_comm_type moe_extended_tp
        """,
        "megarl has no setup or test of this communication": """
            pipeline_model_parallel_comm_backend use_ring_exchange_p2p nccl_all_reduce_for_prefill symmetric_ar_type
        """,
        "megarl has no test of this kernel; attention_backend selects one for attention": """
            flash_attention_version fused_single_qkv_rope moe_shared_expert_glu_interleave_size
            moe_mlp_glu_interleave_size use_grouped_gemm_for_shared_expert use_grouped_gemm_for_dense_mlp
            moe_single_grouped_weight moe_single_grouped_bias
        """,
        "the rollout engine generates, not Megatron": """
            flash_decode batch_invariant_mode inference_rng_tracker inference_sampling_seed
            use_inference_optimized_layers inference_fuse_tp_communication inference_cuda_graph_scope
            inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
            inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type mlp_chunks_for_prefill
            moe_pad_experts_for_cuda_graph_inference
        """,
        "megarl has no deterministic mode on GPUs": "deterministic_mode",
        "nothing is drawn at random: dropout is off": "use_te_rng_tracker",
        "megarl has its own timeline and records": "barrier_with_L1_time config_logger_dir test_mode",
    }
)
"""Fields that megarl does not support, by name, with the reason. Megatron's default is accepted."""

_BATCH_LOSS = "loss depends on the division into micro-batches; set seq_aux_loss"
REJECTED_VALUES = {
    "attention_backend": {"local": "is Megatron's own attention, which megarl does not use"},
    "moe_router_load_balancing_type": {
        "aux_loss": _BATCH_LOSS,
        "global_aux_loss": _BATCH_LOSS,
        "sinkhorn": "selects other experts than the model's family",
    },
}
"""Values of supported fields that megarl does not support, with the reason."""


_SOURCES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
)
_BALANCING = "moe_router_load_balancing_type"
_ENUMS, _BACKENDS = "transformer/enums.py", "AttnBackend"


class TransformerField(NamedTuple):
    """A field of Megatron-Core's ``TransformerConfig``, as written in its source."""

    annotation: ast.expr
    default: ast.expr | None  # None if the source has none


def override_problems(overrides: Mapping[str, Any], *, trains: bool = True) -> Iterator[Problem]:
    """Find fields that cannot be set, by path in the role's section; a role that does not train ignores losses."""
    fields = transformer_fields() if overrides else {}
    for name, value in overrides.items():
        path = f"override_transformer_config.{name}"
        if problem := _problem(name, path, value, fields):
            yield problem
        elif name == "moe_aux_loss_coeff" and trains and value and overrides.get(_BALANCING) != "seq_aux_loss":
            text = f"needs {_BALANCING}=seq_aux_loss"
            yield Problem(path, value, text, code="config.transformer-field-without-effect")


def _problem(name: str, path: str, value: Any, fields: Mapping[str, TransformerField]) -> Problem | None:
    if name in OWNED:
        return Problem(path, value, f"cannot be set: {OWNED[name]}", code="config.owned-transformer-field")
    if not fields:
        return None
    if name not in fields:
        near = difflib.get_close_matches(name, sorted(SUPPORTED & fields.keys()), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        text = f"the installed Megatron-Core's TransformerConfig has no such field{hint}"
        return Problem(path, value, text, code="config.unknown-transformer-field")
    field = fields[name]
    if name in SUPPORTED:
        reason = REJECTED_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
        fits, kind = _kind(name, field)
        text = f"cannot be {format_value(value)}: that {reason}" if reason else f"must be {kind}"
        is_wrong = reason or not fits(value)
        return Problem(path, value, text, code="config.transformer-field-value") if is_wrong else None
    if _is_default(field, value):
        return None
    reason = REJECTED.get(name, "megarl does not know this field of the installed Megatron-Core; remove the key")
    return Problem(path, value, f"is not supported: {reason}", code="config.unsupported-transformer-field")


def _is_default(field: TransformerField, value: Any) -> bool:
    """Whether a value is Megatron's own, as far as the source spells it out."""
    default = field.default
    if isinstance(default, ast.Call):  # dataclasses.field(default=..., metadata=...)
        default = next((keyword.value for keyword in default.keywords if keyword.arg == "default"), None)
    return isinstance(default, ast.Constant) and type(default.value) is type(value) and default.value == value


@cache
def transformer_fields() -> dict[str, TransformerField]:
    """The fields by name; empty without Megatron-Core."""
    fields: dict[str, TransformerField] = {}
    for file, name in _SOURCES:
        fields |= {
            node.target.id: TransformerField(node.annotation, node.value)
            for node in _class_body(file, name)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    return fields


@cache
def attention_backends() -> tuple[str, ...]:
    """Names of Megatron's attention backends."""
    body = (node for node in _class_body(_ENUMS, _BACKENDS) if isinstance(node, ast.Assign))
    return tuple(target.id for node in body for target in node.targets if isinstance(target, ast.Name))


def _class_body(file: str, name: str) -> list[ast.stmt]:
    spec = importlib.util.find_spec("megatron")
    folders = (spec.submodule_search_locations or []) if spec else []
    for source in (Path(folder) / "core" / file for folder in folders):
        if source.is_file():
            tree = ast.parse(source.read_text(encoding="utf-8"))
            return next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return []


def _kind(name: str, field: TransformerField) -> tuple[Callable[[Any], bool], str]:
    """Return the check of a supported field's values, and their description."""
    if name in BALANCE_RATES:
        return lambda value: type(value) in (int, float) and value >= 0, "a number of at least 0"
    if name == _BALANCING:
        return BALANCING_TYPES.__contains__, f"one of {', '.join(BALANCING_TYPES)}"
    if (text := ast.unparse(field.annotation)) != _BACKENDS:
        return lambda value: isinstance(value, bool), text
    names = [name for name in attention_backends() if name not in REJECTED_VALUES["attention_backend"]]
    return attention_backends().__contains__, f"one of {', '.join(names)}"
