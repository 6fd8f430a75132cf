"""Jobs from Python: wrong configurations raise before a process starts, and a job that fails raises its output."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.expected_errors import raises
from support.warm_drivers import write_interpreter

import megarl
from megarl.config import TrainConfig
from megarl.config.overrides import override_of, parse_overrides
from megarl.config.problems import InvalidConfigError

TASK = {"data.train_files": "absent.parquet", "actor_rollout_ref.model.path": "absent"}


def test_a_wrong_configuration_raises_before_a_process_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises("config.unknown-key", "trainer.total_trainig_steps", error=InvalidConfigError):
        megarl.train("quickstart_grpo", {"trainer.total_trainig_steps": 2})
    with pytest.raises(ValueError, match="evaluate"):
        megarl.train(job="evaluate")
    assert not list(tmp_path.iterdir())


def test_a_job_that_fails_raises_with_its_output(tmp_path, monkeypatch, capsys, drivers):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(write_interpreter(tmp_path / "python", drivers.address)))
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart_grpo, _self_]\n", encoding="utf-8")
    run = megarl.train(tmp_path / "mine.yaml", [f"{key}={value}" for key, value in TASK.items()], wait=False)
    with raises("worker.job-failed", "exit code 2", "absent", "[model.folder-missing]", error=megarl.RunFailed):
        run.wait()
    assert not run.running and run.metrics == []
    assert run.folder.parent == tmp_path / "outputs" / "quickstart"
    assert "[model.folder-missing]" in capsys.readouterr().out


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(value=VALUES)
def test_a_value_survives_its_override(value):
    (override,) = parse_overrides([override_of("data.mixture", value)], TrainConfig)
    assert _plain(override.value()) == value


def _plain(value):
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return getattr(value, "text", value)
