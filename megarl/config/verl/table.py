"""The tables of verl's keys, by job, with the rules for all keys but the roles'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from megarl.config.schema.jobs import (
    REWARD_MODEL,
    SEARCH,
    TEACHERS,
    EvaluateConfig,
    GenerateConfig,
    SFTConfig,
    TrainConfig,
)
from megarl.config.verl.role_rules import (
    ADAPTER_KIND,
    MICRO_BATCH_KEYS,
    OPTIM_MEANINGS,
    role_rules,
    supervised_role_rules,
)
from megarl.config.verl.rules import Feature, NoEffect, Only, OtherBackend, PoolSwitch, Refused, Renamed, Rule, Values

_JUDGE = "the model has a scalar head; for a generative judge set reward.judge.base_url"
_CUSTOM = "set reward.custom_reward_function.path for a custom reward"
_OLD, _VERL = "reward_model", "reward.reward_model"
_FUNCTION_KEYS = (
    "name function_weight num_workers launch_reward_fn_async timeout_s max_concurrency max_retries on_error "
    "max_failure_ratio"
)
_FUNCTION_SECTIONS = "functions data_sources function_kwargs reward_kwargs sandbox judge"

REWARDS: dict[str, Rule] = {
    "reward.compute_score_kwargs.*": Refused("set arguments of a function in reward.function_kwargs.<function>"),
    "reward.reward_manager.source": Only(("register",), _CUSTOM),
    "reward.reward_manager.module.*": Feature("reward.reward_manager.source", ("register",), _CUSTOM),
    "reward.sandbox_fusion.*": Renamed("reward.sandbox"),
    f"{_VERL}.enable": Renamed(f"{REWARD_MODEL}.enable", why=_JUDGE),
    f"{_VERL}.model_path": Renamed(f"{REWARD_MODEL}.path"),
    f"{_VERL}.enable_resource_pool": PoolSwitch(REWARD_MODEL),
    f"{_VERL}.n_gpus_per_node": Renamed(f"{REWARD_MODEL}.n_gpus_per_node", left_out=(0,)),
    f"{_VERL}.*": Renamed(REWARD_MODEL),
    f"{REWARD_MODEL}.rollout.*": NoEffect(f"a reward model runs on Megatron; its layout is {REWARD_MODEL}.megatron"),
    f"{REWARD_MODEL}.forward_max_token_len_per_gpu": Renamed(f"{REWARD_MODEL}.max_token_len_per_gpu"),
    "custom_reward_function.*": Renamed("reward.custom_reward_function"),
    "sandbox_fusion.*": Renamed("reward.sandbox"),
    **{f"{_OLD}.{name}": Renamed(f"reward.{name}") for name in _FUNCTION_KEYS.split()},
    **{f"{_OLD}.{name}.*": Renamed(f"reward.{name}") for name in _FUNCTION_SECTIONS.split()},
    f"{_OLD}.reward_manager": Renamed("reward.reward_manager.name"),
    f"{_OLD}.sandbox_fusion.*": Renamed("reward.sandbox"),
    f"{_OLD}.reward_loop_source": Only(("register",), _CUSTOM),
    f"{_OLD}.reward_loop_module_path": Refused(_CUSTOM),
    f"{_OLD}.reward_loop_class_name": Refused(_CUSTOM),
    f"{_OLD}.enable_resource_pool": PoolSwitch(REWARD_MODEL),
    f"{_OLD}.model_weight": Renamed(f"{REWARD_MODEL}.weight"),
    f"{_OLD}.model.*": Renamed(REWARD_MODEL),
    f"{_OLD}.*": Renamed(REWARD_MODEL),
}
"""verl's section `reward`, and the sections before it: `reward_model`, `custom_reward_function`, `sandbox_fusion`."""

SEARCH_AGENT: dict[str, Rule] = {
    "do_search": Renamed(f"{SEARCH}.enable"),
    "max_turns": Renamed(f"{SEARCH}.max_turns"),
    "retriever.*": Renamed(SEARCH),
    "data.max_obs_length": Renamed(f"{SEARCH}.max_obs_length"),
}
"""Keys of Search-R1, whose names megarl had too."""

REMOVED: dict[str, Rule] = {
    "trainer.replay_order": Only(
        (), "asynchronous runs differ in the order of completion; async_training.max_staleness=0 repeats bit for bit"
    ),
    "sync.delta.enable": Only((False,), "a weight sync sends all weights"),
    "sync.delta.full_freq": NoEffect("a weight sync sends all weights"),
}
"""Removed keys of megarl, which complete configurations of earlier runs name."""


_CORRECTION = "algorithm.rollout_correction"
_NEW_RESPONSES = "every step generates new responses; trainer.rollout_data_dir keeps them"
_TEXTS = "supervised training reads text, without images or video"
_MODE = "trainer.v1.trainer_mode"
_ASYNC = "nearest: the section async_training"
_ADMISSION = "async_training.max_staleness admits prompts ahead, so that no sample becomes too stale"
_SWITCH = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
_SWITCHING = "the trainer's devices generate until the first mini-batch is complete, if measured times favour it"

_DRIVER = "the driver uses no GPU: it does not run under nsys"
_FILES = "profiles stay in global_profiler.save_path"
_PROFILER: dict[str, Rule] = {
    "tool": NoEffect("global_profiler.tool applies to all roles"),
    "save_path": NoEffect("global_profiler.save_path applies to all roles"),
    "relocate_results": Only((False,), _FILES),
    "finish_hook_*": NoEffect(_FILES),
    "tool_config.npu.*": NoEffect("concerns Ascend NPUs only"),
    "tool_config.torch_memory.stack_depth": NoEffect("stacks have torch's default depth"),
    "tool_config.*": Renamed("global_profiler.global_tool_config", why="the settings of a tool apply to all roles"),
}

_DATA: dict[str, Rule] = {
    "data.tokenizer": Refused("set actor_rollout_ref.model.tokenizer_path"),
    "data.use_shm": NoEffect("megarl reads files through the page cache"),
    "data.trust_remote_code": NoEffect("megarl never runs code of a model folder"),
    "data.tool_config_path": Renamed("actor_rollout_ref.rollout.multi_turn.tool_config_path"),
    "data.function_tool_path": Refused("list tools in actor_rollout_ref.rollout.multi_turn.tool_config_path"),
    "data.return_raw_input_ids": Only(
        (False,),
        "the policy's chat template encodes prompts; set reward.model.input_tokenizer for a reward model "
        "with a different one",
    ),
    "data.sampler.group_*": Refused("nearest: data.mixture, the weights of data sets in every batch"),
    "data.datagen.*": Refused("nearest: data.custom_cls, a custom data set, or data.sampler with update(batch)"),
    "data.return_raw_chat": NoEffect("agents always get the messages"),
    "data.return_full_prompt": Only((False,), "set trainer.rollout_data_dir to record prompts"),
    "data.dataloader_num_workers": NoEffect("the loader reads rows from memory-mapped files on demand"),
    "data.validation_shuffle": Only((False,), "validation reads its rows in order"),
    "data.audio_key": Only(("audios",), "megarl reads images, but no sound"),
    "data.return_multi_modal_inputs": NoEffect("encoded images travel; the vision tower's ranks process them"),
}

_ALGORITHM: dict[str, Rule] = {
    "algorithm.filter_groups.max_inflight_gen_batches": NoEffect("prompts are admitted one by one"),
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
        "rollout_rs=seq_max_k2 rejects the sequences with a token whose ratio is below v (or above 1/v) if its "
        "threshold is (ln v)^2 / 2, such as 42.4 for 1e-4"
    ),
}

_TEACHER = "distillation.teacher_models.<name>"
_TEACHER_ENGINE = "a teacher is a frozen model on Megatron; its layout is teacher_models.<name>.megatron"

_DISTILLATION: dict[str, Rule] = {
    f"{_TEACHER}.num_replicas": NoEffect("replicas fill the devices; megatron.data_parallel_size limits them"),
    f"{_TEACHER}.inference.tensor_model_parallel_size": Renamed(f"{_TEACHER}.megatron.tensor_model_parallel_size"),
    f"{_TEACHER}.inference.pipeline_model_parallel_size": Renamed(f"{_TEACHER}.megatron.pipeline_model_parallel_size"),
    f"{_TEACHER}.inference.expert_parallel_size": Renamed(f"{_TEACHER}.megatron.expert_model_parallel_size"),
    f"{_TEACHER}.inference.dtype": Renamed(f"{_TEACHER}.megatron.dtype"),
    f"{_TEACHER}.inference.temperature": Refused(
        "teacher and student have the temperature of actor_rollout_ref.rollout"
    ),
    f"{_TEACHER}.inference.quantization": Refused("teacher_models.<name>.megatron.dtype is the format of its weights"),
    f"{_TEACHER}.inference.quantization_config_file": Refused("megatron.dtype is the format of the teacher's weights"),
    f"{_TEACHER}.inference.*": NoEffect(_TEACHER_ENGINE),
    **{f"{_TEACHER}.log_prob_{name}": Renamed(f"{_TEACHER}.{name}") for name in MICRO_BATCH_KEYS},
    "distillation.distillation_loss.policy_loss_mode": Only(("vanilla",), "the policy gradient has PPO's clipped loss"),
    "distillation.distillation_loss.use_chunked_topk": NoEffect("log-probs are always computed in chunks"),
    "distillation.distillation_loss.chunked_topk_chunk_size": NoEffect("the memory of a chunk is constant"),
}

_RUN: dict[str, Rule] = {
    "val_reward_fn.*": Renamed("reward.validation_function"),
    "model_engine": Only(("megatron",), "megarl trains with Megatron; set model_engine=megatron"),
    "actor_rollout_ref.hybrid_engine": Only(
        (True,), "async_training.mode=disaggregated gives the engines their own devices"
    ),
    "actor_rollout_ref.nccl_timeout": Renamed("trainer.nccl_timeout", why="for all roles"),
    "trainer.default_hdfs_dir": Refused("set trainer.default_local_dir to a folder on a mounted file system"),
    "trainer.del_local_ckpt_after_load": Only((False,), "see trainer.max_actor_ckpt_to_keep"),
    "trainer.ray_wait_register_center_timeout": NoEffect("Ray connects the workers"),
    "trainer.use_v1": NoEffect("megarl has one trainer"),
    "trainer.use_legacy_worker_impl": NoEffect("megarl has one implementation of each worker"),
    _MODE: Renamed("async_training.mode", {"separate_async": "disaggregated", "colocate_async": "colocated"}),
    "trainer.v1.separate_async.parameter_sync_step": Renamed(
        "async_training.sync_interval", switch=_MODE, off=("sync", "colocate_async")
    ),
    "trainer.v1.sampler.max_off_policy_threshold": Renamed(
        "async_training.max_staleness", why=_ADMISSION, switch=_MODE, off=("sync",)
    ),
    "trainer.v1.sampler.max_off_policy_strategy": NoEffect(_ADMISSION),
    "trainer.v1.colocate_async.num_warmup_batches": NoEffect(_ADMISSION),
    "trainer.v1.separate_async.num_warmup_batches": NoEffect(_ADMISSION),
    _SWITCH: Renamed("async_training.hybrid_rollout", switch=_MODE, off=("sync", "colocate_async")),
    "trainer.v1.separate_async.hybrid_rollout.*": NoEffect(_SWITCHING),
    "trainer.v1.*": Feature(_MODE, ("sync",), _ASYNC),
    "ray_kwargs.ray_init.num_cpus": Refused(
        "each worker counts as one CPU; limit cores with taskset or the scheduler, or join a cluster by RAY_ADDRESS"
    ),
    "ray_kwargs.ray_init.runtime_env.py_executable": Refused(
        "workers run with the driver's Python; set VERL_USE_UV=0 for verl's scripts, and start them in megarl's "
        "environment"
    ),
    "ray_kwargs.ray_init.runtime_env.env_vars.*": Refused(
        "workers inherit the driver's environment; export the variable before the command"
    ),
    "ray_kwargs.ray_init.runtime_env.*": Refused("workers run in the driver's environment and folder"),
    "ray_kwargs.*": Refused("workers run in the driver's environment; RAY_ADDRESS names a running cluster"),
    "ray_init.*": Refused("workers run in the driver's environment; RAY_ADDRESS names a running cluster"),
    "transfer_queue.enable": NoEffect("batches travel through Ray's object store"),
    "transfer_queue.*": NoEffect("batches travel through Ray's object store"),
    **_DISTILLATION,
    "async_training.staleness_threshold": Renamed("async_training.max_staleness", why=_ADMISSION),
    "async_training.trigger_parameter_sync_step": Renamed("async_training.sync_interval"),
    "async_training.require_batches": Only((1,), "set actor_rollout_ref.actor.ppo_mini_batch_size"),
    "async_training.use_trainer_do_validate": Only((False,), "the engines validate"),
    "async_training.*": Refused(_ASYNC),
    "rollout.nnodes": Renamed("actor_rollout_ref.rollout.nnodes"),
    "rollout.n_gpus_per_node": Renamed("actor_rollout_ref.rollout.n_gpus_per_node"),
    "rollout.*": Refused("trainer.total_training_steps and trainer.test_freq apply to every mode"),
    **{
        f"skip.{kind}.*": Feature(f"skip.{kind}.enable", (False,), _NEW_RESPONSES)
        for kind in ("rollout", "rollout_tq", "async_rollout")
    },
    "skip.*": Refused(_NEW_RESPONSES),
    "trainer.profile_steps": Renamed("global_profiler.steps"),
    "trainer.worker_nsight_options.*": Renamed("global_profiler.global_tool_config.nsys.worker_nsight_options"),
    "trainer.controller_nsight_options.*": NoEffect(_DRIVER),
    "global_profiler.relocate_results": Only((False,), _FILES),
    "global_profiler.finish_hook_*": Feature("global_profiler.finish_hook_cmd", (), _FILES),
    "global_profiler.global_tool_config.nsys.controller_nsight_options.*": NoEffect(_DRIVER),
    "global_profiler.global_tool_config.torch_memory.*": NoEffect("stacks have torch's default depth"),
    "global_profiler.global_tool_config.npu.*": OtherBackend("Ascend NPUs"),
    **{
        f"{role}.profiler.{name}": rule
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
        for name, rule in _PROFILER.items()
    },
}

_ROLLOUT = "actor_rollout_ref.rollout"
_SGLANG = f"{_ROLLOUT}.engine_kwargs.sglang"
_SERVER = f"{_SGLANG}.server_args"
_LENGTHS = "data.max_prompt_length + data.max_response_length"

_OF_ROLLOUT: dict[str, Rule] = {
    "mode": NoEffect("all requests of a step run concurrently"),
    "gpu_memory_utilization": Renamed(f"{_SERVER}.mem_fraction_static"),
    "enforce_eager": Renamed(f"{_SERVER}.disable_cuda_graph", left_out=(False,)),
    "cudagraph_capture_sizes": Renamed(f"{_SERVER}.cuda_graph_bs"),
    "enable_chunked_prefill": Renamed(f"{_SERVER}.chunked_prefill_size", values={False: -1}, left_out=(True,)),
    "max_num_batched_tokens": NoEffect(
        "concerns vLLM, as in verl; SGLang batches by memory, see engine_kwargs.sglang.server_args.max_prefill_tokens"
    ),
    "max_model_len": NoEffect(f"the engine's longest sequence is {_LENGTHS}"),
    "prompt_length": Renamed("data.max_prompt_length"),
    "response_length": Renamed("data.max_response_length"),
    "enable_prefix_caching": Renamed(f"{_SERVER}.disable_radix_cache", values={False: True}, left_out=(True,)),
    "scheduling_policy": Renamed(f"{_SERVER}.schedule_policy", left_out=("fcfs",)),
    "expert_parallel_size": Renamed(f"{_SERVER}.ep_size", left_out=(1,)),
    "data_parallel_size": Only((1,), "every replica is a separate engine; see rollout.replicas"),
    "pipeline_model_parallel_size": Only((1,), "rollout.tensor_model_parallel_size splits an engine"),
    "moe_tensor_parallel_size": OtherBackend("TensorRT-LLM"),
    "load_format": NoEffect("an engine starts without weights and receives the actor's"),
    "layered_summon": NoEffect("concerns FSDP; Megatron's ranks send weights in buckets"),
    "logprobs_mode": NoEffect("log-probs belong to the sampling distribution"),
    "do_sample": Only((True,), "responses are always sampled, by temperature, top_p and top_k"),
    "ignore_eos": Only((False,), "an answer ends with its end-of-sequence token"),
    "disable_log_stats": NoEffect("the engine's log is off"),
    "over_sample_rate": Only((0,), "the step waits for every request"),
    "multi_stage_wake_up": NoEffect("engines wake memory of weights and KV cache one after the other"),
    "full_determinism": Renamed(f"{_SGLANG}.deterministic", left_out=(False,)),
    "skip_tokenizer_init": NoEffect("the engine reads token ids; engine_kwargs.sglang.stop_strings makes it decode"),
    "log_prob_micro_batch_size": Refused(
        "counts samples over all ranks; give log_prob_micro_batch_size_per_gpu, per data-parallel rank"
    ),
    "quantization_config_file": Refused("rollout.quantization=fp8 is the only format besides rollout.dtype"),
    "qat.*": Refused("megarl has no quantization-aware training"),
    "mtp.*": Feature(f"{_ROLLOUT}.mtp.enable", (False,), "the engine predicts one token at a time"),
    "enable_rollout_routing_replay": NoEffect("follows from actor_rollout_ref.actor.router_replay.mode=R3"),
    "moe_load_balance_metrics_interval": NoEffect("every update measures the load of experts (actor/expert_load/*)"),
    "disaggregation.*": Feature(f"{_ROLLOUT}.disaggregation.enabled", (False,), "each engine does prefill and decode"),
    "prometheus.*": Feature(f"{_ROLLOUT}.prometheus.enable", (False,), "set trainer.logger for metrics"),
    "trace.backend": Refused("set trainer.rollout_data_dir to write responses"),
    "trace.*": Feature(f"{_ROLLOUT}.trace.backend", (), "set trainer.rollout_data_dir to write responses"),
    "profiler.*": Feature(f"{_ROLLOUT}.profiler.enable", (False,), "profile engines with SGLang's tools"),
    "checkpoint_engine.backend": Only(("naive",), "nearest: sync.transport"),
    "checkpoint_engine.update_weights_bucket_megabytes": Renamed("sync.bucket_megabytes"),
    "checkpoint_engine.engine_kwargs.*": Refused("nearest: the section sync"),
    "checkpoint_engine.custom_backend_module": Refused("nearest: sync.transport"),
    "agent.custom_async_server.*": Refused("rollout.name selects a registered engine"),
    "multi_turn.function_tool_path": Refused("list tools in multi_turn.tool_config_path"),
    "multi_turn.use_inference_chat_template": Only((False,), "trajectories keep the generated tokens"),
    "multi_turn.tokenization_sanity_check_mode": NoEffect("megarl keeps generated tokens, never tokenizes them again"),
    "multi_turn.num_repeat_rollouts": Refused("set rollout.n, the responses per prompt"),
    "val_kwargs.do_sample": NoEffect("responses are sampled if val_kwargs.temperature is above 0"),
    "engine_kwargs.vllm.*": OtherBackend("vLLM", "SGLang's arguments go below engine_kwargs.sglang"),
    "engine_kwargs.trtllm.*": OtherBackend("TensorRT-LLM", "SGLang's arguments go below engine_kwargs.sglang"),
    "engine_kwargs.sglang.*": Renamed(_SERVER),
}
_GENERATION = {f"{_ROLLOUT}.{name}": rule for name, rule in _OF_ROLLOUT.items()}

_OTHER_ENGINE = "an engine that megarl does not support; set actor_rollout_ref.rollout.name=sglang"

VALUES: dict[str, Values] = {
    f"{_ROLLOUT}.name": Values(refused=dict.fromkeys(("vllm", "trtllm", "hf"), _OTHER_ENGINE)),
    f"{_ROLLOUT}.quantization": Values(refused={"torchao": "of vLLM; megarl has fp8"}),
    "trainer.logger": Values(meanings={"file": "jsonl"}),
    "global_profiler.tool": Values(refused={"npu": "for Ascend NPUs: megarl runs on CUDA and on CPUs"}),
    "trainer.device": Values(refused={"npu": "an Ascend NPU, with MindSpeed: megarl runs on CUDA and on CPUs"}),
    **{
        f"{role}.optim.{name}": Values(meanings=meanings)
        for name, meanings in OPTIM_MEANINGS.items()
        for role in ("actor_rollout_ref.actor", "critic")
    },
    **{f"{model}.lora.type": ADAPTER_KIND for model in ("actor_rollout_ref.model", "critic.model")},
    **{f"{role}.n_gpus_per_node": Values(meanings={0: None}) for role in (REWARD_MODEL, TEACHERS)},
    "algorithm.filter_groups.metric": Values(meanings={None: "score"}),
    "reward.custom_reward_function.name": Values(meanings={None: "compute_score"}),
}


_FSDP = OtherBackend("FSDP", "the layout is in `megatron`, which verl calls `engine`")
_NO_VALIDATION = "megarl sft does not validate while it trains; `megarl evaluate` scores the exported model"
_SFT_ROWS = "megarl sft reads prompts with responses, or conversations (data.messages_key)"

_SFT_DATA: dict[str, Rule] = {
    "data.val_files": NoEffect(_NO_VALIDATION),
    "data.val_max_samples": NoEffect(_NO_VALIDATION),
    "data.tools_key": Only(("tools",), "the column of a row's tools is called `tools`"),
    "data.enable_thinking_key": Only(
        ("enable_thinking",), "megarl reads no such column; set data.apply_chat_template_kwargs.enable_thinking"
    ),
    "data.enable_thinking_default": Renamed(
        "data.apply_chat_template_kwargs.enable_thinking", left_out=(None, "none"), why="for every row"
    ),
    "data.pad_mode": NoEffect("megarl always packs sequences, without padding"),
    "data.balance_dp_token": NoEffect("data-parallel ranks always get equal work"),
    "data.custom_cls.name": Feature("data.custom_cls.path", (), _SFT_ROWS),
    "data.custom_cls.path": Feature("data.custom_cls.path", (), _SFT_ROWS),
    "data.use_shm": NoEffect("megarl reads files through the page cache"),
    "data.num_workers": NoEffect("the loader reads rows from memory-mapped files on demand"),
    "data.ignore_input_ids_mismatch": NoEffect(
        "a conversation whose earlier turns the chat template changes later on (as templates do that remove thinking) "
        "is an error; make one row per assistant message"
    ),
    "data.image_key": Only(("images",), _TEXTS),
    "data.video_key": Only(("videos",), _TEXTS),
    "data.image_patch_size": NoEffect(_TEXTS),
}

_SFT_RUN: dict[str, Rule] = {
    "checkpoint.save_contents": Renamed("trainer.checkpoint.save_contents"),
    "checkpoint.load_contents": Renamed("trainer.checkpoint.load_contents"),
    "checkpoint.async_save": Renamed("trainer.checkpoint.async_save"),
    "checkpoint.strict": NoEffect("every weight must be there exactly once"),
    "checkpoint.mbridge_config.*": NoEffect("megarl's weight maps write Hugging Face folders"),
    "trainer.default_hdfs_dir": Refused("set trainer.default_local_dir to a folder on a mounted file system"),
    "trainer.test_freq": Only((-1,), _NO_VALIDATION),
    "trainer.balance_batch": NoEffect("data-parallel ranks always get equal work"),
    "trainer.profile_interval": Only(([-1, -1],), "megarl sft has no profiler; set trainer.timeline.enable"),
    "profiler.enable": Only((False,), "megarl sft has no profiler; set trainer.timeline.enable"),
    "profiler.*": Feature("profiler.enable", (False,), "megarl sft has no profiler; set trainer.timeline.enable"),
}

_FSDP_ENGINE = (
    "fsdp_size reshard_after_forward wrap_policy.* offload_policy model_dtype ulysses_sequence_parallel_size "
    "entropy_checkpointing forward_prefetch use_orig_params data_parallel_shard_size"
)
_FSDP_OPTIM = "lr_scheduler_type min_lr_ratio num_cycles optimizer_impl warmup_style"

_ENGINE: dict[str, Rule] = {
    "engine.*": Renamed("megatron"),
    "engine.strategy": Only(("megatron",), "megarl trains with Megatron; set engine=megatron"),
    "engine.use_torch_compile": NoEffect("megarl compiles nothing"),
    **{f"engine.{name}": _FSDP for name in _FSDP_ENGINE.split()},
    **{f"optim.{name}": _FSDP for name in _FSDP_OPTIM.split()},
}

SFT_VALUES: dict[str, Values] = {
    "trainer.logger": Values(meanings={"file": "jsonl"}),
    "optim.lr_warmup_steps": Values(meanings={None: -1}),
    "optim.lr_wsd_decay_steps": Values(meanings={None: -1}),
    "optim.total_training_steps": Values(meanings={-1: None}),
    "model.lora.type": ADAPTER_KIND,
    "trainer.save_freq": Values(refused={"after_each_epoch": "a number of steps in megarl, or -1"}),
    "trainer.device": Values(refused={"npu": "an Ascend NPU, with MindSpeed: megarl runs on CUDA and on CPUs"}),
}
"""Keys of both with different values."""


@dataclass(frozen=True)
class VerlTable:
    """The keys of one of verl's programs that megarl's schema lacks, or whose values differ."""

    rules: Mapping[str, Rule] = field(default_factory=dict)
    """By path; ``*`` at the end of a path matches any rest, ``<name>`` the name of a section in :attr:`named`."""
    values: Mapping[str, Values] = field(default_factory=dict)  # keys of both with different values
    groups: Mapping[str, str] = field(default_factory=dict)  # Hydra groups of verl, with the choice that megarl is
    selector: str = ""  # key whose presence selects verl's defaults
    preset: str = ""  # configuration with verl's defaults
    named: tuple[str, ...] = ()  # sections whose entries have free names

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


_TABLES: dict[type, VerlTable] = {
    TrainConfig: VerlTable(
        _DATA | REWARDS | SEARCH_AGENT | REMOVED | _ALGORITHM | _RUN | _GENERATION | role_rules(),
        VALUES,
        selector="model_engine",
        preset="ppo_megatron_trainer",
        named=("distillation.teacher_models",),
    ),
    SFTConfig: VerlTable(
        _SFT_DATA | _SFT_RUN | _ENGINE | supervised_role_rules(),
        SFT_VALUES,
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
