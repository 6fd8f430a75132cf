"""Devices of roles alone: derived layouts, rejected keys, verl's names."""

import pytest
from config_cases import EVALUATE, check_problem, problems_of, with_keys

from megarl.config import EvaluateConfig, GenerateConfig, TrainConfig
from megarl.config.build import build, verl_notes
from megarl.config.schema.jobs import own_pools

REF, TEACHERS = "actor_rollout_ref.ref", "distillation"
KL = {"algorithm.use_kl_in_reward": True}
APART = {"critic.nnodes": 2, "critic.n_gpus_per_node": 4}
SCORING = {"reward.model.enable": True, "reward.model.path": "rm"}
TEACHER = {f"{TEACHERS}.enabled": True, f"{TEACHERS}.teacher_models": {"one": {"model_path": "teacher"}}}


def test_a_layout_fills_the_devices_of_its_role():
    config = build(TrainConfig, with_keys({**APART, "critic.megatron.tensor_model_parallel_size": 2}))
    assert (config.critic.own_devices, config.num_devices, config.trainer.num_devices) == (8, 16, 8)
    assert config.critic.megatron.data_parallel_size == 4
    assert {path: pool.own_devices for path, pool in own_pools(config).items()} == {"critic": 8}
    assert config.actor_rollout_ref.rollout.replicas == 8, "the engines share the trainer's devices"


def test_the_number_per_node_is_the_trainers_by_default():
    config = build(TrainConfig, with_keys({"critic.nnodes": 2, "trainer.n_gpus_per_node": 4}))
    assert config.critic.own_devices == 8 and config.critic.megatron.data_parallel_size == 8


def test_weights_stay_on_devices_of_a_role_alone():
    """Gradients and optimizer state are still offloaded: that lowers the peak of an update."""
    offload = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
    critic = build(TrainConfig, with_keys({**APART, "critic.megatron": offload})).critic.megatron
    assert (critic.param_offload, critic.grad_offload, critic.optimizer_offload) == (False, True, True)
    assert build(TrainConfig, with_keys({"critic.megatron": offload})).critic.megatron.param_offload


@pytest.mark.parametrize("names", [("one",), ("one", "two")])
def test_several_teachers_take_turns_on_their_devices(names):
    models = {name: {"model_path": "teacher", "megatron": {"param_offload": True}} for name in names}
    keys = {**TEACHER, f"{TEACHERS}.teacher_models": models, f"{TEACHERS}.nnodes": 1, f"{TEACHERS}.n_gpus_per_node": 2}
    distillation = build(TrainConfig, with_keys(keys)).distillation
    assert {teacher.megatron.data_parallel_size for teacher in distillation.teacher_models.values()} == {2}
    assert {t.megatron.param_offload for t in distillation.teacher_models.values()} == {len(names) > 1}


def test_all_roles_have_pools():
    keys = {
        **APART, **KL, **SCORING, **TEACHER, f"{REF}.megatron.tensor_model_parallel_size": 2, f"{REF}.nnodes": 1,
        f"{REF}.n_gpus_per_node": 2, f"{TEACHERS}.nnodes": 1, "reward.model.nnodes": 1,
    }  # fmt: skip
    config = build(TrainConfig, with_keys(keys))
    expected = {"critic": 8, REF: 2, TEACHERS: 8, "reward.model": 8}
    assert {path: pool.own_devices for path, pool in own_pools(config).items()} == expected
    assert config.num_devices == 8 + 8 + 2 + 8 + 8
    validating = build(TrainConfig, with_keys({**keys, "trainer.val_only": True, "data.val_files": ["v.parquet"]}))
    assert list(own_pools(validating)) == ["reward.model"]


def test_other_jobs():
    evaluation = build(EvaluateConfig, with_keys({**SCORING, "reward.model.nnodes": 2}, EVALUATE))
    assert own_pools(evaluation)["reward.model"].own_devices == 16
    generation = with_keys({"data.prompts": ["p.txt"]}, {"actor_rollout_ref": EVALUATE["actor_rollout_ref"]})
    assert own_pools(build(GenerateConfig, {**generation, "trainer": {"experiment_name": "x"}})) == {}


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({**APART, "critic.megatron.tensor_model_parallel_size": 3}, "critic.megatron.tensor_model_parallel_size",
         "layout.replicas-do-not-divide: critic.n_gpus_per_node=4); valid with the other sizes: 1, 2"),
        ({**APART, "critic.megatron.data_parallel_size": 9}, "critic.megatron.data_parallel_size",
         "layout.too-many-devices: 8 at most"),
        ({"critic.nnodes": 3, "data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 8},
         "critic.ppo_mini_batch_size", "batch.samples-per-rank: 24"),
        ({**KL, f"{REF}.nnodes": 1, f"{REF}.n_gpus_per_node": 3, f"{REF}.megatron.tensor_model_parallel_size": 2},
         f"{REF}.megatron.tensor_model_parallel_size", f"layout.replicas-do-not-divide: {REF}.n_gpus_per_node=3"),
        ({**SCORING, "reward.model.nnodes": 1, "reward.model.n_gpus_per_node": 3,
          "reward.model.megatron.tensor_model_parallel_size": 2},
         "reward.model.megatron.tensor_model_parallel_size", "layout.replicas-do-not-divide: reward.model.nnodes=1"),
        ({**TEACHER, f"{TEACHERS}.nnodes": 1, f"{TEACHERS}.n_gpus_per_node": 3,
          f"{TEACHERS}.teacher_models.one.megatron.tensor_model_parallel_size": 2},
         f"{TEACHERS}.teacher_models.one.megatron.tensor_model_parallel_size",
         "layout.replicas-do-not-divide: distillation.nnodes=1"),
        ({**APART, "algorithm.adv_estimator": "grpo"}, "critic.nnodes", "layout.unused-devices: adv_estimator=grpo"),
        ({f"{REF}.nnodes": 1}, f"{REF}.nnodes", "layout.unused-devices: set 0"),
        ({**KL, f"{REF}.nnodes": 1}, f"{REF}.nnodes",
         f"layout.unused-devices: {REF}.megatron.tensor_model_parallel_size"),
        ({**KL, f"{REF}.nnodes": 1, f"{REF}.megatron.tensor_model_parallel_size": 1,
          "actor_rollout_ref.model.lora_rank": 8}, f"{REF}.nnodes", "layout.unused-devices: lora_rank=8"),
        ({"reward.model.nnodes": 1}, "reward.model.nnodes", "layout.unused-devices: reward.model.enable"),
        ({f"{TEACHERS}.nnodes": 1}, f"{TEACHERS}.nnodes", "layout.unused-devices: distillation.enabled"),
        ({"critic.nnodes": -1}, "critic.nnodes", "config.value-out-of-limits: >= 0"),
        ({**APART, "critic.n_gpus_per_node": 0}, "critic.n_gpus_per_node", "config.value-out-of-limits: >= 1"),
    ],
)  # fmt: skip
def test_rejected_by_name(values, path, expected):
    check_problem(problems_of(values)[path], expected)


@pytest.mark.parametrize("section", ["reward_model", "reward.reward_model"])
def test_verls_switch_of_a_pool(section):
    sizes = {f"{section}.nnodes": 1, f"{section}.n_gpus_per_node": 4}
    switch, scoring = f"{section}.enable_resource_pool", SCORING
    config = build(TrainConfig, with_keys({**scoring, **sizes, switch: True}))
    assert own_pools(config)["reward.model"].own_devices == 4
    off = with_keys({**scoring, **sizes, switch: False})
    assert own_pools(build(TrainConfig, off)) == {}
    assert f"reward.model.nnodes=1 has no effect: {switch}=false" in verl_notes(TrainConfig, off)
    check_problem(problems_of({**scoring, switch: True})[switch], "config.verl-pool-devices: reward.model.nnodes")
    # verl's default numbers
    build(TrainConfig, with_keys({f"{section}.nnodes": 0, f"{section}.n_gpus_per_node": 0, switch: False}))


def test_verls_pool_of_the_teachers():
    config = build(TrainConfig, with_keys({**TEACHER, f"{TEACHERS}.nnodes": 1, f"{TEACHERS}.n_gpus_per_node": 2}))
    assert own_pools(config)[TEACHERS].own_devices == 2
