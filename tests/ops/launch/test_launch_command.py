"""Errors of the command line before the start, and the jobs of schedulers."""

import re
import subprocess

import pytest

from megarl.base.errors import ConfigError
from megarl.cli import main as megarl
from megarl.ops.launch import command
from megarl.ops.launch.options import split_job

QUICK = ["train", "--config-name", "quickstart"]


def launch(capsys, *argv):
    code = command.main(argv)
    return code, capsys.readouterr().err


def test_launcher_options_and_job_are_split():
    launcher, words, is_megarl = split_job(
        ["--hosts", "train", "--no-doctor", "--port=1", "train", "--config-name", "grpo", "a=b"]
    )
    assert launcher == ["--hosts", "train", "--no-doctor", "--port=1"]
    assert words == ["train", "--config-name", "grpo", "a=b"] and is_megarl
    assert split_job(["--nodes", "2", "--", "python", "--", "x"]) == (["--nodes", "2"], ["python", "--", "x"], False)


@pytest.mark.parametrize("argv", [[], ["--no-doctor"], ["--"]])
def test_missing_job(argv):
    with pytest.raises(ConfigError, match="no job is named"):
        split_job(argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tran", "a=b"], "'tran' is not a job; did you mean train.*reward-model, preference, evaluate or generate"),
        (["--image=x", "--on=local", *QUICK], "--image is for --on kubernetes; this is --on local"),
        (["--srun=srun --mem=0", "--on=local", *QUICK], "--srun is for --on slurm and sbatch; this is --on local"),
        (["--nodes=2", *QUICK], "--nodes is for a command after --; for a job set trainer.nnodes"),
        (["--hosts=hosts.txt", *QUICK], "--hosts=hosts.txt: there is no such file"),
        ([*QUICK, "trainer.nodes=2"], "trainer.nodes"),
        ([*QUICK, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3"], "tensor_model_parallel_size"),
        (["--max-restarts=1", *QUICK], "trainer.resume_mode=disable: a restart .* begin from scratch"),
        (["--hosts=a", *QUICK, "trainer.nnodes=2"], "trainer.nnodes=2, but hosts are only 1: a"),
        (["--on=ssh", *QUICK], "--on ssh needs --hosts"),
        ([*QUICK, "trainer.nnodes=2", "trainer.device=cuda"], "trainer.nnodes=2 on one machine: nodes would share"),
        (["--on=local", "--hosts=a", *QUICK], "not --hosts=a"),
        (["--submit", *QUICK], "--submit is for --on sbatch"),
        ([*QUICK, "--multirun"], "--multirun"),
        (["--port=10000", *QUICK], "overlap with --worker-ports=10002-19999"),
        (["--", "python", "x.py"], "--nodes and --devices-per-node"),
    ],
)
def test_invalid_command_lines_are_refused_before_the_start(capsys, monkeypatch, argv, message):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setattr(subprocess, "Popen", None)
    code, text = launch(capsys, *argv)
    assert code == 2
    assert re.search(message, text), text


def test_restarts_without_checkpoints_are_noted(capsys, monkeypatch):
    monkeypatch.setattr(command, "_launch", lambda *arguments: 0)
    code, text = launch(
        capsys, "--max-restarts=1", "--on=local", *QUICK, "trainer.resume_mode=auto", "trainer.save_freq=-1"
    )
    assert code == 0 and "nothing is saved, so a restart begins from scratch" in text


def test_batch_script_runs_the_launcher_inside(fake_commands, monkeypatch, capsys, tmp_path):
    for name, value in fake_commands.environment().items():
        monkeypatch.setenv(name, value)
    words = [*QUICK, "trainer.nnodes=4", "trainer.device=cuda", "trainer.n_gpus_per_node=8", "data.system_prompt='a b'"]
    own = [
        "--on=sbatch",
        "--sbatch=--time=2-0",
        "--sbatch=--nodes=5",
        "--srun",
        "srun --mem=0",
        f"--workdir={tmp_path}",
    ]
    assert megarl(["launch", *own, *words]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --time=2-0\n" in script and "#SBATCH --gpus-per-node=8\n" in script
    assert script.count("--nodes=") == 1 and "#SBATCH --nodes=5\n" in script, "the user's options override the defaults"
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    inside = script.replace("exec ", "printf '%s\\n' ")
    lines = subprocess.run(["bash"], input=inside, text=True, capture_output=True, check=True).stdout.splitlines()
    assert lines[1:] == [
        "-m",
        "megarl.ops.launch",
        "--on",
        "slurm",
        "--srun",
        "srun --mem=0",
        f"--workdir={tmp_path}",
        *words,
    ]
    assert megarl(["launch", "--submit", *own, *words]) == 0
    assert capsys.readouterr().out == "4711\n"
    assert fake_commands.calls("sbatch")[0]["input"] == script
    assert megarl(["launch", "--submit", *own, "--sbatch=--partition=nowhere", *words]) == 1
    assert "sbatch refused the script: sbatch: error: invalid partition" in capsys.readouterr().err


def test_unreachable_host_is_named(start_launcher):
    options = ("--no-doctor", "--nodes=1", "--devices-per-node=1", "--device=cpu", "--hosts=unreachable")
    launched = start_launcher(*options, "--", "true")
    assert launched.code() == 1
    assert "node unreachable is lost: the connection ended with code 255: ssh: Could not resolve" in launched.text()
