"""Rules for the roles with a Megatron model: `actor_rollout_ref.{actor,ref,model}` and `critic`."""

from __future__ import annotations

from megarl.config.verl.rules import Backend, Feature, NoEffect, Only, Refused, Renamed, Rule

_ACTOR, _REF, _CRITIC, _REWARD = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model"
_PACKED = "sequences are always packed, and padding is never computed"
_EXACT = "log-probs and entropy come from megarl's vocabulary-parallel kernel in any case"
_PER_GPU = "counts samples over all ranks; give {}, per data-parallel rank"
_FLOAT32 = "the optimizer's state is float32, as it is with this in Megatron, too, unless dtypes say otherwise"
_SEEDS = "every rank draws from trainer.seed"
_LORA = "LoRA is not here: all weights are trained; leave it out, or set rank 0"

_MEGATRON: dict[str, Rule] = {
    "use_mbridge": NoEffect("weights are always read from the Hugging Face folder, by megarl's own maps"),
    "vanilla_mbridge": NoEffect("weights are always read from the Hugging Face folder, by megarl's own maps"),
    "use_dist_checkpointing": Only(
        (False,),
        "weights are read from actor_rollout_ref.model.path; `megarl convert` makes that folder of a checkpoint",
    ),
    "dist_checkpointing_path": Feature(
        "{}.use_dist_checkpointing", (False,), "weights are read from actor_rollout_ref.model.path"
    ),
    "dist_checkpointing_prefix": NoEffect("weights are read from actor_rollout_ref.model.path"),
    "dist_ckpt_optim_fully_reshardable": NoEffect("a checkpoint of megarl's is read in any layout"),
    "distrib_optim_fully_reshardable_mem_efficient": NoEffect("a checkpoint of megarl's is read in any layout"),
    "use_remove_padding": NoEffect(_PACKED),
    "pad_bshd_to_minibatch_max": NoEffect(_PACKED),
    "pad_to_length": Only((False,), _PACKED),
    "pad_to_length_bucket": NoEffect(_PACKED),
    "use_megatron_fsdp": Only((False,), "optimizer state is sharded by use_distributed_optimizer instead"),
    "forward_only": NoEffect("the role says whether it learns"),
    "seed": NoEffect(_SEEDS),
    "dynamic_context_parallel": Only((False,), "context_parallel_size is the same for every micro-batch"),
    "max_seqlen_per_dp_cp_rank": Only((), "belongs to dynamic_context_parallel, which is not here; leave it out"),
    "entropy_from_logits_with_chunking": NoEffect(_EXACT),
    "entropy_from_logits_chunk_size": NoEffect(_EXACT),
    "override_ddp_config.overlap_grad_reduce": Renamed("{}.overlap_grad_reduce"),
    "override_ddp_config.overlap_param_gather": Renamed("{}.overlap_param_gather"),
    "override_ddp_config.use_distributed_optimizer": Renamed("{}.use_distributed_optimizer"),
    "override_ddp_config.grad_reduce_in_fp32": Only((True,), "gradients are always summed in float32"),
    "override_ddp_config.average_in_collective": Only(
        (False,), "losses are divided by counts over the whole mini-batch, so gradients are summed"
    ),
    "override_ddp_config.*": Refused(
        "of Megatron's data parallelism one sets overlap_grad_reduce, overlap_param_gather and "
        "use_distributed_optimizer, beside this"
    ),
    "override_mcore_model_config.*": Refused(
        "the model comes from its family's declaration in megarl/models/families; override_transformer_config sets "
        "how it is computed"
    ),
    "router_replay.*": Feature("{}.router_replay.mode", ("disabled",), "routing of the engine is not replayed"),
    "qat.*": Feature("{}.qat.enable", (False,), "there is no training for quantisation; rollout.dtype is the engine's"),
}

_OPTIM: dict[str, Rule] = {
    "optimizer": Only(("adam",), "the optimizer is Adam"),
    "lr_warmup_init": Only((0.0,), "warm-up begins at 0"),
    "lr_decay_steps": Renamed("{}.total_training_steps", why="the steps of warm-up are among them"),
    "weight_decay_incr_style": Only(("constant",), "weight decay is constant"),
    "use_checkpoint_opt_param_scheduler": NoEffect(
        "the schedule is the configuration's, its position the checkpoint's"
    ),
    "use_layer_wise_distributed_optimizer": Only((False,), "see megatron.use_distributed_optimizer"),
    "use_precision_aware_optimizer": NoEffect(_FLOAT32),
    "main_grads_dtype": Only(("fp32",), "gradients are summed in float32"),
    "exp_avg_dtype": Only(("fp32",), "the optimizer's state is float32"),
    "exp_avg_sq_dtype": Only(("fp32",), "the optimizer's state is float32"),
    "muon_*": Feature("{}.optimizer", ("adam",), "the optimizer is Adam"),
    "override_optimizer_config.optimizer_offload_fraction": NoEffect("all of the state is offloaded, or none"),
    "override_optimizer_config.overlap_cpu_optimizer_d2h_h2d": NoEffect("no step of the optimizer runs on the host"),
    "override_optimizer_config.use_precision_aware_optimizer": NoEffect(_FLOAT32),
    "override_optimizer_config.*": Refused("Adam's settings are the keys of this section, such as betas and eps"),
}

_OFFLOAD: dict[str, Rule] = {
    "optim.override_optimizer_config.optimizer_cpu_offload": Renamed(
        "{}.megatron.optimizer_offload",
        why="the state rests in host memory between updates, and is on the device during one",
    ),
}

_MODEL: dict[str, Rule] = {
    "use_shm": NoEffect("ranks read their own slices of the files, through the system's cache"),
    "trust_remote_code": NoEffect(
        "code of a model folder is never run; external_lib names a file that declares its family"
    ),
    "hf_config_path": Refused("the configuration is read from the model's folder"),
    "override_config.*": Refused("edit config.json in the model's folder"),
    "custom_chat_template": Refused("put it into the tokenizer's folder as chat_template.jinja"),
    "enable_gradient_checkpointing": NoEffect("is of FSDP: under Megatron, megatron.recompute_granularity says it"),
    "enable_activation_offload": Only((False,), "nearest: megatron.recompute_granularity"),
    "use_remove_padding": NoEffect(_PACKED),
    "use_fused_kernels": NoEffect(_EXACT),
    "fused_kernel_options.*": NoEffect(_EXACT),
    "use_liger": Only((False,), "its kernels are of FSDP; Transformer Engine's are used where they are installed"),
    "tiled_mlp.*": Feature("{}.tiled_mlp.enabled", (False,), "nearest: megatron.recompute_modules=[mlp]"),
    "lora_rank": Only((0,), _LORA),
    "lora_alpha": Feature("{}.lora_rank", (0,), _LORA),
    "lora_adapter_path": Refused(_LORA),
    "target_modules": Feature("{}.lora_rank", (0,), _LORA),
    "exclude_modules": Feature("{}.lora_rank", (0,), _LORA),
    "lora.*": Feature("{}.lora.rank", (0,), _LORA),
    "mtp.*": Feature(
        "{}.mtp.enable", (False,), "the layers that predict several tokens are neither loaded nor trained"
    ),
}

_UPDATE: dict[str, Rule] = {
    "ppo_micro_batch_size": Refused(_PER_GPU.format("ppo_micro_batch_size_per_gpu")),
    "strategy": Only(("megatron",), "the models are Megatron's; give the layout in `megatron`"),
    "shuffle": Only((False,), "mini-batches are taken in the order of the batch; data.shuffle draws prompts"),
    "data_loader_seed": NoEffect("mini-batches are not shuffled"),
    "grad_clip": Renamed("{}.optim.clip_grad"),
    "ulysses_sequence_parallel_size": Only((1,), "is of FSDP; nearest: megatron.context_parallel_size"),
    "fsdp_config.*": Backend("FSDP", "the layout is in `megatron`"),
    "veomni.*": Backend("VeOmni", "the layout is in `megatron`"),
    "checkpoint.strict": NoEffect("every weight must be there exactly once"),
    "checkpoint.mbridge_config.*": NoEffect("Hugging Face folders are written by megarl's own maps"),
    "use_torch_compile": NoEffect("nothing is compiled"),
    "use_fused_kernels": NoEffect(_EXACT),
    "rollout_n": Refused("set actor_rollout_ref.rollout.n"),
}

_ACTOR_ONLY: dict[str, Rule] = {
    "model_engine": Only(("megatron",), "the models are Megatron's"),
    "calculate_entropy": NoEffect("the entropy is always measured"),
    "calculate_sum_pi_squared": Only((False,), "no estimator here needs it"),
    "entropy_from_logits_with_chunking": NoEffect(_EXACT),
    "entropy_from_logits_chunk_size": NoEffect(_EXACT),
    "freeze_vision_tower": Only((False,), "models that see are not here"),
    "qat.*": Feature("{}.qat.enable", (False,), "there is no training for quantisation; rollout.dtype is the engine's"),
    "router_replay.*": Feature("{}.router_replay.mode", ("disabled",), "routing of the engine is not replayed"),
    "policy_loss.dro_beta": Refused("DRO's loss is not here; see policy_loss.loss_mode"),
}

_REF_ONLY: dict[str, Rule] = {
    "strategy": Only(("megatron",), "the models are Megatron's; give the layout in `megatron`"),
    "log_prob_micro_batch_size": Refused(_PER_GPU.format("log_prob_micro_batch_size_per_gpu")),
    "use_torch_compile": NoEffect("nothing is compiled"),
    "rollout_n": Refused("set actor_rollout_ref.rollout.n"),
    "entropy_from_logits_with_chunking": NoEffect(_EXACT),
    "entropy_from_logits_chunk_size": NoEffect(_EXACT),
    "router_replay.*": Feature("{}.router_replay.mode", ("disabled",), "routing of the engine is not replayed"),
    "fsdp_config.*": Backend("FSDP", "the layout is in `megatron`"),
    "ulysses_sequence_parallel_size": Only((1,), "is of FSDP; nearest: megatron.context_parallel_size"),
    "veomni.*": Backend("VeOmni", "the layout is in `megatron`"),
}

_CRITIC_ONLY: dict[str, Rule] = {
    "loss_scale_factor": Refused("seq-mean-token-sum-norm divides by data.max_response_length"),
    "forward_max_token_len_per_gpu": NoEffect("values are computed under ppo_max_token_len_per_gpu"),
    "nccl_timeout": NoEffect("ranks wait for each other for 600 s at most"),
    "model.tokenizer_path": NoEffect("a critic reads tokens, which the actor's tokenizer made"),
    "model.fsdp_config.*": Backend("FSDP", "the layout is in critic.megatron"),
}

_REWARD_ONLY: dict[str, Rule] = {
    "strategy": Only(("megatron",), "the models are Megatron's; give the layout in `megatron`"),
    "micro_batch_size": Refused(_PER_GPU.format("micro_batch_size_per_gpu")),
    "nccl_timeout": NoEffect("ranks wait for each other for 600 s at most"),
    "load_weight": Only((True,), "a model without its weights scores nothing"),
    "ulysses_sequence_parallel_size": Only((1,), "is of FSDP; nearest: megatron.context_parallel_size"),
    "model.use_shm": NoEffect("ranks read their own slices of the files, through the system's cache"),
    "model.use_remove_padding": NoEffect(_PACKED),
    "model.use_fused_kernels": NoEffect(_EXACT),
    "model.fsdp_config.*": Backend("FSDP", "the layout is in reward_model.megatron"),
    "profiler.*": Feature("{}.profiler.enable", (False,), "the run's report has the time of every phase"),
}


def _below(prefix: str, rules: dict[str, Rule]) -> dict[str, Rule]:
    """Rules with their paths, and the section's own path where a rule names another key."""
    placed = {}
    for name, rule in rules.items():
        if isinstance(rule, Renamed):
            rule = Renamed(rule.to.format(prefix), rule.values, rule.left_out, rule.why)
        elif isinstance(rule, Feature):
            rule = Feature(rule.switch.format(prefix), rule.off, rule.why)
        placed[f"{prefix}.{name}"] = rule
    return placed


def role_rules() -> dict[str, Rule]:
    """The rules of all roles by path; ``*`` at the end stands for anything."""
    rules = _below(_ACTOR, _UPDATE | _ACTOR_ONLY) | _below(_REF, _REF_ONLY) | _below(_CRITIC, _UPDATE | _CRITIC_ONLY)
    rules |= _below(_REWARD, _REWARD_ONLY)
    for role in (_ACTOR, _REF, _CRITIC, _REWARD):
        rules |= _below(f"{role}.megatron", _MEGATRON)
    for role in (_ACTOR, _CRITIC):
        rules |= _below(f"{role}.optim", _OPTIM) | _below(role, _OFFLOAD)
    for model in ("actor_rollout_ref.model", "critic.model"):
        rules |= _below(model, _MODEL)
    for model in ("critic.model", "reward_model.model"):
        imported = Renamed("actor_rollout_ref.model.external_lib", left_out=(None,), why="all processes import it")
        rules |= _below(model, {"external_lib": imported})
    return rules
