"""Impossible combinations of keys, each refused with key, value and remedy."""

import pytest
from config_cases import EVALUATE, SFT, TRAIN, check_problem, problems_of, with_keys

from megarl.config import EvaluateConfig, GenerateConfig, PreferenceConfig, RewardTrainingConfig, SFTConfig, TrainConfig
from megarl.config.batch import token_store_bytes
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
        ({**GRPO, f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n", "algorithm.group-of-one"),
        ({"algorithm.adv_estimator": "opo", f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n",
         "algorithm.group-of-one: adv_estimator=opo"),
        ({**GRPO, f"{ROLLOUT}.n": 8, "critic.enable": True}, "critic.enable", "algorithm.unused-critic"),
        ({"algorithm.adv_estimator": "remax", "algorithm.whiten_rewards": True},
         "algorithm.whiten_rewards", "algorithm.whiten-baseline: set false"),
        ({"critic.enable": False}, "critic.enable", "algorithm.needs-critic: adv_estimator=gae"),
        ({**OTB, f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n", "algorithm.group-of-one"),
        ({**OTB, SQUARES: False}, SQUARES, "algorithm.needs-sum-pi-squared"),
        ({**GRPO, f"{ROLLOUT}.n": 8, SQUARES: True}, SQUARES, "algorithm.unused-sum-pi-squared"),
        ({**OTB, f"{ROLLOUT}.calculate_log_probs": True, "algorithm.rollout_correction.bypass_mode": True},
         "algorithm.rollout_correction.bypass_mode",
         "algorithm.bypass-sum-pi-squared: adv_estimator=optimal_token_baseline"),
        ({**OTB, "async_training.mode": "colocated", "async_training.max_staleness": 1,
          "async_training.proximal": "loglinear", f"{ROLLOUT}.calculate_log_probs": True},
         "async_training.proximal", "async.loglinear-sum-pi-squared: adv_estimator=optimal_token_baseline"),
        ({**GIGPO, f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n", "algorithm.group-of-one"),
        ({**GIGPO, "algorithm.gigpo.mode": "mean"}, "algorithm.gigpo.mode",
         "config.value-out-of-limits: mean_std_norm"),
        ({**OTB, "algorithm.gigpo.mode": "mean_norm"}, "algorithm.gigpo.mode", "algorithm.gigpo-unused: set gigpo"),
        ({**OTB, "algorithm.gigpo.step_advantage_w": 0.5}, "algorithm.gigpo.step_advantage_w",
         "algorithm.gigpo-unused: algorithm.adv_estimator=optimal_token_baseline"),
        ({"algorithm.adv_estimator": "mine.py:estimate", SQUARES: True, f"{ROLLOUT}.calculate_log_probs": True,
          "algorithm.rollout_correction.bypass_mode": True},
         "algorithm.rollout_correction.bypass_mode", "algorithm.bypass-sum-pi-squared: calculate_sum_pi_squared=true"),
        ({f"{ACTOR}.policy_loss.clip_cov_lb": 5.0}, f"{ACTOR}.policy_loss.clip_cov_lb",
         "algorithm.clip-cov-bounds: clip_cov_ub=5"),
        ({**GRPO, f"{ROLLOUT}.n": 8, "trainer.critic_warmup": 3}, "trainer.critic_warmup",
         "algorithm.critic-warmup: set 0"),
        ({f"{ACTOR}.megatron.tensor_model_parallel_size": 3}, f"{ACTOR}.megatron.tensor_model_parallel_size",
         "layout.replicas-do-not-divide: pool of 8"),
        ({f"{ACTOR}.megatron.pipeline_model_parallel_size": 5}, f"{ACTOR}.megatron.pipeline_model_parallel_size",
         "layout.replicas-do-not-divide: trainer.n_gpus_per_node=8"),
        ({"critic.megatron.data_parallel_size": 16}, "critic.megatron.data_parallel_size",
         "layout.too-many-devices: 16 devices"),
        ({"algorithm.use_kl_in_reward": True, f"{REF}.megatron": {"tensor_model_parallel_size": 16}},
         f"{REF}.megatron.tensor_model_parallel_size", "layout.replicas-do-not-divide: pool of 8"),
        ({f"{ACTOR}.megatron.tensor_model_parallel_size": 3}, f"{ACTOR}.megatron.tensor_model_parallel_size",
         "layout.replicas-do-not-divide: 1, 2, 4, 8"),
        ({f"{ACTOR}.megatron.context_parallel_size": 2, f"{ACTOR}.megatron.tensor_model_parallel_size": 8},
         f"{ACTOR}.megatron.tensor_model_parallel_size", "layout.replicas-do-not-divide: 1, 2, 4"),
        ({"critic.megatron.virtual_pipeline_model_parallel_size": 2},
         "critic.megatron.virtual_pipeline_model_parallel_size",
         "layout.virtual-pipeline: pipeline_model_parallel_size"),
        ({"critic.megatron.num_layers_in_first_pipeline_stage": 2},
         "critic.megatron.num_layers_in_first_pipeline_stage", "layout.single-stage"),
        ({"critic.megatron.pipeline_model_parallel_size": 2, "critic.megatron.num_layers_in_last_pipeline_stage": 2,
          "critic.megatron.account_for_loss_in_pipeline_split": True},
         "critic.megatron.account_for_loss_in_pipeline_split", "layout.two-layer-splits"),
        ({"critic.megatron.use_distributed_optimizer": False, "critic.megatron.overlap_param_gather": True},
         "critic.megatron.overlap_param_gather", "layout.overlap-param-gather: use_distributed_optimizer=true"),
        ({"critic.megatron.recompute_num_layers": 2}, "critic.megatron.recompute_num_layers",
         "layout.recompute-not-full"),
        ({"critic.megatron.recompute_granularity": "selective", "critic.megatron.recompute_modules": []},
         "critic.megatron.recompute_modules", "layout.no-recompute-modules"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 3}, f"{ROLLOUT}.tensor_model_parallel_size",
         "layout.replica-size: pool of 8"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, f"{ROLLOUT}.tensor_model_parallel_size",
         "engine.one-device: set 1"),
        ({f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.tensor_model_parallel_size": 4, "trainer.nnodes": 2,
          "trainer.n_gpus_per_node": 6}, f"{ROLLOUT}.tensor_model_parallel_size",
         "layout.replica-nodes: n_gpus_per_node=6"),
        ({f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.tensor_model_parallel_size": 8, "trainer.nnodes": 2,
          "trainer.n_gpus_per_node": 4, f"{ROLLOUT}.engine_kwargs.sglang.mode": "http"},
         f"{ROLLOUT}.engine_kwargs.sglang.mode", "sglang.server-on-nodes: in_process"),
        ({f"{ROLLOUT}.replicas": 9}, f"{ROLLOUT}.replicas", "layout.too-many-replicas: pool of 8"),
        ({f"{ROLLOUT}.name": "sglang", URLS: ["http://a:1", "http://b:1"], f"{ROLLOUT}.replicas": 1,
          f"{ROLLOUT}.engine_kwargs.sglang.api_key_env": "KEY"},
         f"{ROLLOUT}.replicas", "sglang.urls-per-replica: urls has 2"),
        ({f"{ROLLOUT}.name": "sglang", URLS: ["http://a:1"], f"{ROLLOUT}.replicas": 1},
         f"{ROLLOUT}.engine_kwargs.sglang.api_key_env", "sglang.no-api-key-env"),
        ({"trainer.device": "cpu", "sync.transport": "nccl"}, "sync.transport",
         "sync.transport-on-cpu: trainer.device"),
        ({"trainer.device": "cpu", "sync.transport": "cuda_ipc"}, "sync.transport",
         "sync.transport-on-cpu: trainer.device"),
        ({"trainer.nnodes": 2, "sync.transport": "shared_memory"}, "sync.transport", "sync.transport-across-nodes"),
        ({f"{ALIGN}.enable": True}, f"{ALIGN}.enable",
         "algorithm.repr-align-partner: algorithm.repr_align.ref_alignment.enable=true"),
        ({f"{ALIGN}.ref_alignment.enable": True}, f"{ALIGN}.ref_alignment.enable", "algorithm.repr-align-disabled"),
        ({f"{ALIGN}.enable": True, f"{ALIGN}.ref_alignment.enable": True, f"{ROLLOUT}.calculate_log_probs": True,
          f"{RC}.bypass_mode": True}, f"{ALIGN}.enable", "algorithm.bypass-repr-align"),
        ({f"{RC}.rollout_is": "token"}, f"{ROLLOUT}.calculate_log_probs", "rollout.log-probs-needed: rollout_is"),
        ({f"{RC}.rollout_is_threshold": 0.9}, f"{RC}.rollout_is_threshold", "algorithm.weight-bounds: '0.5_5.0'"),
        ({f"{RC}.rollout_is_threshold": "1.5_5.0"}, f"{RC}.rollout_is_threshold", "algorithm.weight-bounds: '0.5_5.0'"),
        ({f"{RC}.rollout_is_threshold": "2.0_x"}, f"{RC}.rollout_is_threshold", "algorithm.weight-bounds: '2.0_x'"),
        ({**RS, f"{RC}.rollout_rs": "token_k9"}, f"{RC}.rollout_rs", "algorithm.unknown-rejection: token_k1"),
        ({**RS, f"{RC}.rollout_rs_threshold": None}, f"{RC}.rollout_rs_threshold",
         "algorithm.rejection-bounds: all 3 options"),
        ({**RS, f"{RC}.rollout_rs_threshold": "1_2,3"}, f"{RC}.rollout_rs_threshold",
         "algorithm.rejection-bounds: all 3 options"),
        ({**RS, f"{RC}.rollout_rs_threshold": "0.5_2"}, f"{RC}.rollout_rs_threshold",
         "algorithm.rejection-bounds: seq_mean_k3"),
        ({**RS, f"{RC}.rollout_rs_threshold": "2_0.5"}, f"{RC}.rollout_rs_threshold",
         "algorithm.rejection-bounds: '2_0.5'"),
        ({**RS, f"{RC}.rollout_rs_threshold": "0.5_0.9"}, f"{RC}.rollout_rs_threshold",
         "algorithm.rejection-bounds: token_k1"),
        ({f"{RC}.rollout_rs_threshold": "2"}, f"{RC}.rollout_rs_threshold", "algorithm.threshold-without-rejection"),
        ({**RS, f"{RC}.rollout_rs_threshold": "2", f"{RC}.bypass_mode": True}, f"{RC}.rollout_rs",
         "algorithm.bypass-correction"),
        ({f"{RC}.bypass_mode": True, f"{ROLLOUT}.calculate_log_probs": True, f"{ACTOR}.state_masking": False},
         f"{RC}.bypass_mode", "algorithm.bypass-state-masking: actor_rollout_ref.actor.state_masking"),
        ({"trainer.val_only": True}, "trainer.val_only", "data.no-val-files: data.val_files"),
        ({"trainer.val_before_train": True}, "trainer.val_before_train", "data.no-val-files: data.val_files"),
        ({"trainer.test_freq": 5}, "trainer.test_freq", "data.no-val-files: data.val_files"),
        ({f"{ROLLOUT}.val_kwargs.n": 4}, f"{ROLLOUT}.val_kwargs.n", "rollout.greedy-duplicates"),
        ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path", "resume.no-path"),
        ({"trainer.resume_from_path": "x"}, "trainer.resume_from_path", "resume.unused-path: resume_path"),
        ({f"{ACTOR}.checkpoint.save_contents": []}, f"{ACTOR}.checkpoint.save_contents", "checkpoint.no-save-contents"),
        ({"critic.checkpoint.save_contents": ["extra"]}, "critic.checkpoint.save_contents",
         "checkpoint.save-without-model"),
        ({f"{ACTOR}.checkpoint.load_contents": ["extra"]}, f"{ACTOR}.checkpoint.load_contents",
         "resume.contents-without-model"),
        ({f"{ACTOR}.checkpoint.load_contents": ["model", "hf_model"]}, f"{ACTOR}.checkpoint.load_contents",
         "config.value-out-of-limits: model, optimizer, extra"),
        ({f"{ACTOR}.checkpoint.save_contents": ["model", "model"]}, f"{ACTOR}.checkpoint.save_contents",
         "checkpoint.repeated-contents"),
        ({"trainer.best_metric": "val-core/x", "trainer.save_freq": 5}, "trainer.best_metric",
         "checkpoint.best-needs-validation"),
        ({"trainer.best_metric": "val-core/x", "trainer.test_freq": 5, "data.val_files": "v"}, "trainer.best_metric",
         "checkpoint.best-needs-saves: trainer.save_freq=-1"),
        ({"data.train_files": []}, "data.train_files", "data.no-train-files"),
        ({"trainer.experiment_name": " "}, "trainer.experiment_name", "config.value-out-of-limits: empty"),
        ({f"{ACTOR}.optim.min_lr": 1.0}, f"{ACTOR}.optim.min_lr", "algorithm.min-lr-above-lr"),
        ({"critic.optim.lr_warmup_steps": 9, "critic.optim.total_training_steps": 8},
         "critic.optim.lr_warmup_steps", "algorithm.warmup-too-long"),
        ({f"{ACTOR}.optim.betas": [0.9, 1.0]}, f"{ACTOR}.optim.betas", "algorithm.adam-betas"),
        ({"data.train_batch_size": 100}, "data.train_batch_size", "batch.mini-batch-size: 256"),
        ({f"{ACTOR}.ppo_mini_batch_size": 4}, f"{ACTOR}.ppo_mini_batch_size", "batch.samples-per-rank"),
        ({f"{ACTOR}.use_dynamic_bsz": False}, f"{ACTOR}.micro_batch_size_per_gpu", "batch.no-micro-batch-size"),
        ({"trainer.watchdog.phases": {"generation": 9}}, "trainer.watchdog.phases",
         "config.watchdog-unknown-phase: start_workers"),
        ({f"{ACTOR}.profiler.enable": True, f"{ACTOR}.profiler.ranks": [0]}, f"{ACTOR}.profiler.enable",
         "timeline.no-profiler: global_profiler.tool"),
        ({**PROFILED, f"{ACTOR}.profiler.ranks": []}, f"{ACTOR}.profiler.ranks", "timeline.no-ranks"),
        ({**PROFILED, f"{ACTOR}.profiler.enable": False}, "global_profiler.tool", "timeline.no-role"),
        ({**PROFILED, "global_profiler.steps": None}, "global_profiler.steps", "timeline.no-steps"),
        ({**PROFILED, f"{REF}.profiler.enable": True, f"{REF}.profiler.all_ranks": True}, f"{REF}.profiler.enable",
         "timeline.shared-processes"),
        ({**PROFILED, "global_profiler.tool": "torch_memory", "trainer.device": "cpu"}, "global_profiler.tool",
         "timeline.needs-cuda: tool=torch"),
        ({"trainer.watchdog.phases": {"gen": 0}}, "trainer.watchdog.phases", "config.watchdog-limit: gen: 0 "),
        ({"trainer.nccl_timeout": 200}, "trainer.watchdog.timeout_s",
         "config.watchdog-after-collectives: trainer.nccl_timeout=300"),
        ({"trainer.watchdog.phases": {"update_actor": 1800}}, "trainer.watchdog.phases",
         "config.watchdog-after-collectives: trainer.nccl_timeout=1860"),
        ({"trainer.nccl_timeout": 90_000}, "trainer.nccl_timeout", "config.collective-timeout: 86400"),
        ({"trainer.watchdog.timeout_s": 60}, f"{ROLLOUT}.health.timeout_s",
         f"config.replica-after-watchdog: {ROLLOUT}.health.timeout_s=45"),
        ({"trainer.watchdog.phases": {"gen": 100}}, f"{ROLLOUT}.health.timeout_s",
         "config.replica-after-watchdog: trainer.watchdog.phases.gen=240"),
        ({"trainer.watchdog.phases": {"update_weights": 100}, "trainer.watchdog.action": "end"}, "sync.timeout_s",
         "sync.timeout-after-watchdog: trainer.watchdog.phases.update_weights=800"),
        ({"trainer.timeline.steps": [-1]}, "trainer.timeline.steps", "timeline.negative-step"),
        ({"critic.max_token_len_per_gpu": 1023}, "critic.max_token_len_per_gpu", "batch.token-budget: 1024"),
        ({f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 9}, f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
         "batch.token-budget: 1024"),
    ],
)  # fmt: skip
def test_impossible_combination(values, path, expected):
    problem = problems_of(values)[path]
    check_problem(problem, expected)
    assert problem.doc


# The texts that new users see first.
@pytest.mark.parametrize(
    ("values", "path", "text"),
    [
        ({"data.train_files": []}, "data.train_files", "must name at least one file, or set data.mixture"),
        ({"trainer.test_freq": 5}, "trainer.test_freq", "needs data.val_files, which is empty; -1 = never validate"),
        ({"data.shuffle": "perhaps"}, "data.shuffle", "must be true or false"),
        ({"algorithm.lam": 1.5}, "algorithm.lam", "must be >= 0 and <= 1"),
        ({f"{ACTOR}.megatron.tensor_model_parallel_size": 3}, f"{ACTOR}.megatron.tensor_model_parallel_size",
         "tensor parallel 3 x pipeline parallel 1 = 3 devices per replica do not divide the pool of 8 "
         "(trainer.nnodes=1 x trainer.n_gpus_per_node=8); valid with the other sizes: 1, 2, 4, 8"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, f"{ROLLOUT}.tensor_model_parallel_size",
         "actor_rollout_ref.rollout.name=embedded runs each replica on one device; set 1"),
        ({"data.train_batch_size": 100}, "data.train_batch_size",
         "100 prompts do not divide into mini-batches of 256 (actor_rollout_ref.actor.ppo_mini_batch_size); nearest "
         "that do: 256"),
        ({f"{ACTOR}.ppo_mini_batch_size": 4}, f"{ACTOR}.ppo_mini_batch_size",
         "4 prompts x 1 sample each (actor_rollout_ref.rollout.n) = 4 samples do not divide over 8 data-parallel "
         "ranks; nearest that do: 8"),
        ({f"{ACTOR}.use_dynamic_bsz": False}, f"{ACTOR}.micro_batch_size_per_gpu",
         "must be set while actor_rollout_ref.actor.use_dynamic_bsz=false"),
        ({"critic.max_token_len_per_gpu": 1023}, "critic.max_token_len_per_gpu",
         "must hold the longest sample, data.max_prompt_length + data.max_response_length = 1024 tokens"),
        ({**GRPO, f"{ROLLOUT}.n": 1}, f"{ROLLOUT}.n",
         "algorithm.adv_estimator=grpo compares the responses of a group; set at least 2"),
        ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path",
         "must be set with trainer.resume_mode=resume_path"),
        ({f"{RC}.rollout_is": "token"}, f"{ROLLOUT}.calculate_log_probs",
         "algorithm.rollout_correction.rollout_is needs the engine's log-probs; set true"),
    ],
)  # fmt: skip
def test_text_of_a_problem(values, path, text):
    assert problems_of(values)[path].text == text


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
        {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.micro_batch_size_per_gpu": 2},
        {"critic.max_token_len_per_gpu": 1024},
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
def test_possible_combination(values):
    build(TrainConfig, with_keys(values))


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"megatron.tensor_model_parallel_size": 3}, "megatron.tensor_model_parallel_size",
         "layout.replicas-do-not-divide: pool of 8"),
        ({"data.train_batch_size": 12}, "data.train_batch_size", "batch.samples-per-rank: 8 and 16"),
        ({"data.use_dynamic_bsz": False}, "data.micro_batch_size_per_gpu", "batch.no-micro-batch-size"),
        ({"data.use_dynamic_bsz": False, "data.micro_batch_size_per_gpu": 3}, "data.micro_batch_size_per_gpu",
         "batch.micro-batch-division: 2 and 4"),
        ({"data.max_token_len_per_gpu": 100}, "data.max_token_len_per_gpu", "batch.token-budget: data.max_length"),
        ({"optim.min_lr": 1.0}, "optim.min_lr", "algorithm.min-lr-above-lr: optim.lr"),
        ({"data.max_prompt_length": 5}, "data.max_prompt_length", "config.training-key: data.max_length"),
        ({"trainer.test_freq": 5}, "trainer.test_freq", "config.verl-value: megarl sft"),
        ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path",
         "resume.no-path: trainer.resume_mode=resume_path"),
        ({"trainer.checkpoint.save_contents": ["optimizer"]}, "trainer.checkpoint.save_contents",
         "checkpoint.save-without-model"),
    ],
)  # fmt: skip
def test_impossible_fine_tuning(values, path, expected):
    check_problem(problems_of(values, SFTConfig, SFT)[path], expected)


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"data.val_files": []}, "data.val_files", "data.no-val-files"),
        ({f"{ROLLOUT}.val_kwargs.n": 4}, f"{ROLLOUT}.val_kwargs.n", "rollout.greedy-duplicates"),
        (
            {f"{ROLLOUT}.tensor_model_parallel_size": 3},
            f"{ROLLOUT}.tensor_model_parallel_size",
            "layout.replica-size: pool of 8",
        ),
        (
            {"actor_rollout_ref.rollout.multi_turn.search.enable": True},
            "actor_rollout_ref.rollout.multi_turn.search.url",
            "tool.no-retriever",
        ),
        ({"trainer.experiment_name": " "}, "trainer.experiment_name", "config.value-out-of-limits: empty"),
        ({"trainer.save_freq": 5}, "trainer.save_freq", "config.training-key"),
        ({"critic.optim.lr": 1.0}, "critic", "config.training-key"),
        ({"critics.optim.lr": 1.0}, "critics", "config.unknown-key"),
    ],
)
def test_impossible_evaluation(values, path, expected):
    check_problem(problems_of(values, EvaluateConfig, EVALUATE)[path], expected)


GENERATE = {"data.prompts": ["Why?"], "actor_rollout_ref.model.path": "model", "trainer.experiment_name": "x"}


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"data.prompts": []}, "data.prompts", "data.no-prompts"),
        ({"data.output_path": "answers.csv"}, "data.output_path", "data.output-suffix"),
        ({f"{ROLLOUT}.val_kwargs.n": 4}, f"{ROLLOUT}.val_kwargs.n", "rollout.greedy-duplicates"),
        ({"reward.name": "gsm8k"}, "reward", "config.training-key"),
    ],
)
def test_impossible_generation(values, path, expected):
    check_problem(problems_of({**GENERATE, **values}, GenerateConfig, {})[path], expected)


def test_derived_keys_of_an_evaluation():
    values = {f"{ROLLOUT}.tensor_model_parallel_size": 2, f"{ROLLOUT}.name": "sglang", "trainer.seed": 5}
    config = build(EvaluateConfig, with_keys(values, EVALUATE))
    policy = config.actor_rollout_ref
    assert (policy.rollout.replicas, policy.rollout.seed, policy.model.tokenizer_path) == (4, 5, "model")


def test_running_servers_set_the_replicas_and_need_one_device_each_for_the_client():
    values = {
        f"{ROLLOUT}.tensor_model_parallel_size": 16,
        f"{ROLLOUT}.name": "sglang",
        URLS: ["http://a:1", "http://b:1"],
        f"{ROLLOUT}.engine_kwargs.sglang.api_key_env": "KEY",
    }
    rollout = build(TrainConfig, with_keys(values)).actor_rollout_ref.rollout
    assert (rollout.replicas, rollout.devices_per_replica) == (2, 1)


def test_combinations_are_reported_together():
    problems = problems_of({f"{ACTOR}.megatron.tensor_model_parallel_size": 3, "trainer.val_only": True,
                         "data.train_batch_size": 100})  # fmt: skip
    assert set(problems) == {
        f"{ACTOR}.megatron.tensor_model_parallel_size",
        "trainer.val_only",
        "data.train_batch_size",
    }
    assert TRAIN["data"] == {"train_files": ["train.parquet"]}


def test_refused_keys_of_verl_name_their_replacement():
    problems = problems_of({f"{RC}.rollout_token_veto_threshold": 1e-4, f"{RC}.rollout_rs_threshold_lower": 0.5})
    check_problem(problems[f"{RC}.rollout_token_veto_threshold"], "config.verl-key: rollout_rs=seq_max_k2")
    check_problem(problems[f"{RC}.rollout_rs_threshold_lower"], "config.verl-key: '0.5_2.0'")


@pytest.mark.parametrize(
    ("values", "log_probs"),
    [
        ({"algorithm.ref_quality_score.enable": True}, True),
        ({f"{ALIGN}.enable": True, f"{ALIGN}.ref_alignment.enable": True}, False),
    ],
)
def test_reference_shaping_needs_a_reference(values, log_probs):
    config = build(TrainConfig, with_keys({**TRAIN, **values}))
    assert config.uses_reference and config.uses_ref_log_prob == log_probs
    assert not build(TrainConfig, with_keys(TRAIN)).uses_reference


RM = "reward.model"
ENABLED = {f"{RM}.enable": True, f"{RM}.path": "reward"}


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
def test_keys_of_training_are_rejected_in_jobs_without_training(schema, path):
    value, instead = OF_TRAINING[path]
    found = problems_of({path: value}, schema, EVALUATE)
    assert set(found) == {path}
    check_problem(found[path], f"config.training-key: {instead or 'remove it'}")


@pytest.mark.parametrize("schema", [TrainConfig, EvaluateConfig])
@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({f"{RM}.enable": True}, f"{RM}.path", "reward.no-model-path: reward.model.enable=true"),
        ({**ENABLED, f"{RM}.weight": 0.0}, f"{RM}.weight", "reward.model-without-weight: enable=false"),
        ({"reward.function_weight": 0.0}, "reward.function_weight", "reward.nothing-scores"),
        ({**ENABLED, f"{RM}.megatron.tensor_model_parallel_size": 3}, f"{RM}.megatron.tensor_model_parallel_size",
         "layout.replicas-do-not-divide: pool of 8"),
        ({**ENABLED, f"{RM}.use_dynamic_bsz": False}, f"{RM}.micro_batch_size_per_gpu", "batch.no-micro-batch-size"),
        ({**ENABLED, f"{RM}.max_length": 50, f"{RM}.max_token_len_per_gpu": 40},
         f"{RM}.max_token_len_per_gpu", "batch.token-budget: reward.model.max_length = 50"),
    ],
)  # fmt: skip
def test_impossible_reward_models(schema, values, path, expected):
    base = TRAIN if schema is TrainConfig else EVALUATE
    check_problem(problems_of(values, schema, base)[path], expected)


def test_a_reward_model_alone_calls_no_function_and_reads_whole_rollouts():
    plain, alone = (build(TrainConfig, with_keys(values, TRAIN)).reward for values in ({}, ENABLED))
    both = build(TrainConfig, with_keys({**ENABLED, "reward.custom_reward_function.path": "mine.py"}, TRAIN))
    assert (plain.function_weight, alone.function_weight, both.reward.function_weight) == (1.0, 0.0, 1.0)
    assert alone.model.max_length == both.data.max_prompt_length + both.data.max_response_length
    assert alone.model.megatron.data_parallel_size == 8


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"trainer.test_freq": 5}, "trainer.test_freq", "data.no-val-files: data.val_files"),
        ({"data.max_token_len_per_gpu": 2000}, "data.max_token_len_per_gpu", "batch.token-budget: data.max_length"),
        ({"data.train_batch_size": 12}, "data.train_batch_size", "batch.samples-per-rank: 8 and 16"),
        ({"data.response_key": "x"}, "data.response_key", "config.unknown-key"),
    ],
)
def test_impossible_training_of_reward_models(values, path, expected):
    check_problem(problems_of(values, RewardTrainingConfig, SFT)[path], expected)


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"trainer.test_freq": 5}, "trainer.test_freq", "data.no-val-files: data.val_files"),
        ({"loss.type": "dop"}, "loss.type", "config.value-out-of-limits: dpo, ipo"),
        ({"loss.beta": 0}, "loss.beta", "config.value-out-of-limits: > 0"),
        (
            {"loss.type": "ipo", "loss.label_smoothing": 0.1},
            "loss.label_smoothing",
            "algorithm.preference-key-unused: loss.type=ipo",
        ),
        ({"loss.simpo_gamma": 0.5}, "loss.simpo_gamma", "algorithm.preference-key-unused: loss.type=dpo"),
        ({"data.margin_key": "gap"}, "data.margin_key", "config.unknown-key"),
        (
            {"loss.desirable_weight": 1.0},
            "loss.desirable_weight",
            "algorithm.preference-key-unused: loss.type=dpo",
        ),
        ({"loss.undesirable_weight": 1.0}, "loss.undesirable_weight", "algorithm.preference-key-unused"),
        ({"data.label_key": "label"}, "data.label_key", "algorithm.preference-key-unused: loss.type=dpo"),
        (
            {"loss.type": "kto", "loss.desirable_weight": -1.0},
            "loss.desirable_weight",
            "config.value-out-of-limits: >= 0",
        ),
        (
            {"loss.type": "kto", "loss.label_smoothing": 0.1},
            "loss.label_smoothing",
            "algorithm.preference-key-unused: loss.type=kto",
        ),
        (
            {"loss.type": "kto", "loss.simpo_gamma": 0.1},
            "loss.simpo_gamma",
            "algorithm.preference-key-unused: loss.type=kto",
        ),
        ({"loss.type": "kto", "data.train_batch_size": 1}, "data.train_batch_size", "algorithm.kto-batch-of-one"),
    ],
)
def test_impossible_preference_optimization(values, path, expected):
    check_problem(problems_of(values, PreferenceConfig, SFT)[path], expected)


SUPPORT = {f"{ROLLOUT}.support.enable": True, f"{ROLLOUT}.top_p": 0.8}
TEACHER = {"distillation.enabled": True, "distillation.teacher_models": {"t": {"model_path": "teacher"}}}


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({f"{ROLLOUT}.top_p": 1.0}, "rollout.support-without-filter"),
        ({f"{ROLLOUT}.repetition_penalty": 1.1}, "rollout.support-penalty"),
        (TEACHER, "rollout.support-distillation"),
    ],
)
def test_log_probs_over_the_support_are_refused_where_they_are_useless_or_wrong(values, code):
    check_problem(problems_of({**SUPPORT, **values})[f"{ROLLOUT}.support.enable"], code)


def test_the_width_of_the_support_follows_from_the_filter_and_its_bound():
    def rollout(**keys):
        config = build(
            TrainConfig, with_keys({**SUPPORT, **{f"{ROLLOUT}.{name}": value for name, value in keys.items()}})
        )
        return config, config.actor_rollout_ref.rollout.support_tokens

    config, width = rollout()
    off, none = rollout(**{"support.enable": False})
    assert (width, none) == (64, 0)
    assert rollout(top_k=20)[1] == 28 and rollout(top_k=60)[1] == 64
    rows = off.data.train_batch_size * off.responses_per_prompt * off.data.max_response_length
    assert token_store_bytes(config) - token_store_bytes(off) == rows * 64 * 4


def test_min_p_needs_sglang_without_its_deterministic_mode():
    rollout = "actor_rollout_ref.rollout"
    sglang = {f"{rollout}.name": "sglang", f"{rollout}.min_p": 0.1, f"{rollout}.val_kwargs.min_p": 0.2}
    for keys in ({"trainer.device": "cpu"}, {f"{rollout}.engine_kwargs.sglang.deterministic": True}):
        problems = problems_of(sglang | keys)
        assert {problem.code for problem in problems.values()} == {"sglang.no-min-p"}
        assert set(problems) == {f"{rollout}.min_p", f"{rollout}.val_kwargs.min_p"}
    free = {"trainer.device": "cpu", f"{rollout}.engine_kwargs.sglang.deterministic": False}
    assert build(TrainConfig, with_keys(sglang | free)).actor_rollout_ref.rollout.min_p == 0.1
