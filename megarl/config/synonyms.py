"""Names of settings in TRL, OpenRLHF, slime, Megatron-LM and verl, for suggestions about unknown keys."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from megarl.config.keys import walk
from megarl.config.schema.jobs import SFTConfig, TrainConfig
from megarl.config.verl.rules import Renamed
from megarl.config.verl.table import table_of

_POLICY, _ACTOR, _ROLLOUT = "actor_rollout_ref", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MEGATRON, _OPTIM = f"{_ACTOR}.megatron", f"{_ACTOR}.optim"

_KEYS: dict[str, str] = {
    # model and data
    f"{_POLICY}.model.path model.path": (
        "model_name_or_path model_name model_path base_model pretrain hf_checkpoint sft_model_path"
    ),
    "critic.model.path": "critic_pretrain critic_model_path",
    "reward.model.path": "reward_pretrain reward_model_path",
    "data.train_files": "dataset dataset_name train_dataset prompt_data train_data",
    "data.val_files": "eval_dataset eval_prompt_data val_data test_files",
    "data.prompt_key": "input_key",
    "data.response_key": "output_key completion_key",
    "data.train_batch_size": "rollout_batch_size batch_size generation_batch_size global_batch_size",
    "data.gen_batch_size": "over_sampling_batch_size",
    "data.max_prompt_length": "prompt_max_len max_prompt_len rollout_max_prompt_len",
    "data.max_response_length": (
        "max_completion_length response_length generate_max_len rollout_max_response_len max_new_tokens"
    ),
    "data.max_length": "max_seq_length max_seq_len seq_length max_len cutoff_len",
    "data.apply_chat_template_kwargs": "chat_template_kwargs",
    "data.shuffle": "shuffle_dataset rollout_shuffle",
    "data.filter_overlong_prompts_workers": "dataset_num_proc num_workers_dataset",
    # rewards
    "reward.custom_reward_function.path": "reward_funcs reward_func custom_rm_path remote_rm_url",
    "reward.name": "rm_type",
    "reward.functions": "reward_weights",
    # policy update
    f"{_OPTIM}.lr optim.lr critic.optim.lr": "learning_rate actor_learning_rate",
    "critic.optim.lr": "critic_learning_rate critic_lr",
    f"{_OPTIM}.lr_decay_style optim.lr_decay_style": "lr_scheduler_type lr_scheduler",
    f"{_OPTIM}.lr_warmup_steps optim.lr_warmup_steps": "warmup_steps lr_warmup_iters critic_lr_warmup_iters",
    f"{_OPTIM}.lr_warmup_steps_ratio optim.lr_warmup_steps_ratio": "warmup_ratio lr_warmup_ratio",
    f"{_OPTIM}.betas optim.betas": "adam_beta1 adam_beta2 adam_betas",
    f"{_OPTIM}.eps optim.eps": "adam_epsilon adam_eps",
    f"{_OPTIM}.clip_grad optim.clip_grad": "max_grad_norm max_norm grad_clip",
    f"{_ACTOR}.ppo_mini_batch_size": "mini_batch_size gradient_accumulation_steps num_mini_batches",
    f"{_ACTOR}.micro_batch_size_per_gpu data.micro_batch_size_per_gpu": (
        "per_device_train_batch_size micro_train_batch_size micro_batch_size local_batch_size"
    ),
    f"{_ACTOR}.use_dynamic_bsz data.use_dynamic_bsz": "use_dynamic_batch use_dynamic_batch_size",
    f"{_ACTOR}.max_token_len_per_gpu data.max_token_len_per_gpu": "max_tokens_per_gpu train_max_tokens_per_gpu",
    f"{_ACTOR}.ppo_epochs": "num_iterations num_ppo_epochs max_epochs",
    f"{_ACTOR}.clip_ratio": "eps_clip cliprange clip_eps",
    f"{_ACTOR}.clip_ratio_low": "epsilon epsilon_low",
    f"{_ACTOR}.clip_ratio_high": "epsilon_high eps_clip_high",
    f"{_ACTOR}.clip_ratio_c": "delta eps_clip_c",
    "critic.cliprange_value": "value_clip eps_clip_value",
    f"{_ACTOR}.kl_loss_coef algorithm.kl_ctrl.kl_coef": "beta",
    f"{_ACTOR}.entropy_coeff": "entropy_coef entropy_loss_coef",
    f"{_ACTOR}.loss_agg_mode": "loss_type",
    f"{_ACTOR}.policy_loss.loss_mode": "importance_sampling_level policy_loss_type",
    # algorithm
    "algorithm.adv_estimator": "advantage_estimator",
    "algorithm.lam": "lambd gae_lambda",
    "algorithm.kl_ctrl.kl_coef": "init_kl_coef",
    "algorithm.kl_penalty": "kl_estimator",
    "algorithm.norm_adv_by_std_in_grpo": "scale_rewards grpo_std_normalization",
    "algorithm.filter_groups.enable": "dynamic_filtering dynamic_sampling_filter_path",
    "algorithm.rollout_correction.rollout_is": "use_tis vllm_importance_sampling_correction",
    "algorithm.rollout_correction.rollout_is_threshold": "tis_clip vllm_importance_sampling_cap",
    # rollout
    f"{_ROLLOUT}.n": "num_generations n_samples_per_prompt num_return_sequences group_size",
    f"{_ROLLOUT}.temperature": "rollout_temperature",
    f"{_ROLLOUT}.top_p": "rollout_top_p",
    f"{_ROLLOUT}.top_k": "rollout_top_k",
    f"{_ROLLOUT}.name": "use_vllm inference_engine",
    f"{_ROLLOUT}.replicas": "vllm_num_engines num_engines",
    f"{_ROLLOUT}.tensor_model_parallel_size": "vllm_tensor_parallel_size rollout_num_gpus_per_engine",
    f"{_ROLLOUT}.engine_kwargs.sglang.server_args": (
        "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static sglang_mem_fraction_static"
    ),
    # devices
    "trainer.nnodes": "num_nodes actor_num_nodes",
    "trainer.n_gpus_per_node": "gpus_per_node num_gpus_per_node actor_num_gpus_per_node num_gpus n_gpus",
    f"{_MEGATRON}.tensor_model_parallel_size megatron.tensor_model_parallel_size": "tensor_parallel_size tp_size",
    f"{_MEGATRON}.pipeline_model_parallel_size megatron.pipeline_model_parallel_size": "pipeline_parallel_size pp_size",
    f"{_MEGATRON}.expert_model_parallel_size megatron.expert_model_parallel_size": "expert_parallel_size ep_size",
    f"{_MEGATRON}.dtype megatron.dtype": "bf16 torch_dtype params_dtype mixed_precision",
    f"{_MEGATRON}.recompute_granularity megatron.recompute_granularity": (
        "gradient_checkpointing recompute_activations activation_checkpointing"
    ),
    # run
    "trainer.default_local_dir trainer.hf_export_dir": "output_dir ckpt_path save_dir",
    "trainer.experiment_name": "run_name wandb_run_name exp_name",
    "trainer.project_name": "wandb_project",
    "trainer.logger": "report_to use_wandb use_tensorboard",
    "trainer.total_epochs": "num_train_epochs num_episodes num_epoch",
    "trainer.total_training_steps": "max_steps num_rollout train_iters num_steps",
    "trainer.logging_freq": "logging_steps log_interval logging_interval",
    "trainer.save_freq": "save_steps save_interval",
    "trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep": "save_total_limit max_ckpt_num",
    "trainer.test_freq": "eval_steps eval_interval",
    "trainer.val_before_train": "eval_on_start",
    "trainer.best_metric": "metric_for_best_model load_best_model_at_end best_metric_key",
    "trainer.resume_mode": "resume_from_checkpoint load_checkpoint",
    "trainer.critic_warmup": "freezing_actor_steps num_critic_only_steps",
    "trainer.balance_batch": "balance_data",
    "trainer.seed": "random_seed",
}
"""Other names by megarl's keys, both separated by spaces; a job has some of the keys, the usual one first."""


def synonyms(path: str, job_keys: Collection[str]) -> list[str]:
    """Return up to three of a job's keys for a setting with another name elsewhere, the usual one first.

    The last part of ``path`` is looked up; keys in its section take precedence.
    """
    name = path.rpartition(".")[2].replace("-", "_").lower()
    keys = [key for key in _table().get(name, ()) if key in job_keys]
    section = path.partition(".")[0]
    return ([key for key in keys if key.partition(".")[0] == section] or keys)[:3]


@cache
def _table() -> dict[str, list[str]]:
    """Keys by name: those above, and verl's names that megarl translates at their own place."""
    table: dict[str, list[str]] = {}
    for keys, names in _KEYS.items():
        for name in names.split():
            table.setdefault(name, []).extend(keys.split())
    for schema in (TrainConfig, SFTConfig):
        own = {path.rpartition(".")[2] for path, _ in walk(schema)}
        for path, rule in table_of(schema).rules.items():
            name = path.rpartition(".")[2]
            if isinstance(rule, Renamed) and name not in own and rule.to not in table.get(name, ()):
                table.setdefault(name, []).append(rule.to)
    return table
