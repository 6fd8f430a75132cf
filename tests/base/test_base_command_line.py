import sys

import pytest

from megarl.base.provenance import command_with


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/v/bin/python3", "-m", "megarl.train", "a=[1, 2]"], "python3 -m megarl.train 'a=[1, 2]' k=v"),
        (["/v/bin/python", "-u", "-m", "megarl.sft"], "python -u -m megarl.sft k=v"),
        (["/v/bin/python", "/v/bin/megarl", "train", "-cn", "ppo"], "megarl train -cn ppo k=v"),
        (["/v/bin/python", "/v/bin/megarl", "train", "-m", "seed=1,2"], "the same command with k=v"),
        (["/v/bin/python", "/v/bin/pytest", "megarl"], "the same command with k=v"),
        (["/v/bin/python"], "the same command with k=v"),
    ],
)
def test_the_command_of_a_job_with_more_overrides(argv, command, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", argv)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert command_with(["k=v"]) == command


def test_a_job_of_a_launcher_names_no_command(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "megarl.train"])
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert command_with([]) == "the same command"
