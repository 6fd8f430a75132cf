"""The launcher in real SLURM jobs."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from support.waits import wait_for_text, wait_until

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
        deadline = time.monotonic() + LIMIT_S
        while self.is_queued():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.5)
        return self.text()


@pytest.fixture
def submit(launch, hosts, shared, request):
    """Submit a batch job with the launcher, and return it; the job is gone at the end."""
    wait_until(lambda: hosts.on("h1", "sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3")

    def start(*options):
        log = shared / f"{request.node.name}.log"
        sbatch = ["--on", "sbatch", "--submit", "--sbatch=--overcommit", f"--sbatch=--output={log}"]
        run = launch(*sbatch, "--no-doctor", *options)
        assert run.code() == 0, run.text()
        return Job(hosts, run.text().split()[-1], Path(log))

    yield start
    hosts.on("h1", "scancel", "--user=root", "--full")
    wait_until(lambda: hosts.on("h1", "squeue", "-h").strip() == "")


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
