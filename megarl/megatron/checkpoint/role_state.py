"""Small files of a role's checkpoint: ``state.json``, and the random generator states of a process."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.base.errors import CheckpointError
from megarl.base.json_text import parse_json
from megarl.base.provenance import installed_versions
from megarl.base.version import __version__
from megarl.models import ParallelLayout
from megarl.models.adapters import LoraOptions
from megarl.models.hf_folder import ModelIdentity

STATE_FILE = "state.json"
FORMAT = 1
_MEGATRON_PREFIX = "megatron."

MODEL, OPTIMIZER_STATE, EXTRA, HF_MODEL = "model", "optimizer", "extra", "hf_model"
RESUMABLE = (MODEL, OPTIMIZER_STATE, EXTRA)
"""Contents that a role needs to resume exactly: weights; optimizer and steps; random generators."""
CONTENTS = (*RESUMABLE, HF_MODEL)
"""Valid contents of a checkpoint."""


@dataclass(frozen=True)
class RoleState:
    """Contents of ``state.json``.

    Attributes:
        dtype: of the weights, such as ``float32``.
        steps: optimizer steps, which determine the learning rate; None if no optimizer was saved.
        device: device type of the random states, ``cpu`` or ``cuda``.
        skipped_in_a_row: consecutive skipped optimizer steps.
        contents: of :data:`CONTENTS`.
        lora: options of the adapters, if these are the saved weights.
        base: the frozen model under the adapters.
        initial: folder of the initial model, from which a conversion copies parts that are not trained.
        versions: of the software that saved, for information.
    """

    dtype: str
    steps: int | None
    layout: ParallelLayout
    device: str
    skipped_in_a_row: int = 0
    contents: tuple[str, ...] = RESUMABLE
    lora: LoraOptions | None = None
    base: ModelIdentity | None = None
    initial: str | None = None
    megarl_version: str = __version__
    versions: Mapping[str, str] = field(default_factory=installed_versions)


def write_state(folder: Path, state: RoleState) -> str:
    """Write ``state.json``, flushed to disk, and return its name; raises OSError."""
    with (folder / STATE_FILE).open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **asdict(state), "layout": state.layout._asdict()}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    return STATE_FILE


def read_state(folder: Path) -> RoleState:
    """Read ``state.json``.

    Raises:
        CheckpointError: it is missing, malformed, or of another format.
    """
    path = folder / STATE_FILE
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            text = f"{path}: format={document['format']!r}, this megarl reads {FORMAT}"
            raise CheckpointError(text, code="checkpoint.other-format")
        return _parse(document)
    except FileNotFoundError:
        text = f"{path} is missing: not a checkpoint of a role"
        raise CheckpointError(text, code="checkpoint.missing-state") from None
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}", code="checkpoint.malformed-state") from error


def _parse(document: Mapping[str, Any]) -> RoleState:
    steps = document["steps"]
    # Older checkpoints lack the field: they have all contents, with an optimizer if steps is set.
    whole, lora = RESUMABLE if steps is not None else (MODEL, EXTRA), document.get("lora")
    return RoleState(
        dtype=str(document["dtype"]),
        steps=None if steps is None else int(steps),
        layout=ParallelLayout(**document["layout"]),
        device=str(document["device"]),
        skipped_in_a_row=int(document.get("skipped_in_a_row", 0)),
        contents=tuple(str(name) for name in document.get("contents", whole)),
        lora=LoraOptions(**lora | {n: tuple(lora[n]) for n in ("targets", "excludes")}) if lora else None,
        base=ModelIdentity(**document["base"]) if document.get("base") else None,
        initial=document.get("initial"),
        megarl_version=str(document["megarl_version"]),
        versions=dict(document.get("versions", {})),
    )


def save_random_state(path: Path, device: torch.device) -> None:
    """Write the states of torch's, numpy's, Python's and Megatron's named generators, and of a CUDA ``device``'s.

    Raises:
        OSError: writing failed.
    """
    version, words, next_gauss = random.getstate()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        **{_MEGATRON_PREFIX + name: state.cpu() for name, state in get_cuda_rng_tracker().get_states().items()},
    }
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    extras = {"python": [version, next_gauss], "numpy": [kind, int(position), int(has_gauss), float(gauss)]}
    # clone: states may share memory, which the format refuses
    save_file({name: state.clone() for name, state in tensors.items()}, path, {"extras": json.dumps(extras)})


def load_random_state(path: Path, device: torch.device) -> None:
    """Restore every generator from a file of :func:`save_random_state`.

    Raises:
        CheckpointError: the file is missing or malformed. No generator was changed, unless a state has a wrong type.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            extras = parse_json(file.metadata()["extras"])
        named = [name for name in tensors if name.startswith(_MEGATRON_PREFIX)]
        states = {name.removeprefix(_MEGATRON_PREFIX): tensors[name] for name in named}
        version, next_gauss = extras["python"]
        kind, position, has_gauss, gauss = extras["numpy"]
        python = (version, tuple(tensors["python"].tolist()), next_gauss)
        numpy = (kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss)
        if device.type == "cuda":
            torch.cuda.set_rng_state(tensors["cuda"], device)
        random.setstate(python)
        np.random.set_state(numpy)
        get_cuda_rng_tracker().set_states(states)
        torch.set_rng_state(tensors["torch"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        text = f"{path}: random states cannot be restored: {error!r}"
        raise CheckpointError(text, code="checkpoint.random-state") from error
