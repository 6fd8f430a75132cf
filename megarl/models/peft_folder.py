"""Folders of low-rank adapters in peft's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.base.errors import ConfigError, ModelError
from megarl.base.json_text import read_json_object
from megarl.models.adapters import DORA, LORA, AdapterMap
from megarl.models.hf_folder import ModelFolder, TensorEntry, read_header
from megarl.models.registry import count, flag, number

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of a tensor's name in peft's files."""
_KEY = "lora_adapter_path"
_UNSUPPORTED: Mapping[str, Any] = {
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "bias": "none",
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "lora_bias": False,
}
"""Settings of peft with the only value that megarl supports."""


class AdapterFolder:
    """A folder of adapters, of which no tensor has been read.

    Args:
        path: the folder.

    Raises:
        ConfigError: it is no folder of adapters in peft's format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (self.path / name).is_file():
                raise ConfigError(
                    f"{_KEY}={path}: {self.path / name} is missing; expected {CONFIG_FILE} and {WEIGHTS_FILE}"
                )
        try:
            self.config = _read_config(self.path / CONFIG_FILE)
            stored = read_header(self.path / WEIGHTS_FILE)
        except ModelError as error:
            raise ConfigError(f"{_KEY}={path}: {error}") from None
        self.tensors: dict[str, TensorEntry] = {
            name.removeprefix(PREFIX): entry._replace(stored_as=name) for name, entry in stored.items()
        }

    @property
    def kind(self) -> str:
        """Kind of the adapters, of :data:`~megarl.models.adapters.KINDS`."""
        return DORA if self.config.get("use_dora") else LORA

    def check(self, adapters: AdapterMap) -> None:
        """Check that the folder has exactly the adapters of a role.

        Raises:
            ConfigError: names the key that differs, or the tensor.
        """
        options = adapters.options
        self.check_supported()
        settings = {
            "lora_rank": (options.rank, self.config.get("r")),
            "lora_alpha": (options.alpha, self.config.get("lora_alpha")),
            "lora.use_rslora": (options.rank_stabilized, self.config.get("use_rslora", False)),
            "lora.type": (options.kind, self.kind),
        }
        for key, (value, stored) in settings.items():
            if stored != value:
                raise ConfigError(f"{key}={_text(value)}: the adapters of {_KEY}={self.path} have {_text(stored)}")
        shapes = adapters.hf_shapes()
        for name in sorted(shapes.keys() | self.tensors.keys()):
            stored_shape = self.tensors[name].shape if name in self.tensors else None
            if name in adapters.head and stored_shape is None:
                continue  # adapters of a language model: the head is new
            if stored_shape != shapes.get(name):
                here, in_folder = (
                    "is absent" if shape is None else f"has shape {list(shape)}"
                    for shape in (shapes.get(name), stored_shape)
                )
                raise ConfigError(
                    f"{_KEY}={self.path}: '{name}' {in_folder} there, and {here} with this model and target_modules"
                )

    def as_model_folder(self, adapters: AdapterMap) -> ModelFolder:
        """Return the tensors by their names in :class:`AdapterMap`, for a reader of model folders."""
        return ModelFolder(self.path, adapters.model, self.tensors)

    def check_supported(self) -> None:
        """Check that every setting is one that megarl supports.

        Raises:
            ConfigError: names the setting.
        """
        if self.config.get("peft_type") != "LORA":
            raise ConfigError(f"{_KEY}={self.path}: peft_type={self.config.get('peft_type')!r}, expected 'LORA'")
        for name, value in _UNSUPPORTED.items():
            stored = self.config.get(name, value)
            if stored not in (value, None):
                raise ConfigError(f"{_KEY}={self.path}: megarl supports {name}={value!r} only, not {stored!r}")


def _read_config(file: Path) -> dict[str, Any]:
    """Read ``adapter_config.json``, with the types of the fields that megarl computes with."""
    config = read_json_object(file, ModelError)
    config |= {name: flag(config, name, file=CONFIG_FILE) for name in ("use_dora", "use_rslora")}
    if config.get("peft_type") == "LORA":  # others have other fields, and are refused by name
        count(config, "r", file=CONFIG_FILE)
        number(config, "lora_alpha", file=CONFIG_FILE)
    return config


def peft_config(adapters: AdapterMap, base: str | None) -> dict[str, Any]:
    """Build the contents of ``adapter_config.json``.

    Args:
        adapters: the adapters.
        base: folder or hub name of the base model.
    """
    options, head = adapters.options, adapters.head
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if not head else "TOKEN_CLS" if adapters.model.has_head_bias else "SEQ_CLS",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": int(options.alpha) if options.alpha == int(options.alpha) else options.alpha,
        "lora_dropout": 0.0,
        "use_rslora": options.rank_stabilized,
        "use_dora": options.has_magnitudes,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": _peft_targets(adapters),
        "modules_to_save": ["score"] if head else None,
        "inference_mode": True,
    }


def _peft_targets(adapters: AdapterMap) -> list[str]:
    """Module names that peft's rule matches to exactly the adapted layers: last parts where possible."""
    adapted = [name.removesuffix(".weight") for name in adapters.targets]
    others = {name.removesuffix(".weight") for name in adapters.base_shapes} - set(adapted)
    ambiguous = {name.rpartition(".")[2] for name in others}
    return list(dict.fromkeys(name if (last := name.rpartition(".")[2]) in ambiguous else last for name in adapted))


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
