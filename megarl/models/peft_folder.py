"""Folders of low-rank adapters in peft's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.base.errors import ConfigError, ModelError
from megarl.base.json_text import read_json_object
from megarl.models.adapters import DORA, LORA, AdapterMap
from megarl.models.hf_folder import (
    EMBEDDING,
    HEAD,
    TensorEntry,
    check_model_folder,
    equal_values,
    nested_name,
    plain_name,
    read_header,
)
from megarl.models.model_config import ModelConfig
from megarl.models.registry import count, flag, number

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of a tensor's name in peft's files."""
_TOWER = r".*\bvisual\..*"
"""Modules of a vision tower, by peft's rule for a string."""
_KEY = "lora_adapter_path"
_READ = {"peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "use_dora"}
_WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config"),
    *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "merge_weights", "megatron_config", "megatron_core", "eva_config", "qalora_group_size"),
}
"""Settings of peft that the tensors repeat, or that change nothing in a trained adapter."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    # The other initializations shift the weights of the base model.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "loftq_config": ({},),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "ensure_weight_tying": (False,),
    "target_parameters": ([],),
    "trainable_token_indices": ([],),
    **dict.fromkeys(
        ("layer_replication", "alora_invocation_tokens", "arrow_config", "corda_config", "enable_lora"), ()
    ),
    **dict.fromkeys(("kasa_config", "lora_ga_config", "monteclora_config", "velora_config"), ()),
}
"""Settings of peft with the only values that megarl supports, besides null."""
_BASE_WEIGHT = ".base_layer."
"""Part of the name of a base weight in peft's files."""


class AdapterFolder:
    """A folder of adapters, of which no tensor has been read.

    Raises:
        ConfigError: it is no folder of adapters in peft's format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (self.path / name).is_file():
                text = f"{_KEY}={path}: {self.path / name} is missing; expected {CONFIG_FILE} and {WEIGHTS_FILE}"
                raise ConfigError(text, code="adapter.missing-file")
        try:
            self.config = _read_config(self.path / CONFIG_FILE)
            stored = read_header(self.path / WEIGHTS_FILE)
        except ModelError as error:
            raise ConfigError(f"{_KEY}={path}: {error.text}", code=error.code) from None
        tensors = {plain_name(n.removeprefix(PREFIX)): entry._replace(stored_as=n) for n, entry in stored.items()}
        self.base_weights = {n.replace(_BASE_WEIGHT, "."): e for n, e in tensors.items() if _is_base_weight(n)}
        """Copies of base weights: peft adds an adapted output layer and resized embeddings."""
        self.tensors: dict[str, TensorEntry] = {n: e for n, e in tensors.items() if not _is_base_weight(n)}

    @property
    def kind(self) -> str:
        """Kind of the adapters, of :data:`~megarl.models.adapters.KINDS`."""
        return DORA if self.config.get("use_dora") else LORA

    def check(self, adapters: AdapterMap) -> None:
        """Check that the folder has exactly a role's adapters.

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
                text = f"{key}={_text(value)}: the adapters of {_KEY}={self.path} have {_text(stored)}"
                raise ConfigError(text, code="adapter.setting-differs")
        shapes = adapters.hf_shapes()
        for name in sorted(shapes.keys() | self.tensors.keys()):
            stored_shape = self.tensors[name].shape if name in self.tensors else None
            if name in adapters.head and stored_shape is None:
                continue  # adapters of a language model: the head is new
            if stored_shape != shapes.get(name):
                pair = shapes.get(name), stored_shape
                here, in_folder = ("is absent" if shape is None else f"has shape {list(shape)}" for shape in pair)
                text = f"{_KEY}={self.path}: '{name}' {in_folder} there, and {here} with this model and target_modules"
                raise ConfigError(text, code="adapter.tensor-differs")

    def check_base(self, path: str | Path) -> None:
        """Check that the copies of base weights are those of a base model, which peft replaces with them.

        Raises:
            ConfigError: names the tensor.
            ModelError: the base model is incomplete.
        """
        if not self.base_weights:
            return
        base = check_model_folder(path, may_lack_head=True).tensors
        for name, entry in self.base_weights.items():
            if name not in base or not equal_values(entry, base[name]):
                raise ConfigError(
                    f"{_KEY}={self.path}: '{entry.stored_as}' is not '{name}' of the base model {path}: the adapters "
                    "belong to a changed model. Save that model and name its folder, or train adapters without "
                    "modules_to_save and resized embeddings",
                    code="adapter.changed-base",
                )

    def check_supported(self) -> None:
        """Check that every setting is one that megarl supports; a setting that it does not know is refused.

        Raises:
            ConfigError: names the setting.
        """
        if self.config.get("peft_type") != "LORA":
            text = f"{_KEY}={self.path}: peft_type={self.config.get('peft_type')!r}, expected 'LORA'"
            raise ConfigError(text, code="adapter.not-lora")
        for name, value in self.config.items():
            if name in _READ or name in _WITHOUT_EFFECT or (name in _ONLY and value is None):
                continue
            if name not in _ONLY:
                raise ConfigError(
                    f"{_KEY}={self.path}: megarl does not know the setting {name}={value!r} of {CONFIG_FILE}, which "
                    "may change what the adapters compute; remove it if it has no effect",
                    code="adapter.unknown-setting",
                )
            if not any(type(value) is type(valid) and value == valid for valid in _ONLY[name]):
                valid_text = " or ".join(map(repr, _ONLY[name] or (None,)))
                text = f"{_KEY}={self.path}: megarl supports {name}={valid_text} only, not {value!r}"
                raise ConfigError(text, code="adapter.unsupported-setting")


def _is_base_weight(name: str) -> bool:
    return _BASE_WEIGHT in name or name in (EMBEDDING, HEAD)


def _read_config(file: Path) -> dict[str, Any]:
    """Read ``adapter_config.json``, with the types of the fields that megarl computes with."""
    config = read_json_object(file, ModelError)
    config |= {name: flag(config, name, file=CONFIG_FILE) for name in ("use_dora", "use_rslora")}
    if config.get("peft_type") == "LORA":  # others have other fields, and are refused by name
        count(config, "r", file=CONFIG_FILE)
        number(config, "lora_alpha", file=CONFIG_FILE)
    return config


def peft_config(adapters: AdapterMap, base: str | None) -> dict[str, Any]:
    """Build the contents of ``adapter_config.json``; ``base`` is the base model's folder or hub name."""
    options, head = adapters.options, adapters.head
    vision = adapters.model.vision
    in_full = dict.fromkeys(map(_saved_module, adapters.in_full))
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
        # Layers of a frozen tower, which the map lacks, may have the names of the decoder's.
        **({} if vision is None or vision.trained else {"exclude_modules": _TOWER}),
        "modules_to_save": list(in_full) or None,
        "inference_mode": True,
    }


def peft_name(config: ModelConfig, name: str) -> str:
    """Return an adapter's name in peft's files: the path of its module in transformers, which nests a decoder."""
    return PREFIX + (name if config.vision is None else nested_name(name))


def _peft_targets(adapters: AdapterMap) -> list[str]:
    """Names that peft's rule matches to exactly the adapted layers: last parts where possible."""
    adapted, every = (
        [peft_name(adapters.model, name).removeprefix(PREFIX).removesuffix(".weight") for name in names]
        for names in (adapters.targets, adapters.base_shapes)
    )
    others = set(every) - set(adapted)
    ambiguous = {name.rpartition(".")[2] for name in others}
    lasts = ((name, name.rpartition(".")[2]) for name in adapted)
    return list(dict.fromkeys(name if last in ambiguous or last.isdigit() else last for name, last in lasts))


def _saved_module(name: str) -> str:
    """The module that peft trains in full for a tensor: the scalar head, or a part of a vision tower."""
    match = re.match(r".*visual\.(?:\w+\.\d+|\w+)", nested_name(name))
    return "score" if match is None else match[0]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
