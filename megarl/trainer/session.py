"""What every job needs before its workers start: a Ray session, devices, logs, a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.cluster import PlacedPool, RaySession, ResourcePool
from megarl.cluster.resources import cluster_nodes
from megarl.config.parts import RunConfig
from megarl.errors import ModelError, ResourceError
from megarl.logs import LOGS_FOLDER, ProcessLogs


@contextmanager
def placed_devices(trainer: RunConfig, logs: ProcessLogs | None = None) -> Iterator[PlacedPool]:
    """A Ray session with the run's devices reserved; all is taken down when the block is left.

    ``trainer.device`` is resolved here: after it, it is ``cpu`` or ``cuda``. What worker processes print
    goes to ``logs``.

    Raises:
        ResourceError: the cluster does not have the devices; says what is needed and what there is.
    """
    with RaySession(logs=logs) as session:
        yield _place(session, trainer)


def _place(session: RaySession, trainer: RunConfig) -> PlacedPool:
    trainer.device = device = resolve_device(trainer.device)
    pool = ResourcePool("devices", device, [trainer.n_gpus_per_node] * trainer.nnodes)
    try:
        return session.place([pool])["devices"]
    except ResourceError as error:
        asked = f"trainer.nnodes={trainer.nnodes}, trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
        where = (
            f"The cluster is that of RAY_ADDRESS={session.address}."
            if session.address
            else "Ray was started on this machine alone: `megarl launch` starts it on several, RAY_ADDRESS names one."
        )
        raise ResourceError(f"{asked}, trainer.device={device}: {error} {where}") from error


def run_logs(trainer: RunConfig, folder: Path) -> ProcessLogs:
    """Where the processes of a run write what they print.

    Args:
        trainer: the run's section of the configuration.
        folder: of the run's files.
    """
    return ProcessLogs(folder.resolve() / LOGS_FOLDER, trainer.log_level)


def resolve_device(device: str) -> Literal["cpu", "cuda"]:
    """``auto`` is CUDA where the connected cluster has a GPU."""
    if device == "auto":
        device = "cuda" if any(node.get("GPU", 0) > 0 for node in cluster_nodes()) else "cpu"
    return "cuda" if device == "cuda" else "cpu"


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises:
        ModelError: there is none, or it has no chat template or no end-of-sequence token.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer can be loaded from {path}: {error}") from error
    for name in ("chat_template", "eos_token"):
        if getattr(tokenizer, name, None) is None:
            raise ModelError(f"the tokenizer in {path} has no {name}; set it in its tokenizer_config.json")
    return tokenizer
