"""The launcher, and the plain batch script, in real SLURM jobs."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from support.waits import wait_for_text, wait_until, wait_while

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0


class Job:
    """A submitted batch job."""

    def __init__(self, hosts, number, log):
        self.hosts, self.number, self.log = hosts, number, log

    def text(self):
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def until(self, pattern):
        wait_for_text(self.is_queued, pattern, self.text, LIMIT_S)

    def is_queued(self):
        return self.hosts.on("h1", "squeue", "-h").strip() != ""

    def wait(self):
        wait_while(self.is_queued, lambda: not self.is_queued(), self.text, LIMIT_S)
        return self.text()


@pytest.fixture
def cluster(hosts):
    """The hosts with an idle SLURM; no job is left at the end."""
    wait_until(lambda: hosts.on("h1", "sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3")
    yield hosts
    hosts.on("h1", "scancel", "--user=root", "--full")
    wait_until(lambda: hosts.on("h1", "squeue", "-h").strip() == "")


@pytest.fixture
def submit(launch, cluster, shared, request):
    """Submit a batch job with the launcher, and return it."""

    def start(*options):
        log = shared / f"{request.node.name}.log"
        sbatch = ["--on", "sbatch", "--submit", "--sbatch=--overcommit", f"--sbatch=--output={log}"]
        run = launch(*sbatch, "--no-doctor", *options)
        assert run.code() == 0, run.text()
        return Job(cluster, run.text().split()[-1], Path(log))

    return start


@pytest.fixture
def submit_plain(cluster, shared, request):
    """Submit ``launch/plain.sbatch`` for two nodes of three, and return the job."""

    def start(*words, restarts=0):
        log = shared / f"{request.node.name}.log"
        variables = {"PYTHON": sys.executable, "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "OMP_NUM_THREADS": "1"}
        variables |= {"NODES": "2", "CPUS": "1", "RESTARTS": str(restarts)}
        environment = [f"{name}={value}" for name, value in variables.items()]
        options = ["--parsable", "--nodes=3", "--overcommit", f"--output={log}", str(ROOT / "launch/plain.sbatch")]
        number = cluster.on("h1", "env", "-C", str(shared), *environment, "sbatch", *options, *words)
        return Job(cluster, number.strip(), Path(log))

    return start


def test_a_batch_job(submit, grpo):
    job = submit(*grpo, "trainer.total_training_steps=2")
    assert re.search(r"launch: Ray at .*h1 \(10.77.0.11\), h2 \(10.77.0.12\)", job.wait()), job.text()
    assert re.search(r"(?m)step[: ]+2\b", job.text()), job.text()


def test_a_time_limit_saves(submit, grpo):
    options = ["--sbatch=--time=3", "--sbatch=--signal=B:TERM@60"]
    job = submit(*options, *grpo, "trainer.total_training_steps=10000", "trainer.save_freq=10000")
    assert re.search(r"SIGTERM.*saved|saved step \d+", job.wait()), job.text()


def test_scancel_says_that_nothing_is_saved(submit, grpo):
    job = submit(*grpo, "trainer.total_training_steps=10000", "trainer.save_freq=10000")
    job.until(r"(?m)step[: ]+1\b")
    job.hosts.on("h1", "scancel", job.number)
    assert f"scancel --batch --signal=TERM {job.number}" in job.wait(), job.text()


def test_scancel_of_the_batch_step_saves(submit, grpo):
    job = submit(*grpo, "trainer.total_training_steps=10000", "trainer.save_freq=10000")
    job.until(r"(?m)step[: ]+1\b")
    job.hosts.on("h1", "scancel", "--batch", "--signal=TERM", job.number)
    assert re.search(r"SIGTERM.*saved|saved step \d+", job.wait()), job.text()


def test_a_lost_node_is_replaced_by_the_spare(submit, grpo, hosts):
    job = submit(
        *("--sbatch=--nodes=3", "--max-restarts", "1", "--restart-delay", "1"),
        *grpo,
        "trainer.total_training_steps=6",
        "trainer.resume_mode=auto",
    )
    job.until(r"(?m)step[: ]+2\b")
    hosts("cut", "h2")
    hosts("off", "h2")
    assert re.search(r"(?m)step[: ]+6\b", job.wait()), job.text()
    assert "h1 (10.77.0.11), h3 (10.77.0.13)" in job.text()


def test_a_short_cut_is_survived(submit, grpo, hosts):
    """SLURM takes a node out of the job after ``SlurmdTimeout``, here 40 s; before, the run goes on."""
    job = submit(*grpo, "trainer.total_training_steps=10000", "trainer.save_freq=10000")
    job.until(r"(?m)step[: ]+1\b")
    hosts("cut", "h2")
    time.sleep(8)
    steps = len(re.findall(r"(?m)^step \d+/", job.text()))
    hosts("mend", "h2")
    job.until(rf"(?m)^step {steps + 2}/")
    job.hosts.on("h1", "scancel", "--batch", "--signal=TERM", job.number)
    assert re.search(r"SIGTERM.*saved|saved step \d+", job.wait()), job.text()


def test_the_plain_batch_script_saves_on_sigterm_of_the_batch_step(submit_plain, grpo):
    job = submit_plain(*grpo, "trainer.total_training_steps=10000", "trainer.save_freq=10000")
    job.until(r"(?m)step[: ]+1\b")
    job.hosts.on("h1", "scancel", "--batch", "--signal=TERM", job.number)
    assert re.search(r"SIGTERM.*saved|saved step \d+", job.wait()), job.text()


def test_the_plain_batch_script_replaces_a_lost_node(submit_plain, grpo, hosts):
    job = submit_plain(*grpo, "trainer.total_training_steps=6", "trainer.resume_mode=auto", restarts=1)
    job.until(r"(?m)step[: ]+2\b")
    hosts("cut", "h2")
    hosts("off", "h2")
    assert re.search(r"(?m)step[: ]+6\b", job.wait()), job.text()
    assert re.search(r"attempt 1 on h1 h3 ended with code 0", job.text()), job.text()
