"""A policy that does not change, as evaluation and generation have it: found, converted, and served by replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megarl.cluster import PlacedPool, WorkerGroup, wait_ready
from megarl.config import EvaluateConfig, GenerateConfig
from megarl.rollout.endpoint import build_endpoint
from megarl.tracing import PHASE, span
from megarl.tracking import Console
from megarl.trainer.evaluated_model import EvaluatedModel, find_model
from megarl.trainer.replicas import restart_replicas, rollout_group, router_replicas
from megarl.trainer.rollout import RolloutPhase
from megarl.trainer.session import load_tokenizer, placed_devices, run_logs
from megarl.trainer.tracing import RunTracing

CONVERTED = "converted"
"""Folder for checkpoints that were made Hugging Face folders, beside the run's."""
STREAM = 0
"""Of random numbers: equal weights give equal answers, whatever checkpoint they are in."""


class FrozenPolicy:
    """The policy of an evaluation or a generation.

    Args:
        config: complete, as ``megarl.config.build`` returns it.
        output_dir: folder of the run's files.

    Attributes:
        model: where the weights are; nothing of them is read before :meth:`convert`.

    Raises:
        CheckpointError: the configuration names no model, or none that answers.
    """

    def __init__(self, config: EvaluateConfig | GenerateConfig, output_dir: Path) -> None:
        self.config = config
        self.output_dir = output_dir
        self.model: EvaluatedModel = find_model(config.actor_rollout_ref.model.path)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The one that the configuration names, or the model's own.

        Raises:
            ModelError: it cannot be loaded, or lacks something.
        """
        keys = self.config.actor_rollout_ref.model
        if keys.tokenizer_path == keys.path:
            keys.tokenizer_path = str(self.model.tokenizer_folder)
        return load_tokenizer(str(keys.tokenizer_path))

    def describe(self) -> str:
        """Which model it is, and how answers are sampled, in a line of text."""
        sampling = self.config.actor_rollout_ref.rollout.val_kwargs
        how = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}" if sampling.temperature else "greedy"
        if sampling.temperature and sampling.top_k != -1:
            how += f", top_k {sampling.top_k}"
        answers = "1 answer" if sampling.n == 1 else f"{sampling.n} answers"
        return f"{self.model.source.path}, step {self.model.step}: {answers} per prompt, {how}"

    def convert(self, console: Console) -> None:
        """Makes the configuration's model path that of a Hugging Face folder, and tells of it.

        A converted checkpoint goes beside the run's folder.

        Raises:
            CheckpointError: the conversion failed.
        """
        console.message(self.describe())
        with console.phase("model"):
            folder = self.model.as_hugging_face(self.output_dir.parent / CONVERTED, console.message)
        self.config.actor_rollout_ref.model.path = str(folder)

    @contextmanager
    def served(
        self, console: Console, start_others: Callable[[PlacedPool], None] | None = None
    ) -> Iterator[RolloutPhase]:
        """Generation by replicas whose weights stay; all processes are gone when the block is left.

        Args:
            console: of the run.
            start_others: starts what else the job needs on the devices.

        Raises:
            MegarlError: there are no such devices, or a process failed.
        """
        config, trainer = self.config, self.config.trainer
        with (
            build_endpoint(config, self.tokenizer) or nullcontext() as endpoint,
            placed_devices(trainer, run_logs(trainer, self.output_dir)) as pool,
            RunTracing(trainer, self.output_dir, console.warn, pool) as tracing,
        ):
            with console.phase("start workers", announce=True), span("start_workers", PHASE):
                replicas = FrozenReplicas(config, pool)
                if start_others:
                    start_others(pool)
            tracing.begin_step(0)
            engines = router_replicas(replicas.group)
            yield RolloutPhase(engines, config, self.tokenizer, on_lost=replicas.replace, endpoint=endpoint)


class FrozenReplicas:
    """Rollout replicas with the weights of a folder, started and loaded.

    Args:
        config: complete; its model path is a Hugging Face folder.
        pool: devices to live on.

    Raises:
        WorkerError: a process failed.
    """

    def __init__(self, config: EvaluateConfig | GenerateConfig, pool: PlacedPool) -> None:
        self.group: WorkerGroup = rollout_group(config.actor_rollout_ref, config.trainer.device, pool)
        wait_ready([self.group])
        self.group.init_model()
        self.group.load_hf()

    def replace(self, lost: Collection[int]) -> None:
        """Put new processes with the same weights in the place of lost ones.

        Raises:
            WorkerError: a new process failed.
        """
        self.group.submit_on(restart_replicas(self.group, lost), "load_hf").result()
