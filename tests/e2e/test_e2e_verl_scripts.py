"""verl's current GRPO and PPO scripts for Megatron, with a tiny model on a CPU: their own overrides, then the user's.

The overrides are those of the scripts at the commit in ``tests/config/verl_facts.json``, at the scripts' defaults. A
user sets the variables of the scripts (model, files, sizes, engine), or adds overrides behind them, as here.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.cli_runs import ROOT, RunFiles, assert_finite

FACTS: dict[str, Any] = json.loads((ROOT / "tests" / "config" / "verl_facts.json").read_text(encoding="utf-8"))
GRPO, PPO = (f"examples/{name}_trainer/run_qwen3_8b_megatron.sh" for name in ("grpo", "ppo"))
ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
STEPS = 2


def overrides_of(script):
    number = FACTS["scripts"].index(script)
    return [override for override, users in FACTS["overrides"].items() if number in users]


def of_a_user(task, name, roles):
    """Model, files, devices and sizes; a CPU generates with the embedded engine."""
    model = f"{task}/model"
    return [
        f"actor_rollout_ref.model.path={model}",
        *([f"critic.model.path={model}"] if "critic" in roles else []),
        f"data.train_files=['{task}/data/train.parquet']",
        f"data.val_files=['{task}/data/test.parquet']",
        *("data.train_batch_size=24", "data.max_prompt_length=32", "data.max_response_length=6"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=12", "actor_rollout_ref.rollout.name=embedded"),
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        *(f"{role}.megatron.pipeline_model_parallel_size=1" for role in roles),
        *("trainer.n_gpus_per_node=2", "trainer.device=cpu", f"trainer.total_training_steps={STEPS}"),
        *("trainer.logger=[console,jsonl]", f"trainer.experiment_name={name}", "reward.name=arithmetic"),
    ]


@pytest.mark.parametrize(
    ("script", "name", "roles", "metrics"),
    [
        (GRPO, "verl-grpo", ROLES[:2], {"actor/kl_loss", "timing_s/ref"}),
        pytest.param(
            *(PPO, "verl-ppo", ROLES, {"critic/vf_loss", "critic/vf_explained_var", "timing_s/values"}),
            marks=pytest.mark.release(twin="tests/e2e/test_e2e_verl_scripts.py::test_verls_script_trains"),
        ),
    ],
)
def test_verls_script_trains(start, task, script, name, roles, metrics):
    run = start(*overrides_of(script), *of_a_user(task, name, roles))
    assert run.wait() == 0, run.output
    # verl's keys: translated, or named as without effect
    assert "config: actor_rollout_ref.rollout.gpu_memory_utilization is " in run.output
    assert "config: actor_rollout_ref.model.use_remove_padding=true has no effect" in run.output
    files = RunFiles(run.folder, name)
    assert list(files.steps)[-STEPS:] == [1, 2]
    for step in (1, 2):
        row = files.steps[step]
        assert_finite(row)
        assert {"actor/pg_loss", "actor/grad_norm", "critic/rewards/mean", "timing_s/update_weights"} | metrics <= set(
            row
        )
    assert "val-core/arithmetic/reward/mean@1" in files.steps[STEPS]  # the last step is validated
    # verl's folder of checkpoints, with the last step's
    saved = run.folder / "checkpoints" / f"verl_{name.removeprefix('verl-')}_gsm8k_math" / name
    assert [folder.name for folder in saved.glob("global_step_*")] == [f"global_step_{STEPS}"]
