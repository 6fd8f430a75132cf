"""Requirements of a configuration for a machine, against hand-computed numbers."""

import json

import pytest

from megarl.config import RewardTrainingConfig, TrainConfig
from megarl.config.compose import ConfigRequest, compose
from megarl.config.schema.jobs import SFTConfig
from megarl.ops.doctor.node import needs_of

GIB, MIB = 2**30, 2**20
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
# Embedding and output; per layer q, k and v with bias, o, three matrices, two norms; and the last norm.
LAYER = 3 * (64 * 64 + 64) + 64 * 64 + 3 * 64 * 128 + 2 * 64
POLICY = 2 * 320 * 64 + 3 * LAYER + 64
CRITIC = 320 * 64 + 3 * LAYER + 64 + 64  # a value head of one row instead of the output layer
FLOAT32 = 4 + 2 * 4  # bytes per parameter in a checkpoint: float32 weights, two moments of Adam


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN), encoding="utf-8")
    return str(tmp_path / "model")


def needs(*overrides):
    return needs_of(compose(ConfigRequest(TrainConfig, "quickstart", overrides)))


def test_sizes_of_actor_and_critic(model):
    needed = needs(f"actor_rollout_ref.model.path={model}", "trainer.save_freq=1", "trainer.nnodes=2")
    assert needed.checkpoint_bytes == pytest.approx(FLOAT32 * (POLICY + CRITIC), rel=0.02), "buffers are padded"
    assert needed.checkpoint_dir == "outputs/quickstart/checkpoints" and needed.models == (model,)
    assert (needed.device, needed.devices, needed.nodes) == ("cpu", 2, 2)
    assert needed.shared_memory_bytes == (2 * 4 * 2 + 200) * MIB and needed.host_bytes > 2 * GIB


def test_without_a_critic_or_checkpoints(model):
    needed = needs(f"actor_rollout_ref.model.path={model}", "algorithm.adv_estimator=grpo", "trainer.save_freq=3")
    assert needed.checkpoint_bytes == pytest.approx(FLOAT32 * POLICY, rel=0.02)
    needed = needs(f"actor_rollout_ref.model.path={model}", "trainer.save_freq=-1")
    assert needed.checkpoint_bytes is None and needed.checkpoint_dir is None


def test_nodes_of_the_engines_alone(model):
    """Two nodes of one device write checkpoints; three of four devices generate."""
    keys = (
        "async_training.mode=disaggregated",
        "actor_rollout_ref.rollout.nnodes=3",
        "actor_rollout_ref.rollout.n_gpus_per_node=4",
    )
    sizes = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1")
    config = compose(
        ConfigRequest(TrainConfig, "quickstart_async", (f"actor_rollout_ref.model.path={model}", *sizes, *keys))
    )
    needed = needs_of(config)
    assert (needed.nodes, needed.trainer_nodes, needed.devices) == (5, 2, 4)
    assert needed.host_bytes >= 4 * GIB


def test_nodes_of_a_critic_alone_write_its_checkpoint(model):
    needed = needs(f"actor_rollout_ref.model.path={model}", "critic.nnodes=2", "critic.n_gpus_per_node=2")
    assert (needed.nodes, needed.trainer_nodes, needed.devices) == (3, 3, 2)


def test_offloaded_states_are_in_host_memory(model):
    """Weights and optimizer states of two ranks of actor and critic take a chunk of 256 MiB each."""
    megatron = "actor_rollout_ref.actor.megatron"
    offloads = (f"{megatron}.param_offload=true", f"{megatron}.optimizer_offload=true")
    without_reference = (f"actor_rollout_ref.model.path={model}", "algorithm.use_kl_in_reward=false")
    more = needs(*without_reference, *offloads).host_bytes - needs(*without_reference).host_bytes
    assert more == 8 * 256 * MIB, "the critic inherits the actor's keys"


def test_sizes_are_unknown_without_the_model(tmp_path):
    needed = needs(f"actor_rollout_ref.model.path={tmp_path}/none", "trainer.save_freq=1")
    assert needed.checkpoint_bytes is None and needed.models == (f"{tmp_path}/none",)


def test_glob_patterns_are_not_files():
    needed = needs("data.train_files=[a.parquet,'b-*.parquet','~/c.parquet']")
    assert needed.readable == ("a.parquet", "outputs/quickstart/task/data/test.parquet")


def test_supervised_jobs(model):
    config = compose(ConfigRequest(SFTConfig, "quickstart_sft", (f"model.path={model}", "trainer.save_freq=1")))
    assert needs_of(config).checkpoint_bytes == pytest.approx(FLOAT32 * POLICY, rel=0.02) and needs_of(
        config
    ).models == (model,)
    overrides = (f"model.path={model}", "data.train_files=none", "trainer.save_freq=1")
    reward_model = compose(ConfigRequest(RewardTrainingConfig, "reward_model", overrides))
    assert needs_of(reward_model).checkpoint_bytes == pytest.approx(14 * CRITIC, rel=0.02), "bfloat16"
