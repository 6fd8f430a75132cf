"""Where values come from that are not the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config import TrainConfig
from megarl.config.build import build
from megarl.config.compose import Request, compose
from megarl.config.differences import Difference, differences


def test_origins_of_values() -> None:
    values: dict[str, Any] = {
        "actor_rollout_ref": {"model": {"path": "model"}, "actor": {"optim": {"lr": 3e-6}}},
        "data": {"train_files": ["x"]},
        "trainer": {"experiment_name": "e", "n_gpus_per_node": 1, "seed": 5},
    }
    config = build(TrainConfig, values)
    told = {one.key: one for one in differences(config, values, ["++trainer.seed=5", "data.train_files=[x]"])}
    assert told["trainer.seed"] == Difference("trainer.seed", 5, 1, "command line")
    assert told["data.train_files"].origin == "command line"
    assert told["actor_rollout_ref.actor.optim.lr"].origin == "file"
    assert told["data.seed"].origin == "derived" and told["data.seed"].value == 5
    assert all(one.value != one.default for one in told.values()) and "trainer.val_only" not in told


def test_what_a_file_states_is_told_as_the_files(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, _self_]\ntrainer: {seed: 9}\n")
    config = compose(Request(TrainConfig, "mine", (), str(tmp_path)))
    file = {"algorithm": {"use_kl_in_reward": True}, "trainer": {"seed": 9}}
    told = {one.key: one.origin for one in differences(config, file, ["trainer.note"])}
    assert told["algorithm.use_kl_in_reward"] == told["trainer.seed"] == "file"
    assert told["data.seed"] == "derived"
