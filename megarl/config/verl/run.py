"""Rules for everything else: data, rewards, algorithm, the run, and what verl can do besides."""

from __future__ import annotations

from megarl.config.verl.rules import Backend, Feature, NoEffect, Only, Refused, Renamed, Rule, Values

_CORRECTION = "algorithm.rollout_correction"
_ANEW = "answers are generated anew in every step; trainer.rollout_data_dir keeps them"
_TEXTS = "rows are texts: images, video and sound are not here"
_ASYNC = "a step generates and then trains, on the same devices; training behind generation is not here"
_REWARD_ENGINE = "a reward model runs on Megatron; its layout is reward_model.megatron"
_JUDGE = "it has a head that scores; a model that writes its verdict is asked at reward_model.judge.base_url"

_DRIVER = "the driver computes nothing on a GPU: it is not run under nsys"
_FILES = "profiles stay where global_profiler.save_path says"
_PROFILER: dict[str, Rule] = {
    "tool": NoEffect("global_profiler.tool is every role's"),
    "save_path": NoEffect("global_profiler.save_path is every role's"),
    "relocate_results": Only((False,), _FILES),
    "finish_hook_*": NoEffect(_FILES),
    "tool_config.npu.*": NoEffect("is of Ascend NPUs"),
    "tool_config.torch_memory.stack_depth": NoEffect("stacks are recorded as torch does by default"),
    "tool_config.*": Renamed("global_profiler.global_tool_config", why="the settings of a tool are every role's"),
}

_DATA: dict[str, Rule] = {
    "data.tokenizer": Refused("set actor_rollout_ref.model.tokenizer_path"),
    "data.use_shm": NoEffect("files are read through the system's cache"),
    "data.trust_remote_code": NoEffect("code of a model folder is never run"),
    "data.tool_config_path": Renamed("actor_rollout_ref.rollout.multi_turn.tool_config_path"),
    "data.function_tool_path": Refused("tools are listed in actor_rollout_ref.rollout.multi_turn.tool_config_path"),
    "data.return_raw_input_ids": Only(
        (False,),
        "prompts are made into tokens by the policy's template; a reward model with another one names its tokenizer in "
        "reward_model.model.input_tokenizer",
    ),
    "data.sampler.group_*": Refused("nearest: data.mixture, the weights of data sets in every batch"),
    "data.datagen.*": Refused("nearest: data.custom_cls, a data set of one's own, or data.sampler with update(batch)"),
    "data.return_raw_chat": NoEffect("agents get the messages in any case"),
    "data.return_full_prompt": Only((False,), "set trainer.rollout_data_dir to see prompts as they were given"),
    "data.dataloader_num_workers": NoEffect("rows are read from memory-mapped files as they are needed"),
    "data.validation_shuffle": Only((False,), "validation goes through its rows in order"),
    "data.image_key": Only(("images",), _TEXTS),
    "data.video_key": Only(("videos",), _TEXTS),
    "data.audio_key": Only(("audios",), _TEXTS),
    "data.image_patch_size": NoEffect(_TEXTS),
    "data.return_multi_modal_inputs": NoEffect(_TEXTS),
    "data.mm_processor_kwargs.*": Refused(_TEXTS),
}

_REWARDS: dict[str, Rule] = {
    "reward.custom_reward_function.path": Renamed("custom_reward_function.path"),
    "reward.custom_reward_function.name": Renamed("custom_reward_function.name"),
    "reward.custom_reward_function.*": Renamed("custom_reward_function"),
    "reward.compute_score_kwargs.*": Refused("arguments of a function go to reward_model.function_kwargs.<function>"),
    "reward.num_workers": Renamed("reward_model.num_workers"),
    "reward.reward_manager.name": Renamed("reward_model.reward_manager"),
    "reward.reward_manager.source": Only(("register",), "a reward of one's own is custom_reward_function.path"),
    "reward.reward_manager.module.*": Feature(
        "reward.reward_manager.source", ("register",), "a reward of one's own is custom_reward_function.path"
    ),
    "reward.reward_kwargs.*": Renamed("reward_model.reward_kwargs"),
    "reward.sandbox_fusion.*": Renamed("reward_model.sandbox_fusion"),
    "sandbox_fusion.*": Renamed("reward_model.sandbox_fusion"),
    "reward.reward_model.enable": Renamed("reward_model.enable", why=_JUDGE),
    "reward.reward_model.model_path": Renamed("reward_model.model.path"),
    "reward.reward_model.enable_resource_pool": Only((False,), "all roles share the devices of the run"),
    "reward.reward_model.n_gpus_per_node": Feature(
        "reward.reward_model.enable_resource_pool", (False,), "all roles share the devices of the run"
    ),
    "reward.reward_model.nnodes": Feature(
        "reward.reward_model.enable_resource_pool", (False,), "all roles share the devices of the run"
    ),
    "reward.reward_model.rollout.*": NoEffect(_REWARD_ENGINE),
    "reward_model.model.trust_remote_code": NoEffect("code of a model folder is never run"),
    "reward_model.launch_reward_fn_async": NoEffect(
        "a step's answers are scored together, in reward_model.num_workers processes, before log-probs are computed"
    ),
    "reward_model.enable_resource_pool": Only((False,), "all roles share the devices of the run"),
    "reward_model.n_gpus_per_node": Feature(
        "reward_model.enable_resource_pool", (False,), "all roles share the devices of the run"
    ),
    "reward_model.nnodes": Feature(
        "reward_model.enable_resource_pool", (False,), "all roles share the devices of the run"
    ),
    "reward_model.rollout.*": NoEffect(_REWARD_ENGINE),
    "reward_model.reward_loop_source": Only(("register",), "a reward of one's own is custom_reward_function.path"),
    "reward_model.reward_loop_module_path": Refused("a reward of one's own is custom_reward_function.path"),
    "reward_model.reward_loop_class_name": Refused("a reward of one's own is custom_reward_function.path"),
}

_ALGORITHM: dict[str, Rule] = {
    "algorithm.filter_groups.max_inflight_gen_batches": NoEffect("batches are generated one after the other"),
    f"{_CORRECTION}.loss_type": Only(
        ("ppo_clip",), "set actor_rollout_ref.actor.policy_loss.loss_mode: vanilla (ppo_clip) or reinforce"
    ),
    f"{_CORRECTION}.rollout_is_level": Refused("is called rollout_is, which takes token or sequence"),
    f"{_CORRECTION}.rollout_is_mode": Refused(
        "weights are truncated; two bounds in rollout_is_threshold, as '0.5_5.0', mask instead"
    ),
    f"{_CORRECTION}.rollout_is_threshold_lower": Refused("write both bounds into rollout_is_threshold, as '0.5_5.0'"),
    f"{_CORRECTION}.rollout_rs_threshold_lower": Refused("write both bounds into rollout_rs_threshold, as '0.5_2.0'"),
    f"{_CORRECTION}.rollout_token_veto_threshold": Refused(
        "rollout_rs=seq_max_k2 rejects the sequences with a token whose ratio is below v (or above 1/v) where its "
        "threshold is (ln v)^2 / 2, such as 42.4 for 1e-4"
    ),
}

_RUN: dict[str, Rule] = {
    "model_engine": Only(("megatron",), "the models are Megatron's; set model_engine=megatron"),
    "actor_rollout_ref.hybrid_engine": Only((True,), "trainer and engines share the devices"),
    "actor_rollout_ref.nccl_timeout": NoEffect("ranks wait for each other for 600 s at most"),
    "trainer.default_hdfs_dir": Refused(
        "checkpoints go to trainer.default_local_dir, on a file system that is mounted"
    ),
    "trainer.del_local_ckpt_after_load": Only((False,), "see trainer.max_actor_ckpt_to_keep"),
    "trainer.ray_wait_register_center_timeout": NoEffect("workers meet through Ray's own means"),
    "trainer.use_v1": NoEffect("there is one trainer"),
    "trainer.use_legacy_worker_impl": NoEffect("there is one implementation of each worker"),
    "trainer.v1.*": Feature("trainer.v1.trainer_mode", ("sync",), _ASYNC),
    "ray_kwargs.ray_init.num_cpus": NoEffect("set RAY_ADDRESS to join a cluster that was started otherwise"),
    "ray_kwargs.ray_init.runtime_env.*": NoEffect("workers run in the driver's own environment"),
    "ray_kwargs.*": Refused("workers run in the driver's own environment; RAY_ADDRESS names a running cluster"),
    "ray_init.*": Refused("workers run in the driver's own environment; RAY_ADDRESS names a running cluster"),
    "transfer_queue.enable": NoEffect("batches go through Ray's object store"),
    "transfer_queue.*": NoEffect("batches go through Ray's object store"),
    "distillation.*": Feature("distillation.enabled", (False,), "nearest: use_kl_loss, with one reference policy"),
    "async_training.*": Refused(_ASYNC),
    "rollout.*": Refused(_ASYNC),
    **{
        f"skip.{kind}.*": Feature(f"skip.{kind}.enable", (False,), _ANEW)
        for kind in ("rollout", "rollout_tq", "async_rollout")
    },
    "skip.*": Refused(_ANEW),
    "trainer.profile_steps": Renamed("global_profiler.steps"),
    "trainer.worker_nsight_options.*": Renamed("global_profiler.global_tool_config.nsys.worker_nsight_options"),
    "trainer.controller_nsight_options.*": NoEffect(_DRIVER),
    "global_profiler.relocate_results": Only((False,), _FILES),
    "global_profiler.finish_hook_*": Feature("global_profiler.finish_hook_cmd", (), _FILES),
    "global_profiler.global_tool_config.nsys.controller_nsight_options.*": NoEffect(_DRIVER),
    "global_profiler.global_tool_config.torch_memory.*": NoEffect("stacks are recorded as torch does by default"),
    "global_profiler.global_tool_config.npu.*": Backend("Ascend NPUs"),
    **{
        f"{role}.profiler.{name}": rule
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
        for name, rule in _PROFILER.items()
    },
}

VALUES: dict[str, Values] = {
    "global_profiler.tool": Values(refused={"npu": "an Ascend NPU's: megarl computes on CUDA and on CPUs"}),
    "trainer.device": Values(refused={"npu": "an Ascend NPU, with MindSpeed: megarl computes on CUDA and on CPUs"}),
    **{f"{role}.optim.lr_warmup_steps": Values(meanings={None: -1}) for role in ("actor_rollout_ref.actor", "critic")},
    **{
        f"{role}.optim.{name}": Values(meanings={-1: None})
        for role in ("actor_rollout_ref.actor", "critic")
        for name in ("total_training_steps",)
    },
    **{
        f"{role}.optim.lr_wsd_decay_steps": Values(meanings={None: -1})
        for role in ("actor_rollout_ref.actor", "critic")
    },
    "algorithm.filter_groups.metric": Values(meanings={None: "score"}),
    "custom_reward_function.name": Values(meanings={None: "compute_score"}),
}


def run_rules() -> dict[str, Rule]:
    """The rules by path; ``*`` at the end stands for anything."""
    return _DATA | _REWARDS | _ALGORITHM | _RUN
