"""Plans of models with images: the tower's memory on first stages and engines, features in host memory, FLOPs."""

import json
from dataclasses import replace

import pytest
import torch
from support.vision_families import FAMILIES, save_family
from support.vision_models import save_vision_model
from torch.autograd.graph import saved_tensors_hooks

from megarl.config import TrainConfig
from megarl.config.build import build
from megarl.models import parse_model_config, read_model_config
from megarl.models.sequence_cost import tower_flops
from megarl.models.tower_class import tower_class, tower_parameters
from megarl.ops.plan import generation, tower
from megarl.ops.plan.flops import lengths_of, rank_elements
from megarl.ops.plan.hardware import read_hardware
from megarl.ops.plan.job import planned_job
from megarl.ops.plan.memory import plan_memory
from megarl.ops.plan.states import StateCounter, rollout_weight_bytes
from megarl.ops.plan.step_costs import PassModel, pass_costs, step_cost
from megarl.ops.plan.tower import saved_bytes
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


def vision_job(folder, estimator, frozen=True, share=True, **megatron):
    """A job of 8 prompts with up to 64 tokens on two devices; PPO, or GRPO with two samples for each and two epochs."""
    layout = {"dtype": "float32"} | megatron
    values = {
        "data": {"train_files": "x.parquet", "train_batch_size": 8, "max_prompt_length": 64, "max_response_length": 8},
        "actor_rollout_ref": {
            "model": {"path": str(folder)},
            "actor": {
                "ppo_mini_batch_size": 8,
                "megatron": layout,
                "freeze_vision_tower": frozen,
                "ppo_epochs": 2,
                "use_prefix_grouper": share,
            },
            "rollout": {"n": 1 if estimator == "gae" else 2, "name": "embedded", "dtype": "float32"},
        },
        "critic": {"megatron": layout} if estimator == "gae" else {},
        "algorithm": {"adv_estimator": estimator},
        "reward": {"name": "arithmetic"},
        "trainer": {"experiment_name": "x", "device": "cpu", "n_gpus_per_node": 2, "nnodes": 1},
    }
    return planned_job(build(TrainConfig, values), device="cpu")


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_first_stages_and_engines_hold_the_tower(tmp_path, estimator):
    model = save_vision_model(tmp_path)
    tower = sum(p.numel() for name, p in model.named_parameters() if ".visual." in name)
    plan = plan_memory(vision_job(tmp_path, estimator, pipeline_model_parallel_size=2))
    owners = {"actor", "critic"} if estimator == "gae" else {"actor"}
    parts = [c for phase in plan.phases for c in phase.components if c.name == "vision tower"]
    assert {part.owner for part in parts} == owners
    assert {part.nbytes for part in parts} == {4 * tower}
    features = {part.owner: part.nbytes for part in plan.host if part.name == "image features"}
    assert features == dict.fromkeys(owners, 8 * 64 * 32 * 4)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["vision_config"]["depth"] == 2


def flops_of(folder, **options):
    job = vision_job(folder, **options)
    return {phase.phase: phase.flops for phase in step_cost(job, read_hardware("h100"), lengths_of(job.config)).phases}


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_each_role_computes_the_features_of_a_frozen_tower_once(tmp_path, estimator, monkeypatch):
    """Eight images of 64 tokens in each role, and in the engine."""
    save_vision_model(tmp_path)
    images = 8 * tower_flops(read_model_config(tmp_path).vision, 64)
    flops = flops_of(tmp_path, estimator=estimator)
    for module in (generation, tower):
        monkeypatch.setattr(module, "tower_flops", lambda vision, tokens: 0.0)
    without = flops_of(tmp_path, estimator=estimator)
    first = {"gen", "old_log_prob", "values"} & flops.keys()
    assert {phase for phase in flops if flops[phase] > without[phase]} == first
    assert [flops[phase] - without[phase] for phase in first] == pytest.approx([images] * len(first))


def test_a_trained_tower_computes_in_each_pass_of_the_actor(tmp_path):
    """Forward and backward, three times the forward, in both epochs."""
    save_vision_model(tmp_path)
    images = 8 * tower_flops(read_model_config(tmp_path).vision, 64)
    frozen, trained = (flops_of(tmp_path, estimator="grpo", frozen=frozen) for frozen in (True, False))
    assert trained["old_log_prob"] == frozen["old_log_prob"] and trained["gen"] == frozen["gen"]
    assert trained["update_actor"] - frozen["update_actor"] == pytest.approx(2 * 3 * images)


def test_samples_apart_from_their_prompts_compute_its_image_again(tmp_path):
    """Two samples of each prompt: without shared prompts, they may be in different micro-batches."""
    save_vision_model(tmp_path)
    images = 8 * tower_flops(read_model_config(tmp_path).vision, 64)
    shared, apart = (flops_of(tmp_path, estimator="grpo", frozen=False, share=share) for share in (True, False))
    assert apart["update_actor"] - shared["update_actor"] == pytest.approx(2 * 3 * images)
    assert apart["old_log_prob"] == shared["old_log_prob"]


def test_data_parallel_ranks_divide_the_images(tmp_path):
    """Tensor-parallel ranks compute the same features."""
    save_vision_model(tmp_path)
    hardware, images = read_hardware("h100"), 8 * tower_flops(read_model_config(tmp_path).vision, 64)
    seconds = []
    for tp in (1, 2):
        job = vision_job(tmp_path, "grpo", tensor_model_parallel_size=tp)
        role, lengths = job.role("actor"), lengths_of(job.config)
        alone = PassModel(role, hardware, lengths, 2).cost(role.passes[0], job.micro_batches(role, role.passes[0]))
        cost = next(pass_costs(job, role, hardware, lengths)).cost
        seconds.append(cost.compute - alone.cost.compute)
    whole = images / hardware.peak_flops("float32")
    assert seconds == pytest.approx([whole / 2, whole])


@pytest.mark.parametrize("distributed", [False, True])
def test_a_trained_tower_has_gradients_and_optimizer_state_on_the_first_stage(tmp_path, distributed):
    model = save_vision_model(tmp_path)
    tower = sum(p.numel() for name, p in model.named_parameters() if ".visual." in name)
    options = {"pipeline_model_parallel_size": 1, "use_distributed_optimizer": distributed}
    frozen, trained = (vision_job(tmp_path, "grpo", frozen, **options).role("actor") for frozen in (True, False))
    before, after = StateCounter(frozen).of(0), StateCounter(trained).of(0)
    assert rank_elements(trained, 0).total - rank_elements(frozen, 0).total == tower
    padding = 64 * len(list(model.named_parameters()))
    assert after.parameters - before.parameters == tower
    assert 0 <= (after.weights - before.weights) // 4 - tower <= padding
    assert 0 <= (after.gradients - before.gradients) // 4 - tower <= padding
    share = tower // 2 if distributed else tower
    assert abs((after.optimizer - before.optimizer) // 8 - share) <= padding
    plan = plan_memory(vision_job(tmp_path, "grpo", False, pipeline_model_parallel_size=2))
    assert not [c for phase in plan.phases for c in phase.components if c.name == "vision tower"]
    states = [stage.states for stage in plan.roles["actor"].stages]
    second = plan_memory(vision_job(tmp_path, "grpo", pipeline_model_parallel_size=2)).roles["actor"].stages[1].states
    assert states[1] == second and states[0].parameters > tower


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_tower_saves_tensors_of_each_token(tmp_path, family, dtype):
    """Within 2 %: the storages that autograd saves, without the weights."""
    save_family(tmp_path, family)
    vision = read_model_config(tmp_path).vision
    sizes = {"hidden_size": 64, "intermediate_size": 160, "depth": 8}
    vision = replace(vision, settings=vision.settings | sizes)
    module = tower_class(vision)(tower_class(vision).config_class(**vision.settings)).to(dtype)
    weights, storages = {p.data_ptr() for p in module.parameters()}, {}

    def save(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    patches = torch.randn(4 * 32, 3 * 2 * 14 * 14, dtype=dtype)
    with saved_tensors_hooks(save, lambda tensor: tensor):
        output = module(patches, grid_thw=torch.tensor([[1, 8, 16]]))
    saved = sum(storage.nbytes() for start, storage in storages.items() if start not in weights)
    kept, again = (saved_bytes(vision, dtype.itemsize, recomputes=recomputes) for recomputes in (False, True))
    assert 32 * kept.saved == pytest.approx(saved, rel=0.02) and not kept.recomputed
    # 8 blocks of 4 patches per token: the input of each, and one block at a time.
    assert again.saved + 8 * again.recomputed == kept.saved + 8 * 4 * 64 * dtype.itemsize
    assert output.pooler_output.requires_grad
