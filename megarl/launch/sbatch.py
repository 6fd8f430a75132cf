"""A batch script for SLURM that runs the launcher inside its allocation."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from megarl.errors import ResourceError
from megarl.launch.settings import JobToRun

_SECONDS_TO_END = 120


def batch_script(job: JobToRun, launcher: Sequence[str], folder: str, options: Sequence[str]) -> str:
    """The script.

    Args:
        job: says how many nodes and GPUs.
        launcher: the command line that runs the launcher there.
        folder: in which it runs.
        options: more of sbatch's, such as ``--time=2-0``; they win over those that are here.
    """
    directives = {
        "--job-name": job.name,
        "--nodes": str(job.nodes),
        "--ntasks-per-node": "1",
        "--output": f"{job.name}-%j.log",
        "--signal": f"B:TERM@{_SECONDS_TO_END}",
    }
    if job.device != "cpu":
        directives["--gpus-per-node"] = str(job.devices)
    given = {option.split("=")[0] for option in options}
    lines = [f"#SBATCH {name}={value}" for name, value in directives.items() if name not in given]
    # The whole of each node, which stays ours when one of them fails: the launcher decides what happens then.
    lines += ["#SBATCH --exclusive", "#SBATCH --no-kill", *(f"#SBATCH {option}" for option in options)]
    # The shell waits for a command in its foreground before it passes on a signal; exec leaves no shell.
    return "\n".join(["#!/bin/bash", *lines, f"cd {shlex.quote(folder)}", f"exec {shlex.join(launcher)}", ""])


def submit(script: str) -> str:
    """Hands a script in; returns what sbatch says, its job's number.

    Raises:
        ResourceError: sbatch refuses it.
    """
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=True)
    except OSError as error:
        raise ResourceError(f"sbatch cannot be started: {error}") from error
    except subprocess.CalledProcessError as error:
        raise ResourceError(f"sbatch refused the script: {error.stderr.strip()}") from error
    return done.stdout.strip()
