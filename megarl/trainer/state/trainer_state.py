"""State of the driver in a checkpoint: ``trainer_state.json``.

The file is plain JSON, so reading it runs no code. Types that JSON lacks (bytes, tensors, arrays, tuples, integer keys)
are tagged and restored exactly, floats to the last bit.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megarl
from megarl.base.errors import CheckpointError
from megarl.base.json_text import parse_json
from megarl.base.provenance import installed_versions
from megarl.models.model_config import ModelConfig

STATE_FILE = "trainer_state.json"
FORMAT = 1
_TAG = "__megarl__"


@dataclass(frozen=True)
class TrainerState:
    """State of the driver after a finished step."""

    step: int
    """Finished global steps."""
    epoch: int
    """Finished passes over the training data."""
    kl_controller: dict[str, Any]
    """``state_dict`` of the KL controller."""
    dataloader: dict[str, Any]
    """``state_dict`` of the stateful loader."""
    model: dict[str, Any]
    """By role, the :func:`model_fingerprint` of the trained model."""
    contents: dict[str, Any] = field(default_factory=dict)
    """By role, the saved contents: some of model, optimizer, extra, hf_model; empty in old checkpoints."""
    rollout: dict[str, Any] = field(default_factory=dict)
    """Work in flight of asynchronous training: ledger, groups and finished samples; empty in synchronous runs."""
    megarl_version: str = field(default=megarl.__version__)
    """Version of megarl that wrote the state; informational."""
    versions: dict[str, Any] = field(default_factory=installed_versions)
    """Software versions of the driver; informational."""

    def write(self, folder: Path) -> None:
        """Write ``trainer_state.json`` into a checkpoint folder.

        Raises:
            OSError: writing failed.
            TypeError: the state contains a type that cannot be stored; names its path.
        """
        values = {name: _encode(getattr(self, name), name) for name in _FIELDS}
        with open(Path(folder) / STATE_FILE, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **values}, file, indent=1)

    @classmethod
    def read(cls, folder: Path) -> TrainerState:
        """Read ``trainer_state.json`` of a checkpoint folder.

        Raises:
            CheckpointError: the file is missing or malformed; names the field.
        """
        path = Path(folder) / STATE_FILE
        try:
            document = parse_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            version = document.get("format") if isinstance(document, dict) else document
            raise CheckpointError(f"{path}: format={version!r}, this megarl reads {FORMAT}")
        for name in _LATER_FIELDS:
            document.setdefault(name, {})
        return cls(**{name: _field(path, document, name, kind) for name, kind in _FIELDS.items()})

    def check_model(self, current: Mapping[str, Any]) -> None:
        """Reject a checkpoint of another model.

        Args:
            current: fingerprints of this run, in the form of :attr:`model`.

        Raises:
            CheckpointError: names every field that differs, with both values.
        """
        saved, expected = dict(_flatten(self.model)), dict(_flatten(current))
        differing = [
            f"{name}: {saved.get(name, 'absent')!r} in the checkpoint, {expected.get(name, 'absent')!r} in this run"
            for name in sorted(saved.keys() | expected.keys())
            if name not in saved or name not in expected or saved[name] != expected[name]
        ]
        if differing:
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(differing)}")

    def check_contents(self, role: str, load_contents: Collection[str], key: str) -> None:
        """Reject a checkpoint that lacks contents to restore.

        Args:
            role: role of the contents.
            load_contents: contents to restore.
            key: configuration key of ``load_contents``.

        Raises:
            CheckpointError: names the missing contents, and the value to set instead.
        """
        saved = self.contents.get(role)
        missing = [] if saved is None else [name for name in load_contents if name not in saved]
        if not missing or saved is None:
            return
        rest = [name for name in load_contents if name in saved]
        advice = (
            f"set {key}=[{','.join(rest)}] to resume without"
            if "model" in rest
            else "its weights were not saved in megarl's format, so no run can resume from it"
        )
        raise CheckpointError(
            f"the checkpoint has no {' and no '.join(missing)} of the {role}, saved with save_contents="
            f"[{','.join(saved)}]: {advice}"
        )

    def differing_versions(self) -> list[str]:
        """List software with another version now, with both versions; a resumed run may then not be exact."""
        now = installed_versions()
        return [
            f"{name} {saved} then, {now.get(name, 'absent')} now"
            for name, saved in self.versions.items()
            if now.get(name) != saved
        ]


_FIELDS: dict[str, type] = {
    "step": int,
    "epoch": int,
    "kl_controller": dict,
    "dataloader": dict,
    "model": dict,
    "contents": dict,
    "rollout": dict,
    "megarl_version": str,
    "versions": dict,
}
_LATER_FIELDS = ("contents", "rollout", "versions")
"""Fields that old checkpoints lack."""


def model_fingerprint(config: ModelConfig) -> dict[str, Any]:
    """List all fields of a model configuration that two runs must share to exchange weights."""
    fields = dataclasses.asdict(config)
    del fields["raw"]
    return fields


def _field(path: Path, document: Mapping[str, Any], name: str, kind: type) -> Any:
    if name not in document:
        raise CheckpointError(f"{path}: {name} is missing")
    try:
        value = _decode(document[name])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {name} is malformed: {error!r}") from None
    if type(value) is not kind or (type(value) is int and value < 0):
        raise CheckpointError(f"{path}: {name}={value!r}, expected {kind.__name__}")
    return value


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: _encode(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[_encode(key, f"{where}, key"), _encode(item, f"{where}.{key}")] for key, item in value.items()]
        return {_TAG: "mapping", "items": pairs}
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "data": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        raw = array.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {_TAG: "tensor", "dtype": str(array.dtype).removeprefix("torch."), **_blob(array.shape, raw)}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {_TAG: "array", "dtype": value.dtype.str, **_blob(value.shape, value.tobytes())}
    raise TypeError(f"trainer state: {where} is a {type(value).__name__}, which {STATE_FILE} cannot store")


def _blob(shape: tuple[int, ...], raw: bytes) -> dict[str, Any]:
    return {"shape": list(shape), "data": base64.b64encode(raw).decode("ascii")}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(item) for key, item in value.items()}
    kind = value[_TAG]
    if kind == "tuple":
        return tuple(_decode(item) for item in value["items"])
    if kind == "mapping":
        return {_decode(key): _decode(item) for key, item in value["items"]}
    raw = base64.b64decode(value["data"], validate=True)
    if kind == "bytes":
        return raw
    if kind == "array":
        return np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind == "tensor":
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no such dtype: {value['dtype']!r}")
        flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    raise ValueError(f"unknown tag {kind!r}")
