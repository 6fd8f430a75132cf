"""The Hugging Face export beside a checkpoint's own files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from megarl.megatron import cuda_on_cpu
from megarl.megatron.engine import MegatronEngine
from megarl.megatron.together import together
from megarl.models import LocalParam
from megarl.models.hf_writer import HFWriter

HF_FOLDER = "huggingface"


def export_beside(engine: MegatronEngine, folder: Path, copy_from: str | Path | None) -> set[str]:
    """Writes the model to ``<folder>/huggingface``; communicates.

    Args:
        engine: of this rank.
        folder: of the checkpoint, shared by all ranks.
        copy_from: folder whose tokenizer is copied.

    Returns:
        Names of the files, relative to ``folder``, on the rank that wrote them.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write.
    """
    failure: Exception | None = None
    with cuda_on_cpu.active():
        if engine.runtime.rank != 0:
            engine.weights.export(lambda param, part: None)
        else:
            try:
                _write(engine, folder / HF_FOLDER, copy_from)
            except Exception as error:  # raised on every rank below
                failure = error

    def list_files() -> set[str]:
        if failure is not None:
            raise failure
        if engine.runtime.rank != 0:
            return set()
        paths = (folder / HF_FOLDER).rglob("*")
        return {path.relative_to(folder).as_posix() for path in paths if path.is_file()}

    return together(engine.runtime, list_files, f"exporting to {folder / HF_FOLDER}")


def _write(engine: MegatronEngine, path: Path, copy_from: str | Path | None) -> None:
    """Takes every part from the other ranks, also after a failure: they must not wait in vain."""
    shapes = engine.weight_map.hf_shapes()
    exact = [name for name in shapes if engine.weight_map.is_float32(name)]
    failure: Exception | None = None
    writer: HFWriter | None = None
    with ExitStack() as stack:
        try:
            options = HFWriter(path, engine.model, shapes, float32=exact, copy_from=copy_from)
            writer = stack.enter_context(options)
        except Exception as error:
            failure = error

        def add(param: LocalParam, part: Tensor) -> None:
            nonlocal failure
            if writer is not None and failure is None:
                try:
                    writer.add(param, part)
                except Exception as error:
                    failure = error

        engine.weights.export(add)
        if failure is not None:
            raise failure
