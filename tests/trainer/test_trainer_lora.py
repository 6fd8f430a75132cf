"""Low-rank adapters in supervised jobs, and a policy that continues from saved adapters."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.arithmetic_task import RUN
from support.dotted_keys import set_keys
from support.expected_errors import raises

from megarl.config.build import build
from megarl.config.schema.jobs import PreferenceConfig
from megarl.convert.command import main as convert
from megarl.tracking import read_metrics
from megarl.trainer.jobs.early_checks import check_learners
from megarl.trainer.jobs.supervised_jobs import run as run_supervised_job
from megarl.trainer.jobs.train import run as run_policy

pytestmark = pytest.mark.usefixtures("forked_workers")

RANK = 4


def test_a_policy_continues_from_the_adapters_of_fine_tuning(sft_config, train_config, tmp_path):
    """SFT's loss falls by adapters alone; RL starts from them, and the KL to them is 0 in the first step."""
    checkpoints, adapters = tmp_path / "checkpoints", tmp_path / "adapters"
    model = {"model.lora_rank": RANK, "model.lora_alpha": 8, "model.lora.type": "dora"}
    lora = {**model, "optim.lr": 3e-2, "optim.weight_decay": 0.0}
    run = {"total_training_steps": 6, "save_freq": 6, "default_local_dir": str(checkpoints)}
    (tmp_path / "sft").mkdir()
    config = sft_config({**lora, **{f"trainer.{name}": value for name, value in run.items()}})
    run_supervised_job(config, tmp_path / "sft")
    losses = [row["train/loss"] for row in read_metrics(tmp_path / "sft" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.5
    assert convert(["megatron-to-peft", str(checkpoints), str(adapters)]) == 0

    policy = {f"actor_rollout_ref.{name}": value for name, value in model.items()} | {
        "actor_rollout_ref.model.lora_adapter_path": str(adapters),
        "actor_rollout_ref.model.lora.reference": "adapter",
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.rollout.n": 4,
        "data.train_batch_size": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": -1,
    }
    (tmp_path / "rl").mkdir()
    run_policy(train_config(policy), tmp_path / "rl")
    rows = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    assert rows[0]["actor/reward_kl_penalty"] == 0

    wrong = train_config({**policy, "actor_rollout_ref.model.lora_rank": 8})
    with raises("adapter.setting-differs", "actor_rollout_ref.model.lora_rank=8: ", " 4"):
        check_learners(wrong)
    wrong = train_config({**policy, "actor_rollout_ref.model.lora.type": "lora"})
    with raises("adapter.setting-differs", "actor_rollout_ref.model.lora.type=lora: ", " dora"):
        check_learners(wrong)


def test_a_reward_model_trains_adapters_and_its_head(pair_config, tmp_path):
    """The export is the base model plus matrices of the adapters' rank."""
    changes = {
        "model.lora_rank": RANK,
        "megatron.dtype": "float32",
        "optim.lr": 1e-2,
        "trainer.total_training_steps": 4,
        "trainer.hf_export_dir": str(tmp_path / "reward"),
    }
    config = pair_config(changes)
    (tmp_path / "run").mkdir()
    run_supervised_job(config, tmp_path / "run")
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert steps[0]["train/loss"] == pytest.approx(0.6931, abs=1e-4)
    base = load_file(Path(config.model.path) / "model.safetensors")
    trained = load_file(tmp_path / "reward" / "model.safetensors")
    assert trained["score.weight"].abs().max() > 0
    for name, weight in base.items():
        change = trained[name] - weight if name in trained else torch.zeros(1)
        if "proj" in name and name.endswith("weight"):
            rank = int(torch.linalg.matrix_rank(change.double(), rtol=1e-4))
            assert 1 <= rank <= RANK, name
        else:
            assert not change.any(), name


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"target_modules": ["q_prj"]}, "adapter.unknown-target", "target_modules: 'q_prj' "),
        ({"target_modules": ["embed_tokens"]}, "adapter.unsupported-target", "target_modules: 'model.embed_tokens' "),
        ({"exclude_modules": ["all_of_it"]}, "adapter.unknown-target", "exclude_modules: 'all_of_it' "),
        ({"lora_adapter_path": "/nowhere"}, "adapter.missing-file", "lora_adapter_path=/nowhere: "),
    ],
)
def test_wrong_adapters_are_rejected_before_any_process_starts(train_config, changes, code, named):
    keys = {"actor_rollout_ref.model.lora_rank": 4} | {f"actor_rollout_ref.model.{k}": v for k, v in changes.items()}
    with raises(code, f"actor_rollout_ref.model.{named}"):
        check_learners(train_config(keys))


def test_preference_optimization_has_the_base_as_reference(pair_config, tmp_path):
    """DPO's loss is log 2 while policy and reference are the same model."""
    pairs = pair_config()
    values = {
        "data.train_files": pairs.data.train_files,
        "data.train_batch_size": 8,
        "model.path": pairs.model.path,
        "model.lora_rank": RANK,
        **RUN,
        "megatron.dtype": "float32",
        "optim.lr": 1e-2,
        "trainer.total_training_steps": 3,
    }
    (tmp_path / "run").mkdir()
    run_supervised_job(build(PreferenceConfig, set_keys({}, values), str(tmp_path / "files")), tmp_path / "run")
    losses = [row["train/loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-7)
    assert abs(losses[2] - math.log(2)) > 1e-4
