"""Errors of the command line before the start, and the jobs of schedulers."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from support.expected_errors import raises

from megarl.cli import main as megarl
from megarl.ops.doctor.node.results import CheckResult, NodeReport, Status
from megarl.ops.launch import command
from megarl.ops.launch.checks import DoctorSummary, doctor_command, parse_doctor_output
from megarl.ops.launch.options import read_job, split_job, with_machines

QUICK = ["train", "--config-name", "quickstart"]
MODEL = Path(__file__).parents[1] / "plan/models/Qwen2.5-32B"
ASYNC = ["train", "-cn", "run_32b_async", f"actor_rollout_ref.model.path={MODEL}", "data.train_files=none"]
ROLLOUT = "actor_rollout_ref.rollout"
UNEQUAL = f"trainer.n_gpus_per_node=8 and {ROLLOUT}.n_gpus_per_node=4 "


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
    with raises("launch.no-job", "megarl launch --help"):
        split_job(argv)


@pytest.mark.parametrize(
    ("argv", "error", "named"),
    [
        (["tran", "a=b"], "launch.unknown-job", "'tran'.* train.*reward-model, preference, dpo, evaluate or generate"),
        (
            ["--srun=srun --mem=0", "--on=local", *QUICK],
            "launch.unused-option",
            "--srun .*slurm and sbatch.*local",
        ),
        (["--nodes=2", *QUICK], "launch.command-option", "--nodes .*trainer.nnodes"),
        (["--hosts=hosts.txt", *QUICK], "launch.no-hosts-file", "--hosts=hosts.txt"),
        ([*QUICK, "trainer.nodes=2"], "config.unknown-key", "trainer.nodes"),
        (
            [*QUICK, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3"],
            "layout.replicas-do-not-divide",
            "tensor_model_parallel_size",
        ),
        (["--max-restarts=1", *QUICK], "launch.restart-from-scratch", "trainer.resume_mode=disable.*=auto"),
        (["--hosts=a", *QUICK, "trainer.nnodes=2"], "launch.too-few-hosts", "trainer.nnodes=2: 2 nodes.* 1: a"),
        (
            ["--hosts=a", "--nodes=2", "--devices-per-node=1", "--", "x"],
            "launch.too-few-hosts",
            "^--nodes=2: 2 nodes.* 1: a",
        ),
        (
            ["--hosts=a,b,c,d,e,f,g", *ASYNC],
            "launch.too-few-hosts",
            f"trainer.nnodes=4 and {ROLLOUT}.nnodes=4: 8 nodes.* 7: a",
        ),
        (["--on=local", *ASYNC], "launch.nodes-share-gpus", f"trainer.nnodes=4 and {ROLLOUT}.nnodes=4 "),
        *(
            (
                [*place, *ASYNC, f"{ROLLOUT}.n_gpus_per_node=4"],
                "launch.machine-size",
                UNEQUAL + ".*--devices-per-node",
            )
            for place in (["--hosts=a"], ["--on=sbatch"], ["--on=local"])
        ),
        (
            ["--hosts=a", "--devices-per-node=8", *ASYNC, f"{ROLLOUT}.n_gpus_per_node=12", f"{ROLLOUT}.nnodes=1"],
            "launch.node-exceeds-machine",
            f"{ROLLOUT}.n_gpus_per_node=12 .*--devices-per-node=8",
        ),
        (
            ["--hosts=a", "--devices-per-node=4", *ASYNC, "trainer.nnodes=1", f"{ROLLOUT}.nnodes=1"],
            "launch.node-exceeds-machine",
            "trainer.n_gpus_per_node=8 .*--devices-per-node=4",
        ),
        (
            ["--hosts=a", "--devices-per-node=8", *ASYNC, "trainer.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=4"],
            "launch.too-few-hosts",
            f"trainer.nnodes=1 and {ROLLOUT}.nnodes=4: 3 nodes.* 1: a. .* by --devices-per-node",
        ),
        (["--on=ssh", *QUICK], "launch.hosts-option", "--on ssh .*--hosts"),
        ([*QUICK, "trainer.nnodes=2", "trainer.device=cuda"], "launch.nodes-share-gpus", "trainer.nnodes=2 "),
        (["--on=local", "--hosts=a", *QUICK], "launch.hosts-option", "not --hosts=a"),
        (["--submit", *QUICK], "launch.unused-option", "--submit .*--on sbatch"),
        (["--on=local-ray", *QUICK], "launch.ray-address", r"RAY_ADDRESS=\(not set\)"),
        (["--on=local-ray", "--port=7000", *QUICK], "launch.unused-option", "--port "),
        ([*QUICK, "--multirun"], "launch.multirun-or-cfg", "--multirun"),
        (["--port=10000", *QUICK], "launch.port-overlap", "--worker-ports=10002-19999"),
        (["--", "python", "x.py"], "launch.command-size", "--nodes and --devices-per-node"),
    ],
)
def test_invalid_command_lines_are_refused_before_the_start(capsys, monkeypatch, argv, error, named):
    for name in ("SLURM_JOB_NODELIST", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "Popen", None)
    code, text = launch(capsys, *argv)
    assert code == 2
    assert re.search(named, text) and f" [{error}]\n" in text, text


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
    assert capsys.readouterr().err.endswith("nowhere [launch.sbatch-refused]\n")


def test_nodes_of_the_engines_are_launched(monkeypatch, capsys, tmp_path):
    """Four nodes train, four generate: every place starts eight."""
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(command.Launcher, "run", lambda self: started.append((self.settings, self.job)) or 0)
    assert command.main(["--hosts=a,b,c,d,e,f,g,h,i", *ASYNC]) == 0
    assert "8 of 9 hosts are used; i are spares" in capsys.readouterr().err
    ((settings, job),) = started
    assert settings.hosts == tuple("abcdefghi") and (job.nodes, job.devices) == (8, 8)
    doctor = doctor_command("python", job)
    assert doctor[doctor.index("--devices") + 1] == "8"
    assert command.main(["--on=sbatch", *ASYNC]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=8\n" in script and "#SBATCH --gpus-per-node=8\n" in script


def test_one_machine_holds_a_trainer_and_engines_of_one_node_each():
    sizes = ["trainer.nnodes=1", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=4"]
    job = read_job([*ASYNC, *sizes], 0)
    local = with_machines(job, "local", None)
    assert (local.nodes, local.devices) == (1, 12), "12 devices of one Ray node"
    synchronous = read_job(QUICK, 0)
    assert with_machines(synchronous, "ssh", None) is synchronous


@pytest.mark.parametrize(
    ("trainer", "engines", "machines"),
    [((1, 4), (1, 4), 1), ((2, 8), (3, 4), 4), ((4, 4), (1, 2), 3), ((2, 4), (2, 4), 2), ((2, 2), (2, 6), 2)],
)
def test_nodes_share_machines_of_a_given_size(trainer, engines, machines, monkeypatch, capsys, tmp_path):
    """Of 8 devices each, as nodes and devices of trainer and engines; the other places get the same numbers."""
    monkeypatch.chdir(tmp_path)
    sizes = [f"trainer.nnodes={trainer[0]}", f"trainer.n_gpus_per_node={trainer[1]}",
             f"{ROLLOUT}.nnodes={engines[0]}", f"{ROLLOUT}.n_gpus_per_node={engines[1]}"]  # fmt: skip
    layout = [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
    ]
    job = read_job([*ASYNC, *sizes, *layout], 0)
    shared = with_machines(job, "ssh", 8)
    assert (shared.nodes, shared.devices) == (machines, 8)
    assert command.main(["--on=sbatch", "--devices-per-node=8", *ASYNC, *sizes, *layout]) == 0
    script = capsys.readouterr().out
    assert f"#SBATCH --nodes={machines}\n" in script and "#SBATCH --gpus-per-node=8\n" in script
    assert "--devices-per-node=8" in script.splitlines()[-1], "the launcher in the allocation counts the same machines"


def test_report_of_the_doctor_is_summarized():
    nodes = [
        NodeReport(
            "n0", [CheckResult("disk", Status.FAIL, "full", "free 10 GB"), CheckResult("port", Status.PASS, "free")]
        ),
        NodeReport("n1", [CheckResult("clock", Status.WARN, "2 s ahead")]),
    ]
    line = json.dumps({"nodes": [node.to_json() for node in nodes]})
    summary = parse_doctor_output(1, f"a message of Ray\n{line}\n")
    assert summary == DoctorSummary(("n0: disk: full -> free 10 GB",), ("n1: clock: 2 s ahead",), 1)
    with raises("launch.no-doctor-report", "code 3", "\nTraceback"):
        parse_doctor_output(3, "Traceback")


def test_unreachable_host_is_named(start_launcher):
    options = ("--no-doctor", "--nodes=1", "--devices-per-node=1", "--device=cpu", "--hosts=unreachable")
    launched = start_launcher(*options, "--", "true")
    assert launched.code() == 1
    assert "node unreachable is lost: the connection ended with code 255: ssh: Could not resolve" in launched.text()


@pytest.mark.parametrize(
    ("place", "size", "machines", "devices"),
    [("local", None, 1, 4), ("ssh", 4, 1, 4), ("ssh", 2, 2, 2), ("ssh", 3, 2, 3)],
)
def test_machines_hold_the_pools_of_all_roles(place, size, machines, devices):
    """The trainer has two devices, critic and reference one each."""
    layout = ["actor_rollout_ref.ref.megatron.tensor_model_parallel_size=1", "critic.megatron.data_parallel_size=1"]
    pools = [f"{role}.{key}=1" for role in ("critic", "actor_rollout_ref.ref") for key in ("nnodes", "n_gpus_per_node")]
    job = with_machines(read_job([*QUICK, *layout, *pools], 0), place, size)
    assert (job.nodes, job.devices) == (machines, devices)
    assert job.size_keys == "trainer.nnodes=1 and critic.nnodes=1 and actor_rollout_ref.ref.nnodes=1"
