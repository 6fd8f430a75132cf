"""Fixtures: a small quickstart task, and complete configurations of its jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import EvaluateConfig, PreferenceConfig, RewardTrainingConfig, SFTConfig, TrainConfig
from megarl.config.build import build
from support.arithmetic_task import RUN, make_task
from support.dotted_keys import set_keys


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``model`` and ``data/{train,test,sft,pairs,pairs_test}.parquet``: 90 and 10 problems."""
    options = ("--layers", "2", "--largest", "9", "--num-test", "10", "--lessons", "60", "60", "--pairs", "40", "10")
    return make_task(tmp_path_factory.mktemp("arithmetic"), *options)


@pytest.fixture
def train_config(arithmetic: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """``train_config({"dotted.key": value})``: a complete configuration; its files are in ``tmp_path``."""

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
        return build(TrainConfig, set_keys({}, {**base, **(changes or {})}), str(tmp_path / "files"))

    return make


@pytest.fixture
def sft_config(arithmetic: Path, tmp_path: Path) -> Callable[..., SFTConfig]:
    """Like ``train_config``, for supervised fine-tuning."""

    def make(changes: dict[str, Any] | None = None) -> SFTConfig:
        base = {
            "data.train_files": [str(arithmetic / "data" / "sft.parquet")],
            "data.train_batch_size": 8,
            "model.path": str(arithmetic / "model"),
            **RUN,
        }
        return build(SFTConfig, set_keys({}, {**base, **(changes or {})}), str(tmp_path / "files"))

    return make


@pytest.fixture
def pair_config(arithmetic: Path, tmp_path: Path) -> Callable[..., RewardTrainingConfig]:
    """Like ``train_config``, for reward-model training."""

    def make(changes: dict[str, Any] | None = None) -> RewardTrainingConfig:
        keys = set_keys({}, {**_pair_keys(arithmetic), **(changes or {})})
        return build(RewardTrainingConfig, keys, str(tmp_path / "files"))

    return make


@pytest.fixture
def preference_config(arithmetic: Path, tmp_path: Path) -> Callable[..., PreferenceConfig]:
    """Like ``train_config``, for preference optimization."""

    def make(changes: dict[str, Any] | None = None) -> PreferenceConfig:
        keys = set_keys({}, {**_pair_keys(arithmetic), **(changes or {})})
        return build(PreferenceConfig, keys, str(tmp_path / "files"))

    return make


def _pair_keys(arithmetic: Path) -> dict[str, Any]:
    """Keys of a job that trains on the task's pairs."""
    return {
        "data.train_files": [str(arithmetic / "data" / "pairs.parquet")],
        "data.val_files": [str(arithmetic / "data" / "pairs_test.parquet")],
        "data.train_batch_size": 8,
        "model.path": str(arithmetic / "model"),
        **RUN,
    }


@pytest.fixture
def evaluate_config(arithmetic: Path, tmp_path: Path) -> Callable[..., EvaluateConfig]:
    """Like ``train_config``, for an evaluation."""

    def make(changes: dict[str, Any] | None = None) -> EvaluateConfig:
        base = {
            "data.val_files": [str(arithmetic / "data" / "test.parquet")],
            "data.max_prompt_length": 32,
            "data.max_response_length": 6,
            "actor_rollout_ref.model.path": str(arithmetic / "model"),
            **RUN,
        }
        return build(EvaluateConfig, set_keys({}, {**base, **(changes or {})}), str(tmp_path / "files"))

    return make
