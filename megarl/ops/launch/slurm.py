"""Batch scripts for SLURM."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from megarl.base.errors import ResourceError
from megarl.ops.launch.settings import JobToRun

_SLURM_WARNING_S = 120  # time between SLURM's SIGTERM and the time limit


def batch_script(job: JobToRun, launcher: Sequence[str], folder: str, options: Sequence[str]) -> str:
    """Write a batch script that runs the launcher inside its allocation.

    Args:
        options: further options of sbatch, such as ``--time=2-0``; they override the defaults.
    """
    directives = {
        "--job-name": job.name,
        "--nodes": str(job.nodes),
        "--ntasks-per-node": "1",
        "--output": f"{job.name}-%j.log",
        "--signal": f"B:TERM@{_SLURM_WARNING_S}",
    }
    if job.device != "cpu":
        directives["--gpus-per-node"] = str(job.devices)
    overridden = {option.split("=")[0] for option in options}
    lines = [f"#SBATCH {name}={value}" for name, value in directives.items() if name not in overridden]
    # Whole nodes; the allocation survives a failed node, since the launcher decides about a restart.
    lines += ["#SBATCH --exclusive", "#SBATCH --no-kill", *(f"#SBATCH {option}" for option in options)]
    # With exec no shell delays signals until its foreground command ends.
    return "\n".join(["#!/bin/bash", *lines, f"cd {shlex.quote(folder)}", f"exec {shlex.join(launcher)}", ""])


def submit_batch(script: str) -> str:
    """Submit a batch script; returns sbatch's output, the job ID.

    Raises:
        ResourceError: sbatch refuses the script.
    """
    try:
        process = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=True)
    except OSError as error:
        raise ResourceError(f"sbatch cannot be started: {error}", code="launch.no-sbatch") from error
    except subprocess.CalledProcessError as error:
        raise ResourceError(
            f"sbatch refused the script: {error.stderr.strip()}", code="launch.sbatch-refused"
        ) from error
    return process.stdout.strip()
