"""A policy with fixed weights for evaluation and generation: found, converted to Hugging Face format, and served."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from megarl.base.checkpoint_files import HF_FOLDER, POINTER
from megarl.base.errors import CheckpointError, MegarlError
from megarl.cluster.agent_runners import AgentRunners, replica_processes
from megarl.cluster.resources import PlacedPool
from megarl.cluster.role_groups import RolloutGroup
from megarl.cluster.stored_images import store_images
from megarl.cluster.worker_group import wait_ready
from megarl.config.keys import with_values
from megarl.config.schema.jobs import EvaluateConfig, GenerateConfig
from megarl.convert.conversion import ConversionOptions, convert
from megarl.convert.open import open_source
from megarl.convert.source import HUGGING_FACE, CheckpointSource
from megarl.data.tokenizers import load_tokenizer
from megarl.models import ModelConfig
from megarl.models.carried_tensors import warn_of_unused
from megarl.models.hf_folder import INDEX_FILE, SINGLE_FILE
from megarl.models.tower_class import check_tower_shapes
from megarl.samples.rollout_group import build_engines, restart_replicas, rollout_group
from megarl.samples.rollouts import Rollouts
from megarl.tracking import Console
from megarl.trainer.roles.worker_groups import Progress
from megarl.trainer.state.checkpoint_manifest import MANIFEST, is_whole

KEY = "actor_rollout_ref.model.path"
LATEST = "latest"
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run's folder."""
CONVERTED = "converted"
"""Folder of the converted checkpoints, next to the run's folder."""
STREAM = 0
"""Seed stream of the draws: equal weights give equal samples, whatever checkpoint they are in."""
_STEP = re.compile(r"(?:global_step|iter)_(\d+)")
_Config = TypeVar("_Config", bound=EvaluateConfig | GenerateConfig)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model of which only headers have been read.

    Attributes:
        step: training step, by the name of the checkpoint folder; 0 without one.
    """

    source: CheckpointSource
    step: int

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return self.source.config

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of its tokenizer."""
        return self.source.companions

    def hugging_face_folder(self, converted: Path) -> Path:
        """Return the weights' Hugging Face folder, which :meth:`convert` creates for another format."""
        if self.source.kind == HUGGING_FACE:
            return self.source.path
        return converted / f"{self.source.path.parent.name}-{_digest(self.source)}"

    def convert(self, target: Path, message: Callable[[str], None]) -> None:
        """Convert the weights to Hugging Face format bit for bit, if needed.

        Args:
            target: the :meth:`hugging_face_folder`; an earlier conversion of the same files is reused.

        Raises:
            CheckpointError: the conversion failed; the next one resumes it.
        """
        if target == self.source.path:
            return
        if target.is_dir():
            message(f"{self.source.path} was converted to {target} before")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        result = convert(self.source, target, HUGGING_FACE, ConversionOptions(show_progress=False))
        message(f"{self.source.path} was converted to {target}: {result.tensors} tensors, {result.nbytes / 1e9:.3f} GB")


def find_model(path: str) -> EvaluatedModel:
    """Find the model of a path.

    Args:
        path: a Hugging Face folder; a checkpoint of a role or a ``global_step_<N>``, in any format that
            ``megarl convert`` reads; a folder of checkpoints with a pointer to the latest; or a run's folder that
            contains such a folder. The last two may end in ``/latest``.

    Raises:
        CheckpointError: there is no model, it or its vision tower is not complete, or it is a critic.
    """
    try:
        source = open_source(_resolve_pointer(Path(path)))
        _check_complete(source.path)
        exported = source.path / HF_FOLDER
        if any((exported / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
            source = open_source(exported)
        if source.config.vision is not None:
            shapes = {name: view.shape for name, view in source.tower.items()}
            check_tower_shapes(source.initial or source.companions, source.config.vision, shapes)
    except MegarlError as error:
        raise CheckpointError(f"{KEY}={path}: {error.text}", code=error.code) from error
    warn_of_unused(source.path, source.left_out)
    if source.has_value_head or source.config.is_value_model:
        raise CheckpointError(
            f"{KEY}={path}: {source.path} is a critic, which generates no text; name an actor",
            code="model.critic-as-policy",
        )
    steps = _STEP.findall("/".join(source.path.absolute().parts[-4:]))
    return EvaluatedModel(source, int(steps[-1]) if steps else 0)


def _resolve_pointer(path: Path) -> Path:
    """Resolve a run's folder, or a path with ``/latest``, to its checkpoint folder; leave any other path unchanged."""
    latest = path.name == LATEST and not path.exists()
    root = path.parent if latest else path
    for folder in (root, root / CHECKPOINTS):
        if (folder / POINTER).is_file():
            return folder
    if latest:
        raise CheckpointError(f"there is no {POINTER} in {root} or {root / CHECKPOINTS}", code="checkpoint.no-pointer")
    return path


def _check_complete(role: Path) -> None:
    """Check the files of a run's checkpoint against its manifest, by size."""
    for folder in (role, role.parent, role.parent.parent):
        if (folder / MANIFEST).is_file() and not is_whole(folder):
            raise CheckpointError(
                f"checkpoint {folder} is corrupt: its files differ from its {MANIFEST}; name another checkpoint",
                code="checkpoint.corrupt-file",
            )


def _digest(source: CheckpointSource) -> str:
    """Digest of paths, sizes and times, to distinguish checkpoints with the same name."""
    stats = [(str(file.absolute()), file.stat()) for file in source.files()]
    text = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


class FrozenPolicy(Generic[_Config]):
    """The policy of an evaluation or a generation.

    Args:
        output_dir: folder of the run's files. A converted checkpoint lies next to it.

    Attributes:
        model: folder of the weights; they are not read before :meth:`convert`.

    Raises:
        CheckpointError: the configuration names no model, or a critic.
    """

    def __init__(self, config: _Config, output_dir: Path) -> None:
        self.model = find_model(config.actor_rollout_ref.model.path)
        self._requested = config
        self._folder = self.model.hugging_face_folder(output_dir.parent / CONVERTED)
        self.config: _Config = with_values(config, {KEY: str(self._folder)})

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The configured tokenizer, by default the model's.

        Raises:
            ModelError: it cannot be loaded, or lacks a chat template or an end-of-sequence token.
        """
        keys = self._requested.actor_rollout_ref.model
        from_model = keys.tokenizer_path == keys.path
        return load_tokenizer(str(self.model.tokenizer_folder if from_model else keys.tokenizer_path))

    @property
    def with_model_folder(self) -> _Config:
        """The configuration with a model path that has a ``config.json``, also before :meth:`convert`."""
        return with_values(self._requested, {KEY: str(self.model.source.companions)})

    def describe(self) -> str:
        """Describe model and sampling in one line."""
        sampling = self.config.actor_rollout_ref.rollout.val_kwargs
        how = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}" if sampling.temperature else "greedy"
        if sampling.temperature and sampling.top_k != -1:
            how += f", top_k {sampling.top_k}"
        if sampling.temperature and sampling.min_p:
            how += f", min_p {sampling.min_p:g}"
        if sampling.repetition_penalty != 1:
            how += f", repetition_penalty {sampling.repetition_penalty:g}"
        answers = "1 answer" if sampling.n == 1 else f"{sampling.n} answers"
        return f"{self.model.source.path}, step {self.model.step}: {answers} per prompt, {how}"

    def convert(self, console: Console) -> None:
        """Convert the weights to Hugging Face format if needed.

        Raises:
            CheckpointError: the conversion failed.
        """
        console.message(self.describe())
        with console.phase("model"):
            self.model.convert(self._folder, console.message)


class FrozenReplicas:
    """Rollout replicas that are started and hold the weights of a Hugging Face folder.

    Args:
        config: complete; its model path is a Hugging Face folder.

    Raises:
        WorkerError: a process failed.
    """

    def __init__(
        self,
        config: EvaluateConfig | GenerateConfig,
        pool: PlacedPool,
        progress: Progress,
        eos_token_ids: tuple[int, ...] | None = None,
    ) -> None:
        self.config = config
        self.group: RolloutGroup = rollout_group(config, pool, eos_token_ids=eos_token_ids)
        wait_ready([self.group], progress=progress)
        build_engines(self.group, range(self.group.world_size))
        self.group.load_hf()

    def rollouts(self, tokenizer: PreTrainedTokenizerBase, runners: AgentRunners) -> Rollouts:
        """Lead conversations on the replicas; lost ones are replaced with the same weights."""
        return Rollouts(
            runners,
            lambda: replica_processes(self.group),
            self.config,
            tokenizer,
            on_lost=self.replace,
            store_images=store_images,
        )

    def replace(self, lost: Collection[int]) -> None:
        """Replace lost replicas by new processes with the same weights.

        Raises:
            WorkerError: a new process failed.
        """
        self.group.submit_on(restart_replicas(self.group, lost), "load_hf").result()
