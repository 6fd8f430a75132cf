"""Rules for roles with a Megatron model: `actor_rollout_ref.{actor,ref,model}`, `critic` and `reward.model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.config.checks.transformer_fields import KEYS_OF_SECTION
from megarl.config.verl.rules import Feature, NoEffect, Only, OtherBackend, Refused, Renamed, Rule, Values

_ACTOR, _REF, _CRITIC, _REWARD = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward.model"
MICRO_BATCH_KEYS = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")
_PACKED = "megarl always packs sequences, without padding"
_EXACT = "megarl always computes log-probs and entropy on chunks of 256 MiB of float32 logits"
_PER_GPU = "counts samples over all ranks; give {}, per data-parallel rank"
_ADAM = (
    "the optimizer is Adam; Megatron-Core's Muon needs the package emerging_optimizers, and trains without the "
    "distributed optimizer"
)
_FLOAT32 = "the optimizer state is float32, as in Megatron with this key and default dtypes"
_SEEDS = "every rank draws from trainer.seed"
_MERGED = "weights are merged while they are sent to the engine"
_ACTOR_REPLAYS = "only the actor's update replays routes: set actor_rollout_ref.actor.router_replay.mode"
_NO_FILES = "routes travel with the samples, not through files"


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    """One rule for several keys, separated by spaces."""
    return dict.fromkeys(names.split(), rule)


_STRATEGY = Only(("megatron",), "megarl trains with Megatron; set the layout in `megatron`")
_ULYSSES = Only((1,), "concerns FSDP; nearest: megatron.context_parallel_size")
_BACKENDS: dict[str, Rule] = {
    "ulysses_sequence_parallel_size": _ULYSSES,
    "fsdp_config.*": OtherBackend("FSDP", "the layout is in `megatron`"),
    "veomni.*": OtherBackend("VeOmni", "the layout is in `megatron`"),
}
_EXACT_ENTROPY = _each("entropy_from_logits_with_chunking entropy_from_logits_chunk_size", NoEffect(_EXACT))
_NO_QAT = Feature(
    "{}.qat.enable", (False,), "megarl has no quantization-aware training; rollout.dtype is the engine's format"
)

_MEGATRON: dict[str, Rule] = {
    **_each("use_mbridge vanilla_mbridge", NoEffect("megarl's weight maps always read the Hugging Face folder")),
    "use_dist_checkpointing": Only(
        (False,),
        "set actor_rollout_ref.model.path; `megarl convert` makes a Hugging Face folder from a checkpoint",
    ),
    "dist_checkpointing_path": Feature(
        "{}.use_dist_checkpointing", (False,), "megarl reads weights from actor_rollout_ref.model.path"
    ),
    "dist_checkpointing_prefix": NoEffect("megarl reads weights from actor_rollout_ref.model.path"),
    **_each(
        "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient",
        NoEffect("megarl reads its checkpoints in any layout"),
    ),
    **_each("use_remove_padding pad_bshd_to_minibatch_max pad_to_length_bucket", NoEffect(_PACKED)),
    "pad_to_length": Only((False,), _PACKED),
    "use_megatron_fsdp": Only((False,), "use_distributed_optimizer shards the optimizer state instead"),
    "forward_only": NoEffect("the role decides whether it trains"),
    "seed": NoEffect(_SEEDS),
    "dynamic_context_parallel": Only((False,), "context_parallel_size is the same for every micro-batch"),
    "max_seqlen_per_dp_cp_rank": Only((), "belongs to dynamic_context_parallel, which megarl lacks; remove the key"),
    **_EXACT_ENTROPY,
    **{
        f"override_ddp_config.{name}": Renamed(f"{{}}.{name}")
        for name in ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
    },
    "override_ddp_config.grad_reduce_in_fp32": Only((True,), "megarl always sums gradients in float32"),
    "override_ddp_config.average_in_collective": Only(
        (False,), "losses are divided by counts over the whole mini-batch, so gradients are summed"
    ),
    "override_ddp_config.*": Refused(
        "set overlap_grad_reduce, overlap_param_gather and use_distributed_optimizer of `megatron` for "
        "Megatron's data parallelism"
    ),
    "override_mcore_model_config.*": Refused(
        "the model comes from its family's declaration in megarl/models/families; override_transformer_config sets "
        "how it is computed"
    ),
    "router_replay.*": Feature("{}.router_replay.mode", ("disabled",), _ACTOR_REPLAYS),
    "qat.*": _NO_QAT,
}

_OPTIM: dict[str, Rule] = {
    "optimizer": Only(("adam",), _ADAM),
    "lr_warmup_init": Only((0.0,), "warm-up begins at 0"),
    "lr_decay_steps": Renamed("{}.total_training_steps", why="including the warm-up steps"),
    "weight_decay_incr_style": Only(("constant",), "weight decay is constant"),
    "use_checkpoint_opt_param_scheduler": NoEffect(
        "the schedule comes from the configuration, its position from the checkpoint"
    ),
    "use_layer_wise_distributed_optimizer": Only((False,), "see megatron.use_distributed_optimizer"),
    "use_precision_aware_optimizer": NoEffect(_FLOAT32),
    "main_grads_dtype": Only(("fp32",), "megarl sums gradients in float32"),
    **_each("exp_avg_dtype exp_avg_sq_dtype", Only(("fp32",), "the optimizer state is float32")),
    "muon_*": Feature("{}.optimizer", ("adam",), _ADAM),
    "override_optimizer_config.optimizer_offload_fraction": NoEffect("the optimizer offloads all of its state or none"),
    "override_optimizer_config.overlap_cpu_optimizer_d2h_h2d": NoEffect("no optimizer step runs on the host"),
    "override_optimizer_config.use_precision_aware_optimizer": NoEffect(_FLOAT32),
    "override_optimizer_config.*": Refused("Adam's settings are the keys of this section, such as betas and eps"),
}

_CPU_OFFLOAD = "override_optimizer_config.optimizer_cpu_offload"
_OFFLOADED = "the state is in host memory between updates and on the device during an update"

_MODEL: dict[str, Rule] = {
    "use_shm": NoEffect("each rank reads its slices of the files through the page cache"),
    "trust_remote_code": NoEffect(
        "megarl never runs code of a model folder; external_lib names a file that declares its family"
    ),
    "hf_config_path": Refused("the configuration is read from the model's folder"),
    "override_config.*": Refused("edit config.json in the model's folder"),
    "custom_chat_template": Refused("put the template into the tokenizer's folder as chat_template.jinja"),
    "enable_gradient_checkpointing": NoEffect("concerns FSDP; for Megatron set megatron.recompute_granularity"),
    "enable_activation_offload": Only((False,), "nearest: megatron.recompute_granularity"),
    "use_remove_padding": NoEffect(_PACKED),
    **_each("use_fused_kernels fused_kernel_options.*", NoEffect(_EXACT)),
    "use_liger": Only((False,), "its kernels are for FSDP; megarl uses Transformer Engine's kernels if installed"),
    "tiled_mlp.*": Feature("{}.tiled_mlp.enabled", (False,), "nearest: megatron.recompute_modules=[mlp]"),
    "mtp.*": Feature(
        "{}.mtp.enable", (False,), "megarl neither loads nor trains the layers of multi-token prediction (MTP)"
    ),
}

_LORA: dict[str, Rule] = {
    "lora.rank": Renamed("{}.lora_rank"),
    **{
        f"lora.{name}": Renamed("{}." + to, switch="{}.lora.rank", off=(0,))
        for name, to in {
            "alpha": "lora_alpha",
            "target_modules": "target_modules",
            "exclude_modules": "exclude_modules",
            "adapter_path": "lora_adapter_path",
        }.items()
    },
    **_each("lora.merge lora.fully_sharded_loras", NoEffect(_MERGED)),
    "lora.dropout": Only((0.0,), "adapters have no dropout: the log-probs of a policy must not be random"),
    "lora.dropout_position": NoEffect("adapters have no dropout"),
    "lora.lora_B_init_method": Only(("zero",), "B starts at zero, so that the first policy is the base model"),
    "lora.a2a_experimental": Only((False,), "the token dispatcher is all-to-all"),
    "lora.dtype": Refused("adapters have the weights' number format, megatron.dtype, and float32 optimizer state"),
    "lora.freeze_language_model": Only((True,), "with adapters the decoder's own weights stay frozen"),
}
_MODEL |= _LORA

ADAPTER_KIND = Values(meanings={"canonical_lora": "lora", "vlm_lora": "lora"})
"""verl's values of `lora.type`: each Hugging Face tensor always has an A and a B, also in Megatron's fused layers.

The keys `lora.freeze_vision_*`, which verl reads with `vlm_lora`, hold for all kinds.
"""

OPTIM_MEANINGS: Mapping[str, Mapping[Any, Any]] = {
    "lr_warmup_steps": {None: -1},
    "total_training_steps": {-1: None},
    "lr_wsd_decay_steps": {None: -1},
}
"""megarl's value by verl's for keys of an optimizer."""

_UPDATE: dict[str, Rule] = {
    "ppo_micro_batch_size": Refused(_PER_GPU.format("micro_batch_size_per_gpu")),
    "ppo_micro_batch_size_per_gpu": Renamed("{}.micro_batch_size_per_gpu"),
    "ppo_max_token_len_per_gpu": Renamed("{}.max_token_len_per_gpu"),
    "strategy": _STRATEGY,
    "data_loader_seed": NoEffect("shuffling draws from trainer.seed"),
    "grad_clip": Renamed("{}.optim.clip_grad"),
    **_BACKENDS,
    "checkpoint.strict": NoEffect("every weight must be there exactly once"),
    "checkpoint.mbridge_config.*": NoEffect("megarl's weight maps write Hugging Face folders"),
    "use_torch_compile": NoEffect("megarl compiles nothing"),
    "use_fused_kernels": NoEffect(_EXACT),
    "rollout_n": Refused("set actor_rollout_ref.rollout.n"),
}

_ACTOR_ONLY: dict[str, Rule] = {
    "model_engine": Only(("megatron",), "megarl trains with Megatron"),
    "calculate_entropy": NoEffect("megarl always computes the entropy"),
    **_EXACT_ENTROPY,
    "qat.*": _NO_QAT,
    **_each("router_replay.record_file router_replay.replay_file", Only((), _NO_FILES)),
    "policy_loss.dro_beta": Refused("megarl has no DRO loss; see policy_loss.loss_mode"),
}

_REF_ONLY: dict[str, Rule] = {
    "strategy": _STRATEGY,
    "log_prob_micro_batch_size": Refused(_PER_GPU.format("micro_batch_size_per_gpu")),
    **{f"log_prob_{name}": Renamed(f"{{}}.{name}") for name in MICRO_BATCH_KEYS},
    "use_torch_compile": NoEffect("megarl compiles nothing"),
    "rollout_n": Refused("set actor_rollout_ref.rollout.n"),
    **_EXACT_ENTROPY,
    "router_replay.*": Feature("{}.router_replay.mode", ("disabled",), _ACTOR_REPLAYS),
    **_BACKENDS,
}

_CRITIC_ONLY: dict[str, Rule] = {
    "shuffle": Renamed("actor_rollout_ref.actor.shuffle", why="actor and critic have the same mini-batches"),
    "loss_scale_factor": Refused("seq-mean-token-sum-norm divides by data.max_response_length"),
    "forward_max_token_len_per_gpu": NoEffect("max_token_len_per_gpu limits the forward pass for values"),
    "nccl_timeout": Renamed("trainer.nccl_timeout", why="for all roles"),
    "model.tokenizer_path": NoEffect("the critic reads the token ids of the actor's tokenizer"),
    "model.fsdp_config.*": OtherBackend("FSDP", "the layout is in critic.megatron"),
}

_REWARD_ONLY: dict[str, Rule] = {
    "strategy": _STRATEGY,
    "micro_batch_size": Refused(_PER_GPU.format("micro_batch_size_per_gpu")),
    "nccl_timeout": Renamed("trainer.nccl_timeout", why="for all roles"),
    "load_weight": Only((True,), "a model without its weights scores nothing"),
    "ulysses_sequence_parallel_size": _ULYSSES,
    "trust_remote_code": NoEffect("megarl never runs code of a model folder"),
    "use_shm": NoEffect("each rank reads its slices of the files through the page cache"),
    "use_remove_padding": NoEffect(_PACKED),
    "use_fused_kernels": NoEffect(_EXACT),
    "fsdp_config.*": OtherBackend("FSDP", "the layout is in reward.model.megatron"),
    "profiler.*": Feature("{}.profiler.enable", (False,), "the run's report shows the time of every phase"),
}


_MEGATRON_SECTIONS = tuple(f"{role}.megatron" for role in (_ACTOR, _REF, _CRITIC, _REWARD))

_SPARSE = "megarl has no model families with sparse attention (DSA)"
_KERNELS = "megarl uses fused kernels if Transformer Engine is installed"
_MINDSPEED = "concerns Ascend NPUs (MindSpeed) only; remove the key"

_TRANSFORMER: dict[str, Rule] = {
    "normalization": Only(("RMSNorm",), "the model family sets it"),
    "swiglu": Only((True,), "the model family sets it"),
    "moe_router_dtype": Only(("fp32",), "the router computes in float32"),
    "moe_router_enable_expert_bias": Only((True,), "the router keeps the bias of the checkpoint, if there is one"),
    **_each(
        "moe_router_topk_scaling_factor moe_router_score_function moe_router_num_groups moe_router_group_topk",
        Refused("the model family defines the router"),
    ),
    **_each("moe_token_dispatcher_type moe_enable_deepep", NoEffect("the token dispatcher is all-to-all")),
    "moe_aux_loss_coeff": NoEffect(
        "verl's models balance nothing unless moe_router_load_balancing_type is set", "moe_router_load_balancing_type"
    ),
    "moe_grouped_gemm": Only((True,), "one kernel computes the experts if Transformer Engine is installed"),
    "masked_softmax_fusion": NoEffect("attention kernels include mask and softmax"),
    "persist_layer_norm": NoEffect("it concerns LayerNorm, and the norm is RMSNorm"),
    "attention_softmax_in_fp32": Only((True,), "attention computes its softmax in float32"),
    "moe_expert_capacity_factor": Refused("every token reaches all of its experts"),
    "multi_latent_attention": Only((True,), "the model family sets it"),
    "mtp_num_layers": Only((0,), "megarl does not train the layers of multi-token prediction (MTP)"),
    "mtp_loss_scaling_factor": Refused("megarl does not train the layers of multi-token prediction (MTP)"),
    "pipeline_model_parallel_layout": Refused(
        "give num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage of `megatron`"
    ),
    "bf16": Refused("set megatron.dtype"),
    "fp16": Refused("set megatron.dtype to bfloat16"),
    "variable_seq_lengths": Only((True,), "micro-batches differ in their numbers of tokens"),
    "calculate_per_token_loss": Only((True,), "losses are divided by counts over the whole mini-batch"),
    "use_flash_attn": Only((True,), f"{_KERNELS}; attention_backend selects one for attention"),
    **_each("use_fused_rmsnorm use_fused_swiglu", Only((True,), _KERNELS)),
    "use_fused_mhc": Only((False,), "megarl has no model families with hyper-connections (mHC)"),
    **_each("use_naive_l2norm context_parallel_algo", Refused(_MINDSPEED)),
    "apply_dsa_kernel_fusion": Refused(_SPARSE),
    "dsa_indexer_loss_coeff": Only((0,), _SPARSE),
    "dsa_indexer_use_sparse_loss": Feature("{}.dsa_indexer_loss_coeff", (0,), _SPARSE),
    "dsa_*": Refused(_SPARSE),
}


def _below(prefix: str, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules with full paths; ``{}`` in the key that a rule names becomes the section's path."""
    placed: dict[str, Rule] = {}
    for name, rule in rules.items():
        if isinstance(rule, Renamed):
            rule = replace(rule, to=rule.to.format(prefix), switch=rule.switch.format(prefix))
        elif isinstance(rule, Feature):
            rule = Feature(rule.switch.format(prefix), rule.off, rule.why)
        placed[f"{prefix}.{name}"] = rule
    return placed


def role_rules() -> dict[str, Rule]:
    """Return the rules of all roles by path; ``*`` at the end matches any rest."""
    rules = _below(_ACTOR, _UPDATE | _ACTOR_ONLY) | _below(_REF, _REF_ONLY) | _below(_CRITIC, _UPDATE | _CRITIC_ONLY)
    rules |= _below(_REWARD, _REWARD_ONLY)
    for role in (_ACTOR, _REF, _CRITIC, _REWARD):
        rules |= _below(f"{role}.megatron", _MEGATRON)
    replay = f"{_ACTOR}.megatron.router_replay"
    del rules[f"{replay}.*"]
    rules |= {f"{replay}.mode": Renamed(f"{_ACTOR}.router_replay.mode")}
    rules |= {f"{replay}.{name}": Only((), _NO_FILES) for name in ("record_file", "replay_file")}
    for role in (_ACTOR, _CRITIC):
        rules |= _below(f"{role}.optim", _OPTIM)
        rules[f"{role}.optim.{_CPU_OFFLOAD}"] = Renamed(f"{role}.megatron.optimizer_offload", why=_OFFLOADED)
    for model in ("actor_rollout_ref.model", "critic.model"):
        rules |= _below(model, _MODEL)
    for model in ("critic.model", _REWARD):
        imported = Renamed("actor_rollout_ref.model.external_lib", left_out=(None,), why="all processes import it")
        rules |= _below(model, {"external_lib": imported})
    return rules | _transformer_rules()


def supervised_role_rules() -> dict[str, Rule]:
    """Return the rules of a supervised job's model, engine and optimizer by path."""
    rules = _below("megatron", _MEGATRON) | _below("optim", _OPTIM) | _below("model", _MODEL)
    rules[f"optim.{_CPU_OFFLOAD}"] = Renamed("megatron.optimizer_offload", why=_OFFLOADED)
    return rules | _transformer_rules(("megatron",))


def _transformer_rules(sections: tuple[str, ...] = _MEGATRON_SECTIONS) -> dict[str, Rule]:
    """Rules for the fields of `megatron.override_transformer_config`, of all roles by path."""
    rules: dict[str, Rule] = {}
    for section in sections:
        path = f"{section}.override_transformer_config"
        names = (*KEYS_OF_SECTION.split(), "use_distributed_optimizer")
        rules |= {f"{path}.{name}": Renamed(f"{section}.{name}") for name in names} | _below(path, _TRANSFORMER)
    return rules
