"""The checks of the jobs stage: a resume that forgot the optimizer's state, and a stage that is killed."""

import shutil
import signal
import subprocess
import sys

import torch
from support.waits import LIMIT_S, wait_for_end, wait_until

from megarl.megatron import MegatronOptions, OptimizerOptions
from megarl.megatron.checkpoint.sharded import begin_save
from megarl.ops.acceptance.jobs import DECAY, UPDATES, lost_moments
from megarl.ops.acceptance.models import SHAPES, SingleRankEngine
from megarl.ops.acceptance.speed import one_step

FIELDS = SHAPES["tiny"]
OPTIONS = MegatronOptions(optimizer=OptimizerOptions(lr=1e-6, betas=(0.9, DECAY)))


def train_and_save(run, *steps):
    """Train a new engine, and save a checkpoint at each step."""
    with SingleRankEngine(FIELDS, OPTIONS, torch.device("cpu")) as engine:
        done = 0
        for step in steps:
            for _ in range(UPDATES * (step - done)):
                one_step(engine, FIELDS, tokens=8)
            done = step
            begin_save(engine, run / "checkpoints" / f"global_step_{step}" / "actor").finish()


def test_resume_without_the_optimizer_state_is_found(tmp_path):
    """Random weights differ between engines, and so do gradients: only the state tells a resume from a new start."""
    continued, restarted = tmp_path / "continued", tmp_path / "restarted"
    train_and_save(continued, 10, 12)
    assert lost_moments(continued) == ""
    train_and_save(restarted, 2)
    folder = restarted / "checkpoints"
    (folder / "global_step_2").rename(folder / "global_step_12")
    shutil.copytree(continued / "checkpoints" / "global_step_10", folder / "global_step_10")
    lost = lost_moments(restarted)
    assert lost.startswith("exp_avg_sq/model.") and lost.endswith(" between steps 10 and 12")


STAGE = """
import sys
from megarl.ops.acceptance import jobs, stages

def run(bench):
    jobs.sys.executable = sys.argv[1]
    jobs._Case(bench)._job("train", "any")

jobs.run = run
stages.main(["jobs", "--folder", sys.argv[2], "--scale", "tiny", "--device", "cpu"])
"""


def test_killed_stage_leaves_no_job(tmp_path):
    job = tmp_path / "job.sh"
    job.write_text("#!/bin/sh\necho $$ > pid.new\nmv pid.new pid\nexec sleep 600\n", encoding="utf-8")
    job.chmod(0o755)
    for number in (signal.SIGTERM, signal.SIGKILL):
        folder = tmp_path / number.name
        stage = subprocess.Popen([sys.executable, "-c", STAGE, str(job), str(folder)])
        try:
            wait_until(lambda folder=folder: list(folder.glob("scratch/jobs/*/pid")))
            (file,) = folder.glob("scratch/jobs/*/pid")
            stage.send_signal(number)
            stage.wait(LIMIT_S)
            wait_for_end(int(file.read_text(encoding="utf-8")))
        finally:
            stage.kill()
