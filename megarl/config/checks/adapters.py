"""Checks of low-rank adapters: keys without effect, and the reference policy."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.keys import keys_of
from megarl.config.problems import Problem
from megarl.config.schema.jobs import PreferenceConfig, SupervisedConfig, TrainConfig
from megarl.config.schema.model import AdapterKeys, LoraConfig

_POLICY = "actor_rollout_ref.model"
_IN_PRESETS = ("lora_A_init_method",)
"""Keys that the presets with verl's defaults set, for runs without adapters too."""


def adapters(config: TrainConfig | SupervisedConfig) -> Iterator[Problem]:
    """Check the adapters of each role that trains."""
    if isinstance(config, SupervisedConfig):
        yield from _role(config.model, "model")
        if isinstance(config, PreferenceConfig):
            yield from _reference(config.model, "model", config.loss.uses_reference)
        else:
            yield from _no_reference(config.model, "model")
        return
    policy = config.actor_rollout_ref.model
    yield from _role(policy, _POLICY)
    yield from _role(config.critic.model, "critic.model")
    yield from _no_reference(config.critic.model, "critic.model")
    yield from _reference(policy, _POLICY, config.uses_reference)


def _role(model: AdapterKeys, path: str) -> Iterator[Problem]:
    if not model.target_modules:
        text = "names no layer; set all-linear"
        yield Problem(f"{path}.target_modules", model.target_modules, text, code="adapter.no-target-modules")
    if model.lora_rank:
        return
    for section, holder, cls in ((path, model, AdapterKeys), (f"{path}.lora", model.lora, LoraConfig)):
        for item in keys_of(cls):
            value = getattr(holder, item.name)
            if item.section is None and value != item.default and item.name not in _IN_PRESETS:
                text = f"has no effect with {path}.lora_rank=0, which trains all weights; set a rank, such as 32"
                yield Problem(f"{section}.{item.name}", value, text, code="adapter.rank-zero")


def _reference(model: AdapterKeys, path: str, is_used: bool) -> Iterator[Problem]:
    key, reference = f"{path}.lora.reference", model.lora.reference
    if reference != "adapter" or not model.lora_rank:
        return
    if model.lora_adapter_path is None:
        text = f"needs {path}.lora_adapter_path: without one the first adapters are zero, which is base"
        yield Problem(key, reference, text, code="adapter.reference-needs-path")
    elif not is_used:
        yield Problem(key, reference, "this run has no reference policy; leave base", code="adapter.no-reference")


def _no_reference(model: AdapterKeys, path: str) -> Iterator[Problem]:
    if model.lora.reference != "base" and model.lora_rank:
        text = "this role has no reference; leave base"
        yield Problem(f"{path}.lora.reference", model.lora.reference, text, code="adapter.no-reference")
