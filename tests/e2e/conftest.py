from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from support.arithmetic_task import make_task
from support.cli_runs import ONE_BY_ONE, REWARDS, CliRun
from support.warm_drivers import Drivers

from megarl.base.packages import is_installed

# SGLang is installed in a separate environment.
collect_ignore = [] if is_installed("sglang") else ["test_e2e_sglang.py", "test_e2e_sglang_vision.py"]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small quickstart task: 48 thousand parameters, 80 training and 20 validation problems."""
    options = ("--layers", "2", "--largest", "9", "--num-test", "20", "--lessons", "60", "60")
    return make_task(tmp_path_factory.mktemp("task"), *options)


@pytest.fixture(scope="session")
def mixture(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE with the task's tokenizer."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(task / "model", folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    dense = json.loads((task / "model" / "config.json").read_text(encoding="utf-8"))
    kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "max_position_embeddings")
    sizes = {name: dense[name] for name in (*kept, "num_hidden_layers", "eos_token_id", "pad_token_id")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**sizes, **experts, head_dim=8, bos_token_id=None, initializer_range=0.2)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small(task: Path) -> list[str]:
    """Overrides for a small quickstart run: 24 prompts per step, three steps per epoch."""
    return [
        f"data.train_files={task}/data/train.parquet",
        f"data.val_files={task}/data/test.parquet",
        f"actor_rollout_ref.model.path={task}/model",
        "data.train_batch_size=24",
        "actor_rollout_ref.actor.ppo_mini_batch_size=12",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=5",
        "trainer.hf_export_dir=null",
        "trainer.save_freq=-1",
    ]


@pytest.fixture(scope="session")
def dense_reward() -> list[str]:
    return [f"reward.custom_reward_function.path={REWARDS}", "reward.custom_reward_function.name=dense", *ONE_BY_ONE]


@pytest.fixture(scope="session")
def start(
    tmp_path_factory: pytest.TempPathFactory, shared_server: dict[str, str], drivers: Drivers
) -> Iterator[Callable[..., CliRun]]:
    """``start(*arguments, folder=None, env=None, job="train", warm=None)`` ends the previous run and starts a new one.

    The driver and the workers of a warm run are forks. A run with an environment, even an empty one, is not warm by
    default: it has a driver and a fork server of its own.
    """
    runs: list[CliRun] = []

    def start_run(
        *arguments: str,
        folder: Path | None = None,
        env: dict[str, str] | None = None,
        job: str = "train",
        warm: bool | None = None,
    ) -> CliRun:
        if runs:
            runs[-1].close()
        folder = folder or tmp_path_factory.mktemp("run")
        if env is None if warm is None else warm:
            runs.append(CliRun(folder, arguments, {**shared_server, **(env or {})}, job, drivers))
        else:
            runs.append(CliRun(folder, arguments, env, job))
        return runs[-1]

    yield start_run
    for run in runs[-1:]:
        run.close()
