"""Short flags set the keys that they stand for, in every job."""

import pytest
from support.expected_errors import raises

from megarl.config.keys import value_at
from megarl.config.problems import InvalidConfigError
from megarl.ops.jobs.table import JOBS, compose_job

ODD = "/data/it's a,b=#1 {x}[y]\\z.parquet"


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("gsm8k", {"reward.name": "gsm8k"}),
        ("own/reward.py:score", {"reward.name": "own/reward.py:score"}),
        ("owner/a-reward", {"reward.model.enable": True, "reward.model.path": "owner/a-reward"}),
    ],
)
def test_a_reward_is_a_name_a_function_or_a_model(reward, expected):
    config = compose_job("grpo", ["--model", "own/model", "--data", ODD, "--data", "b.jsonl", "--reward", reward])
    assert {key: value_at(config, key) for key in expected} == expected
    assert config.data.train_files == [ODD, "b.jsonl"] and config.actor_rollout_ref.model.path == "own/model"
    assert config.algorithm.adv_estimator == "grpo" and not config.uses_critic


def test_a_judge_is_an_address():
    words = ["--model", "m", "--data", "d", "--reward", "http://127.0.0.1:1/v1"]
    config = compose_job("ppo", words)
    assert config.reward.name == "judge" and config.reward.judge.base_url == "http://127.0.0.1:1/v1"
    assert config.uses_critic and config.reward.judge.model is None


def test_an_unknown_reward_is_named_with_its_neighbour():
    with raises("reward.unknown-name", "gsm9k", "gsm8k"):
        compose_job("grpo", ["--model", "m", "--data", "d", "--reward", "gsm9k"])


def test_distillation_needs_a_teacher():
    words = ["--model", "m", "--data", "d"]
    config = compose_job("distill", [*words, "--teacher", "big"])
    assert [teacher.model_path for teacher in config.distillation.local_teachers.values()] == ["big"]
    assert not config.distillation.distillation_loss.use_task_rewards and not config.uses_critic
    with pytest.raises(InvalidConfigError) as caught:
        compose_job("distill", words)
    assert {problem.path for problem in caught.value.problems} == {"distillation.teacher_models"}


@pytest.mark.parametrize("name", sorted(JOBS.keys() - {"evaluate", "generate"}))
def test_model_and_data_are_flags_of_every_training_job(name):
    teacher = ["--teacher", "t"] if name == "distill" else []
    validated = ["--val-data", "v"] if name != "sft" else []  # fine-tuning validates by evaluation
    config = compose_job(name, ["--model", "m", "--data", "d", *validated, *teacher])
    model = config.model if hasattr(config, "model") else config.actor_rollout_ref.model
    assert (model.path, config.data.train_files) == ("m", ["d"])
    assert not validated or config.data.val_files == ["v"]


def test_evaluation_reads_its_data_by_the_same_flag():
    config = compose_job("evaluate", ["--model", "m", "--data", "d", "--reward", "gsm8k"])
    assert config.data.val_files == ["d"] and config.reward.name == "gsm8k"


def test_a_name_of_the_hub_is_data_unless_a_folder_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "local").mkdir(parents=True)
    words = ["--model", "m", "--data", "own/sums", "--data", "own/local", "--data", "own/a.parquet"]
    config = compose_job("grpo", [*words, "--val-data", "own/sums"])
    assert config.data.train_files == ["hf://datasets/own/sums/**/train*.parquet", "own/local", "own/a.parquet"]
    assert config.data.val_files == ["hf://datasets/own/sums/**/test*.parquet"]


def test_overrides_win_over_flags():
    assert compose_job("sft", ["--model", "m", "--data", "d", "model.path=n"]).model.path == "n"
