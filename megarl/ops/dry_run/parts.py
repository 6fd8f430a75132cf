"""Parts of a dry run that all training jobs share, and the loop that checks them.

A failed part does not stop the others, so one dry run reports every problem. It writes nothing except the data cache
and files that the run's own checks write.
"""

from __future__ import annotations

import functools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from megarl.base.errors import ConfigError, MegarlError
from megarl.base.formatting import count_noun, gib
from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.batch import BatchPlan, plan_batches, render_plan
from megarl.config.keys import value_at
from megarl.config.schema.jobs import POOL_OWNERS, own_pools
from megarl.config.schema.model import ModelPathConfig
from megarl.data import DataProto, StatefulLoader
from megarl.data.loader import PromptQueue
from megarl.models import read_model_config
from megarl.models.end_tokens import read_end_tokens
from megarl.models.hf_folder import INDEX_FILE, SINGLE_FILE, check_model_folder
from megarl.ops.doctor.node import Status, needs_of
from megarl.ops.doctor.node.system import check_checkpoint_room
from megarl.ops.plan.estimate import estimate, find_suggestion
from megarl.ops.plan.flops import lengths_of
from megarl.ops.plan.hardware import hardware_of
from megarl.ops.plan.report import shortfall_lines
from megarl.tracking import check_trackers
from megarl.trainer.jobs.early_checks import check_packages, check_writable
from megarl.trainer.jobs.output_folders import check_output_folders
from megarl.trainer.jobs.preflight import check_schedules
from megarl.trainer.phases.end_tokens import disagreement
from megarl.trainer.roles.devices import check_devices
from megarl.trainer.state.run_state import find_resume

PartCheck = Callable[[], Iterator[str]]

PARTS: Mapping[str, str] = {
    "this machine": "machine",
    "batches": "batches",
    "models and layouts": "models",
    "rollout engine": "engine",
    "tokenizer": "tokenizer",
    "data": "data",
    "algorithm": "algorithm",
    "rewards": "rewards",
    "conversations": "conversations",
    "memory": "memory",
    "resharding": "resharding",
    "checkpoints": "checkpoints",
    "trackers": "trackers",
}
"""All parts in the order of a run, with the method that checks each; a job has the parts whose methods it defines."""
WARNING = "warning: "  # start of a line about a probable mistake that does not stop the run


def check_parts(dry_run: DryRun, write: Callable[[str], None] | None = None) -> None:
    """Check all parts of a job and print the result of each.

    Args:
        write: prints a line for the user; None = to the standard output, at once even if it is a pipe.

    Raises:
        ConfigError: a part failed; the message lists all failed parts, and each failure was printed.
    """
    write = write or functools.partial(print, flush=True)
    parts, failed, doubtful = dry_run.parts(), [], []
    for name, part in parts.items():
        started = time.perf_counter()
        try:
            lines = list(part())
        except MegarlError as error:
            failed.append(name)
            write(f"fail  {name}: {error}")
            continue
        warns = any(line.startswith(WARNING) for line in lines)
        doubtful += [name] if warns else []
        write(f"{'warn ' if warns else 'ok   '} {name} ({time.perf_counter() - started:.1f} s)")
        for line in lines:
            write(f"      {line}")
    if failed:
        raise ConfigError(
            f"dry run: {len(failed)} of {len(parts)} parts failed: {', '.join(failed)}", code="config.dry-run-failed"
        )
    result = f"no part failed; read the warnings of: {', '.join(doubtful)}" if doubtful else "every part is fine"
    write(f"dry run: {result}; without trainer.dry_run the workers would be started now")


class DryRun(ABC):
    """Dry run of a job: one method per part, in the order of a run.

    A part's method takes no arguments. It yields lines of the report, or raises an error. A part that depends on a
    failed part fails too.
    """

    model_key: ClassVar[str]  # config path of the trained model, which also has the tokenizer
    rows: str  # plural noun for the rows of the data

    def __init__(self, config: TrainConfig | SupervisedConfig) -> None:
        self.config = config
        self._batches: BatchPlan | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._first_batch: DataProto | None = None
        self._total_steps: int | None = None
        self._layouts_fit: bool | None = None

    def parts(self) -> dict[str, PartCheck]:
        """Return the job's parts of :data:`PARTS`, by name."""
        return {name: getattr(self, method) for name, method in PARTS.items() if hasattr(self, method)}

    @abstractmethod
    def roles(self) -> dict[str, tuple[str, str]]:
        """Return the model folder and layout of each role; raises if a layout does not fit its model."""

    @abstractmethod
    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer as the run does."""

    @abstractmethod
    def training_rows(self) -> StatefulLoader:
        """Check the training files, rows and their order, and return the loader of the run."""

    @abstractmethod
    def held_out_rows(self) -> StatefulLoader | None:
        """Return the loader of the validation data, which it checks; None without validation."""

    def machine(self) -> Iterator[str]:
        """Check the packages and devices of this machine, or that the cluster at ``RAY_ADDRESS`` answers.

        Several nodes, or ``trainer.hardware``, are a run for other machines: a shortage here is then a warning.

        Raises:
            ConfigError: a package is missing, or the run has more devices than this machine.
        """
        config, trainer = self.config, self.config.trainer
        problems: list[MegarlError] = []
        for check in (lambda: check_packages(config), lambda: check_devices(trainer, own_pools(config))):
            try:
                check()
            except MegarlError as error:
                problems.append(error)
        if problems and trainer.nnodes == 1 and trainer.hardware is None:
            remedy = "a dry run for another machine needs trainer.hardware, and only warns"
            text = "; ".join([*(problem.text for problem in problems), remedy])
            raise ConfigError(text, code=problems[0].code)
        yield from (f"{WARNING}{problem}" for problem in problems)
        if not problems:
            address = os.environ.get("RAY_ADDRESS")
            yield f"the Ray cluster at {address} answers" if address else "it has the packages and devices of the run"

    def batches(self) -> Iterator[str]:
        """Check the batch sizes of a step."""
        self._batches = plan_batches(self.config)
        yield from render_plan(self._batches).splitlines()

    def models(self) -> Iterator[str]:
        """Check the model and layout of every role, and the weights if they exist."""
        roles, trainer = self.roles(), self.config.trainer
        self._layouts_fit = True
        yield f"{_pool_size(trainer.nnodes, trainer.n_gpus_per_node)} ({trainer.device})"
        for section, pool in own_pools(self.config).items():
            yield f"{_pool_size(pool.nnodes, pool.n_gpus_per_node or 1)} for {POOL_OWNERS[section]} alone"
        for role, (path, layout) in roles.items():
            yield f"{role}: {read_model_config(path).architecture} of {path}, {layout}"
        for path in dict.fromkeys(path for path, _ in roles.values()):
            yield _weights(path)

    def tokenizer(self) -> Iterator[str]:
        """Load the tokenizer."""
        model: ModelPathConfig = value_at(self.config, self.model_key)
        self._tokenizer = self.load_tokenizer()
        words, rows = len(self._tokenizer), read_model_config(model.path).vocab_size
        yield f"{words} tokens of {model.tokenizer_path}; the model has room for {rows}"
        if words > rows:
            yield f"{WARNING}a row with one of the other {words - rows} tokens is refused: is it the model's tokenizer?"
        if (ends := read_end_tokens(model.path, self._tokenizer.eos_token_id)).disagree:
            yield f"{WARNING}{disagreement(model.path, ends, self._tokenizer)}"

    def data(self) -> Iterator[str]:
        """Read the files and tokenize the first batches, as the run does."""
        self._needed(self._tokenizer, "tokenizer")
        queue, trainer = PromptQueue(self.training_rows()), self.config.trainer
        self._total_steps = trainer.total_training_steps or trainer.total_epochs * len(queue)
        self._first_batch = queue.take(self.config.data.train_batch_size)
        yield f"{len(queue)} batches per epoch; the run has {self._total_steps} steps"
        yield f"first batch: {self._lengths(self._first_batch)}"
        held_out = self.held_out_rows()
        if held_out is None:
            yield "no validation"
        else:
            yield f"first held-out batch: {self._lengths(next(iter(held_out)))}"

    def algorithm(self) -> Iterator[str]:
        """Check the schedules for the length of the run."""
        batches, steps = self._needed(self._batches, "batches"), self._needed(self._total_steps, "data")
        check_schedules(self.config, batches, steps)
        yield f"schedules (learning rate and others) fit {steps} steps"

    def memory(self) -> Iterator[str]:
        """Estimate the memory of the fullest device and node; a run that does not seem to fit gets a warning."""
        self._needed(self._layouts_fit, "models and layouts")
        plan = estimate(self.config, hardware_of(self.config), lengths_of(self.config))
        name, usable = plan.hardware.name, plan.usable_bytes
        for phase in plan.memory.phases:
            parts = ", ".join(f"{part.owner} {part.name} {gib(part.nbytes)}" for part in phase.components[:4])
            yield f"{phase.phase}: {gib(phase.nbytes)} GiB on device {phase.device} ({parts})"
        yield f"host memory of the fullest node: {gib(plan.memory.host_bytes)} GiB"
        if plan.fits:
            yield f"fits {name}: {gib(usable)} GiB of each device are usable"
        else:
            lines = "; ".join(shortfall_lines(plan, find_suggestion(plan)))
            yield f"{WARNING}on {name} (trainer.hardware) it does not seem to fit: {lines}"

    def checkpoints(self) -> Iterator[str]:
        """Check that the output folders are writable, estimate the space, and find the checkpoint to resume from."""
        config, trainer = self.config, self.config.trainer
        check_writable(config)
        if trainer.save_freq > 0:
            for finding in check_checkpoint_room(needs_of(config)):
                start = "" if finding.status is Status.PASS else WARNING
                yield f"{start}{finding.observation}{finding.remedy and '; '}{finding.remedy}"
            yield f"one every {trainer.save_freq} steps, in {trainer.default_local_dir}"
        else:
            yield "no checkpoints (trainer.save_freq=-1)"
        resume = find_resume(config)
        check_output_folders(config, resume.path if resume else None)
        yield f"resumes from {resume.path}, after step {resume.state.step}" if resume else "starts at step 0"

    def trackers(self) -> Iterator[str]:
        """Check that all trackers are known and installed; opens none."""
        check_trackers(self.config.trainer.logger)
        yield ", ".join(self.config.trainer.logger) or "none"

    def _lengths(self, batch: DataProto) -> str:
        lengths = batch.padded("attention_mask").sum(-1)
        low, mean, high = int(lengths.min()), float(lengths.float().mean()), int(lengths.max())
        return f"{len(batch)} {self.rows} of {low} to {high} tokens, {mean:.0f} on average"

    @staticmethod
    def _needed(result: Any, part: str) -> Any:
        if result is None:
            raise ConfigError(
                f"needs the result of '{part}', which failed; fix that first", code="config.dry-run-needs-part"
            )
        return result


def _pool_size(nodes: int, devices: int) -> str:
    return f"{count_noun(nodes, 'node')} of {count_noun(devices, 'device')}"


def _weights(path: str) -> str:
    """Check the weights of a model folder; reads only their headers."""
    if not any((Path(path) / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return f"{path} has no weights: not checked, and required by the run"
    folder = check_model_folder(path)
    size = sum(Path(file).stat().st_size for file in {entry.file for entry in folder.tensors.values()})
    return f"{path} has complete weights: {len(folder.tensors)} tensors, {gib(size)} GiB"
