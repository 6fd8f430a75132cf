"""The tables of verl's keys, by job: rules for keys that megarl lacks, and the names that both share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from megarl.config.schema.jobs import EvaluateConfig, GenerateConfig, SFTConfig, TrainConfig
from megarl.config.verl.role_rules import role_rules, supervised_role_rules
from megarl.config.verl.rules import Renamed, Rule, Values
from megarl.config.verl.run_rules import REWARDS, SEARCH_AGENT, SFT_VALUES, VALUES, run_rules, sft_rules


@dataclass(frozen=True)
class VerlTable:
    """The keys of one of verl's programs.

    Attributes:
        rules: by path; ``*`` at the end of a path matches any rest, ``<name>`` the name of a section in :attr:`named`.
        values: keys of both with different values.
        same: sections with the keys of the same name and meaning, separated by spaces.
        groups: Hydra groups of verl, with the choice that megarl corresponds to.
        selector: key whose presence selects verl's defaults.
        preset: configuration with verl's defaults.
        named: sections whose entries have free names.
    """

    rules: Mapping[str, Rule] = field(default_factory=dict)
    values: Mapping[str, Values] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    selector: str = ""
    preset: str = ""
    named: tuple[str, ...] = ()

    @cached_property
    def patterns(self) -> list[str]:
        """Prefixes of the paths that end in ``*``, the longest first."""
        return sorted((path[:-1] for path in self.rules if path.endswith("*")), key=len, reverse=True)

    def rule_for(self, path: str) -> Rule | None:
        """Find the rule for a key of verl, by its path or its longest prefix; None without one.

        The rule of a translated key names the full key of megarl.
        """
        for section in self.named:
            name, dot, rest = path.removeprefix(f"{section}.").partition(".")
            if path.startswith(f"{section}.") and dot and name != "<name>":
                rule = self.rule_for(f"{section}.<name>.{rest}")
                return replace(rule, to=rule.to.replace("<name>", name)) if isinstance(rule, Renamed) else rule
        exact = self.rules.get(path)
        if exact is not None:
            return exact
        for start in self.patterns:
            if path.startswith(start) or path == start.removesuffix("."):
                rule = self.rules[f"{start}*"]
                if isinstance(rule, Renamed):
                    if path.startswith(f"{rule.to}."):
                        return None  # the target section holds megarl's keys
                    return replace(rule, to=rule.to + path.removeprefix(start.removesuffix(".")))
                return rule
        return None

    def current_name(self, path: str) -> str:
        """Return megarl's name for a key, which is the path itself for a key that no rule translates."""
        rule = self.rule_for(path)
        return self.current_name(rule.to) if isinstance(rule, Renamed) else path

    def same_names(self) -> Iterator[tuple[str, list[str]]]:
        """List the sections with the keys that have the same name and meaning in verl and megarl."""
        for section, names in self.same.items():
            yield section, names.split()


_MEGATRON = (
    "context_parallel_size dtype expert_model_parallel_size expert_tensor_parallel_size grad_offload "
    "optimizer_offload override_transformer_config param_offload pipeline_model_parallel_size sequence_parallel "
    "tensor_model_parallel_size use_distributed_optimizer virtual_pipeline_model_parallel_size"
)
_OPTIM = (
    "betas clip_grad lr lr_decay_style lr_warmup_steps lr_warmup_steps_ratio lr_wsd_decay_steps "
    "lr_wsd_decay_style min_lr total_training_steps weight_decay"
)
_ADAPTERS = "exclude_modules lora_adapter_path lora_alpha lora_rank target_modules"
_CHECKPOINT, _PROFILER = "async_save load_contents save_contents", "enable all_ranks ranks"
_SAME = {
    "actor_rollout_ref.actor.checkpoint": _CHECKPOINT,
    "actor_rollout_ref.actor": (
        "tau_neg tau_pos loss_scale_factor calculate_sum_pi_squared "
        "clip_ratio clip_ratio_c clip_ratio_high clip_ratio_low entropy_coeff kl_loss_coef kl_loss_type "
        "loss_agg_mode ppo_epochs ppo_mini_batch_size shuffle "
        "use_dynamic_bsz use_kl_loss use_prefix_grouper"
    ),
    "actor_rollout_ref.actor.megatron": _MEGATRON,
    "actor_rollout_ref.actor.optim": _OPTIM,
    "actor_rollout_ref.actor.profiler": _PROFILER,
    "actor_rollout_ref.ref.profiler": _PROFILER,
    "critic.profiler": _PROFILER,
    "global_profiler": "tool steps profile_continuous_steps save_path",
    "global_profiler.global_tool_config.nsys": "discrete",
    "actor_rollout_ref.actor.router_replay": "mode",
    "actor_rollout_ref.actor.policy_loss": "clip_cov_lb clip_cov_ratio clip_cov_ub kl_cov_ratio loss_mode ppo_kl_coef",
    "actor_rollout_ref.model": f"external_lib path tokenizer_path {_ADAPTERS}",
    "actor_rollout_ref.model.lora": "lora_A_init_method type",
    "actor_rollout_ref.ref.megatron": _MEGATRON,
    "actor_rollout_ref.rollout.agent": "agent_loop_config_path default_agent_loop num_workers",
    "actor_rollout_ref.rollout": (
        "calculate_log_probs dtype free_cache_engine log_prob_max_token_len_per_gpu "
        "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz max_num_seqs n n_gpus_per_node name nnodes seed "
        "quantization temperature "
        "tensor_model_parallel_size top_k top_p"
    ),
    "actor_rollout_ref.rollout.multi_turn": (
        "enable format max_assistant_turns max_parallel_calls max_tool_response_length max_user_turns "
        "tool_config_path tool_response_truncate_side"
    ),
    "actor_rollout_ref.rollout.val_kwargs": "n temperature top_k top_p",
    "algorithm": "adv_estimator gamma kl_penalty lam norm_adv_by_std_in_grpo use_kl_in_reward use_pf_ppo",
    "algorithm.filter_groups": "enable max_num_gen_batches metric",
    "algorithm.kl_ctrl": "horizon kl_coef target_kl type",
    "algorithm.rollout_correction": (
        "bypass_mode rollout_is rollout_is_batch_normalize rollout_is_threshold rollout_rs rollout_rs_threshold"
    ),
    "critic.checkpoint": _CHECKPOINT,
    "critic": "cliprange_value enable loss_agg_mode ppo_epochs ppo_mini_batch_size use_dynamic_bsz",
    "critic.megatron": _MEGATRON,
    "critic.model.lora": "lora_A_init_method type",
    "critic.model": f"path {_ADAPTERS}",
    "critic.optim": _OPTIM,
    "data": (
        "reward_fn_key train_max_samples val_max_samples filter_overlong_prompts_workers "
        "apply_chat_template_kwargs filter_overlong_prompts gen_batch_size max_prompt_length max_response_length "
        "prompt_key seed shuffle train_batch_size train_files truncation val_batch_size val_files"
    ),
    "algorithm.pf_ppo": "reweight_method weight_pow",
    "reward": "num_workers",
    "reward.custom_reward_function": "name path reward_kwargs",
    "reward.reward_kwargs": "max_resp_len",
    "reward.reward_kwargs.overlong_buffer_cfg": "enable len log penalty_factor",
    "reward.reward_manager": "name",
    "data.custom_cls": "name path",
    "distillation": "enabled n_gpus_per_node nnodes teacher_key",
    "distillation.distillation_loss": (
        "clip_ratio clip_ratio_high clip_ratio_low distillation_loss_coef log_prob_min_clamp loss_max_clamp loss_mode "
        "topk use_policy_gradient use_task_rewards"
    ),
    "data.sampler": "class_name class_path",
    "trainer": (
        "balance_batch critic_warmup default_local_dir device esi_redundant_time experiment_name "
        "log_val_generations logger max_actor_ckpt_to_keep max_critic_ckpt_to_keep n_gpus_per_node nnodes "
        "project_name resume_from_path resume_mode rollout_data_dir save_freq test_freq total_epochs "
        "total_training_steps val_before_train val_only validation_data_dir"
    ),
}
_SFT_SAME = {
    "data": (
        "apply_chat_template_kwargs max_length max_token_len_per_gpu messages_key micro_batch_size_per_gpu "
        "train_batch_size train_files train_max_samples truncation use_dynamic_bsz"
    ),
    "model.lora": "lora_A_init_method type",
    "model": f"external_lib path tokenizer_path {_ADAPTERS}",
    "optim": _OPTIM,
    "trainer": (
        "default_local_dir device experiment_name logger max_ckpt_to_keep n_gpus_per_node nnodes project_name "
        "resume_from_path resume_mode save_freq seed total_epochs total_training_steps"
    ),
}

_TABLES: dict[type, VerlTable] = {
    TrainConfig: VerlTable(
        run_rules() | role_rules(),
        VALUES,
        _SAME,
        selector="model_engine",
        preset="ppo_megatron_trainer",
        named=("distillation.teacher_models",),
    ),
    SFTConfig: VerlTable(
        sft_rules() | supervised_role_rules(),
        SFT_VALUES,
        _SFT_SAME,
        groups={"engine": "megatron", "optim": "megatron", "model": "hf_model"},
        selector="engine",
        preset="sft_trainer_engine",
    ),
    EvaluateConfig: VerlTable(REWARDS | SEARCH_AGENT),
    GenerateConfig: VerlTable(SEARCH_AGENT),
}
_NO_TABLE = VerlTable()


def table_of(schema: type) -> VerlTable:
    """Return the table of a job's configuration class; empty for a job without a counterpart in verl."""
    return _TABLES.get(schema, _NO_TABLE)
