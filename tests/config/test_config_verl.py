"""verl's keys among megarl's: accepted, translated, or refused by name."""

from pathlib import Path

import pytest
from config_cases import EVALUATE, SFT, check_problem, problems_of, with_keys

from megarl.config import EvaluateConfig, GenerateConfig, RewardTrainingConfig, SFTConfig, TrainConfig
from megarl.config.build import build, verl_notes
from megarl.config.compose import ConfigRequest, compose, compose_run, compose_sweep
from megarl.config.keys import value_at, walk
from megarl.config.problems import InvalidConfigError
from megarl.config.verl.adopt import adopt, is_verl_key
from megarl.config.verl.rules import Feature, Only, Renamed
from megarl.config.verl.table import table_of

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
SERVER = f"{ROLLOUT}.engine_kwargs.sglang.server_args"


@pytest.mark.parametrize(
    ("key", "value", "to", "becomes"),
    [
        (f"{ROLLOUT}.gpu_memory_utilization", 0.6, f"{SERVER}", {"mem_fraction_static": 0.6}),
        (f"{ROLLOUT}.enable_chunked_prefill", False, SERVER, {"chunked_prefill_size": -1}),
        (f"{ROLLOUT}.enable_chunked_prefill", True, SERVER, {}),
        (f"{ROLLOUT}.enforce_eager", True, SERVER, {"disable_cuda_graph": True}),
        (f"{ROLLOUT}.engine_kwargs.sglang.attention_backend", "fa3", SERVER, {"attention_backend": "fa3"}),
        (f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", 512, "sync.bucket_megabytes", 512),
        (f"{ROLLOUT}.response_length", 100, "data.max_response_length", 100),
        ("trainer.profile_steps", [1, 2], "global_profiler.steps", [1, 2]),
        (f"{ACTOR}.profiler.tool_config.torch.contents", ["cpu"],
         "global_profiler.global_tool_config.torch.contents", ["cpu"]),
        ("trainer.worker_nsight_options.trace", "cuda",
         "global_profiler.global_tool_config.nsys.worker_nsight_options", {"trace": "cuda"}),
        (f"{ACTOR}.grad_clip", 0.5, f"{ACTOR}.optim.clip_grad", 0.5),
        (f"{ACTOR}.optim.lr_decay_steps", 7, f"{ACTOR}.optim.total_training_steps", 7),
        (f"{ACTOR}.optim.total_training_steps", -1, f"{ACTOR}.optim.total_training_steps", None),
        ("critic.optim.lr_warmup_steps", None, "critic.optim.lr_warmup_steps", -1),
        (f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload", True,
         f"{ACTOR}.megatron.optimizer_offload", True),
        (f"{ACTOR}.megatron.override_transformer_config.recompute_granularity", "full",
         f"{ACTOR}.megatron.recompute_granularity", "full"),
        ("reward_model.num_workers", 4, "reward.num_workers", 4),
        ("reward_model.reward_manager", "dapo", "reward.reward_manager.name", "dapo"),
        ("reward_model.functions", {"a.py:f": 1, "gsm8k": 2}, "reward.functions", {"a.py:f": 1, "gsm8k": 2}),
        ("reward_model.sandbox.max_cases", None, "reward.sandbox.max_cases", None),
        ("reward_model.model_weight", 2.0, "reward.model.weight", 2.0),
        ("reward_model.max_length", 99, "reward.model.max_length", 99),
        ("reward_model.forward_max_token_len_per_gpu", 9999, "reward.model.max_token_len_per_gpu", 9999),
        ("custom_reward_function.reward_kwargs", {"a.b": 1}, "reward.custom_reward_function.reward_kwargs", {"a.b": 1}),
        ("max_turns", 7, f"{ROLLOUT}.multi_turn.search.max_turns", 7),
        ("retriever.url", "http://s", f"{ROLLOUT}.multi_turn.search.url", "http://s"),
        ("data.max_obs_length", 99, f"{ROLLOUT}.multi_turn.search.max_obs_length", 99),
        ("critic.ppo_max_token_len_per_gpu", 9999, "critic.max_token_len_per_gpu", 9999),
        (f"{REF}.log_prob_max_token_len_per_gpu", 9999, f"{REF}.max_token_len_per_gpu", 9999),
        ("val_reward_fn.name", "mine", "reward.validation_function.name", "mine"),
        ("sandbox_fusion.max_concurrent", 8, "reward.sandbox.max_concurrent", 8),
        ("actor_rollout_ref.nccl_timeout", 3600, "trainer.nccl_timeout", 3600),
        ("critic.nccl_timeout", 3600, "trainer.nccl_timeout", 3600),
        (f"{ACTOR}.megatron.router_replay.mode", "R3", f"{ACTOR}.router_replay.mode", "R3"),
        (f"{ACTOR}.megatron.override_transformer_config.moe_z_loss_coeff", 0.001,
         f"{ACTOR}.megatron.override_transformer_config", {"moe_z_loss_coeff": 0.001}),
        ("critic.shuffle", True, f"{ACTOR}.shuffle", True),
        ("reward_model.sandbox_fusion.url", "http://s/run_code", "reward.sandbox.url", "http://s/run_code"),
        ("reward.sandbox_fusion.url", "http://s/run_code", "reward.sandbox.url", "http://s/run_code"),
        ("reward_model.model.path", "rm", "reward.model.path", "rm"),
        ("reward.reward_model.model_path", "rm", "reward.model.path", "rm"),
        ("reward_model.megatron.override_transformer_config.recompute_granularity", "full",
         "reward.model.megatron.recompute_granularity", "full"),
        ("critic.megatron.override_ddp_config.overlap_grad_reduce", True, "critic.megatron.overlap_grad_reduce", True),
        (f"{ACTOR}.megatron.override_transformer_config.attention_backend", "flash",
         f"{ACTOR}.megatron.override_transformer_config", {"attention_backend": "flash"}),
        (f"{ACTOR}.megatron.override_transformer_config.moe_router_dtype", "fp32",
         f"{ACTOR}.megatron.override_transformer_config", {}),
    ],
)  # fmt: skip
def test_translated(key, value, to, becomes):
    assert value_at(build(TrainConfig, with_keys({key: value})), to) == becomes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{ACTOR}.strategy", "megatron"),
        (f"{ACTOR}.megatron.use_mbridge", True),
        (f"{ACTOR}.megatron.use_dist_checkpointing", False),
        (f"{ACTOR}.megatron.dist_checkpointing_path", "anywhere"),  # not read while the switch is off
        (f"{ACTOR}.ppo_micro_batch_size", None),  # null sets nothing
        (f"{ACTOR}.megatron.override_ddp_config", {}),
        ("actor_rollout_ref.hybrid_engine", True),
        ("actor_rollout_ref.model.use_remove_padding", True),
        ("actor_rollout_ref.model.lora.rank", 0),
        ("actor_rollout_ref.model.lora.alpha", 16),
        ("distillation.enabled", False),
        ("distillation.teacher_models.one.inference.name", "vllm"),
        ("trainer.default_hdfs_dir", None),
        ("model_engine", "megatron"),
        ("ray_kwargs.ray_init.runtime_env.py_executable", None),
        ("ray_kwargs.ray_init.num_cpus", None),
        (f"{ROLLOUT}.mode", "async"),
        ("skip.rollout.enable", False),
        ("algorithm.filter_groups.metric", None),
        ("reward_model.megatron.use_mbridge", True),
        ("reward_model.launch_reward_fn_async", True),
        (f"{ACTOR}.megatron.override_transformer_config.use_fused_rmsnorm", True),
        (f"{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff", 0.01),  # no balancing type
        ("sync.delta.enable", False),
        ("trainer.replay_order", None),
        ("sync.delta.full_freq", 10),
    ],
)
def test_accepted_without_a_change(key, value):
    assert build(TrainConfig, with_keys({key: value})) == build(TrainConfig, with_keys({}))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (f"{ACTOR}.strategy", "fsdp", "config.verl-value"),
        (f"{ACTOR}.fsdp_config.param_offload", True, "config.verl-key"),
        (f"{ROLLOUT}.engine_kwargs.vllm.max_model_len", 9, "config.verl-key"),
        (f"{ROLLOUT}.name", "vllm", "config.verl-value: rollout.name=sglang"),
        (f"{ROLLOUT}.name", "trtllm", "config.verl-value: rollout.name=sglang"),
        ("trainer.device", "npu", "config.verl-value"),
        ("sync.delta.enable", True, "config.verl-value"),
        ("trainer.replay_order", "batch_order.jsonl", "config.verl-value"),
        ("actor_rollout_ref.model.lora.dropout", 0.1, "config.verl-value"),
        ("actor_rollout_ref.model.lora.freeze_language_model", False, "config.verl-value"),
        (f"{ACTOR}.ppo_micro_batch_size", 8, "config.verl-key: micro_batch_size_per_gpu"),
        (f"{ACTOR}.router_replay.record_file", "routes.pt", "config.verl-value"),
        ("actor_rollout_ref.ref.router_replay.mode", "R2", "config.verl-feature"),
        (f"{ACTOR}.megatron.override_transformer_config.num_layers", 4, "config.owned-transformer-field"),
        (
            f"{ACTOR}.megatron.override_transformer_config.atention_backend",
            "flash",
            "config.unknown-transformer-field: attention_backend",
        ),
        (f"{ACTOR}.megatron.override_transformer_config.attention_backend", "flsh", "config.transformer-field-value"),
        (f"{ACTOR}.megatron.override_transformer_config.use_flash_attn", False, "config.verl-value: attention_backend"),
        (f"{ACTOR}.megatron.override_transformer_config.dsa_indexer_loss_coeff", 0.1, "config.verl-value"),
        ("data.sampler.group_key", "source", "config.verl-key: data.mixture"),
        ("reward_model.strategy", "fsdp", "config.verl-value"),
        ("skip.rollout.enable", True, "config.verl-feature"),
        ("algorithm.rollout_correction.rollout_is_level", "token", "config.verl-key: rollout_is"),
        ("ray_kwargs.timeline_json_file", "x", "config.verl-key"),
        ("ray_kwargs.ray_init.num_cpus", 16, "config.verl-key"),
        ("ray_kwargs.ray_init.runtime_env.py_executable", "uv run", "config.verl-key: VERL_USE_UV=0"),
        ("ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG", "INFO", "config.verl-key"),
        ("ray_kwargs.ray_init.runtime_env.working_dir", "/x", "config.verl-key"),
    ],
)
def test_refused_by_name(key, value, expected):
    problem = problems_of({key: value})[key]
    check_problem(problem, expected)
    assert problem.value == value


def test_keys_of_an_enabled_feature_are_refused_with_it():
    name = "actor_rollout_ref.model.mtp"
    problems = problems_of({f"{name}.enable": True, f"{name}.enable_train": True})
    check_problem(problems[f"{name}.enable_train"], "config.verl-feature: mtp.enable=true")
    assert len(problems) == 2


def test_adapters_have_verls_keys_of_both_of_its_sections():
    model = "actor_rollout_ref.model"
    nested = {"rank": 8, "alpha": 32, "target_modules": ["linear_qkv"], "exclude_modules": [], "merge": True}
    config = build(TrainConfig, with_keys({f"{model}.lora.{name}": value for name, value in nested.items()}))
    flat = {"lora_rank": 8, "lora_alpha": 32, "target_modules": ["linear_qkv"], "exclude_modules": []}
    assert build(TrainConfig, with_keys({f"{model}.{name}": value for name, value in flat.items()})) == config
    assert (config.actor_rollout_ref.model.lora_rank, config.actor_rollout_ref.model.lora_alpha) == (8, 32)


@pytest.mark.parametrize(
    ("kind", "expected", "trains_tower"),
    [("canonical_lora", "lora", False), ("dora", "dora", False), ("vlm_lora", "lora", True)],
)
def test_adapters_have_verls_kinds(kind, expected, trains_tower):
    model = "critic.model"
    values = {f"{model}.lora_rank": 8, f"{model}.lora.type": kind}
    if trains_tower:
        values |= {f"{model}.lora.freeze_vision_model": False, f"{model}.lora.freeze_vision_projection": True}
    config = build(TrainConfig, with_keys(values))
    assert config.critic.model.trains_tower is trains_tower
    assert config.critic.model.lora.type == expected


def test_adapters_need_no_layout_of_the_reference():
    """verl ignores the reference's layout if the model has adapters."""
    values = {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.ref.megatron.tensor_model_parallel_size": 1}
    assert build(TrainConfig, with_keys(values)).actor_rollout_ref.ref.megatron is None


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("actor_rollout_ref.model.lora_alpha", 32, "adapter.rank-zero: actor_rollout_ref.model.lora_rank=0"),
        ("critic.model.lora.type", "dora", "adapter.rank-zero: critic.model.lora_rank=0"),
        ("actor_rollout_ref.model.lora.use_rslora", True, "adapter.rank-zero: actor_rollout_ref.model.lora_rank=0"),
        ("critic.model.lora_adapter_path", "adapter", "adapter.rank-zero: critic.model.lora_rank=0"),
        ("critic.model.lora.freeze_vision_model", False, "adapter.rank-zero: critic.model.lora_rank=0"),
        ("actor_rollout_ref.model.lora_rank", -1, "config.value-out-of-limits: >= 0"),
    ],
)
def test_keys_of_adapters_without_a_rank_are_refused(key, value, expected):
    check_problem(problems_of({key: value})[key], expected)


def test_an_adapter_as_reference_needs_its_folder():
    model = "actor_rollout_ref.model"
    problems = problems_of({f"{model}.lora_rank": 8, f"{model}.lora.reference": "adapter"})
    check_problem(problems[f"{model}.lora.reference"], f"adapter.reference-needs-path: {model}.lora_adapter_path")


def test_two_names_of_one_setting_must_agree():
    values = {f"{ACTOR}.grad_clip": 0.5, f"{ACTOR}.optim.clip_grad": 0.7}
    check_problem(problems_of(values)[f"{ACTOR}.grad_clip"], "config.verl-two-names: 0.7")
    values = {f"{ACTOR}.grad_clip": 0.5, f"{ACTOR}.optim.clip_grad": 0.5}
    assert build(TrainConfig, with_keys(values)).actor_rollout_ref.actor.optim.clip_grad == 0.5


@pytest.mark.parametrize(
    ("file", "overrides", "expected"),
    [
        ("reward_model: {timeout_s: 60}", (), 60),
        ("reward_model: {timeout_s: 60}", ("reward.timeout_s=30",), 30),  # the default, but on the command line
        ("reward: {timeout_s: 60}", ("reward_model.timeout_s=70",), 70),
        ("reward: {timeout_s: 60}", ("reward_model={timeout_s:70}",), 70),
        ("reward_model: {timeout_s: 60}", ("reward_model.timeout_s=70",), 70),
        ("reward_model: {name: gsm8k, timeout_s: 60}", (), 60),  # the file below it has reward.name
        ("reward: {timeout_s: 60}\nreward_model: {timeout_s: '${reward.timeout_s}'}", (), 60),
        ("reward: {timeout_s: 60}\nreward_model: {timeout_s: 70}", (), None),
        ("reward_model: {timeout_s: 60}", ("reward.timeout_s=30", "reward_model.timeout_s=70"), None),
    ],
)
def test_the_command_line_takes_precedence_over_another_name_in_a_file(file, overrides, expected, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"defaults: [quickstart_evaluate, _self_]\n{file}\n", encoding="utf-8")
    request = ConfigRequest(EvaluateConfig, "mine", overrides, str(tmp_path))
    if expected is not None:
        assert compose(request).reward.timeout_s == expected
        return
    with pytest.raises(InvalidConfigError) as caught:
        compose(request)
    (problem,) = caught.value.problems
    check_problem(problem, "config.verl-two-names: reward.timeout_s")
    assert (problem.path, problem.value) == ("reward_model.timeout_s", 70)


def test_a_stored_configuration_of_an_earlier_run_means_the_same():
    """The file has the sections that moved as such a run stored them: with all of their keys."""
    folder = str(Path(__file__).parent)
    new = (
        "reward.name=code", "reward.functions={custom: 1.0, a.f: 2.0}", "reward.sandbox.max_cases=null",
        "reward.sandbox.url=http://s/run_code", "reward.reward_manager.name=naive", "reward.num_workers=2",
        "reward.model.path=rm", "reward.model.enable=true", "reward.model.weight=0.5", "reward.function_weight=1.0",
        "reward.model.max_token_len_per_gpu=4096", "reward.model.megatron.param_offload=true",
        "reward.model.megatron={tensor_model_parallel_size: 1, sequence_parallel: true, dtype: bfloat16}",
        "reward.custom_reward_function={path: mine.py, reward_kwargs: {b.c: 1}}",
        "reward.validation_function.path=val.py",
        f"{ROLLOUT}.multi_turn.search={{enable: true, url: http://r, topk: 5}}",
        f"{ROLLOUT}.multi_turn.search.max_obs_length=16", "data.max_response_length=40",
        "critic.max_token_len_per_gpu=2048",
        f"{ACTOR}.micro_batch_size_per_gpu=2", f"{REF}.micro_batch_size_per_gpu=4",
    )  # fmt: skip
    run = compose_run(ConfigRequest(TrainConfig, "earlier_run", config_dir=folder))
    assert run.config == compose(ConfigRequest(TrainConfig, "quickstart", new))
    changed = {note.split(" is ")[0] for note in run.notes}
    assert "reward_model.model_weight" in changed and len(changed) == 28  # no notes on the keys at their defaults


def test_a_sweep_takes_earlier_names():
    request = ConfigRequest(EvaluateConfig, "quickstart_evaluate", ("reward_model.name=gsm8k,math",))
    assert [run.config.reward.name for run in compose_sweep(request).runs] == ["gsm8k", "math"]


def test_notes_show_no_secrets():
    values = {"custom_reward_function.reward_kwargs.api_key": "abc-123", "retriever.url": "http://me:hunter22@h/r"}
    notes = "\n".join(verl_notes(TrainConfig, with_keys(values)))
    assert notes.count("<redacted>") == 2 and "abc-123" not in notes and "hunter22" not in notes


def test_a_balancing_loss_has_its_effect_with_its_type():
    fields = {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "seq_aux_loss"}
    path = f"{ACTOR}.megatron.override_transformer_config"
    config = build(TrainConfig, with_keys({f"{path}.{name}": value for name, value in fields.items()}))
    assert config.actor_rollout_ref.actor.megatron.override_transformer_config == fields


def test_notes_on_translated_keys_and_keys_without_effect():
    values = {
        f"{ROLLOUT}.gpu_memory_utilization": 0.6,
        f"{ACTOR}.megatron.use_mbridge": True,
        f"{ACTOR}.clip_ratio": 0.3,
    }
    bridge, memory = sorted(verl_notes(TrainConfig, with_keys(values)))
    assert bridge.startswith(f"{ACTOR}.megatron.use_mbridge=true has no effect: ")
    assert memory == f"{ROLLOUT}.gpu_memory_utilization is {SERVER}.mem_fraction_static=0.6 in megarl"


MICRO, LOG_PROB = "ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"


@pytest.mark.parametrize(
    ("values", "actor", "rollout"),
    [
        ({}, (True, None), (True, None)),
        ({f"{ACTOR}.{MICRO}": 2}, (False, 2), (False, 2)),
        ({f"{ACTOR}.{MICRO}": 2, f"{ROLLOUT}.{LOG_PROB}": 4}, (False, 2), (False, 4)),
        ({f"{ROLLOUT}.{LOG_PROB}": 4}, (True, None), (False, 4)),
        ({f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.{MICRO}": 2}, (True, None), (True, None)),
        ({f"{ACTOR}.use_dynamic_bsz": True, f"{ROLLOUT}.{LOG_PROB}": 4}, (True, None), (True, None)),
        ({f"{ACTOR}.{MICRO}": 2, f"{ROLLOUT}.log_prob_use_dynamic_bsz": True}, (False, 2), (True, None)),
    ],
)
def test_micro_batches_follow_verls_keys(values, actor, rollout):
    policy = build(TrainConfig, with_keys(values)).actor_rollout_ref
    assert (policy.actor.use_dynamic_bsz, policy.actor.micro_batch_size_per_gpu) == actor
    assert (policy.rollout.log_prob_use_dynamic_bsz, policy.rollout.log_prob_micro_batch_size_per_gpu) == rollout


def test_missing_keys_of_the_reference_layout_are_the_actors():
    values = {
        f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
        f"{ACTOR}.megatron.pipeline_model_parallel_size": 2,
        f"{ACTOR}.megatron.num_layers_in_first_pipeline_stage": 3,
        f"{ACTOR}.megatron.override_transformer_config": {"attention_backend": "fused"},
    }
    layout = build(
        TrainConfig, with_keys({**values, f"{REF}.megatron.param_offload": True})
    ).actor_rollout_ref.ref.megatron
    assert layout is not None and layout.param_offload and layout.data_parallel_size == 2
    assert (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size) == (2, 2)
    assert layout.num_layers_in_first_pipeline_stage == 3
    assert layout.override_transformer_config == {"attention_backend": "fused"}
    one_stage = build(TrainConfig, with_keys({**values, f"{REF}.megatron.pipeline_model_parallel_size": 1}))
    assert one_stage.actor_rollout_ref.ref.megatron is not None
    assert one_stage.actor_rollout_ref.ref.megatron.num_layers_in_first_pipeline_stage is None
    # keys without effect request no separate workers
    bridged = build(TrainConfig, with_keys({f"{REF}.megatron.use_mbridge": True}))
    assert bridged.actor_rollout_ref.ref.megatron is None


def test_a_plus_before_a_key_changes_nothing():
    overrides = (
        "data.train_files=t.parquet",
        "actor_rollout_ref.model.path=model",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True",
        "++actor_rollout_ref.rollout.quantization=null",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.chunked_prefill_size=-1",
        "+critic.optim.lr=3e-5",
        'trainer.logger=["console","wandb"]',
    )
    config = compose(ConfigRequest(TrainConfig, "grpo", overrides))
    assert config.actor_rollout_ref.actor.megatron.override_transformer_config == {"apply_rope_fusion": True}
    assert config.actor_rollout_ref.rollout.engine_kwargs.sglang.server_args == {"chunked_prefill_size": -1}
    assert config.critic.optim.lr == 3e-5 and config.trainer.logger == ["console", "wandb"]


def test_sglang_arguments_under_megarls_name_stay_unchanged():
    overrides = (
        "data.train_files=t.parquet",
        "actor_rollout_ref.model.path=model",
        f"+{SERVER}.mem_fraction_static=0.7",
    )
    config = compose(ConfigRequest(TrainConfig, "grpo", overrides))
    assert config.actor_rollout_ref.rollout.engine_kwargs.sglang.server_args == {"mem_fraction_static": 0.7}


def test_problems_of_verls_keys_are_reported_with_all_others():
    overrides = (
        "data.train_files=t",
        "actor_rollout_ref.model.path=m",
        "actor_rollout_ref.rollout.name=vllm",
        "data.sed=1",
    )
    with pytest.raises(InvalidConfigError) as caught:
        compose(ConfigRequest(TrainConfig, "grpo", overrides))
    assert {problem.path for problem in caught.value.problems} == {"actor_rollout_ref.rollout.name", "data.sed"}


def test_moved_keys_are_translated_in_all_jobs_that_have_them():
    values = {"reward_model.name": "gsm8k", "reward_model.model.path": "rm", "retriever.topk": 5, "max_turns": 4}
    config = build(EvaluateConfig, with_keys(values, EVALUATE))
    search = config.actor_rollout_ref.rollout.multi_turn.search
    assert (config.reward.name, config.reward.model.path, search.topk, search.max_turns) == ("gsm8k", "rm", 5, 4)
    generated = build(GenerateConfig, with_keys({"data.max_obs_length": 64}, EVALUATE))
    assert generated.actor_rollout_ref.rollout.multi_turn.search.max_obs_length == 64


def test_other_jobs_have_no_rules_for_verl():
    assert is_verl_key(TrainConfig, "model_engine") and not is_verl_key(SFTConfig, "model_engine")
    check_problem(problems_of({"model_engine": "megatron"}, SFTConfig, SFT)["model_engine"], "config.unknown-key")
    values = with_keys({"data.use_dynamic_bsz": True, "data.micro_batch_size_per_gpu": 2}, SFT)
    assert adopt(RewardTrainingConfig, values).values == values


# The tables of rules.

TABLES = pytest.mark.parametrize("schema", [TrainConfig, SFTConfig, EvaluateConfig, GenerateConfig])


@TABLES
def test_no_rule_is_for_a_key_of_megarl(schema):
    table, known = table_of(schema), dict(walk(schema))
    stale = [path for path in table.rules if path in known]
    assert not stale, f"they are in the schema now; delete their rules in megarl/config/verl and run from_verl: {stale}"
    assert table.values.keys() <= known.keys()


@TABLES
def test_every_translation_has_a_target(schema):
    table, known = table_of(schema), dict(walk(schema))
    free = tuple(path for path, key in known.items() if key.is_mapping)
    for path, rule in table.rules.items():
        if isinstance(rule, Renamed) and rule.to not in known and not rule.to.startswith(free):
            assert table.rule_for(f"{rule.to}.x" if path.endswith("*") else rule.to) is not None, path


@TABLES
def test_every_switch_is_a_key_with_a_rule(schema):
    table = table_of(schema)
    for path, rule in table.rules.items():
        if isinstance(rule, Feature):
            assert table.rule_for(rule.switch) is not None, path
        if isinstance(rule, Only):
            assert rule.why, path


def test_adopt_does_not_change_its_argument():
    values = {"actor_rollout_ref": {"rollout": {"mode": "async"}}}
    adoption = adopt(TrainConfig, values)
    assert values == {"actor_rollout_ref": {"rollout": {"mode": "async"}}}
    assert adoption.values == {"actor_rollout_ref": {"rollout": {}}} and len(adoption.notes) == 1
