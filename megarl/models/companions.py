"""The files that belong to a model besides its weights: config, tokenizer, chat template, generation config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.files import flush_path

COPIED_FILES = (
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)
"""What is copied from the folder that a model came from; weights and config are written anew."""


def copy_companions(source: Path, target: Path) -> None:
    """Copies the files of :data:`COPIED_FILES`, folders of chat templates among them, that ``source`` has.

    Raises:
        OSError: reading or writing failed.
    """
    for pattern in COPIED_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
            elif path.is_dir():
                shutil.copytree(path, target / path.name, dirs_exist_ok=True)


def write_companions(folder: Path, config: Mapping[str, Any], copy_from: str | Path | None) -> set[str]:
    """Makes a folder that tells which model a checkpoint is of, so that it can be converted without the original.

    Args:
        folder: the folder; its parent exists.
        config: content of ``config.json``.
        copy_from: folder whose tokenizer and the like are copied; None copies nothing.

    Returns:
        Paths of its files, relative to its parent, all flushed to disk.

    Raises:
        OSError: reading or writing failed.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if copy_from is not None and Path(copy_from).is_dir():
        copy_companions(Path(copy_from), folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in [*files, folder]:
        flush_path(path)
    return {path.relative_to(folder.parent).as_posix() for path in files}
