"""Finds out what a folder is, and which model it is of."""

from __future__ import annotations

import re
from pathlib import Path

from megarl.checkpoint_index import INDEX
from megarl.convert.foreign_arguments import model_folders
from megarl.convert.hugging_face import open_hugging_face
from megarl.convert.role import STATE_FILE, open_role
from megarl.convert.source import Source
from megarl.convert.torch_dist import open_torch_dist
from megarl.errors import CheckpointError
from megarl.models import read_model_config
from megarl.models.hf_folder import INDEX_FILE, SINGLE_FILE

CONFIG = "config.json"
HF_FOLDERS = ("huggingface", "hf_config", "")
"""Where a checkpoint may have the model's config and tokenizer, relative to it and to the folder above it."""
ROLES = ("actor", "critic", "sft", "reward_model")
POINTER = "latest_checkpointed_iteration.txt"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "mp_rank_00", "mp_rank_00_000")


def open_source(path: str | Path, model: str | Path | None = None, role: str | None = None) -> Source:
    """Opens a checkpoint of any format that can be read.

    Args:
        path: a Hugging Face folder; the checkpoint of a role, a ``global_step_<N>`` of megarl's or verl's, an
            ``iter_<N>`` of Megatron-LM's or slime's, or a folder of those with a pointer to the latest.
        model: Hugging Face folder with config and tokenizer, for a checkpoint without.
        role: one of :data:`ROLES`, where the folder holds several; None takes the first of them.

    Raises:
        CheckpointError: the folder is none of these, is incomplete, or does not fit its config.
        ModelError: a Hugging Face folder is not whole, or its architecture is unknown.
    """
    folder = find_checkpoint(Path(path), role)
    if not (folder / INDEX).is_file():
        return open_hugging_face(folder)
    companions = _find_model(folder, Path(model) if model is not None else None)
    config = read_model_config(companions)
    read = open_role if (folder / STATE_FILE).is_file() else open_torch_dist
    return read(folder, config, companions)


def find_checkpoint(path: Path, role: str | None = None) -> Path:
    """The folder below ``path`` that holds the tensors.

    Raises:
        CheckpointError: there is none; says what was expected.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist" if not path.exists() else f"{path} is a file, expected a folder")
    if (path / INDEX).is_file():
        return path
    if (path / POINTER).is_file():
        return find_checkpoint(_pointed(path), role)
    for name in [role] if role is not None else ROLES:
        if (path / name).is_dir():
            return find_checkpoint(path / name)
    if (path / "dist_ckpt").is_dir():
        return find_checkpoint(path / "dist_ckpt")
    for folder in (path, path / "huggingface"):
        if any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
            return folder
    if (path / STATE_FILE).is_file() or any(path.glob("*.distcp")):
        raise CheckpointError(f"{path / INDEX} is missing: the checkpoint is incomplete")
    if (path / CONFIG).is_file():
        return path
    found = [name for name in _PICKLED if (path / name).exists()]
    reason = f" ({found[0]} is a pickle, which could run code: save as safetensors or torch_dist)" if found else ""
    raise CheckpointError(
        f"{path} is neither a Hugging Face folder ({CONFIG}, *.safetensors) nor a Megatron checkpoint ({INDEX}, "
        f"*.distcp), nor a folder of checkpoints, such as a run's trainer.default_local_dir ({POINTER}){reason}"
    )


def _pointed(path: Path) -> Path:
    text = (path / POINTER).read_text(encoding="utf-8", errors="replace").strip()
    names = ["release"] if text == "release" else []
    if re.fullmatch(r"\d{1,18}", text):
        names = [f"global_step_{int(text)}", f"iter_{int(text):07d}"]
    for name in names:
        if (path / name).is_dir():
            return path / name
    raise CheckpointError(f"{path / POINTER} says {text[:40]!r}, and no such checkpoint is there")


def _find_model(folder: Path, given: Path | None) -> Path:
    if given is not None:
        return given
    candidates = [base / name for base in (folder, folder.parent, folder.parent.parent) for name in HF_FOLDERS]
    for candidate in [*candidates, *model_folders(folder)]:
        if (candidate / CONFIG).is_file():
            return candidate
    raise CheckpointError(
        f"checkpoint {folder} does not say which Hugging Face model it is of; name a folder with its {CONFIG} and "
        f"tokenizer: --model FOLDER"
    )
