"""The random generators of a process, in a file that holds data only."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.errors import CheckpointError

_TRACKED = "megatron."


def save_random_state(path: Path, device: torch.device) -> None:
    """Writes the states of torch's, numpy's and Python's generators and of those that Megatron keeps by name.

    Args:
        path: file to write.
        device: where this process computes; on CUDA its generator is saved too.

    Raises:
        OSError: writing failed.
    """
    version, words, next_gauss = random.getstate()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        **{_TRACKED + name: state.cpu() for name, state in get_cuda_rng_tracker().get_states().items()},
    }
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    extras = {"python": [version, next_gauss], "numpy": [kind, int(position), int(has_gauss), float(gauss)]}
    # clone: states may share memory, which the format refuses
    save_file({name: state.clone() for name, state in tensors.items()}, path, {"extras": json.dumps(extras)})


def load_random_state(path: Path, device: torch.device) -> None:
    """Puts every generator where :func:`save_random_state` found it.

    Raises:
        CheckpointError: the file is missing or malformed; no generator was touched, unless a state is of a wrong kind.
    """
    try:
        tensors, extras = _read(path)
        states = {name.removeprefix(_TRACKED): s for name, s in tensors.items() if name.startswith(_TRACKED)}
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
        raise CheckpointError(f"{path}: random states cannot be restored: {error!r}") from error


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["extras"])  # noqa: SIM118
