"""Software, machine and source of a run."""

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.base import provenance
from megarl.base.provenance import command_with, git_state, run_facts


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_checkout_has_commit_and_changed_files(tmp_path):
    git(tmp_path, "init", "-q", "-b", "work")
    assert git_state(tmp_path) is None, "no commit yet"
    (tmp_path / "a b.py").write_text("1", encoding="utf-8")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": head, "branch": "work", "changed": []}
    (tmp_path / "a b.py").write_text("2", encoding="utf-8")
    (tmp_path / "new.py").write_text("not known to git", encoding="utf-8")
    state = git_state(tmp_path)
    assert state is not None and state["changed"] == ['"a b.py"']
    installed = tmp_path / "venv" / "megarl"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    assert git_state(installed) is None, "a package installed inside somebody's checkout is not of that checkout"


def test_missing_git_is_no_error(tmp_path, monkeypatch):
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(Path(provenance.__file__).parent) is None


def test_run_facts_of_this_process(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q", "-b", "custom")
    (tmp_path / "reward.py").touch()
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "mine")
    monkeypatch.chdir(tmp_path)
    facts = run_facts()
    assert facts["versions"]["torch"] and facts["machine"]["cpus"] and facts["started"].endswith("+00:00")
    assert facts["git"]["working folder"]["branch"] == "custom", "custom reward functions have a source, too"


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/v/bin/python3", "-m", "megarl", "train", "a=[1, 2]"], "python3 -m megarl train 'a=[1, 2]' k=v"),
        (["/v/bin/python", "-u", "-m", "megarl", "sft"], "python -u -m megarl sft k=v"),
        (["/v/bin/python", "/v/bin/megarl", "train", "-cn", "ppo"], "megarl train -cn ppo k=v"),
        (["/v/bin/python", "/v/bin/megarl", "train", "x.api_key=a b"], "megarl train 'x.api_key=<redacted>' k=v"),
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
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "megarl", "train"])
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert command_with([]) == "the same command"
