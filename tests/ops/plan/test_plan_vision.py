"""Memory of models with images: the tower on first stages and engines, features in host memory."""

import json

import pytest
from support.vision_models import save_vision_model

from megarl.config import TrainConfig
from megarl.config.build import build
from megarl.models import parse_model_config
from megarl.models.tower_class import tower_parameters
from megarl.ops.plan.job import planned_job
from megarl.ops.plan.memory import plan_memory
from megarl.ops.plan.states import rollout_weight_bytes
from tests.models.test_models_vision_folder import SIZES, published, published_qwen25


def test_the_published_tower_has_its_parameters():
    """Patches, 32 blocks and merger of Qwen2.5-VL-7B, by hand; 8,292,166,656 in all, as published."""
    config = parse_model_config(published_qwen25(**SIZES["7B"]))
    hidden, ffn, merged = 1280, 3420, 4 * 1280
    attention = 3 * hidden * (hidden + 1) + hidden * (hidden + 1)
    block = attention + 2 * ffn * (hidden + 1) + hidden * (ffn + 1) + 2 * hidden
    merger = hidden + merged * (merged + 1) + 3584 * (merged + 1)
    tower = hidden * 3 * 2 * 14 * 14 + 32 * block + merger
    assert tower_parameters(config.vision) == tower
    assert rollout_weight_bytes(config, 1, 0, "bfloat16") == 2 * 8_292_166_656


@pytest.mark.parametrize(("name", "nbytes"), [("Qwen3-VL-8B", 17_534_247_392), ("Qwen3-VL-30B-A3B", 62_141_508_064)])
def test_published_weights_have_their_size(name, nbytes):
    """``total_size`` of the published index files, in bfloat16."""
    assert rollout_weight_bytes(published(name), 1, 0, "bfloat16") == nbytes


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_first_stages_and_engines_hold_the_tower(tmp_path, estimator):
    model = save_vision_model(tmp_path / "model")
    tower = sum(p.numel() for name, p in model.named_parameters() if ".visual." in name)
    layout = {"pipeline_model_parallel_size": 2, "dtype": "float32"}
    values = {
        "data": {"train_files": "x.parquet", "train_batch_size": 8, "max_prompt_length": 64, "max_response_length": 8},
        "actor_rollout_ref": {
            "model": {"path": str(tmp_path / "model")},
            "actor": {"ppo_mini_batch_size": 8, "megatron": layout, "freeze_vision_tower": True},
            "rollout": {"n": 1 if estimator == "gae" else 2, "name": "embedded", "dtype": "float32"},
        },
        "critic": {"megatron": layout} if estimator == "gae" else {},
        "algorithm": {"adv_estimator": estimator},
        "reward": {"name": "arithmetic"},
        "trainer": {"experiment_name": "x", "device": "cpu", "n_gpus_per_node": 2, "nnodes": 1},
    }
    job = planned_job(build(TrainConfig, values), device="cpu")
    plan = plan_memory(job)
    owners = {"actor", "critic"} if estimator == "gae" else {"actor"}
    parts = [c for phase in plan.phases for c in phase.components if c.name == "vision tower"]
    assert {part.owner for part in parts} == owners
    assert {part.nbytes for part in parts} == {4 * tower}
    features = {part.owner: part.nbytes for part in plan.host if part.name == "image features"}
    assert features == dict.fromkeys(owners, 8 * 64 * 32 * 4)
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["vision_config"]["depth"] == 2
