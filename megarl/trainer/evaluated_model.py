"""Which model an evaluation is of: a Hugging Face folder as it is, or a checkpoint, of which one is made."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megarl.convert.conversion import Options, convert
from megarl.convert.open import open_source
from megarl.convert.source import HUGGING_FACE, Source
from megarl.errors import CheckpointError, MegarlError
from megarl.models import ModelConfig
from megarl.models.hf_folder import INDEX_FILE, SINGLE_FILE
from megarl.trainer.checkpoint_export import HF_FOLDER
from megarl.trainer.checkpoint_manifest import MANIFEST, is_whole
from megarl.trainer.checkpoint_store import POINTER

KEY = "actor_rollout_ref.model.path"
LATEST = "latest"
CHECKPOINTS = "checkpoints"
"""Where a run has its checkpoints, in its own folder."""
_STEP = re.compile(r"(?:global_step|iter)_(\d+)")


@dataclass(frozen=True)
class EvaluatedModel:
    """A model that was found; nothing of it has been read but headers.

    Attributes:
        source: where its weights are.
        step: of the training, by the checkpoint's folder; 0 where it is in none.
    """

    source: Source
    step: int

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return self.source.config

    @property
    def tokenizer_folder(self) -> Path:
        """Where its tokenizer is."""
        return self.source.companions

    def as_hugging_face(self, folder: Path, tell: Callable[[str], None]) -> Path:
        """A Hugging Face folder of the weights: its own, or one converted bit for bit.

        Args:
            folder: where converted ones are kept; what is there of the same files is used again.
            tell: shows the user a line.

        Raises:
            CheckpointError: the conversion failed; the next one goes on where it stopped.
        """
        if self.source.kind == HUGGING_FACE:
            return self.source.path
        made = folder / f"{self.source.path.parent.name}-{_digest(self.source)}"
        if made.is_dir():
            tell(f"{self.source.path} was converted to {made} before")
            return made
        folder.mkdir(parents=True, exist_ok=True)
        outcome = convert(self.source, made, HUGGING_FACE, Options(show_progress=False))
        tell(f"{self.source.path} was converted to {made}: {outcome.tensors} tensors, {outcome.nbytes / 1e9:.3f} GB")
        return made


def find_model(path: str) -> EvaluatedModel:
    """The model that a path means.

    Args:
        path: a Hugging Face folder; a checkpoint of a role, or a ``global_step_<N>``, of megarl's or of what else
            ``megarl convert`` reads; a folder of those with a pointer to the latest, or a run's folder with such a
            folder in it, with or without a last ``/latest``.

    Raises:
        CheckpointError: there is nothing, it is not whole, or it is no language model, as a critic is none.
    """
    try:
        checkpoint = _pointing(Path(path))
        source = open_source(checkpoint)
        _check_whole(source.path)
        exported = source.path / HF_FOLDER
        if any((exported / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
            source = open_source(exported)
    except MegarlError as error:
        raise CheckpointError(f"{KEY}={path}: {error}") from error
    if source.has_value_head or source.config.is_value_model:
        raise CheckpointError(f"{KEY}={path}: {source.path} is a critic, which answers nothing; name an actor")
    steps = _STEP.findall("/".join(source.path.absolute().parts[-4:]))
    return EvaluatedModel(source, int(steps[-1]) if steps else 0)


def _pointing(path: Path) -> Path:
    """The folder that a path to a run, or to its latest checkpoint, means; any other path as it is."""
    latest = path.name == LATEST and not path.exists()
    root = path.parent if latest else path
    for folder in (root, root / CHECKPOINTS):
        if (folder / POINTER).is_file():
            return folder
    if latest:
        raise CheckpointError(f"there is no {POINTER} in {root} or {root / CHECKPOINTS}")
    return path


def _check_whole(role: Path) -> None:
    """Checks a run's checkpoint against its manifest, by sizes."""
    for folder in (role, role.parent, role.parent.parent):
        if (folder / MANIFEST).is_file() and not is_whole(folder):
            raise CheckpointError(f"checkpoint {folder} is not whole: its files are not those of its {MANIFEST}")


def _digest(source: Source) -> str:
    """Tells checkpoints of one name apart."""
    stats = [(str(file.absolute()), file.stat()) for file in source.files()]
    text = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
