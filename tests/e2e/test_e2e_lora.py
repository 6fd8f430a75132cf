"""PPO with LoRA and DoRA from the command line: engines, the free reference, checkpoints, resume and conversion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from support.cli_runs import RunFiles, assert_finite, reproducible

from megarl.base.checkpoint_files import read_index
from megarl.convert.command import main

STEPS = 3
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
OTHER_LAYOUT = [
    f"{ACTOR}.megatron.tensor_model_parallel_size=1",
    f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
    *("critic.megatron.pipeline_model_parallel_size=1", "critic.megatron.tensor_model_parallel_size=2"),
]


@pytest.fixture(scope="module")
def arguments(small, dense_reward):
    return [
        *("--config-name", "quickstart", *small, *dense_reward, "trainer.experiment_name=lora"),
        *(f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{MODEL}.exclude_modules=[k_proj]"),
        f"{MODEL}.lora.type=dora",
        *(f"{ACTOR}.optim.lr=1e-2", f"{ACTOR}.megatron.param_offload=true", f"{ACTOR}.megatron.optimizer_offload=true"),
        *("critic.model.lora_rank=2", "critic.model.lora.use_rslora=true"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false", "trainer.test_freq=-1"),
        *("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=9", "trainer.max_critic_ckpt_to_keep=9"),
        "sync.verify_freq=1",
    ]


@pytest.fixture(scope="module")
def trained(arguments, start):
    run = start(*arguments)
    assert run.wait() == 0, run.output
    return RunFiles(run.folder, "lora")


def test_engines_sample_from_each_new_policy(trained):
    """The trainer's log-probs of the samples are the engine's, and the policy leaves its base from step to step."""
    penalties = [row["actor/reward_kl_penalty"] for row in trained.steps.values()]
    assert penalties[0] == 0, "the reference is the same model without adapters"
    assert len(set(penalties)) == STEPS
    for row in trained.steps.values():
        assert_finite(row)
        assert row["training/rollout_log_probs_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0


@pytest.mark.parametrize(("role", "rank", "head"), [("actor", 4, set()), ("critic", 2, {"score.weight"})])
def test_checkpoints_have_adapters_only(trained, role, rank, head):
    folder = _checkpoint(trained.folder, 3) / role
    names = {key.partition("/")[2] for key in read_index(folder).state_dict_metadata}
    assert names and all("lora_" in name for name in names - head) and head <= names
    assert not any("k_proj" in name for name in names) or role == "critic"
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    assert state["lora"]["rank"] == rank and len(state["base"]["weights"]) == 32


def test_resume_in_another_layout_continues_exactly(trained, arguments, start):
    checkpoint = _checkpoint(trained.folder, 2)
    run = start(*arguments, *OTHER_LAYOUT, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    assert run.wait() == 0, run.output
    again = reproducible(RunFiles(run.folder, "lora").steps[3])
    for name, value in reproducible(trained.steps[3]).items():
        if name.startswith(("actor/", "critic/")):
            assert again[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_checkpoint_converts_to_pefts_format(trained, tmp_path):
    assert main(["megatron-to-peft", str(_checkpoint(trained.folder, 3)), str(tmp_path / "peft")]) == 0
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 8, True)
    assert {"q_proj", "down_proj"} <= set(config["target_modules"]) and "k_proj" not in config["target_modules"]
    with safe_open(tmp_path / "peft" / "adapter_model.safetensors", framework="pt") as file:
        assert all(name.startswith("base_model.model.model.layers.") for name in file.keys())  # noqa: SIM118


def _checkpoint(folder, step):
    found: Path = next(folder.rglob(f"global_step_{step}"))
    return found
