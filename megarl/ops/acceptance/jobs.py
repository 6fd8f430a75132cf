"""Colocated jobs on one device: warm-up, GRPO, PPO with critic and reference, and a resume after a kill."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megarl.base.checkpoint_files import INDEX, read_index
from megarl.base.child_process import kill_process_tree, parent_death_hook
from megarl.ops.acceptance.bench import Bench, checkout, needs_package, within
from megarl.ops.acceptance.results import Result, Verdict

DECAY, UPDATES = 0.95, 2  # Adam's beta2, and optimizer steps per step, of the configurations
RISE = 0.05  # smallest rise of the mean score from the first to the last fifth of a run
SAME_SCORE = 0.15  # largest difference of the mean score after a resume; on a CPU the difference must be zero
ROUNDING = 1e-4  # relative error of a second moment after a few steps in float32
SAVE_FREQ = 2
SAVING = (f"trainer.save_freq={SAVE_FREQ}", "trainer.resume_mode=auto", "trainer.max_actor_ckpt_to_keep=null")
SCORE, ENTROPY = "critic/score/mean", "actor/entropy"


def run(bench: Bench) -> None:
    """Run the jobs one after the other."""
    case = _Case(bench)
    bench.check("supervised warm-up", case.warm_up)
    bench.check("GRPO learning curve", partial(case.learns, lambda: case.grpo))
    bench.check("PPO learning curve", partial(case.learns, case.ppo))
    bench.check("kill and resume", case.resumes)


class _Case:
    """The quickstart's task and configurations on one device."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.steps = 4 if bench.is_tiny else 30

    @cached_property
    def task(self) -> Path:
        """Folder of data and random model."""
        needs_package("ray")
        folder = self.bench.scratch / "task"
        size = ["--hidden", "32", "--layers", "2", "--largest", "9", "--num-test", "20", "--lessons", "60", "60"]
        command = [sys.executable, str(checkout() / "tools" / "make_arithmetic.py"), "--out", str(folder)]
        subprocess.run(command + (size if self.bench.is_tiny else []), check=True, stdout=2)
        return folder

    @cached_property
    def warm(self) -> Path:
        """Folder of the model after the supervised warm-up."""
        folder = self.bench.scratch / "warm"
        if not (folder / "config.json").is_file():
            self._job("sft", "quickstart_sft", f"data.train_files={self.task}/data/sft.parquet",
                      f"model.path={self.task}/model", f"trainer.hf_export_dir={folder}",
                      *(["data.train_batch_size=24"] if self.bench.is_tiny else []),
                      *_devices(self.bench, "megatron."))  # fmt: skip
        return folder

    def warm_up(self) -> Result:
        started = time.monotonic()
        assert self.warm.is_dir()
        return Result("", Verdict.OK, time.monotonic() - started, "s")

    @cached_property
    def grpo(self) -> Path:
        """Folder of a GRPO job that saves; a resumed job is compared with it."""
        return self._job("train", "quickstart_grpo", *self._overrides("quickstart_grpo"), *SAVING)

    def ppo(self) -> Path:
        """Run a PPO job with critic and reference; returns its folder."""
        return self._job("train", "quickstart", *self._overrides("quickstart"))

    def learns(self, train: Callable[[], Path]) -> Result:
        """Train, and compare the score at the start and at the end."""
        started = time.monotonic()
        rows = _metric(train(), SCORE)
        seconds = (time.monotonic() - started) / max(1, len(rows))
        values = list(rows.values())
        count = max(1, len(values) // 5)
        first, last = statistics.mean(values[:count]), statistics.mean(values[-count:])
        learned = self.bench.is_tiny or last - first >= RISE
        outcome = Verdict.FAIL if len(rows) != self.steps else Verdict.OK if learned else Verdict.BELOW
        note = f"score {first:.3f} to {last:.3f}; {seconds:.1f} s per step with the start"
        target = f"{self.steps} steps" + ("" if self.bench.is_tiny else f", +{RISE}")
        return Result("", outcome, len(rows), "steps", target, note)

    def resumes(self) -> Result:
        """Kill a GRPO job after a checkpoint, resume it, and compare it with the undisturbed run."""
        overrides = [*self._overrides("quickstart_grpo"), *SAVING]
        whole = self.grpo
        # Late enough that a lost second moment is still far behind at the next checkpoint.
        last = max(SAVE_FREQ, self.steps // 3) + 1
        folder = self._job("train", "quickstart_grpo", *overrides, kill_after=last)
        before = max(_metric(folder, SCORE), default=0)
        self._job("train", "quickstart_grpo", *overrides, folder=folder)
        end = max(_metric(folder, SCORE), default=0)
        killed = f"killed in step {before + 1}"
        if end != self.steps:
            return Result("", Verdict.FAIL, end, "steps", f"{self.steps}", killed)
        if lost := lost_moments(folder):
            return Result("", Verdict.FAIL, target="the checkpoint's optimizer state", note=f"{killed}; lost: {lost}")
        is_exact = self.bench.device.type == "cpu"
        names = (SCORE, ENTROPY) if is_exact else (SCORE,)
        metrics = [(_metric(whole, name), _metric(folder, name)) for name in names]
        difference = max(abs(present[step] - x) for expected, present in metrics for step, x in expected.items())
        return within(difference, 0.0 if is_exact else SAME_SCORE, "score", killed)

    def _overrides(self, config: str) -> list[str]:
        small = [
            "data.train_batch_size=24",
            "actor_rollout_ref.actor.ppo_mini_batch_size=12",
            "actor_rollout_ref.rollout.n=2",
        ]
        roles = ["actor_rollout_ref.actor.megatron."] + (["critic.megatron."] if config == "quickstart" else [])
        return [
            *(small if self.bench.is_tiny else []),
            *_devices(self.bench, *roles),
            *(
                f"data.{name}_files={self.task}/data/{file}.parquet"
                for name, file in (("train", "train"), ("val", "test"))
            ),
            f"actor_rollout_ref.model.path={self.warm}",
            f"actor_rollout_ref.rollout.dtype={_dtype(self.bench)}",
            f"trainer.total_training_steps={self.steps}",
            "trainer.hf_export_dir=null",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.save_freq=-1",
        ]

    def _job(
        self, command: str, config: str, *overrides: str, folder: Path | None = None, kill_after: int | None = None
    ) -> Path:
        """Run a job in a new folder, or again in ``folder``; kill it during the step after ``kill_after``."""
        folder = folder or self.bench.scratch / f"{config}-{time.time_ns()}"
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "output.txt"
        with log.open("a", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "megarl", command, "--config-name", config, *overrides],
                cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=parent_death_hook(os.getpid()),  # a stage that is killed leaves no job on the device
            )  # fmt: skip
            try:
                while (status := process.poll()) is None:
                    if kill_after is not None and max(_metric(folder, SCORE), default=0) >= kill_after:
                        os.killpg(process.pid, signal.SIGKILL)
                    time.sleep(0.05)
            finally:
                kill_process_tree(process)
        if status != 0 and kill_after is None:
            lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
            raise RuntimeError(f"megarl {command} {config} ended with {status}: {' | '.join(lines[-3:])}; {log}")
        return folder


def lost_moments(run: Path) -> str:
    """Name a tensor whose second moments a run forgot between two of its checkpoints; empty if it forgot none.

    A step decays a second moment by :data:`DECAY` and adds a square. So a moment that decays faster was not loaded.
    """
    indices = {int(path.name.rpartition("_")[2]): path for path in run.glob("**/global_step_*")}
    for before, after in pairwise(sorted(indices)):
        earlier, later = (_second_moments(indices[step]) for step in (before, after))
        floor = DECAY ** (UPDATES * (after - before)) * (1 - ROUNDING)
        for name, moment in earlier.items():
            if bool((later[name] < floor * moment).any()):
                return f"{name} between steps {before} and {after}"
    return ""


def _second_moments(checkpoint: Path) -> dict[str, Tensor]:
    (index,) = checkpoint.glob(f"actor/**/{INDEX}")
    stored = read_index(index.parent).state_dict_metadata
    moments = {
        name: torch.empty(entry.size)
        for name, entry in stored.items()
        if name.startswith("exp_avg_sq/") and isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(moments, storage_reader=dcp.FileSystemReader(index.parent), no_dist=True)
    return moments


def _devices(bench: Bench, *roles: str) -> list[str]:
    """Overrides that place every role on the only device, without parallelism."""
    overrides = [f"trainer.device={bench.device.type}", "trainer.n_gpus_per_node=1"]
    for role in roles:
        overrides += [f"{role}tensor_model_parallel_size=1", f"{role}dtype={_dtype(bench)}"]
        if role.startswith("critic"):
            overrides.append(f"{role}data_parallel_size=auto")
    return overrides


def _dtype(bench: Bench) -> str:
    return "float32" if bench.device.type == "cpu" else "bfloat16"


def _metric(folder: Path, name: str) -> dict[int, float]:
    """A metric by step, over all attempts of a run; a later attempt replaces an earlier one."""
    files = sorted(folder.glob("outputs/*/*/metrics.jsonl"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return {int(row["step"]): row[name] for row in map(json.loads, lines) if name in row}
