"""State of the driver in a checkpoint: ``trainer_state.json``, and the bytes of large arrays in ``trainer_arrays.bin``.

The first file is plain JSON, so reading it runs no code. Types that JSON lacks (bytes, tensors, arrays, tuples, integer
keys) are tagged and restored exactly, floats to the last bit. Finished samples of asynchronous training can have
gigabytes of arrays, which the second file holds one after the other.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, get_origin, get_type_hints

import numpy as np
import torch

from megarl.base.errors import CheckpointError
from megarl.base.json_text import parse_json
from megarl.base.provenance import installed_versions
from megarl.base.version import __version__
from megarl.models.model_config import ModelConfig

STATE_FILE, ARRAY_FILE = "trainer_state.json", "trainer_arrays.bin"
FORMAT, FORMATS = 2, (1, 2)
"""Format that is written, and those that are read; 1 had no second file."""
_INLINE_BYTES = 2**16
"""Bytes of the largest array that the JSON file holds."""
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
    """Samples in flight: ledger, groups and finished samples; empty if the next group follows from the step."""
    megarl_version: str = field(default=__version__)
    """Version of megarl that wrote the state; informational."""
    versions: dict[str, Any] = field(default_factory=installed_versions)
    """Software versions of the driver; informational."""

    def write(self, folder: Path) -> None:
        """Write the files of the state into a checkpoint folder.

        Raises:
            OSError: writing failed.
            TypeError: the state contains a type that cannot be stored; names its path.
        """
        with (Path(folder) / ARRAY_FILE).open("wb") as arrays:
            encoder = Encoder(arrays)
            values = {name: encoder.encode(getattr(self, name), name) for name in _FIELDS}
            has_arrays = arrays.tell() > 0
        if not has_arrays:
            Path(arrays.name).unlink()
        with (Path(folder) / STATE_FILE).open("w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **values}, file, indent=1)

    @classmethod
    def read(cls, folder: Path) -> TrainerState:
        """Read the state of a checkpoint folder.

        Raises:
            CheckpointError: a file is missing or malformed; names the field.
        """
        path = Path(folder) / STATE_FILE
        try:
            document = parse_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing", code="checkpoint.no-trainer-state") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", code="checkpoint.unreadable-file") from None
        if not isinstance(document, dict) or document.get("format") not in FORMATS:
            version = document.get("format") if isinstance(document, dict) else document
            raise CheckpointError(
                f"{path}: format={version!r}, this megarl reads {' and '.join(map(str, FORMATS))}",
                code="checkpoint.other-format",
            )
        for name in _LATER_FIELDS:
            document.setdefault(name, {})
        decoder = Decoder(path.with_name(ARRAY_FILE))
        return cls(**{name: _field(path, document, name, kind, decoder) for name, kind in _FIELDS.items()})

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
            raise CheckpointError(
                f"the checkpoint is of another model: {'; '.join(differing)}", code="resume.other-model"
            )

    def check_contents(self, role: str, load_contents: Collection[str], key: str) -> None:
        """Reject a checkpoint that lacks contents to restore.

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
            f"[{','.join(saved)}]: {advice}",
            code="resume.missing-contents",
        )

    def differing_versions(self) -> list[str]:
        """List software with another version now, with both versions; a resumed run may then not be exact."""
        now = installed_versions()
        return [
            f"{name} {saved} then, {now.get(name, 'absent')} now"
            for name, saved in self.versions.items()
            if now.get(name) != saved
        ]


_FIELDS: dict[str, type] = {name: get_origin(hint) or hint for name, hint in get_type_hints(TrainerState).items()}
_LATER_FIELDS = ("contents", "rollout", "versions")
"""Fields that old checkpoints lack."""


def model_fingerprint(config: ModelConfig) -> dict[str, Any]:
    """List all fields of a model configuration that two runs must share to exchange weights."""
    fields = dataclasses.asdict(config)
    del fields["raw"]
    return fields


def _field(path: Path, document: Mapping[str, Any], name: str, kind: type, decoder: Decoder) -> Any:
    if name not in document:
        raise CheckpointError(f"{path}: {name} is missing", code="checkpoint.malformed-state")
    try:
        value = decoder.decode(document[name])
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {name} is malformed: {error!r}", code="checkpoint.malformed-state") from None
    if type(value) is not kind or (type(value) is int and value < 0):
        raise CheckpointError(f"{path}: {name}={value!r}, expected {kind.__name__}", code="checkpoint.malformed-state")
    return value


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


class Encoder:
    """Converts values to JSON; the bytes of large arrays go to a file."""

    def __init__(self, arrays: BinaryIO) -> None:
        self._arrays = arrays

    def encode(self, value: Any, where: str) -> Any:
        """Convert a value; ``where`` is its path in errors."""
        if value is None or isinstance(value, bool | int | float | str):
            return value.item() if isinstance(value, np.generic) else value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, list):
            return self._items(value, where)
        if isinstance(value, tuple):
            return {_TAG: "tuple", "items": self._items(value, where)}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) for key in value) and _TAG not in value:
                return {key: self.encode(item, f"{where}.{key}") for key, item in value.items()}
            pairs = [
                [self.encode(key, f"{where}, key"), self.encode(item, f"{where}.{key}")] for key, item in value.items()
            ]
            return {_TAG: "mapping", "items": pairs}
        if isinstance(value, bytes | bytearray):
            return {_TAG: "bytes", **self._content(bytes(value))}
        if isinstance(value, torch.Tensor):
            array = value.detach().cpu().contiguous()
            raw = array.reshape(-1).view(torch.uint8).numpy().tobytes()
            kind = {_TAG: "tensor", "dtype": str(array.dtype).removeprefix("torch."), "shape": list(array.shape)}
            return kind | self._content(raw)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            kind = {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape)}
            return kind | self._content(value.tobytes())
        raise TypeError(f"trainer state: {where} is a {type(value).__name__}, which {STATE_FILE} cannot store")

    def _items(self, values: Sequence[Any], where: str) -> list[Any]:
        return [self.encode(item, f"{where}[{index}]") for index, item in enumerate(values)]

    def _content(self, raw: bytes) -> dict[str, Any]:
        if len(raw) <= _INLINE_BYTES:
            return {"data": base64.b64encode(raw).decode("ascii")}
        begin = self._arrays.tell()
        self._arrays.write(raw)
        return {"begin": begin, "bytes": len(raw)}


class Decoder:
    """Restores the values of :class:`Encoder`."""

    def __init__(self, arrays: Path) -> None:
        self._arrays = arrays

    def decode(self, value: Any) -> Any:
        """Restore a value.

        Raises:
            OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError: the value is malformed.
        """
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if _TAG not in value:
            return {key: self.decode(item) for key, item in value.items()}
        kind = value[_TAG]
        if kind == "tuple":
            return tuple(self.decode(item) for item in value["items"])
        if kind == "mapping":
            return {self.decode(key): self.decode(item) for key, item in value["items"]}
        raw = self._content(value)
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

    def _content(self, value: Mapping[str, Any]) -> bytes:
        if "data" in value:
            return base64.b64decode(value["data"], validate=True)
        with self._arrays.open("rb") as file:
            file.seek(value["begin"])
            raw = file.read(value["bytes"])
        if len(raw) != value["bytes"]:
            raise ValueError(f"{self._arrays.name} ends before byte {value['begin'] + value['bytes']}")
        return raw
