"""Impossible combinations of keys, each refused with key, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest
from config_cases import EVALUATE, SFT, TRAIN, problems_of, with_keys

from megarl.config import EvaluateConfig, GenerateConfig, PreferenceConfig, RewardTrainingConfig, SFTConfig, TrainConfig
from megarl.config.build import build

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
GRPO = {"algorithm.adv_estimator": "grpo"}
OTB = {"algorithm.adv_estimator": "optimal_token_baseline", "actor_rollout_ref.rollout.n": 8}
GIGPO = {"algorithm.adv_estimator": "gigpo", "actor_rollout_ref.rollout.n": 8}
SQUARES = "actor_rollout_ref.actor.calculate_sum_pi_squared"
RC, ALIGN = "algorithm.rollout_correction", "algorithm.repr_align"
URLS = f"{ROLLOUT}.engine_kwargs.sglang.urls"
RS = {f"{ROLLOUT}.calculate_log_probs": True, f"{RC}.rollout_rs": "token_k1,seq_mean_k3, seq_max_k2"}

PROFILED = {
    "global_profiler.tool": "torch",
    "global_profiler.steps": [2],
    f"{ACTOR}.profiler.enable": True,
    f"{ACTOR}.profiler.ranks": [0],
}


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({**GRPO, f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n", "at least 2"),
        ({"algorithm.adv_estimator": "opo", f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n", "adv_estimator=opo compares"),
        ({**GRPO, f"{ROLLOUT}.n": 8, "critic.enable": True}, "critic.enable", "reads no values"),
        ({"algorithm.adv_estimator": "remax", "algorithm.whiten_rewards": True},
         "algorithm.whiten_rewards", "set false"),
        ({"critic.enable": False}, "critic.enable", "adv_estimator=gae needs a critic"),
        ({**OTB, f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n", "at least 2"),
        ({**OTB, SQUARES: False}, SQUARES, "needs the sum of squared probabilities; leave it null"),
        ({**GRPO, f"{ROLLOUT}.n": 8, SQUARES: True}, SQUARES, "reads no squared probabilities; leave it null"),
        ({**OTB, f"{ROLLOUT}.calculate_log_probs": True, "algorithm.rollout_correction.bypass_mode": True},
         "algorithm.rollout_correction.bypass_mode", "adv_estimator=optimal_token_baseline needs; set false"),
        ({**OTB, "async_training.mode": "colocated", "async_training.max_staleness": 1,
          "async_training.proximal": "loglinear", f"{ROLLOUT}.calculate_log_probs": True},
         "async_training.proximal", "adv_estimator=optimal_token_baseline needs; set recompute"),
        ({**GIGPO, f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n", "at least 2"),
        ({**GIGPO, "algorithm.gigpo.mode": "mean"}, "algorithm.gigpo.mode", "one of mean_norm, mean_std_norm"),
        ({**OTB, "algorithm.gigpo.mode": "mean_norm"}, "algorithm.gigpo.mode", "remove it, or set gigpo"),
        ({**OTB, "algorithm.gigpo.step_advantage_w": 0.5}, "algorithm.gigpo.step_advantage_w",
         "no effect with algorithm.adv_estimator=optimal_token_baseline"),
        ({"algorithm.adv_estimator": "mine.py:estimate", SQUARES: True, f"{ROLLOUT}.calculate_log_probs": True,
          "algorithm.rollout_correction.bypass_mode": True},
         "algorithm.rollout_correction.bypass_mode", "calculate_sum_pi_squared=true needs; set false"),
        ({f"{ACTOR}.policy_loss.clip_cov_lb": 5.0}, f"{ACTOR}.policy_loss.clip_cov_lb", "clip_cov_ub=5"),
        ({**GRPO, f"{ROLLOUT}.n": 8, "trainer.critic_warmup": 3}, "trainer.critic_warmup", "set 0"),
        ({f"{ACTOR}.megatron.tensor_model_parallel_size": 3}, f"{ACTOR}.megatron.tensor_model_parallel_size",
         "do not divide the pool of 8"),
        ({f"{ACTOR}.megatron.pipeline_model_parallel_size": 5}, f"{ACTOR}.megatron.pipeline_model_parallel_size",
         "trainer.n_gpus_per_node=8"),
        ({"critic.megatron.data_parallel_size": 16}, "critic.megatron.data_parallel_size", "16 devices are more"),
        ({"algorithm.use_kl_in_reward": True, f"{REF}.megatron": {"tensor_model_parallel_size": 16}},
         f"{REF}.megatron.tensor_model_parallel_size", "do not divide the pool of 8"),
        ({f"{ACTOR}.megatron.tensor_model_parallel_size": 3}, f"{ACTOR}.megatron.tensor_model_parallel_size",
         "valid with the other sizes: 1, 2, 4, 8"),
        ({f"{ACTOR}.megatron.context_parallel_size": 2, f"{ACTOR}.megatron.tensor_model_parallel_size": 8},
         f"{ACTOR}.megatron.tensor_model_parallel_size", "valid with the other sizes: 1, 2, 4"),
        ({"critic.megatron.virtual_pipeline_model_parallel_size": 2},
         "critic.megatron.virtual_pipeline_model_parallel_size", "needs pipeline_model_parallel_size of at least 2"),
        ({"critic.megatron.num_layers_in_first_pipeline_stage": 2},
         "critic.megatron.num_layers_in_first_pipeline_stage", "one stage only"),
        ({"critic.megatron.pipeline_model_parallel_size": 2, "critic.megatron.num_layers_in_last_pipeline_stage": 2,
          "critic.megatron.account_for_loss_in_pipeline_split": True},
         "critic.megatron.account_for_loss_in_pipeline_split", "already sets the split of layers"),
        ({"critic.megatron.use_distributed_optimizer": False, "critic.megatron.overlap_param_gather": True},
         "critic.megatron.overlap_param_gather", "needs use_distributed_optimizer=true"),
        ({"critic.megatron.recompute_num_layers": 2}, "critic.megatron.recompute_num_layers", "has no effect"),
        ({"critic.megatron.recompute_granularity": "selective", "critic.megatron.recompute_modules": []},
         "critic.megatron.recompute_modules", "at least one"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 3}, f"{ROLLOUT}.tensor_model_parallel_size", "do not divide"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, f"{ROLLOUT}.tensor_model_parallel_size", "on one device; set 1"),
        ({f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.tensor_model_parallel_size": 4, "trainer.nnodes": 2,
          "trainer.n_gpus_per_node": 6}, f"{ROLLOUT}.tensor_model_parallel_size", "or be a multiple of it"),
        ({f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.tensor_model_parallel_size": 8, "trainer.nnodes": 2,
          "trainer.n_gpus_per_node": 4, f"{ROLLOUT}.engine_kwargs.sglang.mode": "http"},
         f"{ROLLOUT}.engine_kwargs.sglang.mode", "8 devices are on 2; set in_process"),
        ({f"{ROLLOUT}.replicas": 9}, f"{ROLLOUT}.replicas", "more than the pool of 8"),
        ({f"{ROLLOUT}.name": "sglang", URLS: ["http://a:1", "http://b:1"], f"{ROLLOUT}.replicas": 1,
          f"{ROLLOUT}.engine_kwargs.sglang.api_key_env": "KEY"},
         f"{ROLLOUT}.replicas", "urls has 2, one per replica"),
        ({f"{ROLLOUT}.name": "sglang", URLS: ["http://a:1"], f"{ROLLOUT}.replicas": 1},
         f"{ROLLOUT}.engine_kwargs.sglang.api_key_env", "the API key that the servers of urls demand"),
        ({"trainer.device": "cpu", "sync.transport": "nccl"}, "sync.transport", "trainer.device is cpu; set auto"),
        ({"trainer.device": "cpu", "sync.transport": "cuda_ipc"}, "sync.transport", "trainer.device is cpu; set auto"),
        ({"trainer.nnodes": 2, "sync.transport": "shared_memory"}, "sync.transport", "one node to another"),
        ({f"{ALIGN}.enable": True}, f"{ALIGN}.enable", "set algorithm.repr_align.ref_alignment.enable=true"),
        ({f"{ALIGN}.ref_alignment.enable": True}, f"{ALIGN}.ref_alignment.enable", "no effect without"),
        ({f"{ALIGN}.enable": True, f"{ALIGN}.ref_alignment.enable": True, f"{ROLLOUT}.calculate_log_probs": True,
          f"{RC}.bypass_mode": True}, f"{ALIGN}.enable", "needs the policy's entropy"),
        ({f"{RC}.rollout_is": "token"}, f"{ROLLOUT}.calculate_log_probs", "rollout_is needs the engine's log-probs"),
        ({f"{RC}.rollout_is_threshold": 0.9}, f"{RC}.rollout_is_threshold", "1, the ratio of equal policies"),
        ({f"{RC}.rollout_is_threshold": "1.5_5.0"}, f"{RC}.rollout_is_threshold", "must be within"),
        ({f"{RC}.rollout_is_threshold": "2.0_x"}, f"{RC}.rollout_is_threshold", "is not a number"),
        ({**RS, f"{RC}.rollout_rs": "token_k9"}, f"{RC}.rollout_rs", "known are token_k1"),
        ({**RS, f"{RC}.rollout_rs_threshold": None}, f"{RC}.rollout_rs_threshold", "needs bounds"),
        ({**RS, f"{RC}.rollout_rs_threshold": "1_2,3"}, f"{RC}.rollout_rs_threshold", "one for all 3 options"),
        ({**RS, f"{RC}.rollout_rs_threshold": "0.5_2"}, f"{RC}.rollout_rs_threshold", "seq_mean_k3 has one bound"),
        ({**RS, f"{RC}.rollout_rs_threshold": "2_0.5"}, f"{RC}.rollout_rs_threshold", "two that rise"),
        ({**RS, f"{RC}.rollout_rs_threshold": "0.5_0.9"}, f"{RC}.rollout_rs_threshold", "within for token_k1"),
        ({f"{RC}.rollout_rs_threshold": "2"}, f"{RC}.rollout_rs_threshold", "has no effect without"),
        ({**RS, f"{RC}.rollout_rs_threshold": "2", f"{RC}.bypass_mode": True}, f"{RC}.rollout_rs",
         "nothing to compare"),
        ({f"{RC}.bypass_mode": True, f"{ROLLOUT}.calculate_log_probs": True, f"{ACTOR}.state_masking": False},
         f"{RC}.bypass_mode", "without actor_rollout_ref.actor.state_masking"),
        ({"trainer.val_only": True}, "trainer.val_only", "needs data.val_files"),
        ({"trainer.val_before_train": True}, "trainer.val_before_train", "needs data.val_files"),
        ({"trainer.test_freq": 5}, "trainer.test_freq", "needs data.val_files"),
        ({f"{ROLLOUT}.val_kwargs.n": 4}, f"{ROLLOUT}.val_kwargs.n", "greedy"),
        ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path", "must be set"),
        ({"trainer.resume_from_path": "x"}, "trainer.resume_from_path", "set that to resume_path"),
        ({f"{ACTOR}.checkpoint.save_contents": []}, f"{ACTOR}.checkpoint.save_contents", "at least one of model"),
        ({"critic.checkpoint.save_contents": ["extra"]}, "critic.checkpoint.save_contents", "without model"),
        ({f"{ACTOR}.checkpoint.load_contents": ["extra"]}, f"{ACTOR}.checkpoint.load_contents", "must have model"),
        ({f"{ACTOR}.checkpoint.load_contents": ["model", "hf_model"]}, f"{ACTOR}.checkpoint.load_contents",
         "one of model, optimizer, extra"),
        ({f"{ACTOR}.checkpoint.save_contents": ["model", "model"]}, f"{ACTOR}.checkpoint.save_contents", "once"),
        ({"trainer.best_metric": "val-core/x", "trainer.save_freq": 5}, "trainer.best_metric", "needs validation"),
        ({"trainer.best_metric": "val-core/x", "trainer.test_freq": 5, "data.val_files": "v"}, "trainer.best_metric",
         "trainer.save_freq=-1 saves none"),
        ({"data.train_files": []}, "data.train_files", "at least one"),
        ({"trainer.experiment_name": " "}, "trainer.experiment_name", "must not be empty"),
        ({f"{ACTOR}.optim.min_lr": 1.0}, f"{ACTOR}.optim.min_lr", "must not exceed"),
        ({"critic.optim.lr_warmup_steps": 9, "critic.optim.total_training_steps": 8},
         "critic.optim.lr_warmup_steps", "must not exceed"),
        ({f"{ACTOR}.optim.betas": [0.9, 1.0]}, f"{ACTOR}.optim.betas", "below 1"),
        ({"data.train_batch_size": 100}, "data.train_batch_size", "256"),
        ({f"{ACTOR}.ppo_mini_batch_size": 4}, f"{ACTOR}.ppo_mini_batch_size", "8 data-parallel ranks"),
        ({f"{ACTOR}.use_dynamic_bsz": False}, f"{ACTOR}.ppo_micro_batch_size_per_gpu", "must be set"),
        ({"trainer.watchdog.phases": {"generation": 9}}, "trainer.watchdog.phases", "there are start_workers, step"),
        ({f"{ACTOR}.profiler.enable": True, f"{ACTOR}.profiler.ranks": [0]}, f"{ACTOR}.profiler.enable",
         "set global_profiler.tool"),
        ({**PROFILED, f"{ACTOR}.profiler.ranks": []}, f"{ACTOR}.profiler.ranks", "no rank is profiled"),
        ({**PROFILED, f"{ACTOR}.profiler.enable": False}, "global_profiler.tool", "no role is profiled"),
        ({**PROFILED, "global_profiler.steps": None}, "global_profiler.steps", "no step is profiled"),
        ({**PROFILED, f"{REF}.profiler.enable": True, f"{REF}.profiler.all_ranks": True}, f"{REF}.profiler.enable",
         "shares the actor's processes"),
        ({**PROFILED, "global_profiler.tool": "torch_memory", "trainer.device": "cpu"}, "global_profiler.tool",
         "use tool=torch, with memory among"),
        ({"trainer.watchdog.phases": {"gen": 0}}, "trainer.watchdog.phases", "gen: 0 must be seconds > 0, or null"),
        ({"trainer.nccl_timeout": 200}, "trainer.watchdog.timeout_s",
         "set trainer.watchdog.timeout_s to 140 or less, or set trainer.nccl_timeout=300"),
        ({"trainer.watchdog.phases": {"update_actor": 1800}}, "trainer.watchdog.phases",
         "set trainer.watchdog.phases.update_actor to 1740 or less, or set trainer.nccl_timeout=1860"),
        ({"trainer.nccl_timeout": 90_000}, "trainer.nccl_timeout", "must be below 86400 s"),
        ({"trainer.watchdog.timeout_s": 60}, f"{ROLLOUT}.health.timeout_s",
         f"set {ROLLOUT}.health.timeout_s=45, or trainer.watchdog.timeout_s=240"),
        ({"trainer.watchdog.phases": {"gen": 100}}, f"{ROLLOUT}.health.timeout_s",
         "or trainer.watchdog.phases.gen=240"),
        ({"trainer.watchdog.phases": {"update_weights": 100}, "trainer.watchdog.action": "end"}, "sync.timeout_s",
         "set sync.timeout_s=75, or trainer.watchdog.phases.update_weights=800"),
        ({"trainer.timeline.steps": [-1]}, "trainer.timeline.steps", "counted from 0"),
        ({"critic.ppo_max_token_len_per_gpu": 1023}, "critic.ppo_max_token_len_per_gpu", "1024 tokens"),
        ({f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 9}, f"{ROLLOUT}.log_prob_max_token_len_per_gpu", "1024 tokens"),
    ],
)  # fmt: skip
def test_impossible_combination(values: dict[str, Any], path: str, expected: str) -> None:
    problem = problems_of(values)[path]
    assert expected in problem.text and problem.doc


@pytest.mark.parametrize(
    "values",
    [
        {**GRPO, f"{ROLLOUT}.n": 2},
        {"algorithm.use_kl_in_reward": True, f"{ACTOR}.use_kl_loss": True},
        {"critic.megatron.data_parallel_size": 4},  # deliberately fewer than the pool has
        {f"{ROLLOUT}.replicas": 3},
        {"trainer.val_only": True, "data.val_files": "val.parquet"},
        {f"{ROLLOUT}.val_kwargs.n": 4, f"{ROLLOUT}.val_kwargs.temperature": 1.0},
        {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "x"},
        {f"{ACTOR}.checkpoint.save_contents": ["hf_model"], "critic.checkpoint.load_contents": ["model"]},
        {"trainer.best_metric": "v", "trainer.test_freq": 5, "trainer.save_freq": 5, "data.val_files": "v"},
        {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2},
        {"critic.ppo_max_token_len_per_gpu": 1024},
        PROFILED,
        {**PROFILED, "global_profiler.tool": "nsys"},
        {"trainer.watchdog.phases": {"gen": 500, "testing": None}, "trainer.timeline.steps": [0, 3]},
        {"trainer.nccl_timeout": 300},
        {"trainer.watchdog.timeout_s": None, "trainer.nccl_timeout": 30},
        {"trainer.watchdog.timeout_s": 60, f"{ROLLOUT}.health.timeout_s": 45},
        # roles outside the job are not checked
        {**GRPO, f"{ROLLOUT}.n": 2, "critic.megatron.tensor_model_parallel_size": 3, "critic.ppo_mini_batch_size": 7},
        {f"{REF}.megatron": {"tensor_model_parallel_size": 16}},
    ],
)
def test_possible_combination(values: dict[str, Any]) -> None:
    build(TrainConfig, with_keys(values))


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"megatron.tensor_model_parallel_size": 3}, "megatron.tensor_model_parallel_size", "do not divide the pool"),
        ({"data.train_batch_size": 12}, "data.train_batch_size", "nearest that do: 8 and 16"),
        ({"data.use_dynamic_bsz": False}, "data.micro_batch_size_per_gpu", "must be set"),
        ({"data.use_dynamic_bsz": False, "data.micro_batch_size_per_gpu": 3}, "data.micro_batch_size_per_gpu",
         "2 and 4"),
        ({"data.max_token_len_per_gpu": 100}, "data.max_token_len_per_gpu", "data.max_length = 1024"),
        ({"optim.min_lr": 1.0}, "optim.min_lr", "must not exceed optim.lr"),
        ({"data.max_prompt_length": 5}, "data.max_prompt_length", "did you mean data.max_length?"),
        ({"trainer.test_freq": 5}, "trainer.test_freq", "megarl.sft does not validate"),
        ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path", "must be set with"),
        ({"trainer.checkpoint.save_contents": ["optimizer"]}, "trainer.checkpoint.save_contents", "without model"),
    ],
)  # fmt: skip
def test_impossible_fine_tuning(values: dict[str, Any], path: str, expected: str) -> None:
    assert expected in problems_of(values, SFTConfig, SFT)[path].text


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"data.val_files": []}, "data.val_files", "must name at least one file"),
        ({f"{ROLLOUT}.val_kwargs.n": 4}, f"{ROLLOUT}.val_kwargs.n", "gives 4 equal answers"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 3}, f"{ROLLOUT}.tensor_model_parallel_size", "do not divide"),
        ({"do_search": True}, "retriever.url", "needs a server"),
        ({"trainer.experiment_name": " "}, "trainer.experiment_name", "must not be empty"),
        ({"trainer.save_freq": 5}, "trainer.save_freq", "is a key of training"),
        ({"critic.optim.lr": 1.0}, "critic", "is a key of training"),
        ({"critics.optim.lr": 1.0}, "critics", "unknown key"),
    ],
)
def test_impossible_evaluation(values: dict[str, Any], path: str, expected: str) -> None:
    assert expected in problems_of(values, EvaluateConfig, EVALUATE)[path].text


GENERATE = {"data.prompts": ["Why?"], "actor_rollout_ref.model.path": "model", "trainer.experiment_name": "x"}


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"data.prompts": []}, "data.prompts", "no prompts"),
        ({"data.output_path": "answers.csv"}, "data.output_path", "must end in .jsonl or .parquet"),
        ({f"{ROLLOUT}.val_kwargs.n": 4}, f"{ROLLOUT}.val_kwargs.n", "gives 4 equal answers"),
        ({"reward_model.name": "gsm8k"}, "reward_model", "is a key of training"),
    ],
)
def test_impossible_generation(values: dict[str, Any], path: str, expected: str) -> None:
    assert expected in problems_of({**GENERATE, **values}, GenerateConfig, {})[path].text


def test_derived_keys_of_an_evaluation() -> None:
    values = {f"{ROLLOUT}.tensor_model_parallel_size": 2, f"{ROLLOUT}.name": "sglang", "trainer.seed": 5}
    config = build(EvaluateConfig, with_keys(values, EVALUATE))
    policy = config.actor_rollout_ref
    assert (policy.rollout.replicas, policy.rollout.seed, policy.model.tokenizer_path) == (4, 5, "model")


def test_running_servers_set_the_replicas_and_need_one_device_each_for_the_client() -> None:
    values = {
        f"{ROLLOUT}.tensor_model_parallel_size": 16,
        f"{ROLLOUT}.name": "sglang",
        URLS: ["http://a:1", "http://b:1"],
        f"{ROLLOUT}.engine_kwargs.sglang.api_key_env": "KEY",
    }
    rollout = build(TrainConfig, with_keys(values)).actor_rollout_ref.rollout
    assert (rollout.replicas, rollout.devices_per_replica) == (2, 1)


def test_combinations_are_reported_together() -> None:
    problems = problems_of({f"{ACTOR}.megatron.tensor_model_parallel_size": 3, "trainer.val_only": True,
                         "data.train_batch_size": 100})  # fmt: skip
    assert set(problems) == {
        f"{ACTOR}.megatron.tensor_model_parallel_size",
        "trainer.val_only",
        "data.train_batch_size",
    }
    assert TRAIN["data"] == {"train_files": ["train.parquet"]}


def test_refused_keys_of_verl_name_their_replacement() -> None:
    problems = problems_of({f"{RC}.rollout_token_veto_threshold": 1e-4, f"{RC}.rollout_rs_threshold_lower": 0.5})
    assert "rollout_rs=seq_max_k2" in problems[f"{RC}.rollout_token_veto_threshold"].text
    assert "'0.5_2.0'" in problems[f"{RC}.rollout_rs_threshold_lower"].text


@pytest.mark.parametrize(
    ("values", "log_probs"),
    [
        ({"algorithm.ref_quality_score.enable": True}, True),
        ({f"{ALIGN}.enable": True, f"{ALIGN}.ref_alignment.enable": True}, False),
    ],
)
def test_reference_shaping_needs_a_reference(values: dict[str, Any], log_probs: bool) -> None:
    config = build(TrainConfig, with_keys({**TRAIN, **values}))
    assert config.uses_reference and config.uses_ref_log_prob == log_probs
    assert not build(TrainConfig, with_keys(TRAIN)).uses_reference


RM = "reward_model"
ENABLED = {f"{RM}.enable": True, f"{RM}.model.path": "reward"}


OF_TRAINING = {
    "actor_rollout_ref.rollout.n": (4, "actor_rollout_ref.rollout.val_kwargs.n"),
    "actor_rollout_ref.rollout.temperature": (0.7, "actor_rollout_ref.rollout.val_kwargs.temperature"),
    "actor_rollout_ref.rollout.top_p": (0.9, "actor_rollout_ref.rollout.val_kwargs.top_p"),
    "actor_rollout_ref.rollout.top_k": (20, "actor_rollout_ref.rollout.val_kwargs.top_k"),
    "actor_rollout_ref.rollout.min_p": (0.1, "actor_rollout_ref.rollout.val_kwargs.min_p"),
    "actor_rollout_ref.rollout.repetition_penalty": (1.1, "actor_rollout_ref.rollout.val_kwargs.repetition_penalty"),
    "actor_rollout_ref.rollout.free_cache_engine": (False, None),
    "actor_rollout_ref.rollout.calculate_log_probs": (True, None),
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": (True, None),
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": (4096, None),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": (2, None),
    "data.train_batch_size": (8, "data.val_batch_size"),
    "trainer.save_freq": (10, None),
}


@pytest.mark.parametrize("schema", [EvaluateConfig, GenerateConfig])
@pytest.mark.parametrize("path", OF_TRAINING)
def test_keys_of_training_are_rejected_in_jobs_without_training(schema: type, path: str) -> None:
    value, instead = OF_TRAINING[path]
    found = problems_of({path: value}, schema, EVALUATE)
    assert set(found) == {path}
    rest = f"; did you mean {instead}?" if instead else ": remove it"
    assert found[path].text == f"is a key of training, without effect here{rest}"


@pytest.mark.parametrize("schema", [TrainConfig, EvaluateConfig])
@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({f"{RM}.enable": True}, f"{RM}.model.path", "must be set with"),
        ({**ENABLED, f"{RM}.model_weight": 0.0}, f"{RM}.model_weight", "enable=false"),
        ({f"{RM}.function_weight": 0.0}, f"{RM}.function_weight", "nothing to score with"),
        ({**ENABLED, f"{RM}.megatron.tensor_model_parallel_size": 3}, f"{RM}.megatron.tensor_model_parallel_size",
         "do not divide the pool of 8"),
        ({**ENABLED, f"{RM}.use_dynamic_bsz": False}, f"{RM}.micro_batch_size_per_gpu", "must be set"),
        ({**ENABLED, f"{RM}.max_length": 50, f"{RM}.forward_max_token_len_per_gpu": 40},
         f"{RM}.forward_max_token_len_per_gpu", "reward_model.max_length = 50"),
    ],
)  # fmt: skip
def test_impossible_reward_models(schema: Any, values: dict[str, Any], path: str, expected: str) -> None:
    assert expected in problems_of(values, schema, TRAIN if schema is TrainConfig else EVALUATE)[path].text


def test_a_reward_model_alone_calls_no_function_and_reads_whole_rollouts() -> None:
    plain, alone = (build(TrainConfig, with_keys(values, TRAIN)).reward_model for values in ({}, ENABLED))
    both = build(TrainConfig, with_keys({**ENABLED, "custom_reward_function.path": "mine.py"}, TRAIN))
    assert (plain.function_weight, alone.function_weight, both.reward_model.function_weight) == (1.0, 0.0, 1.0)
    assert alone.max_length == both.data.max_prompt_length + both.data.max_response_length
    assert alone.megatron.data_parallel_size == 8


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"trainer.test_freq": 5}, "trainer.test_freq", "needs data.val_files"),
        ({"data.max_token_len_per_gpu": 2000}, "data.max_token_len_per_gpu", "2 x data.max_length = 2048"),
        ({"data.train_batch_size": 12}, "data.train_batch_size", "nearest that do: 8 and 16"),
        ({"data.response_key": "x"}, "data.response_key", "unknown key"),
    ],
)
def test_impossible_training_of_reward_models(values: dict[str, Any], path: str, expected: str) -> None:
    assert expected in problems_of(values, RewardTrainingConfig, SFT)[path].text


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"trainer.test_freq": 5}, "trainer.test_freq", "needs data.val_files"),
        ({"loss.type": "dop"}, "loss.type", "must be one of dpo, ipo"),
        ({"loss.beta": 0}, "loss.beta", "> 0"),
        ({"loss.type": "ipo", "loss.label_smoothing": 0.1}, "loss.label_smoothing", "no effect with loss.type=ipo"),
        ({"loss.simpo_gamma": 0.5}, "loss.simpo_gamma", "no effect with loss.type=dpo"),
        ({"data.margin_key": "gap"}, "data.margin_key", "unknown key"),
        (
            {"loss.desirable_weight": 1.0},
            "loss.desirable_weight",
            "no effect with loss.type=dpo; leave it null, or use kto",
        ),
        ({"loss.undesirable_weight": 1.0}, "loss.undesirable_weight", "or use kto"),
        ({"data.label_key": "label"}, "data.label_key", "no effect with loss.type=dpo; leave it null, or use kto"),
        ({"loss.type": "kto", "loss.desirable_weight": -1.0}, "loss.desirable_weight", ">= 0"),
        ({"loss.type": "kto", "loss.label_smoothing": 0.1}, "loss.label_smoothing", "no effect with loss.type=kto"),
        ({"loss.type": "kto", "loss.simpo_gamma": 0.1}, "loss.simpo_gamma", "no effect with loss.type=kto"),
        ({"loss.type": "kto", "data.train_batch_size": 1}, "data.train_batch_size", "responses to other prompts"),
    ],
)
def test_impossible_preference_optimization(values: dict[str, Any], path: str, expected: str) -> None:
    assert expected in problems_of(values, PreferenceConfig, SFT)[path].text


def test_min_p_needs_sglang_without_its_deterministic_mode() -> None:
    rollout = "actor_rollout_ref.rollout"
    sglang = {f"{rollout}.name": "sglang", f"{rollout}.min_p": 0.1, f"{rollout}.val_kwargs.min_p": 0.2}
    for keys in ({"trainer.device": "cpu"}, {f"{rollout}.engine_kwargs.sglang.deterministic": True}):
        problems = problems_of(sglang | keys)
        assert set(problems) == {f"{rollout}.min_p", f"{rollout}.val_kwargs.min_p"}
    free = {"trainer.device": "cpu", f"{rollout}.engine_kwargs.sglang.deterministic": False}
    assert build(TrainConfig, with_keys(sglang | free)).actor_rollout_ref.rollout.min_p == 0.1
