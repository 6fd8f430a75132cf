"""Identity of a base model: digests of its config and of samples of its weights, without reading all of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from megarl.models.hf_folder import check_model_folder

_SAMPLES, _SAMPLE_BYTES = 16, 4096
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Keys of ``config.json`` that do not describe the model."""


@dataclass(frozen=True)
class ModelIdentity:
    """Identity of a model folder; two folders with the same weights have equal digests wherever they are.

    Attributes:
        settings: digest of ``config.json``.
        weights: digest of every tensor's name, shape and dtype, and of samples of its bytes.
    """

    path: str
    settings: str
    weights: str

    def difference(self, other: ModelIdentity) -> str | None:
        """Return the field that differs from another model's; None for the same model."""
        return next((part for part in ("settings", "weights") if getattr(self, part) != getattr(other, part)), None)


def identify_model(path: str | Path) -> ModelIdentity:
    """Identify a Hugging Face folder.

    It reads up to 64 KiB of each tensor at evenly spaced places: training changes elements everywhere. The digest does
    not depend on the division into files.

    Raises:
        ModelError: the folder is incomplete.
    """
    folder = check_model_folder(path, may_lack_head=True)
    weights = hashlib.blake2b(digest_size=16)
    for name, entry in sorted(folder.tensors.items()):
        weights.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
        with entry.file.open("rb") as file:
            for start, stop in _samples(entry.nbytes):
                file.seek(entry.offset + start)
                weights.update(file.read(stop - start))
    described = {key: value for key, value in folder.config.raw.items() if key not in _VOLATILE}
    settings = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=16)
    return ModelIdentity(str(Path(path).absolute()), settings.hexdigest(), weights.hexdigest())


def _samples(size: int) -> list[tuple[int, int]]:
    """Byte ranges to read of a tensor: all of a small one."""
    if size <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, size)]
    last = size - _SAMPLE_BYTES
    return [(start, start + _SAMPLE_BYTES) for start in (last * n // (_SAMPLES - 1) for n in range(_SAMPLES))]
