"""``auto``: keys that follow others, and Megatron sections of roles that inherit the actor's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml
from config_cases import EVALUATE, SFT, TRAIN, check_problem, problems_of, with_keys

from megarl.config import EvaluateConfig, GenerateConfig, PreferenceConfig, RewardTrainingConfig, SFTConfig, TrainConfig
from megarl.config.build import build, changed_keys, defaults
from megarl.config.compose import REPOSITORY_CONFIGS, ConfigRequest, compose, compose_sweep, to_yaml
from megarl.config.derived import followers, inherit
from megarl.config.keys import keys_of, lookup, value_at, walk
from megarl.config.schema.distillation import TeacherConfig
from megarl.config.schema.model import MegatronConfig

ACTOR, REF = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"
TP, PP, VPP, EP = (
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model")
)
BASES = {TrainConfig: TRAIN, SFTConfig: SFT, EvaluateConfig: EVALUATE}


def build_train(values):
    return build(TrainConfig, with_keys(values))


@pytest.mark.parametrize(
    "schema",
    [TrainConfig, SFTConfig, RewardTrainingConfig, PreferenceConfig, EvaluateConfig, GenerateConfig, TeacherConfig],
)
def test_an_unset_key_documents_either_auto_or_null(schema):
    for path, item in walk(schema):
        if item.section is None and (item.optional or item.auto):
            texts = [word for word in ("auto", "null") if f"{word} = " in item.doc]
            assert texts == ["auto" if item.auto else "null"], path
            assert item.default is None or not item.auto, path


@pytest.mark.parametrize("schema", BASES)
def test_auto_is_stored_and_read_again(schema):
    """Every key as ``auto`` is the default configuration; the stored one, read again, is the same."""
    base, every = BASES[schema], {path: item for path, item in walk(schema) if item.accepts_auto}
    autos = {path: "auto" for path in every if not path.startswith(REF)}
    expected = build(schema, base)
    assert build(schema, with_keys(autos, base)) == expected
    assert build(schema, with_keys({path: None for path in autos if every[path].auto}, base)) == expected, "verl's null"
    stored = yaml.safe_load(to_yaml(expected))
    assert build(schema, stored) == expected
    assert lookup(stored, "trainer.hardware" if schema is TrainConfig else "trainer.sweep_metric") == "auto"
    assert lookup(defaults(schema), "data.cache_dir") == "auto"


def test_auto_is_read_from_files_command_line_and_sweeps():
    overrides = ("data.train_files=[x]", "actor_rollout_ref.model.path=m", "critic.megatron.dtype=auto")
    config = compose(ConfigRequest(TrainConfig, "ppo", (*overrides, "actor_rollout_ref.actor.clip_ratio_low=auto")))
    assert config.actor_rollout_ref.actor.clip_ratio_low == 0.2
    sweep = ConfigRequest(TrainConfig, "ppo", (*overrides, "actor_rollout_ref.actor.clip_ratio_high=auto,0.28"))
    assert [run.config.actor_rollout_ref.actor.clip_ratio_high for run in compose_sweep(sweep).runs] == [
        0.2,
        0.28,
    ]
    fields = "critic.megatron.override_transformer_config.attention_backend=unfused"
    critic = compose(ConfigRequest(TrainConfig, "ppo", (*overrides, fields))).critic.megatron
    assert critic.override_transformer_config == {"attention_backend": "unfused"}


@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("trainer.max_actor_ckpt_to_keep", "config.no-auto"),
        ("trainer.rollout_data_dir", "config.no-auto"),
        ("actor_rollout_ref.actor.shuffle", "config.no-auto"),
        (f"{ACTOR}.{TP}", "config.no-auto"),
        ("actor_rollout_ref.rollout.quantization", "config.no-auto"),
    ],
)
def test_keys_that_follow_no_other_have_no_auto(key, code):
    check_problem(problems_of({key: "auto"})[key], code)


def test_a_text_may_be_auto():
    assert build_train({"trainer.experiment_name": "auto"}).trainer.experiment_name == "auto"


LAYOUT = {
    f"{ACTOR}.{TP}": 2, f"{ACTOR}.{PP}": 2, f"{ACTOR}.{VPP}": 3, f"{ACTOR}.{EP}": 2, f"{ACTOR}.dtype": "float32",
    f"{ACTOR}.param_offload": True, f"{ACTOR}.optimizer_offload": True, f"{ACTOR}.recompute_granularity": "full",
    f"{ACTOR}.recompute_method": "block", f"{ACTOR}.override_transformer_config": {"attention_backend": "flash"},
    "algorithm.use_kl_in_reward": True, "reward.model.enable": True, "reward.model.path": "other",
    f"{REF}.{TP}": "auto", "distillation.teacher_models": {"big": {"model_path": "other"}},
}  # fmt: skip


def test_roles_with_the_actors_model_inherit_its_section():
    config = build_train(LAYOUT)
    policy = config.actor_rollout_ref
    assert policy.actor.megatron == config.critic.megatron == policy.ref.megatron


def test_roles_with_another_model_inherit_neither_experts_nor_the_split_of_layers():
    config = build_train({**LAYOUT, "critic.model.path": "other"})
    expected = MegatronConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2, dtype="float32",
        param_offload=True, optimizer_offload=True, recompute_granularity="full", recompute_method="block",
    )  # fmt: skip
    teacher = config.distillation.teacher_models["big"].megatron
    assert config.critic.megatron == config.reward.model.megatron == teacher == expected


def test_a_role_on_its_own_devices_inherits_no_offloading_and_fills_its_devices():
    critic = build_train({**LAYOUT, "critic.nnodes": 2}).critic.megatron
    assert (critic.param_offload, critic.optimizer_offload, critic.data_parallel_size) == (False, False, 4)
    assert build_train(
        {**LAYOUT, "critic.nnodes": 2, "critic.megatron.grad_offload": True}
    ).critic.megatron.grad_offload


def test_a_teacher_behind_servers_inherits_no_layout():
    values = {**LAYOUT, "distillation.teacher_models": {"big": {"server": {"urls": ["http://teacher:1"]}}}}
    config = build_train(values)
    assert config.distillation.teacher_models["big"].megatron == MegatronConfig()
    assert not any(path.startswith("distillation.") for path in followers(config, {f"{ACTOR}.{TP}": 4}))


def test_keys_of_another_choice_are_not_inherited():
    critic = build_train({**LAYOUT, f"critic.megatron.{PP}": 1, "critic.megatron.recompute_granularity": None}).critic
    layout = critic.megatron
    assert (layout.tensor_model_parallel_size, layout.virtual_pipeline_model_parallel_size) == (2, None)
    assert (layout.recompute_granularity, layout.recompute_method) == (None, None)
    plain = build_train({**LAYOUT, f"critic.megatron.{VPP}": None})
    assert plain.critic.megatron == replace(
        plain.actor_rollout_ref.actor.megatron, virtual_pipeline_model_parallel_size=None
    )


def test_what_a_role_sets_is_stored_and_read_again():
    values = {**LAYOUT, f"critic.megatron.{VPP}": None, "reward.model.megatron.dtype": "bfloat16"}
    config = build_train(values)
    assert build(TrainConfig, yaml.safe_load(to_yaml(config))) == config


def test_an_evaluation_has_no_actor_to_inherit_from():
    config = build(EvaluateConfig, with_keys({f"reward.model.megatron.{TP}": "auto"}, EVALUATE))
    assert config.reward.model.megatron == MegatronConfig(data_parallel_size=8)
    assert lookup(defaults(EvaluateConfig), f"reward.model.megatron.{TP}") == "auto", "unchanged"


def test_every_key_is_inherited_or_an_exception():
    values = {"actor_rollout_ref": {"actor": {"megatron": {item.name: 1 for item in keys_of(MegatronConfig)}}}}
    critic: dict[str, Any] = {"critic": {"megatron": {}, "model": {}}}
    names = {path.rpartition(".")[2] for path in inherit(TrainConfig, {**values, **critic})}
    assert names == {item.name for item in keys_of(MegatronConfig)} - {"data_parallel_size"}


def test_a_problem_of_the_actors_layout_is_reported_once():
    problems = problems_of({f"{ACTOR}.{TP}": 3, f"{ACTOR}.{EP}": "x", f"{ACTOR}.dtype": "int8"})
    assert set(problems) == {f"{ACTOR}.{EP}", f"{ACTOR}.dtype"}
    problems = problems_of({f"{ACTOR}.{TP}": 3, f"{ACTOR}.override_transformer_config": {"hidden": 1}})
    assert set(problems) == {f"{ACTOR}.{TP}", f"{ACTOR}.override_transformer_config.hidden"}


def test_an_inherited_size_that_does_not_fit_names_both_keys():
    values = {f"{ACTOR}.{TP}": 4, "critic.nnodes": 1, "critic.n_gpus_per_node": 2}
    problem = problems_of(values)[f"critic.megatron.{TP}"]
    check_problem(problem, f"layout.replicas-do-not-divide: {ACTOR}.{TP}; set critic.megatron.{TP}")
    own = problems_of({**values, f"critic.megatron.{TP}": 8})[f"critic.megatron.{TP}"]
    assert ACTOR not in own.text


def test_inherited_keys_are_no_changes_of_the_configuration():
    values = with_keys({**LAYOUT, "critic.megatron.dtype": "bfloat16"})
    changed = {change.key: change for change in changed_keys(build(TrainConfig, values), values, [])}
    assert [key for key in changed if key.startswith(("critic.megatron", "reward.model.megatron"))] == [
        "critic.megatron.dtype"
    ]
    assert changed["data.seed"].default == "auto" and "data.cache_dir" not in changed


def test_verls_critic_and_reward_model_inherit_nothing():
    request = ConfigRequest(TrainConfig, "ppo_megatron_trainer", (
        f"{ACTOR}.{TP}=2", f"{ACTOR}.{PP}=2", f"{ACTOR}.expert_tensor_parallel_size=1", f"{ACTOR}.param_offload=true",
        "critic.megatron.override_ddp_config.overlap_grad_reduce=True", "actor_rollout_ref.model.path=m",
        f"critic.megatron.{TP}=4",
    ))  # fmt: skip
    config = compose(request)
    assert config.critic.megatron == MegatronConfig(
        tensor_model_parallel_size=4, expert_tensor_parallel_size=4, data_parallel_size=2, overlap_grad_reduce=True
    )
    assert config.reward.model.megatron == MegatronConfig(expert_tensor_parallel_size=1, data_parallel_size=8)
    section = yaml.safe_load((REPOSITORY_CONFIGS / "ppo_megatron_trainer.yaml").read_text(encoding="utf-8"))["critic"][
        "megatron"
    ]
    derived = {"data_parallel_size", "recompute_method", "recompute_num_layers"}
    assert section.keys() == {item.name for item in keys_of(MegatronConfig)} - derived


def test_a_changed_layout_of_the_actor_changes_the_roles_that_have_it():
    """The planner's changes mean the same as overrides."""
    before = {f"{ACTOR}.{PP}": 2, f"critic.megatron.{PP}": 1, f"{REF}.{TP}": "auto", "algorithm.use_kl_in_reward": True}
    changes = {f"{ACTOR}.{TP}": 4, f"{ACTOR}.{PP}": 1, f"{ACTOR}.{EP}": 4, f"{ACTOR}.param_offload": True}
    config, changed = build_train(before), build_train({**before, **changes})
    followed = followers(config, changes)
    assert f"reward.model.megatron.{EP}" not in followed and f"critic.megatron.{PP}" not in followed
    for path in ("critic.megatron", "reward.model.megatron", REF):
        for item in keys_of(MegatronConfig):
            key = f"{path}.{item.name}"
            if item.name != "data_parallel_size":
                assert followed.get(key, value_at(config, key)) == value_at(changed, key), key
    assert followers(config, {f"critic.megatron.{TP}": 2}) == {}
