"""The quickstart's task in small, and configurations of it as a user's become."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import EvaluateConfig, SFTConfig, TrainConfig
from megarl.config.build import build

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_arithmetic.py"


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model`` (and tokenizer) and ``data/{train,test,sft}.parquet``: 90 problems and 10."""
    folder = tmp_path_factory.mktemp("arithmetic")
    command = [sys.executable, str(TOOL), "--out", str(folder), "--hidden", "32", "--layers", "2"]
    command += ["--largest", "9", "--num-test", "10", "--lessons", "60", "60"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


RUN = {"trainer.experiment_name": "test", "trainer.n_gpus_per_node": 1, "trainer.device": "cpu"}
"""One device of this machine."""


def with_keys(values: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in values.items():
        node = nested
        *sections, name = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return nested


@pytest.fixture
def train_config(arithmetic: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """``train_config({"dotted.key": value})``: a complete configuration, with files under the test's folder."""

    def make(changes: dict[str, Any] | None = None) -> TrainConfig:
        base = {
            "data.train_files": [str(arithmetic / "data" / "train.parquet")],
            "data.val_files": [str(arithmetic / "data" / "test.parquet")],
            "data.train_batch_size": 8,
            "data.max_prompt_length": 32,
            "data.max_response_length": 6,
            "actor_rollout_ref.model.path": str(arithmetic / "model"),
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "actor_rollout_ref.rollout.dtype": "float32",
            **RUN,
        }
        return build(TrainConfig, with_keys({**base, **(changes or {})}), str(tmp_path / "files"))

    return make


@pytest.fixture
def sft_config(arithmetic: Path, tmp_path: Path) -> Callable[..., SFTConfig]:
    """As ``train_config``, for supervised fine-tuning."""

    def make(changes: dict[str, Any] | None = None) -> SFTConfig:
        base = {
            "data.train_files": [str(arithmetic / "data" / "sft.parquet")],
            "data.train_batch_size": 8,
            "model.path": str(arithmetic / "model"),
            **RUN,
        }
        return build(SFTConfig, with_keys({**base, **(changes or {})}), str(tmp_path / "files"))

    return make


@pytest.fixture
def evaluate_config(arithmetic: Path, tmp_path: Path) -> Callable[..., EvaluateConfig]:
    """As ``train_config``, for an evaluation."""

    def make(changes: dict[str, Any] | None = None) -> EvaluateConfig:
        base = {
            "data.val_files": [str(arithmetic / "data" / "test.parquet")],
            "data.max_prompt_length": 32,
            "data.max_response_length": 6,
            "actor_rollout_ref.model.path": str(arithmetic / "model"),
            **RUN,
        }
        return build(EvaluateConfig, with_keys({**base, **(changes or {})}), str(tmp_path / "files"))

    return make
