"""The parts of a dry run, and those among them that all jobs that learn have.

Parts do not stop each other: what is wrong is told of all of them at once. Nothing is written but into the data
cache, and what the run's own checks would write.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from megarl.amounts import gib, some
from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.batch import BatchPlan, plan_batches, render_plan
from megarl.config.parts import ModelPathConfig
from megarl.config.problems import value_at
from megarl.data import DataProto, StatefulLoader
from megarl.data.prompt_queue import PromptQueue
from megarl.doctor.node import Status, needs_of
from megarl.doctor.node.storage import check_checkpoint_room
from megarl.errors import CheckpointError, ConfigError, MegarlError
from megarl.models import read_model_config
from megarl.models.hf_folder import INDEX_FILE, SINGLE_FILE, check_model_folder
from megarl.plan.report import shortfall_lines
from megarl.plan.verdict import plan_run
from megarl.tracking import check_trackers
from megarl.trainer.preflight import check_schedules
from megarl.trainer.run_state import find_resume

Part = Callable[[], Iterator[str]]

PARTS: Mapping[str, str] = {
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
"""All parts in the order of a run, each with the method that goes through it; a job has those whose methods it has."""


def dry_run(rehearsal: Rehearsal, tell: Callable[[str], None] = print) -> None:
    """Goes through all parts and tells of each what the run would do.

    Args:
        rehearsal: of the job.
        tell: shows the user a line.

    Raises:
        ConfigError: some part is wrong; each was told as it was found.
    """
    parts, wrong = rehearsal.parts(), []
    for name, part in parts.items():
        began = time.perf_counter()
        try:
            lines = list(part())
        except MegarlError as error:
            wrong.append(name)
            tell(f"fail  {name}: {error}")
            continue
        tell(f"ok    {name} ({time.perf_counter() - began:.1f} s)")
        for line in lines:
            tell(f"      {line}")
    if wrong:
        raise ConfigError(f"dry run: {len(wrong)} of {len(parts)} parts failed: {', '.join(wrong)}")
    tell("dry run: every part is fine; without trainer.dry_run the workers would be started now")


class Rehearsal(ABC):
    """The parts of a run, in its own order; a later one that needs an earlier one's result says so.

    A part is a method without arguments, which yields what there is to tell, or raises what is wrong.

    Args:
        config: complete.
    """

    model_key: ClassVar[str]
    """Path of the section of the model that is trained, whose tokenizer is the run's."""
    rows: str
    """What a row of the data is, in the plural."""

    def __init__(self, config: TrainConfig | SupervisedConfig) -> None:
        self.config = config
        self._batches: BatchPlan | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._first_batch: DataProto | None = None
        self._total_steps: int | None = None
        self._layouts_fit: bool | None = None

    def parts(self) -> dict[str, Part]:
        """Those of :data:`PARTS` that the job has, by name."""
        return {name: getattr(self, method) for name, method in PARTS.items() if hasattr(self, method)}

    @abstractmethod
    def roles(self) -> dict[str, tuple[str, str]]:
        """Model folder and layout of each role, in words, once each is checked to fit the other.

        Raises:
            ModelError, ConfigError: one does not.
        """

    @abstractmethod
    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The run's tokenizer, as the run loads it.

        Raises:
            ModelError: there is none that does.
        """

    @abstractmethod
    def training_rows(self) -> StatefulLoader:
        """What the run learns from, as it reads it, once the files are checked.

        Raises:
            DataError, ConfigError: a file, a row, or what says in which order rows come is wrong.
        """

    @abstractmethod
    def held_out_rows(self) -> StatefulLoader | None:
        """What the run validates on; None where nothing is validated.

        Raises:
            DataError, ConfigError: a file or a row is wrong.
        """

    def batches(self) -> Iterator[str]:
        """How a step's samples are divided."""
        self._batches = plan_batches(self.config)
        yield from render_plan(self._batches).splitlines()

    def models(self) -> Iterator[str]:
        """Every role's model and layout; weights where they are there."""
        roles, trainer = self.roles(), self.config.trainer
        self._layouts_fit = True
        yield f"{some(trainer.nnodes, 'node')} of {some(trainer.n_gpus_per_node, 'device')} ({trainer.device})"
        for role, (path, layout) in roles.items():
            yield f"{role}: {read_model_config(path).architecture} of {path}, {layout}"
        for path in dict.fromkeys(path for path, _ in roles.values()):
            yield _weights(path)

    def tokenizer(self) -> Iterator[str]:
        """Loads it."""
        model: ModelPathConfig = value_at(self.config, self.model_key)
        self._tokenizer = self.load_tokenizer()
        words, rows = len(self._tokenizer), read_model_config(model.path).vocab_size
        if words > rows:
            raise ConfigError(
                f"{self.model_key}.tokenizer_path={model.tokenizer_path} has {words} tokens, the model's vocabulary "
                f"{rows}: name the model's own tokenizer"
            )
        yield f"{words} tokens of {model.tokenizer_path}; the model has room for {rows}"

    def data(self) -> Iterator[str]:
        """Reads the files and tokenizes the first batches as the run would."""
        self._needed(self._tokenizer, "tokenizer")
        queue, trainer = PromptQueue(self.training_rows()), self.config.trainer
        self._total_steps = trainer.total_training_steps or trainer.total_epochs * len(queue)
        self._first_batch = queue.take(self.config.data.train_batch_size)
        yield f"{len(queue)} batches per epoch; the run has {self._total_steps} steps"
        yield f"first batch: {self._lengths(self._first_batch)}"
        held_out = self.held_out_rows()
        if held_out is None:
            yield "nothing is validated"
        else:
            yield f"first held-out batch: {self._lengths(next(iter(held_out)))}"

    def algorithm(self) -> Iterator[str]:
        """Schedules, for the length of the run."""
        batches, steps = self._needed(self._batches, "batches"), self._needed(self._total_steps, "data")
        check_schedules(self.config, batches, steps)
        yield f"schedules, such as that of the learning rate, fit {steps} steps"

    def memory(self) -> Iterator[str]:
        """What the fullest device and node would hold; refused where that is more than they have."""
        self._needed(self._layouts_fit, "models and layouts")
        found, remedy = plan_run(self.config)
        name, usable = found.hardware.name, found.usable_bytes
        if not found.fits:
            lines = "; ".join(shortfall_lines(found, remedy))
            raise ConfigError(f"on {name} (trainer.hardware) it does not fit: {lines}. `megarl plan` tells more")
        for phase in found.memory.phases:
            parts = ", ".join(f"{part.owner} {part.name} {gib(part.nbytes)}" for part in phase.components[:4])
            yield f"{phase.phase}: {gib(phase.nbytes)} GiB on device {phase.device} ({parts})"
        yield f"fits {name}, of whose devices' memory {gib(usable)} GiB are usable"
        yield f"host memory of the fullest node: {gib(found.memory.host_bytes)} GiB"

    def checkpoints(self) -> Iterator[str]:
        """Whether the folder can be written to and has room, and what the run would continue from."""
        config, trainer = self.config, self.config.trainer
        if trainer.save_freq > 0:
            for finding in check_checkpoint_room(needs_of(config)):
                if finding.status is Status.FAIL:
                    raise CheckpointError(f"trainer.default_local_dir: {finding.found}; {finding.remedy}")
                yield f"{finding.found}; {finding.remedy}" if finding.remedy else finding.found
            yield f"one every {trainer.save_freq} steps, in {trainer.default_local_dir}"
        else:
            yield "none is saved (trainer.save_freq=-1)"
        resume = find_resume(config)
        yield f"continues from {resume.path}, after step {resume.state.step}" if resume else "begins at step 0"

    def trackers(self) -> Iterator[str]:
        """Whether they are known and installed; none is opened."""
        check_trackers(self.config.trainer.logger)
        yield ", ".join(self.config.trainer.logger) or "none"

    def _lengths(self, batch: DataProto) -> str:
        lengths = batch.tensors["attention_mask"].sum(-1)
        low, mean, high = int(lengths.min()), float(lengths.float().mean()), int(lengths.max())
        return f"{len(batch)} {self.rows} of {low} to {high} tokens, {mean:.0f} on average"

    @staticmethod
    def _needed(found: Any, part: str) -> Any:
        if found is None:
            raise ConfigError(f"needs what '{part}' did not give; repair that first")
        return found


def _weights(path: str) -> str:
    """Whether a folder has its weights, which only their headers are read of."""
    if not any((Path(path) / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return f"{path} has no weights: not checked, and the run will need them"
    folder = check_model_folder(path)
    size = sum(os.path.getsize(file) for file in {entry.file for entry in folder.tensors.values()})
    return f"{path} has its weights whole: {len(folder.tensors)} tensors, {gib(size)} GiB"
