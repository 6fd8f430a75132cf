"""Megatron sections of the roles: keys that a role does not set have the actor's values.

This works on plain values, before they are typed: a typed section has a value for every key.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megarl.config.keys import AUTO, find_key, keys_of, lookup, value_at, walk
from megarl.config.schema.jobs import ACTOR, CRITIC, REFERENCE, TEACHERS, JobConfig, TrainConfig
from megarl.config.schema.model import MegatronConfig

ACTOR_MEGATRON = f"{ACTOR}.megatron"

NOT_INHERITED = ("data_parallel_size",)
"""Keys of the role's devices."""
OFFLOAD_KEYS = ("param_offload", "grad_offload", "optimizer_offload")
"""Keys that a role inherits only on the trainer's devices: on its own, nobody else needs the memory."""
SPLIT_KEYS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Split of the layers over the pipeline stages."""
MODEL_KEYS = (
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    *SPLIT_KEYS,
    "override_transformer_config",
)
"""Keys about layers and experts, which a role inherits only with the actor's model."""
DEPENDENT_KEYS: Mapping[str, tuple[str, ...]] = {
    "pipeline_model_parallel_size": SPLIT_KEYS,
    "recompute_granularity": ("recompute_method", "recompute_num_layers", "recompute_modules"),
    "use_distributed_optimizer": ("overlap_param_gather",),
}
"""Keys that a role inherits only with the actor's value of another key."""
_ROLE_KEY = re.compile(r"(?P<section>[\w.]+\.megatron)\.(?P<name>\w+)=")


def without_auto(schema: type, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested plain values without keys that are ``auto``; :func:`inherit` reads those of the roles' layouts."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            inherits = (item := find_key(schema, path)) is not None and item.inherits
            plain[name] = dict(value) if inherits else without_auto(schema, value, f"{path}.")
        elif value != AUTO or (item := find_key(schema, path)) is None or not item.accepts_auto:
            plain[name] = value
    return plain


def inheriting_sections(schema: type, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of the sections that inherit the actor's, with those of all teachers but servers.

    Args:
        values: nested and plain.
    """
    for path, item in walk(schema):
        if item.section is not None and item.inherits:
            yield path
        elif item.entry is not None:
            entries = lookup(values, path) or {}
            names = [name for name, entry in entries.items() if not lookup(entry, "server.urls")]
            yield from (f"{path}.{name}.{inner}" for name in names for inner in inheriting_sections(item.entry, {}))


def inherit(schema: type, values: Mapping[str, Any]) -> set[str]:
    """Complete the Megatron sections of the roles by the actor's values, in place.

    Without an actor, as in evaluation, unset keys have their defaults.

    Args:
        values: nested and plain, with verl's keys translated.

    Returns:
        The inherited keys.
    """
    actors = lookup(values, ACTOR_MEGATRON)
    inherited: set[str] = set()
    for path in inheriting_sections(schema, values):
        role, _, name = path.rpartition(".")
        if not isinstance(section := lookup(values, role), dict):
            continue
        layout = section.setdefault(name, {})  # a teacher's section may be absent
        if not isinstance(layout, dict):
            continue
        for item in keys_of(MegatronConfig):
            is_unset = layout.get(item.name) is None and (item.auto or not item.optional)
            if is_unset or layout.get(item.name) == AUTO:
                layout.pop(item.name, None)
        if isinstance(actors, Mapping):
            names = _inherited_names(layout, actors, _role_of(path, values)) - layout.keys()
            layout |= {name: copy.deepcopy(actors[name]) for name in names}
            inherited |= {f"{path}.{name}" for name in names}
    return inherited


def followers(config: JobConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of roles that follow changes of the actor's section, with their new values.

    A complete configuration does not tell inherited keys from others: a key with the actor's value counts as inherited.
    """
    prefix = f"{ACTOR_MEGATRON}."
    changed = {path.removeprefix(prefix): value for path, value in changes.items() if path.startswith(prefix)}
    if not changed or not isinstance(config, TrainConfig):
        return {}
    plain = dataclasses.asdict(config)
    followed: dict[str, Any] = {}
    before = lookup(plain, ACTOR_MEGATRON)
    after = before | changed
    for path in inheriting_sections(TrainConfig, plain):
        if not isinstance(layout := lookup(plain, path), Mapping):
            continue
        named = {name: changes[f"{path}.{name}"] for name in layout if f"{path}.{name}" in changes}
        own = {name: value for name, value in layout.items() if value != before[name]} | named
        names = _inherited_names(own, after, _role_of(path, plain)) - own.keys()
        followed |= {f"{path}.{name}": after[name] for name in names if after[name] != layout[name]}
    return followed


def inheritance_note(config: object, text: str) -> str:
    """Return the end of a message about a role's layout: where the value comes from, if it is the actor's.

    Args:
        text: names the key as ``critic.megatron.tensor_model_parallel_size=8``.
    """
    match = _ROLE_KEY.search(text)
    if match is None or match["section"] == ACTOR_MEGATRON or not isinstance(config, TrainConfig):
        return ""
    section, name = match["section"], match["name"]
    if name in NOT_INHERITED or value_at(config, f"{section}.{name}") != value_at(config, f"{ACTOR_MEGATRON}.{name}"):
        return ""
    return f". This is the value of {ACTOR_MEGATRON}.{name}; set {section}.{name} to give the role another"


class _Role(NamedTuple):
    has_actors_model: bool
    has_own_devices: bool


def _role_of(path: str, values: Mapping[str, Any]) -> _Role:
    role = path.rpartition(".")[0]
    critics = lookup(values, f"{CRITIC}.model.path")
    is_same = role == REFERENCE or (
        role == CRITIC and critics in (None, lookup(values, "actor_rollout_ref.model.path"))
    )
    pool = TEACHERS if role.startswith(f"{TEACHERS}.") else role
    return _Role(is_same, bool(lookup(values, f"{pool}.nnodes")))


def _inherited_names(layout: Mapping[str, Any], actors: Mapping[str, Any], role: _Role) -> set[str]:
    """Keys that the role would inherit if it sets none of them."""
    excluded = {*NOT_INHERITED}
    if not role.has_actors_model:
        excluded |= {*MODEL_KEYS}
    if role.has_own_devices:
        excluded |= {*OFFLOAD_KEYS}
    for name, dependents in DEPENDENT_KEYS.items():
        if layout.get(name, actors.get(name)) != actors.get(name):
            excluded |= {*dependents}
    return {item.name for item in keys_of(MegatronConfig)} & actors.keys() - excluded
