"""Models with images before a run starts: the tower is frozen, and teachers see the policy's images."""

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.expected_errors import raises
from support.vision_families import save_family
from support.vision_models import PROCESSOR, save_vision_model

from megarl.config import TrainConfig
from megarl.config.build import build
from megarl.models import read_model_config
from megarl.models.hf_folder import image_grid
from megarl.trainer.jobs.early_checks import check_learners, check_reward_model
from megarl.trainer.jobs.frozen_policy import find_model
from megarl.trainer.jobs.preflight import check_engine, check_towers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision")
    save_vision_model(path)
    return path


def config(path, teacher=None, **keys: Any):
    megatron = {"pipeline_model_parallel_size": keys.get("pp", 1)}
    actor = {"freeze_vision_tower": keys.get("freeze", True), "ppo_mini_batch_size": 8, "megatron": megatron}
    actor["vision_lr_factor"] = keys.get("factor", 1.0)
    teachers = {"t": {"model_path": str(teacher)}}
    return build(
        TrainConfig,
        {
            "data": {"train_files": "x.parquet", "train_batch_size": 8},
            "actor_rollout_ref": {
                "model": {"path": str(path), "lora_rank": keys.get("lora", 0), "lora": keys.get("keys", {})},
                "actor": actor,
                "rollout": {"n": 2, "name": "embedded"},
            },
            "algorithm": {"adv_estimator": "gae" if "critic" in keys else "grpo"},
            "critic": {"model": {"path": str(keys["critic"])}} if "critic" in keys else {},
            "distillation": {"enabled": True, "teacher_models": teachers} if teacher else {},
            "reward": {"name": "arithmetic", "model": {"enable": "reward" in keys, "path": keys.get("reward")}},
            "trainer": {"experiment_name": "x", "device": "cpu", "n_gpus_per_node": keys.get("pp", 1), "nnodes": 1},
        },
    )


def with_config(folder, target, section="", **changes):
    """A folder with the config and image processor of another one, changed."""
    target.mkdir()
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(raw | changes), encoding="utf-8")
    return target


def test_a_tower_may_be_frozen_or_trained(folder):
    check_learners(config(folder), weights=False)
    check_learners(config(folder), weights=True)
    check_learners(config(folder, freeze=False), weights=True)
    check_learners(config(folder, freeze=False, lora=4), weights=False)


TOWER_KEYS = ({"adapt_vision_tower": True}, {"freeze_vision_model": False}, {"freeze_vision_projection": False})


@pytest.mark.parametrize("keys", TOWER_KEYS)
def test_keys_of_adapters_train_the_tower(folder, keys):
    check_learners(config(folder, freeze=False, lora=4, keys=keys, factor=0.5), weights=True)
    with raises("image.frozen-tower", "actor_rollout_ref.actor.freeze_vision_tower=true"):
        check_learners(config(folder, lora=4, keys=keys), weights=False)


@pytest.mark.parametrize(("freeze", "lora"), [(True, 0), (False, 4)])
def test_a_learning_rate_without_a_trained_tower_is_refused(folder, freeze, lora):
    with raises("image.no-trained-tower", "actor_rollout_ref.actor.vision_lr_factor=0.5"):
        check_learners(config(folder, freeze=freeze, lora=lora, factor=0.5), weights=False)


def test_layers_with_features_of_a_trained_tower_are_in_the_first_chunk(tmp_path):
    save_family(tmp_path, "qwen3_vl")
    check_learners(config(tmp_path, pp=4), weights=False)
    with raises("layout.tower-features", "actor_rollout_ref.actor.megatron", "first 2"):
        check_learners(config(tmp_path, pp=4, freeze=False), weights=False)
    check_learners(config(tmp_path, pp=2, freeze=False), weights=False)
    with raises("layout.tower-features", "actor_rollout_ref.actor.megatron", "first 2"):
        check_learners(config(tmp_path, pp=4, freeze=False, lora=4, keys=TOWER_KEYS[0]), weights=False)


@pytest.mark.parametrize("name", ["sglang", "embedded"])
def test_ranks_of_the_engine_divide_a_trained_tower(folder, tmp_path, name):
    tower = read_model_config(folder).vision.settings | {"num_heads": 1}
    model = read_model_config(with_config(folder, tmp_path / "one", vision_config=tower))
    job = config(folder, freeze=False)
    rollout = replace(job.actor_rollout_ref.rollout, name=name, tensor_model_parallel_size=2)
    policy = replace(job.actor_rollout_ref, rollout=rollout)
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    with raises("layout.tp-heads", key, "vision_config.num_heads=1"):
        check_engine(replace(job, actor_rollout_ref=policy), model)


def test_a_model_without_a_tower_does_not_freeze_it(folder, tmp_path):
    raw = read_model_config(folder).settings
    fields = {name: value for name, value in raw.items() if name not in ("vision_config", "text_config")}
    text = with_config(folder, tmp_path / "text", vision_config=None, text_config=None, **fields)
    raw = json.loads((text / "config.json").read_text(encoding="utf-8"))
    raw |= {"architectures": ["Qwen2ForCausalLM"], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    (text / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    check_learners(config(text, freeze=False), weights=False)
    for keys in TOWER_KEYS:
        with raises("image.no-tower", f"actor_rollout_ref.model.lora.{next(iter(keys))}="):
            check_learners(config(text, freeze=False, lora=4, keys=keys), weights=False)
    with raises("image.no-tower", "actor_rollout_ref.actor.freeze_vision_tower=true", text):
        check_learners(config(text), weights=False)
    with raises("image.other-processor", "distillation.teacher_models.t.model_path", "image_token_id", 120, None):
        check_learners(config(folder, text), weights=False)
    check_learners(config(text, folder, freeze=False), weights=False)  # the data has no images


@pytest.mark.parametrize(
    ("token", "processor", "name"),
    [(121, {}, "image_token_id"), (120, {"max_pixels": 1}, "max_pixels"), (120, {"patch_size": 16}, "patch_size")],
)
def test_a_teacher_has_the_same_tokens_of_images(folder, tmp_path, token, processor, name):
    teacher = with_config(folder, tmp_path / "teacher", image_token_id=120)
    file = teacher / "preprocessor_config.json"
    file.write_text(json.dumps(PROCESSOR | {"processor_class": "Other"}), encoding="utf-8")
    check_learners(config(folder, teacher), weights=False)
    other = with_config(folder, tmp_path / "other", image_token_id=token)
    (other / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | processor), encoding="utf-8")
    with raises("image.other-processor", name, other):
        check_learners(config(folder, other), weights=False)


def test_critic_and_reward_model_see_the_images(folder, tmp_path):
    rewarding = with_config(folder, tmp_path / "reward", architectures=["Qwen2_5_VLForSequenceClassification"])
    check_learners(config(folder, critic=folder), weights=False)
    with raises("image.other-processor", "critic.model.path", "patch_size", rewarding):
        check_learners(config(folder, critic=rewarding), weights=False)
    with raises("image.other-processor", "reward.model.path", "patch_size", rewarding):
        check_reward_model(config(folder, reward=str(rewarding)), weights=False)
    shutil.copy(folder / "preprocessor_config.json", rewarding)
    check_learners(config(folder, critic=rewarding), weights=False)
    check_reward_model(config(folder, reward=str(rewarding)), weights=False)


def test_both_spellings_of_a_processors_limits_are_read(tmp_path):
    size = {"size": {"shortest_edge": 784, "longest_edge": 50176}, "patch_size": 14, "merge_size": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(size), encoding="utf-8")
    assert image_grid(tmp_path) == {"patch_size": 14, "merge_size": 2, "min_pixels": 784, "max_pixels": 50176}
    assert set(image_grid(tmp_path / "none").values()) == {None}


@pytest.mark.parametrize(
    ("part", "shape"), [("merger.mlp.0.weight", None), ("patch_embed.proj.weight", None), ("merger.ln_q.weight", (15,))]
)
def test_every_model_has_a_whole_tower(folder, tmp_path, part, shape):
    partial = tmp_path / "partial"
    shutil.copytree(folder, partial)
    tensors = load_file(partial / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith(f"visual.{part}")]
    whole = tensors.pop(name)
    save_file(tensors | ({} if shape is None else {name: torch.zeros(shape)}), partial / "model.safetensors")
    expected = ("model.vision-tower", partial, f"visual.{part}", list(whole.shape))
    check_learners(config(partial))  # needs no torch, and finds nothing
    check_towers(config(folder, folder, critic=folder, reward=str(folder)))
    models = (config(partial), config(folder, partial), config(folder, critic=partial))
    for one in (*models, config(folder, reward=str(partial))):
        with raises(*expected):
            check_towers(one)
    find_model(str(folder))
    with raises(expected[0], "actor_rollout_ref.model.path", *expected[1:]):
        find_model(str(partial))
