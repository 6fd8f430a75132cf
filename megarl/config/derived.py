"""Values that follow other keys: keys documented as "auto = ...", and the Megatron sections that inherit the actor's.

Inheritance works on plain values, before they are typed: a typed section has a value for every key.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from megarl.base.algorithm_names import default_aggregation
from megarl.config.keys import AUTO, find_key, keys_of, lookup, value_at, walk
from megarl.config.schema.data import PromptsConfig
from megarl.config.schema.distillation import DistillationConfig
from megarl.config.schema.jobs import (
    ACTOR,
    CRITIC,
    REFERENCE,
    TEACHERS,
    EvaluateConfig,
    GenerateConfig,
    GenerationJobConfig,
    JobConfig,
    JobT,
    PreferenceConfig,
    ScoredJobConfig,
    SupervisedConfig,
    TrainConfig,
)
from megarl.config.schema.model import LogProbBatchConfig, MegatronConfig, ModelPathConfig, OwnDevicesConfig
from megarl.config.schema.rewards import RewardConfig
from megarl.config.schema.roles import ActorConfig, CriticConfig
from megarl.config.schema.rollout import RolloutConfig, TrainingRolloutConfig
from megarl.config.schema.run import RunConfig

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
SIMPO_GAMMA = 0.5
"""Target margin of SimPO unless configured."""


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
    """Yield the paths of the sections that inherit the actor's, with those of all teachers but servers."""
    for path, item in walk(schema):
        if item.section is not None and item.inherits:
            yield path
        elif item.entry is not None:
            entries = lookup(values, path) or {}
            names = [name for name, entry in entries.items() if not lookup(entry, "server.urls")]
            yield from (f"{path}.{name}.{inner}" for name in names for inner in inheriting_sections(item.entry, {}))


def inherit(schema: type, values: Mapping[str, Any]) -> set[str]:
    """Complete the roles' Megatron sections by the actor's values, in place; return the inherited keys.

    Verl's keys are translated before. Without an actor, as in evaluation, unset keys have their defaults.
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
            names = _inherited_names(path, values, layout, actors) - layout.keys()
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
    plain = asdict(config)
    followed: dict[str, Any] = {}
    before = lookup(plain, ACTOR_MEGATRON)
    after = before | changed
    for path in inheriting_sections(TrainConfig, plain):
        if not isinstance(layout := lookup(plain, path), Mapping):
            continue
        named = {name: changes[f"{path}.{name}"] for name in layout if f"{path}.{name}" in changes}
        own = {name: value for name, value in layout.items() if value != before[name]} | named
        names = _inherited_names(path, plain, own, after) - own.keys()
        followed |= {f"{path}.{name}": after[name] for name in names if after[name] != layout[name]}
    return followed


def inheritance_note(config: object, text: str) -> str:
    """Return the end of a message that names a key as ``critic.megatron.<key>=8``, if the value is the actor's."""
    match = _ROLE_KEY.search(text)
    if match is None or match["section"] == ACTOR_MEGATRON or not isinstance(config, TrainConfig):
        return ""
    section, name = match["section"], match["name"]
    if name in NOT_INHERITED or value_at(config, f"{section}.{name}") != value_at(config, f"{ACTOR_MEGATRON}.{name}"):
        return ""
    return f". This is the value of {ACTOR_MEGATRON}.{name}; set {section}.{name} to give the role another"


def _inherited_names(
    path: str, values: Mapping[str, Any], layout: Mapping[str, Any], actors: Mapping[str, Any]
) -> set[str]:
    """Keys that the role at ``path`` would inherit if its layout sets none of them."""
    role, excluded = path.rpartition(".")[0], {*NOT_INHERITED}
    policy, critics = lookup(values, "actor_rollout_ref.model.path"), lookup(values, f"{CRITIC}.model.path")
    if role != REFERENCE and not (role == CRITIC and critics in (None, policy)):
        excluded |= {*MODEL_KEYS}
    if lookup(values, f"{TEACHERS if role.startswith(f'{TEACHERS}.') else role}.nnodes"):
        excluded |= {*OFFLOAD_KEYS}
    for name, dependents in DEPENDENT_KEYS.items():
        if layout.get(name, actors.get(name)) != actors.get(name):
            excluded |= {*dependents}
    return {item.name for item in keys_of(MegatronConfig)} & actors.keys() - excluded


_Value = TypeVar("_Value")
_GenerationJob = TypeVar("_GenerationJob", bound=GenerationJobConfig)
_Supervised = TypeVar("_Supervised", bound=SupervisedConfig)
_ModelPath = TypeVar("_ModelPath", bound=ModelPathConfig)
_OwnDevices = TypeVar("_OwnDevices", bound=OwnDevicesConfig)
_Reward = TypeVar("_Reward", bound=RewardConfig)
_LogProbKeys = TypeVar("_LogProbKeys", bound=LogProbBatchConfig)


def with_derived(config: JobT, files_root: str | None = None) -> JobT:
    """Return a copy of a configuration with the keys that follow others filled.

    A layout that does not divide the devices leaves its size None; the checks report it.

    Args:
        files_root: folder of files without an explicit path; None = ``outputs/<experiment_name>``.
    """
    root = files_root or f"outputs/{config.trainer.experiment_name}"
    if isinstance(config, TrainConfig):
        return cast(JobT, _train(_generation_job(config, config.trainer, root), root))
    if isinstance(config, EvaluateConfig | GenerateConfig):
        return cast(JobT, _generation_job(config, config.trainer, root))
    config = _supervised(config, root)
    return cast(JobT, _preference(config) if isinstance(config, PreferenceConfig) else config)


def _train(config: TrainConfig, root: str) -> TrainConfig:
    policy, trainer, data = config.actor_rollout_ref, config.trainer, config.data
    actor = _actor(policy.actor, data.max_response_length, trainer.num_devices)
    by_tokens = policy.actor.use_dynamic_bsz
    old_log_prob = _log_prob(policy.rollout.log_prob_batch, actor, by_tokens)
    ref = _with_devices(policy.ref, trainer)
    if ref.megatron is not None:
        ref = replace(ref, megatron=_layout(ref.megatron, ref.own_devices or trainer.num_devices, bool(ref.nnodes)))
    return replace(
        config,
        distillation=_distillation(config.distillation, actor, by_tokens, trainer),
        actor_rollout_ref=replace(
            policy,
            actor=actor,
            ref=_log_prob(ref, actor, by_tokens),
            rollout=replace(
                policy.rollout, **{f"log_prob_{key}": value for key, value in asdict(old_log_prob).items()}
            ),
        ),
        critic=_critic(config.critic, actor, policy.model, trainer),
        data=replace(
            data,
            seed=_first(data.seed, trainer.seed),
            gen_batch_size=_first(data.gen_batch_size, data.train_batch_size),
        ),
        trainer=replace(trainer, default_local_dir=_first(trainer.default_local_dir, f"{root}/checkpoints")),
    )


def _generation_job(config: _GenerationJob, trainer: RunConfig, root: str) -> _GenerationJob:
    policy = config.actor_rollout_ref
    rollout = _rollout(policy.rollout, trainer, root)
    config = replace(config, actor_rollout_ref=replace(policy, model=_model(policy.model), rollout=rollout))
    if isinstance(config, ScoredJobConfig):
        return replace(config, reward=_reward(config.reward, config.data, trainer))
    return config


def _supervised(config: _Supervised, root: str) -> _Supervised:
    data, trainer = config.data, config.trainer
    return replace(
        config,
        data=replace(data, seed=_first(data.seed, trainer.seed)),
        model=_model(config.model),
        megatron=_layout(config.megatron, trainer.num_devices),
        trainer=replace(
            trainer,
            hf_export_dir=_first(trainer.hf_export_dir, f"{root}/hf"),
            default_local_dir=_first(trainer.default_local_dir, f"{root}/checkpoints"),
        ),
    )


def _preference(config: PreferenceConfig) -> PreferenceConfig:
    loss = config.loss
    if loss.type == "simpo":
        loss = replace(loss, simpo_gamma=_first(loss.simpo_gamma, SIMPO_GAMMA))
    if not loss.uses_pairs:
        desirable, undesirable = _first(loss.desirable_weight, 1.0), _first(loss.undesirable_weight, 1.0)
        loss = replace(loss, desirable_weight=desirable, undesirable_weight=undesirable)
    return replace(config, loss=loss)


def _first(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


def _model(model: _ModelPath) -> _ModelPath:
    return replace(model, tokenizer_path=_first(model.tokenizer_path, model.path))


def _with_devices(keys: _OwnDevices, trainer: RunConfig) -> _OwnDevices:
    return replace(keys, n_gpus_per_node=_first(keys.n_gpus_per_node, trainer.n_gpus_per_node))


def _distillation(
    keys: DistillationConfig, actor: ActorConfig, actor_by_tokens: bool | None, trainer: RunConfig
) -> DistillationConfig:
    keys = _with_devices(keys, trainer)
    devices, alone = keys.own_devices or trainer.num_devices, keys.teacher_is_alone
    teachers = {
        name: _log_prob(replace(teacher, megatron=_layout(teacher.megatron, devices, alone)), actor, actor_by_tokens)
        if not teacher.server.urls
        else teacher
        for name, teacher in keys.teacher_models.items()
    }
    return replace(keys, teacher_models=teachers)


def _layout(megatron: MegatronConfig, devices: int, alone: bool = False) -> MegatronConfig:
    """Fill the layout of a role; alone on its devices, it keeps its weights there between phases."""
    if alone:
        megatron = replace(megatron, param_offload=False)
    replica = megatron.devices_per_replica
    if megatron.data_parallel_size is None and devices % replica == 0:
        return replace(megatron, data_parallel_size=devices // replica)
    return megatron


def _rollout(rollout: RolloutConfig, trainer: RunConfig, root: str) -> RolloutConfig:
    if isinstance(rollout, TrainingRolloutConfig):
        rollout = _with_devices(rollout, trainer)
        rollout = replace(rollout, free_cache_engine=rollout.free_cache_engine and not rollout.nnodes)
    devices = rollout.own_devices or trainer.num_devices
    per_replica, replicas = rollout.devices_per_replica, rollout.replicas
    if replicas is None and devices % per_replica == 0:
        replicas = len(rollout.server_urls) or devices // per_replica
    access_file = _first(rollout.endpoint.access_file, f"{root}/endpoint.json")
    return replace(
        rollout,
        replicas=replicas,
        seed=_first(rollout.seed, trainer.seed),
        endpoint=replace(rollout.endpoint, access_file=access_file),
    )


def _reward(keys: _Reward, data: PromptsConfig, trainer: RunConfig) -> _Reward:
    model = _with_devices(keys.model, trainer)
    model_alone = model.enable and not keys.custom_reward_function.path and not keys.functions
    model = replace(
        model,
        megatron=_layout(model.megatron, model.own_devices or trainer.num_devices, bool(model.nnodes)),
        max_length=_first(model.max_length, data.max_prompt_length + data.max_response_length),
    )
    return replace(keys, model=model, function_weight=_first(keys.function_weight, 0.0 if model_alone else 1.0))


def _actor(actor: ActorConfig, max_response_length: int, devices: int) -> ActorConfig:
    loss_mode = _absolute_spec(actor.policy_loss.loss_mode)
    return replace(
        actor,
        clip_ratio_low=_first(actor.clip_ratio_low, actor.clip_ratio),
        clip_ratio_high=_first(actor.clip_ratio_high, actor.clip_ratio),
        policy_loss=replace(actor.policy_loss, loss_mode=loss_mode),
        loss_agg_mode=_first(actor.loss_agg_mode, default_aggregation(loss_mode)),
        loss_scale_factor=_first(actor.loss_scale_factor, max_response_length),
        use_dynamic_bsz=_first(actor.use_dynamic_bsz, actor.micro_batch_size_per_gpu is None),
        megatron=_layout(actor.megatron, devices),
    )


def _absolute_spec(name: str) -> str:
    """A custom function with the absolute path of its file: workers have different working folders."""
    path, colon, function = name.rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{function}" if colon else name


def _log_prob(keys: _LogProbKeys, actor: ActorConfig, actor_by_tokens: bool | None) -> _LogProbKeys:
    """Micro-batches of a log-prob pass, as in the actor's update.

    If the user left the actor's ``use_dynamic_bsz`` auto (``actor_by_tokens``), a size in samples decides for the pass.
    """
    in_samples = keys.micro_batch_size_per_gpu is not None and actor_by_tokens is None
    by_tokens = _first(keys.use_dynamic_bsz, False if in_samples else bool(actor.use_dynamic_bsz))
    samples = keys.micro_batch_size_per_gpu
    if samples is None and not by_tokens:
        samples = actor.micro_batch_size_per_gpu
    return replace(
        keys,
        use_dynamic_bsz=by_tokens,
        max_token_len_per_gpu=_first(keys.max_token_len_per_gpu, actor.max_token_len_per_gpu),
        micro_batch_size_per_gpu=samples,
    )


def _critic(critic: CriticConfig, actor: ActorConfig, model: ModelPathConfig, trainer: RunConfig) -> CriticConfig:
    critic = _with_devices(critic, trainer)
    return replace(
        critic,
        model=replace(critic.model, path=_first(critic.model.path, model.path)),
        ppo_mini_batch_size=_first(critic.ppo_mini_batch_size, actor.ppo_mini_batch_size),
        ppo_epochs=_first(critic.ppo_epochs, actor.ppo_epochs),
        loss_agg_mode=_first(critic.loss_agg_mode, actor.loss_agg_mode),
        use_dynamic_bsz=_first(critic.use_dynamic_bsz, critic.micro_batch_size_per_gpu is None),
        megatron=_layout(critic.megatron, critic.own_devices or trainer.num_devices, bool(critic.nnodes)),
    )
