"""``state.json``: what the checkpoint of a role is, as far as no tensor tells it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import megarl
from megarl.errors import CheckpointError
from megarl.models import ParallelLayout
from megarl.provenance import installed_versions

STATE_FILE = "state.json"
FORMAT = 1

MODEL, OPTIMIZER_STATE, EXTRA, HF_MODEL = "model", "optimizer", "extra", "hf_model"
RESUMABLE = (MODEL, OPTIMIZER_STATE, EXTRA)
"""What a role needs to go on as if nothing had happened: weights; optimizer and steps; generators."""
CONTENTS = (*RESUMABLE, HF_MODEL)
"""What a checkpoint may hold."""


@dataclass(frozen=True)
class RoleState:
    """Contents of ``state.json``."""

    dtype: str
    """Number format of the weights, such as ``float32``."""
    steps: int | None
    """Optimizer steps taken, on which the learning rate depends; None where no optimizer was saved."""
    layout: ParallelLayout
    """Layout that saved."""
    device: str
    """Kind of device that the random states are of: ``cpu`` or ``cuda``."""
    skipped_in_a_row: int = 0
    """Optimizer steps skipped since the last one taken."""
    contents: tuple[str, ...] = RESUMABLE
    """What was saved, of :data:`CONTENTS`."""
    megarl_version: str = megarl.__version__
    versions: Mapping[str, str] = field(default_factory=installed_versions)
    """Of the software that saved; for the reader's information."""


def write_state(folder: Path, state: RoleState) -> str:
    """Writes ``state.json``, flushed to disk; returns its name.

    Raises:
        OSError: writing failed.
    """
    with open(folder / STATE_FILE, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **asdict(state), "layout": state.layout._asdict()}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    return STATE_FILE


def read_state(folder: Path) -> RoleState:
    """Reads ``state.json``.

    Raises:
        CheckpointError: it is missing, malformed, or of another format.
    """
    path = folder / STATE_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise CheckpointError(f"{path}: format={document['format']!r}, this megarl reads {FORMAT}")
        return _parse(document)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: not a checkpoint of a role") from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}") from error


def _parse(document: Mapping[str, Any]) -> RoleState:
    steps = document["steps"]
    # Checkpoints of before the field held everything, an optimizer where there was one.
    whole = RESUMABLE if steps is not None else (MODEL, EXTRA)
    return RoleState(
        dtype=str(document["dtype"]),
        steps=None if steps is None else int(steps),
        layout=ParallelLayout(**document["layout"]),
        device=str(document["device"]),
        skipped_in_a_row=int(document.get("skipped_in_a_row", 0)),
        contents=tuple(str(name) for name in document.get("contents", whole)),
        megarl_version=str(document["megarl_version"]),
        versions=dict(document.get("versions", {})),
    )
