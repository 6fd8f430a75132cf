"""Parallel layouts that model and devices allow, without regard to memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megarl.base.errors import MegarlError
from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.schema.jobs import ROLLOUT, own_pools
from megarl.models import ModelConfig
from megarl.ops.plan.estimate import changed
from megarl.ops.plan.flops import optimized_elements, rank_elements
from megarl.ops.plan.hardware import Hardware
from megarl.ops.plan.job import PlannedJob, PlannedRole, planned_job
from megarl.ops.plan.pass_activations import pass_activations
from megarl.ops.plan.states import FLOAT32, MOMENTS

Config = TrainConfig | SupervisedConfig
Changes = Mapping[str, Any]

MIN_CONTEXT = 1024  # minimum tokens of the longest sequence per context-parallel rank
TP, PP, CP = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context"))
EP = "expert_model_parallel_size"
STAGES = {
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Keys that divide the layers into stages, with the values of an even split."""
_WITHOUT_OTHER_SPLITS = {
    CP: 1,
    EP: 1,
    "expert_tensor_parallel_size": None,
    "data_parallel_size": None,
    **STAGES,
}


def initial_changes(
    config: Config, hardware: Hardware, fixed: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return changes that make an invalid layout valid, the same sizes for each trained role; empty if it is valid.

    Each role is evaluated with the others' initial layouts, which therefore have to be valid. ``fixed`` values stay.

    Raises:
        ConfigError, ModelError: no such sizes exist; the error is that of the unchanged configuration.
    """
    own_error: MegarlError | None = None
    for sizes in ({}, *_uniform_layouts(config)):
        changes = {**sizes, **fixed}
        try:
            planned_job(changed(config, changes), device=hardware.device)
            return changes
        except MegarlError as error:
            own_error = own_error or error
    assert own_error is not None
    raise own_error


def _uniform_layouts(config: Config) -> Iterator[dict[str, Any]]:
    """Yield sizes for all trained roles alike, and for the rollout, that divide the devices; the smallest first."""
    trainer, rollout = config.trainer, isinstance(config, TrainConfig)
    sections = ["actor_rollout_ref.actor.megatron", "critic.megatron"] if rollout else ["megatron"]
    devices = trainer.num_devices
    for replica in powers(trainer.n_gpus_per_node if rollout else 1):
        engine = {f"{ROLLOUT}.tensor_model_parallel_size": replica, f"{ROLLOUT}.replicas": None} if rollout else {}
        for pp in (pp for pp in range(1, devices + 1) if devices % pp == 0):
            for tp in (tp for tp in powers(trainer.n_gpus_per_node) if devices // pp % tp == 0):
                sizes = {TP: tp, PP: pp, **_WITHOUT_OTHER_SPLITS}
                yield engine | {f"{section}.{key}": value for section in sections for key, value in sizes.items()}


def devices_of(config: Config, role: PlannedRole) -> tuple[int, int]:
    """Return the number of devices of a role's pool, in total and per node."""
    own = own_pools(config).get(role.section)
    per_node = (own.n_gpus_per_node if own else None) or config.trainer.n_gpus_per_node
    return own.own_devices if own else config.trainer.num_devices, per_node


def layouts(
    role: PlannedRole,
    devices: int,
    per_node: int,
    longest: int,
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[dict[str, Any]]:
    """Yield parallel sizes of a role that divide model and devices; tensor parallelism stays inside a node.

    Args:
        devices: of the role's pool, ``per_node`` on each node.
        longest: tokens of the longest sequence.
        fixed: sizes that stay, by key of the role's layout.
    """
    model = role.model
    for tp in _sizes(fixed, TP, powers(min(per_node, devices))):
        if model.num_key_value_heads % tp:
            continue  # rejected by the checks, independent of the other sizes
        for pp in _sizes(fixed, PP, range(1, min(devices // tp, model.num_layers) + 1)):
            if devices % (tp * pp):
                continue
            for cp in _sizes(fixed, CP, powers(min(devices // (tp * pp), max(1, longest // MIN_CONTEXT)))):
                if devices % (tp * pp * cp):
                    continue
                sizes = {TP: tp, PP: pp, CP: cp}
                for stages in [{}] if fixed.keys() & STAGES.keys() else _stages(model.num_layers, pp):
                    for experts in _experts(model, devices // pp, fixed):
                        all_sizes = {**sizes, **stages, **experts, **fixed}
                        yield {f"{role.path}.{key}": value for key, value in all_sizes.items()}


def _sizes(fixed: Mapping[str, Any], key: str, sizes: Iterable[int]) -> Iterable[int]:
    return [fixed[key]] if key in fixed else sizes


def least_bytes(job: PlannedJob, role: PlannedRole) -> float:
    """Return the minimum bytes of a rank in the role's update, without other roles.

    An offloaded optimizer may return to the device after the activations are freed. Gradients and optimizer of adapters
    are small, and not counted.
    """
    largest = 0.0
    for stage in {0, role.layout.pp - 1}:
        elements = rank_elements(role, stage)
        main = 0 if role.megatron.dtype == "float32" else FLOAT32
        optimizer = optimized_elements(role, elements) * (main + MOMENTS * FLOAT32)
        updates = [pass_activations(job, role, planned, stage) for planned in role.passes if planned.updates]
        saved = max((activations.layers + activations.ends for activations in updates), default=0)
        peak = max(optimizer, saved) if role.megatron.optimizer_offload else optimizer + saved
        if role.lora is None:
            largest = max(largest, elements.total * (role.dtype_bytes + FLOAT32) + peak)
        else:
            largest = max(largest, elements.total * role.dtype_bytes + saved)
    return largest


def _stages(layers: int, pp: int) -> Iterator[dict[str, Any]]:
    """Yield the split of the layers into stages, if any; the last stage may be shorter."""
    last = layers - -(-layers // pp) * (pp - 1) if layers % pp else None
    if last is None or last > 0:
        yield {
            "num_layers_in_first_pipeline_stage": None,
            "virtual_pipeline_model_parallel_size": None,
            "num_layers_in_last_pipeline_stage": last,
        }


def _experts(model: ModelConfig, ranks: int, fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the expert-parallel sizes; each expert stays whole on its rank."""
    if model.experts is None:
        yield {}
        return
    for ep in _sizes(fixed, EP, powers(min(model.experts.count, ranks))):
        if model.experts.count % ep == 0 and ranks % ep == 0:
            yield {EP: ep, "expert_tensor_parallel_size": 1}


def powers(most: int) -> Iterator[int]:
    """Yield the powers of two up to a number."""
    size = 1
    while size <= most:
        yield size
        size *= 2


def longest_sequence(config: Config) -> int:
    """Return the maximum tokens of a sequence."""
    if isinstance(config, SupervisedConfig):
        return config.data.max_length
    return config.data.max_prompt_length + config.data.max_response_length
