"""What a configuration needs of a machine, against numbers by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config import RewardTrainingConfig, TrainConfig
from megarl.config.compose import Request, compose
from megarl.config.sft_schema import SFTConfig
from megarl.doctor.node import Needs, needs_of

GIB, MIB = 2**30, 2**20
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "vocab_size": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
# Embedding and output; per layer q with bias, k and v with bias, o, three matrices, two norms; and the last norm.
LAYER = (64 + 8) + 2 * (32 + 4) + 64 + 3 * 128 + 2 * 8
POLICY = 2 * 32 * 8 + 3 * LAYER + 8
CRITIC = 32 * 8 + 3 * LAYER + 8 + 8  # a row instead of the output


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN))
    return str(tmp_path / "model")


def needs(*overrides: str) -> Needs:
    return needs_of(compose(Request(TrainConfig, "quickstart", overrides)))


def test_sizes_of_actor_and_critic(model: str) -> None:
    asked = needs(f"actor_rollout_ref.model.path={model}", "trainer.save_freq=1", "trainer.nnodes=2")
    assert asked.checkpoint_bytes == 16 * (POLICY + CRITIC)
    assert asked.checkpoint_dir == "outputs/quickstart/checkpoints" and asked.models == (model,)
    assert (asked.device, asked.devices, asked.nodes) == ("cpu", 2, 2)
    assert asked.shared_memory_bytes == (2 * 4 * 2 + 200) * MIB and asked.host_bytes == 2 * GIB


def test_without_a_critic_or_checkpoints(model: str) -> None:
    asked = needs(f"actor_rollout_ref.model.path={model}", "algorithm.adv_estimator=grpo", "trainer.save_freq=3")
    assert asked.checkpoint_bytes == 16 * POLICY
    asked = needs(f"actor_rollout_ref.model.path={model}", "trainer.save_freq=-1")
    assert asked.checkpoint_bytes is None and asked.checkpoint_dir is None


def test_offloaded_states_are_in_host_memory(model: str) -> None:
    megatron = "actor_rollout_ref.actor.megatron"
    asked = needs(
        f"actor_rollout_ref.model.path={model}", f"{megatron}.param_offload=true", f"{megatron}.optimizer_offload=true"
    )
    assert asked.host_bytes == 2 * GIB + 14 * POLICY


def test_a_model_that_is_not_there_leaves_sizes_open(tmp_path: Path) -> None:
    asked = needs(f"actor_rollout_ref.model.path={tmp_path}/none", "trainer.save_freq=1")
    assert asked.checkpoint_bytes is None and asked.models == (f"{tmp_path}/none",)


def test_patterns_are_not_taken_for_files() -> None:
    asked = needs("data.train_files=[a.parquet,'b-*.parquet','~/c.parquet']")
    assert asked.readable == ("a.parquet", "outputs/quickstart/task/data/test.parquet")


def test_supervised_jobs(model: str) -> None:
    config = compose(Request(SFTConfig, "quickstart_sft", (f"model.path={model}", "trainer.save_freq=1")))
    assert needs_of(config).checkpoint_bytes == 16 * POLICY and needs_of(config).models == (model,)
    overrides = (f"model.path={model}", "data.train_files=none", "trainer.save_freq=1")
    judge = compose(Request(RewardTrainingConfig, "reward_model", overrides))
    assert needs_of(judge).checkpoint_bytes == 16 * CRITIC
