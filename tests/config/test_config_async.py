"""Asynchronous training: modes, devices of the engines, sizes and inputs, and verl's keys for them."""

import pytest
from config_cases import check_problem, problems_of, with_keys

from megarl.config import TrainConfig
from megarl.config.build import build

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SIZES = {"data.train_batch_size": 64, f"{ACTOR}.ppo_mini_batch_size": 16}
STALE = {f"{ROLLOUT}.calculate_log_probs": True, "algorithm.rollout_correction.rollout_is": "token"}
APART = {
    **SIZES, **STALE, "async_training.mode": "disaggregated", "async_training.sync_interval": 4,
    f"{ROLLOUT}.nnodes": 1, f"{ROLLOUT}.n_gpus_per_node": 4,
}  # fmt: skip
AHEAD = {**APART, "async_training.max_staleness": 1}
SHARED = {**SIZES, **STALE, "async_training.mode": "colocated", "async_training.max_staleness": 1}


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"async_training.max_staleness": 1}, "async_training.max_staleness", "async.no-effect-in-sync"),
        ({"async_training.sync_interval": 4}, "async_training.sync_interval", "async.no-effect-in-sync"),
        ({"async_training.sync_wave_size": 1}, "async_training.sync_wave_size", "async.wave-needs-partial-rollout"),
        ({**SHARED, "async_training.sync_wave_size": 1}, "async_training.sync_wave_size",
         "async.wave-needs-partial-rollout: mode=disaggregated"),
        ({**AHEAD, "async_training.sync_wave_size": 1, "async_training.partial_rollout": False},
         "async_training.sync_wave_size", "async.wave-needs-partial-rollout: partial_rollout=true"),
        ({**AHEAD, "async_training.max_staleness": 2, "async_training.partial_rollout": False},
         "async_training.max_staleness", "async.staleness-without-overlap: partial_rollout=true"),
        ({**SHARED, "async_training.partial_rollout": False}, "async_training.partial_rollout",
         "async.colocated-partial-rollout: mode=sync"),
        ({**SHARED, "async_training.sync_interval": 4}, "async_training.sync_interval",
         "async.colocated-sync-interval: set 1"),
        ({**SHARED, f"{ROLLOUT}.nnodes": 1}, f"{ROLLOUT}.nnodes", "async.shared-engine-devices: set 0"),
        ({**APART, f"{ROLLOUT}.nnodes": 0}, f"{ROLLOUT}.nnodes", "async.no-engine-devices: n_gpus_per_node"),
        ({f"{ROLLOUT}.nnodes": 1}, f"{ROLLOUT}.nnodes", "async.shared-engine-devices: mode=disaggregated"),
        ({**APART, f"{ROLLOUT}.tensor_model_parallel_size": 3, f"{ROLLOUT}.name": "sglang"},
         f"{ROLLOUT}.tensor_model_parallel_size", "layout.replica-size: the pool of 4"),
        ({**APART, f"{ROLLOUT}.replicas": 5}, f"{ROLLOUT}.replicas", "layout.too-many-replicas: the pool of 4"),
        ({**APART, f"{ROLLOUT}.nnodes": 2, f"{ROLLOUT}.n_gpus_per_node": 3, f"{ROLLOUT}.name": "sglang",
          f"{ROLLOUT}.tensor_model_parallel_size": 2}, f"{ROLLOUT}.tensor_model_parallel_size",
         f"layout.replica-nodes: {ROLLOUT}.n_gpus_per_node=3"),
        ({**SHARED, "async_training.hybrid_rollout": True}, "async_training.hybrid_rollout",
         "async.hybrid-needs-disaggregated: set false"),
        ({**APART, "async_training.hybrid_rollout": True, f"{ROLLOUT}.min_replicas": 1},
         "async_training.hybrid_rollout", f"async.hybrid-elastic: {ROLLOUT}.min_replicas=1"),
        ({**APART, "async_training.hybrid_rollout": True, f"{ROLLOUT}.name": "sglang",
          f"{ROLLOUT}.nnodes": 2, f"{ROLLOUT}.n_gpus_per_node": 8, f"{ROLLOUT}.tensor_model_parallel_size": 16},
         "async_training.hybrid_rollout", "async.hybrid-replica-size: trainer.n_gpus_per_node=8"),
        ({**SHARED, f"{ROLLOUT}.min_replicas": 1}, f"{ROLLOUT}.min_replicas",
         "async.elastic-needs-disaggregated: set null"),
        ({**APART, f"{ROLLOUT}.min_replicas": 5}, f"{ROLLOUT}.min_replicas",
         f"async.min-replicas: {ROLLOUT}.replicas=4"),
        ({**APART, f"{ROLLOUT}.min_replicas": 1, f"{ROLLOUT}.nnodes": 2, f"{ROLLOUT}.n_gpus_per_node": 2,
          f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.tensor_model_parallel_size": 4}, f"{ROLLOUT}.min_replicas",
         "async.elastic-several-nodes: nodes of 2"),
        ({**APART, f"{ROLLOUT}.min_replicas": 1, f"{ROLLOUT}.name": "sglang",
          f"{ROLLOUT}.engine_kwargs.sglang.api_key_env": "KEY",
          f"{ROLLOUT}.engine_kwargs.sglang.urls": [f"http://host{n}:30000" for n in range(4)]},
         f"{ROLLOUT}.min_replicas", "async.elastic-server-urls"),
        ({**APART, "async_training.sync_interval": 3}, "async_training.sync_interval",
         "async.prompts-per-sync: data.train_batch_size=64"),
        ({**APART, f"{ACTOR}.ppo_mini_batch_size": 24, "async_training.sync_interval": 2,
          "data.train_batch_size": 72}, "async_training.sync_interval",
         "async.prompts-per-sync: data.train_batch_size=72"),
        ({**APART, "critic.ppo_mini_batch_size": 32}, "critic.ppo_mini_batch_size",
         "async.critic-mini-batch: ppo_mini_batch_size=16"),
        ({**AHEAD, "async_training.max_staleness": 0.01}, "async_training.max_staleness",
         "async.staleness-below-prompt: 0.016"),
        ({**SHARED, f"{ROLLOUT}.n": 4, "algorithm.filter_groups.enable": True, "reward.model.enable": True,
          "reward.model.path": "model"}, "algorithm.filter_groups.enable", "async.filter-by-reward-model"),
    ],
)  # fmt: skip
def test_refused(values, path, expected):
    check_problem(problems_of(values)[path], expected)


def test_engines_of_a_pool_have_its_devices_and_keep_their_memory():
    config = build(TrainConfig, with_keys(APART))
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.replicas, rollout.own_devices, config.trainer.num_devices, config.num_devices) == (4, 4, 8, 12)
    assert not rollout.free_cache_engine
    for values in (SIZES, SHARED):
        shared = build(TrainConfig, with_keys(values))
        assert shared.actor_rollout_ref.rollout.replicas == shared.num_devices == 8
        assert shared.actor_rollout_ref.rollout.free_cache_engine


def test_elastic_replicas_have_a_group_of_devices_each():
    fixed, elastic = (
        build(TrainConfig, with_keys({**APART, f"{ROLLOUT}.min_replicas": least})).actor_rollout_ref.rollout
        for least in (None, 2)
    )
    assert (fixed.device_groups, fixed.required_groups) == ([4], None)
    assert (elastic.device_groups, elastic.required_groups) == ([1, 1, 1, 1], 2)


def test_staleness_0_needs_no_correction():
    values = {**APART, "data.train_batch_size": 16, "async_training.sync_interval": 1}
    values["algorithm.rollout_correction.rollout_is"] = None
    assert build(TrainConfig, with_keys(values)).async_training.max_staleness == 0


def test_the_modes_of_verl_are_translated():
    fully_async = {
        **SIZES, **STALE, "async_training.mode": "disaggregated", "async_training.staleness_threshold": 0.5,
        "async_training.trigger_parameter_sync_step": 4, "async_training.require_batches": 1,
        "async_training.partial_rollout": True, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 2,
    }  # fmt: skip
    config = build(TrainConfig, with_keys(fully_async))
    assert (config.async_training.max_staleness, config.async_training.sync_interval) == (0.5, 4)
    assert config.actor_rollout_ref.rollout.own_devices == 2
    trainer_v1 = {
        **SIZES, **STALE, "trainer.v1.trainer_mode": "separate_async", f"{ROLLOUT}.nnodes": 1,
        "trainer.v1.separate_async.num_warmup_batches": 1, "trainer.v1.sampler.max_off_policy_threshold": 8,
        "trainer.v1.separate_async.parameter_sync_step": 4,
    }  # fmt: skip
    config = build(TrainConfig, with_keys(trainer_v1))
    assert (config.async_training.mode, config.async_training.max_staleness) == ("disaggregated", 8)
    assert config.async_training.sync_interval == 4
    keys = {"trainer.v1.trainer_mode": "colocate_async", "trainer.v1.sampler.max_off_policy_threshold": 2}
    config = build(TrainConfig, with_keys({**SIZES, **STALE, **keys}))
    assert (config.async_training.mode, config.async_training.max_staleness) == ("colocated", 2)
    switching = "trainer.v1.separate_async.hybrid_rollout."
    for enabled in (False, True):
        keys = {f"{switching}enable_switch": enabled, f"{switching}switch_threshold_ratio": 0.4}
        assert build(TrainConfig, with_keys({**trainer_v1, **keys})).async_training.hybrid_rollout == enabled
    key = "rollout.total_rollout_steps"
    check_problem(problems_of({key: 9})[key], "config.verl-key: trainer.total_training_steps")
