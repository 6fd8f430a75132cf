"""Unknown keys, wrong types and wrong values, each named with path, value and remedy."""

import dataclasses
import pickle
from pathlib import Path

import pytest
from config_cases import SFT, TRAIN, check_problem, problems_of, with_keys
from omegaconf import OmegaConf

from megarl.config import MegatronConfig, SFTConfig, TrainConfig
from megarl.config.build import build
from megarl.config.keys import KeyLimits, walk, with_values
from megarl.config.problems import InvalidConfigError, nearest_keys


def test_minimal_config_becomes_dataclasses():
    config = build(TrainConfig, TRAIN)
    assert isinstance(config, TrainConfig)
    assert isinstance(config.critic.megatron, MegatronConfig)
    assert config.data.train_files == ["train.parquet"]
    assert config.critic.optim.lr == 1e-5 and config.actor_rollout_ref.actor.optim.lr == 1e-6


def test_values_replace_defaults_and_scalars_become_lists():
    config = build(
        TrainConfig,
        with_keys({"data.train_files": "one.parquet", "trainer.logger": "wandb", "actor_rollout_ref.rollout.n": "4"}),
    )
    assert config.data.train_files == ["one.parquet"]
    assert config.trainer.logger == ["wandb"]
    assert config.actor_rollout_ref.rollout.n == 4


def test_a_configuration_is_frozen():
    config = build(TrainConfig, TRAIN)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.trainer.seed = 2  # type: ignore[misc]
    changed = with_values(config, {"trainer.seed": 2, "actor_rollout_ref.actor.optim.lr": 0.5})
    assert (changed.trainer.seed, changed.actor_rollout_ref.actor.optim.lr) == (2, 0.5)
    assert config.trainer.seed == 1 and changed.critic is config.critic


def test_values_in_free_mappings_can_be_replaced():
    kwargs = {"a": 1, "b": {"c": 2}}
    config = build(TrainConfig, with_keys({"data.apply_chat_template_kwargs": kwargs}))
    changed = with_values(config, {"data.apply_chat_template_kwargs.b.c": 3})
    assert changed.data.apply_chat_template_kwargs == {"a": 1, "b": {"c": 3}}
    assert config.data.apply_chat_template_kwargs == kwargs


def test_two_builds_share_nothing():
    first, second = build(TrainConfig, TRAIN), build(TrainConfig, TRAIN)
    first.trainer.logger.append("wandb")
    first.actor_rollout_ref.actor.optim.betas[0] = 0.5
    assert "wandb" not in second.trainer.logger
    assert second.actor_rollout_ref.actor.optim.betas[0] == 0.9
    assert build(TrainConfig, TRAIN).trainer.logger == ["console", "jsonl"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("actor_rollout_ref.actor.clip_ratoi", "actor_rollout_ref.actor.clip_ratio"),
        ("actor_rollout_ref.actor.megatron.tensor_parallel_size",
         "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"),
        ("trainer.ppo_mini_batch_size",
         "critic.ppo_mini_batch_size or actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("critc", "critic"),
        ("trainer.max_actor_ckpt", "trainer.max_actor_ckpt_to_keep"),
        ("actor_rollout_ref.ref.megatron.dtyp", "actor_rollout_ref.ref.megatron.dtype"),
    ],
)  # fmt: skip
def test_unknown_key_suggests_the_nearest(path, meant):
    problem = problems_of({path: 3})[path]
    assert problem.value == 3
    check_problem(problem, f"config.unknown-key:  {meant}?")


def test_unknown_key_that_resembles_nothing_has_no_suggestion():
    problem = problems_of({"zzzz": 1})["zzzz"]
    assert (problem.code, problem.text) == ("config.unknown-key", "unknown key")
    assert nearest_keys("zzzz", []) == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("trainer.seed", "many", "a whole number"),
        ("trainer.seed", 1.5, "a whole number"),
        ("trainer.seed", True, "a whole number"),
        ("trainer.seed", None, "a whole number"),
        ("data.shuffle", "perhaps", "true or false"),
        ("actor_rollout_ref.actor.optim.lr", "fast", "a number"),
        ("actor_rollout_ref.actor.optim.lr", {"a": 1}, "a number"),
        ("trainer.hf_export_dir", False, "a text or null"),
        ("data.train_files", {"a": 1}, "a list of str"),
        ("actor_rollout_ref.actor.optim.betas", ["a", 1], "a list of float"),
        ("data.apply_chat_template_kwargs", 3, "a mapping"),
        ("critic.optim", None, "a section"),
    ],
)
def test_wrong_type_names_the_expected_type(path, value, expected):
    problem = problems_of({path: value})[path]
    check_problem(problem, f"config.wrong-type: {expected}")
    assert problem.value == value


def test_a_value_instead_of_a_section_names_its_keys():
    check_problem(problems_of({"critic.optim": 4})["critic.optim"], "config.section-needs-keys: lr, ")


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("algorithm.adv_estimator", "gea", "one of gae, grpo, "),
        ("algorithm.adv_estimator", "gea", "or your own as path.py:function"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "clip-cov", "one of vanilla, gspo, "),
        ("trainer.logger", ["console", "papyrus"], "console, jsonl, mlflow, swanlab, tensorboard, wandb"),
        ("actor_rollout_ref.actor.loss_agg_mode", "mean", "token-mean"),
        ("actor_rollout_ref.actor.clip_ratio_c", 1.0, "> 1"),
        ("actor_rollout_ref.actor.clip_ratio", 0, "> 0"),
        ("algorithm.lam", 1.5, ">= 0 and <= 1"),
        ("algorithm.gamma", float("nan"), "> 0 and <= 1"),
        ("actor_rollout_ref.actor.optim.lr", float("inf"), ">= 0"),
        ("actor_rollout_ref.rollout.top_k", 0, "-1 or >= 1"),
        ("trainer.save_freq", 0, "-1 or >= 1"),
        ("actor_rollout_ref.rollout.temperature", 0, "> 0"),
        ("actor_rollout_ref.actor.optim.betas", [0.9], "2 entries"),
        ("actor_rollout_ref.actor.optim.betas", [0.9, 1.2], "<= 1"),
        ("reward.name", "arithmetc", "path.py:function"),
    ],
)
def test_wrong_value_lists_the_valid_values(path, value, expected):
    problem = problems_of({path: value})[path]
    check_problem(problem, f"config.value-out-of-limits: {expected}")
    assert problem.doc


@pytest.mark.parametrize("name", ["arithmetic", "mine.py:score", "package.module.score"])
def test_reward_may_be_a_custom_function(name):
    assert build(TrainConfig, with_keys({"reward.name": name})).reward.name == name


def test_special_values_outside_the_range_are_allowed():
    config = build(TrainConfig, with_keys({"actor_rollout_ref.rollout.top_k": -1, "trainer.test_freq": -1}))
    assert config.actor_rollout_ref.rollout.top_k == -1


def test_limits_without_bounds_refuse_only_non_finite_numbers():
    assert KeyLimits().complaint(-5.0) is None
    assert KeyLimits().complaint(float("inf")) == "must be a finite number"
    assert KeyLimits().complaint(None) is None


def test_missing_keys_are_all_named():
    with pytest.raises(InvalidConfigError) as caught:
        build(TrainConfig, {})
    codes = {problem.path: problem.code for problem in caught.value.problems}
    required = ("data.train_files", "actor_rollout_ref.model.path", "trainer.experiment_name")
    assert codes == dict.fromkeys(required, "config.required-key")


def test_all_problems_are_reported_together_and_survive_pickling():
    values = {"trainer.seeed": 1, "trainer.seed": "x", "algorithm.adv_estimator": "ppo", "critic.nothing.at": 1}
    with pytest.raises(InvalidConfigError) as caught:
        build(TrainConfig, with_keys(values))
    assert "4 problems" in str(caught.value)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert copied.problems == caught.value.problems and str(copied) == str(caught.value)


def test_interpolation_may_refer_to_a_default():
    config = build(TrainConfig, with_keys({"trainer.seed": "${data.max_prompt_length}"}))
    assert config.trainer.seed == 512


def test_interpolation_to_nothing_is_named():
    problem = problems_of({"trainer.seed": "${data.nothing}"})["trainer.seed"]
    check_problem(problem, "config.interpolation: data.nothing")
    assert problem.value == "${data.nothing}"


def test_optional_section_takes_the_section_defaults():
    assert build(TrainConfig, TRAIN).actor_rollout_ref.ref.megatron is None
    config = build(TrainConfig, with_keys({"actor_rollout_ref.ref.megatron.tensor_model_parallel_size": 2}))
    megatron = config.actor_rollout_ref.ref.megatron
    assert megatron is not None
    assert (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size) == (2, 1)


def test_free_mapping_keeps_its_values():
    kwargs = {"enable_thinking": False, "nested": {"a": [1]}}
    config = build(TrainConfig, with_keys({"data.apply_chat_template_kwargs": kwargs}))
    assert config.data.apply_chat_template_kwargs == kwargs


def test_resolved_config_builds_to_itself():
    for schema, base in ((TrainConfig, TRAIN), (SFTConfig, SFT)):
        config = build(schema, base)
        again = build(schema, OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(config))))
        assert again == config


@pytest.mark.parametrize("schema", [TrainConfig, SFTConfig])
def test_every_key_is_documented_and_every_default_is_right(schema):
    for path, item in walk(schema):
        if item.section is None:
            assert item.doc, f"{path} has no documentation"
            if item.default != "???":
                assert item.limits.complaint(item.default) is None, path


def test_derived_keys():
    values = {
        "actor_rollout_ref.actor.clip_ratio": 0.3,
        "actor_rollout_ref.actor.clip_ratio_high": 0.4,
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
        "actor_rollout_ref.actor.use_dynamic_bsz": False,
        "actor_rollout_ref.actor.micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum",
        "trainer.seed": 9,
        "data.seed": 3,
    }
    config = build(TrainConfig, with_keys(values))
    policy = config.actor_rollout_ref
    assert (policy.actor.clip_ratio_low, policy.actor.clip_ratio_high) == (0.3, 0.4)
    assert policy.actor.megatron.data_parallel_size == config.critic.megatron.data_parallel_size == 4
    assert policy.rollout.replicas == 8
    assert policy.model.tokenizer_path == config.critic.model.path == "model"
    for keys in (policy.rollout.log_prob_batch, policy.ref):
        assert keys.use_dynamic_bsz is False and keys.micro_batch_size_per_gpu == 4
    assert (config.data.seed, policy.rollout.seed) == (3, 9)
    assert config.critic.loss_agg_mode == "seq-mean-token-sum"
    assert config.critic.ppo_mini_batch_size == policy.actor.ppo_mini_batch_size
    assert config.trainer.default_local_dir == "outputs/test/checkpoints"
    assert build(TrainConfig, TRAIN, files_root="here").trainer.default_local_dir == "here/checkpoints"
    assert build(SFTConfig, SFT, files_root="here").trainer.hf_export_dir == "here/hf"
    assert build(SFTConfig, SFT).trainer.hf_export_dir == "outputs/test/hf"


def test_roles_of_a_job():
    assert build(TrainConfig, TRAIN).uses_critic and not build(TrainConfig, TRAIN).uses_reference
    grpo = build(TrainConfig, with_keys({"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8}))
    assert not grpo.uses_critic
    for key in ("algorithm.use_kl_in_reward", "actor_rollout_ref.actor.use_kl_loss"):
        assert build(TrainConfig, with_keys({key: True})).uses_reference


@pytest.mark.parametrize(
    ("name", "critic", "baselines"),
    [("gae", True, False), ("rloo", False, False), ("reinforce_plus_plus", False, False), ("remax", False, True)],
)
def test_inputs_of_an_estimator(name, critic, baselines):
    config = build(TrainConfig, with_keys({"algorithm.adv_estimator": name, "actor_rollout_ref.rollout.n": 4}))
    assert (config.uses_critic, config.uses_baselines) == (critic, baselines)


def test_estimators_that_need_the_sum_of_squared_probabilities():
    key = "actor_rollout_ref.actor.calculate_sum_pi_squared"
    for name, value, expected in (
        ("optimal_token_baseline", None, True),
        ("tir_optimal_token_baseline", True, True),
        ("grpo", None, False),
        ("mine.py:estimate", None, False),
        ("mine.py:estimate", True, True),
    ):
        keys = {"algorithm.adv_estimator": name, "actor_rollout_ref.rollout.n": 4, key: value}
        assert build(TrainConfig, with_keys(keys)).uses_sum_pi_squared is expected, name


def test_a_custom_estimator_may_need_a_critic():
    custom = {"algorithm.adv_estimator": "mine.py:estimate"}
    assert not build(TrainConfig, with_keys(custom)).uses_critic
    assert build(TrainConfig, with_keys(custom | {"critic.enable": True})).uses_critic


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        ({}, "token-mean"),
        ({f"{ACTOR}.policy_loss.loss_mode": "gspo"}, "seq-mean-token-mean"),
        ({f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.loss_agg_mode": "token-mean"}, "token-mean"),
        ({f"{ACTOR}.policy_loss.loss_mode": "/mine.py:loss"}, "token-mean"),
    ],
)
def test_a_loss_has_a_default_aggregation(values, mode):
    assert build(TrainConfig, with_keys(values)).actor_rollout_ref.actor.loss_agg_mode == mode


def test_a_custom_loss_gets_an_absolute_path():
    name = f"{ACTOR}.policy_loss.loss_mode"
    custom = build(TrainConfig, with_keys({name: "mine.py:loss"})).actor_rollout_ref.actor.policy_loss.loss_mode
    assert custom == f"{Path.cwd() / 'mine.py'}:loss"
    dotted = build(TrainConfig, with_keys({name: "my.losses.one"})).actor_rollout_ref.actor.policy_loss.loss_mode
    assert dotted == "my.losses.one"


def test_divisor_of_length_normalized_losses():
    assert (
        build(TrainConfig, with_keys({"data.max_response_length": 77})).actor_rollout_ref.actor.loss_scale_factor == 77
    )
    explicit = build(TrainConfig, with_keys({f"{ACTOR}.loss_scale_factor": 5}))
    assert explicit.actor_rollout_ref.actor.loss_scale_factor == 5
