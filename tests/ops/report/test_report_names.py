"""Names of compared runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.ops.report.names import run_names
from megarl.ops.report.run_files import RunRecord

LR, CRITIC_LR = "actor_rollout_ref.actor.optim.lr", "critic.optim.lr"


def run(
    folder: str, name: str, overrides: list[str], config: dict[str, Any] | None = None, config_name: str = "ppo"
) -> RunRecord:
    facts = {"overrides": overrides, "config_name": config_name}
    return RunRecord(Path(folder), name, [], config=config or {}, facts=facts)


def names(*overrides: list[str]) -> list[str]:
    return run_names([run(str(number), "x", texts) for number, texts in enumerate(overrides)])


def test_run_names_are_unique() -> None:
    assert run_names([run("a", "x", [])]) == ["x"]
    assert run_names([run("a", "x", ["s=1", "a.lr=2"]), run("b", "x", ["s=1", "a.lr=3"])]) == ["lr=2", "lr=3"]
    assert run_names([run("a", "x", []), run("b", "y", ["lr=3"])]) == ["x", "y"]
    assert run_names([run("a", "x", []), run("b", "x", [])]) == ["a", "b"]
    assert run_names([run("1/a", "x", []), run("2/a", "x", [])]) == ["0: x", "1: x"]


def test_equal_ends_of_keys_keep_the_part_that_differs() -> None:
    assert names([f"{LR}=1", f"{CRITIC_LR}=1"], [f"{LR}=2", f"{CRITIC_LR}=3"]) == [
        "actor.lr=1 critic.lr=1", "actor.lr=2 critic.lr=3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["/data/gsm8k/train.parquet", "/data/math/train.parquet"], ["f=gsm8k", "f=math"]),
        (["/a/b/model", "/a/b/other"], ["f=model", "f=other"]),
        (["/a/b", "/a/b/c"], ["f=b", "f=b/c"]),
        (["x" * 10 + "1" * 20, "y" * 10 + "2" * 20], ["f=xxxxxxxxxx1…111111111111", "f=yyyyyyyyyy2…222222222222"]),
    ],
)
def test_values_are_short(values: list[str], expected: list[str]) -> None:
    assert names(*([f"data.f={value}"] for value in values)) == expected


def test_many_differences_are_reduced_to_those_that_distinguish_the_runs() -> None:
    """Eight differing overrides; the seed alone tells the runs apart."""
    others = [[f"a.k{key}={number % 2}" for key in range(7)] for number in range(4)]
    assert names(*([*texts, f"trainer.seed={number}"] for number, texts in enumerate(others))) == [
        "seed=0", "seed=1", "seed=2", "seed=3",
    ]  # fmt: skip


def test_folders_and_defaults() -> None:
    """Output folders name no run; the value of a run without the override comes from its configuration."""
    config = {"algorithm": {"gamma": 1.0, "norm": True}}
    runs = [
        run("a", "x", ["trainer.default_local_dir=/very/long/1"], config),
        run("b", "x", ["trainer.default_local_dir=/very/long/2", "algorithm.gamma=0.9", "+algorithm.norm=false"]),
    ]
    assert run_names(runs) == ["gamma=1.0 norm=true", "gamma=0.9 norm=false"]


def test_name_of_the_configuration_distinguishes_runs() -> None:
    runs = [run("a", "x", [], config_name="quickstart"), run("b", "x", ["a.n=2"], config_name="quickstart_grpo")]
    assert run_names(runs) == ["quickstart", "quickstart_grpo n=2"]
