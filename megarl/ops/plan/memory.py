"""Memory plan: bytes on the devices in each phase of a training step, and in host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megarl.config import TrainConfig
from megarl.config.schema.jobs import ACTOR, ROLLOUT
from megarl.ops.plan.generation import KVCacheCapacity, kv_cache_capacity
from megarl.ops.plan.job import PlannedJob, PlannedRole, PlannedRollout
from megarl.ops.plan.pass_activations import PassActivations, padded_vocab, pass_activations
from megarl.ops.plan.states import RankStates, StateCounter, rollout_weight_bytes, tower_bytes
from megarl.workers.settings import needed_store_bytes

HOST_CHUNK = 2**28  # chunk size, in bytes, in which host memory is allocated for offloaded states

INCOMPLETE_BUCKETS = 3
"""Buckets of weights that wait in a rank for the rest of their matrices, which it then quantizes; an upper bound for
published models, whose matrices fill at most one bucket of 256 MiB."""


class Component(NamedTuple):
    """One use of memory, in bytes.

    The owner is a role, ``rollout`` or ``sync``. Names are ``weights``, ``gradients``, ``optimizer``, ``activations``
    (saved for the backward), ``logits`` or ``working`` (whichever is larger at the peak), ``kv_cache``, ``buckets``,
    ``matrices before FP8``, ``reference head``, ``teacher heads``, ``vision tower``; in host memory also ``reference
    copy``, ``proximal copy``, ``swapped weights`` and ``image features``.
    """

    owner: str
    name: str
    nbytes: int


@dataclass(frozen=True)
class StageMemory:
    """A role's model on the ranks of one pipeline stage."""

    stage: int
    rank: int  # the rank of the stage with the most memory
    layers: tuple[int, ...]  # global numbers of its decoder layers
    states: RankStates  # weights, gradients and optimizer state of that rank
    activations: Mapping[str, PassActivations]  # activations by phase


@dataclass(frozen=True)
class RoleMemory:
    """A role's model, stage by stage."""

    role: PlannedRole
    stages: tuple[StageMemory, ...]

    @property
    def largest(self) -> StageMemory:
        """The stage with the largest states."""
        return max(self.stages, key=lambda stage: stage.states.total)


@dataclass(frozen=True)
class PhaseMemory:
    """The device with the highest memory use in a phase."""

    phase: str
    device: int  # number of the device
    components: tuple[Component, ...]  # memory on the device, the largest first, without offloaded states

    @property
    def nbytes(self) -> int:
        """Sum of all components."""
        return sum(component.nbytes for component in self.components)

    @property
    def dominant(self) -> Component:
        """The largest component."""
        return self.components[0]


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a job."""

    roles: Mapping[str, RoleMemory]  # memory of each role, by name
    phases: tuple[PhaseMemory, ...]  # the fullest device of each phase, in the order of a training step
    host: tuple[Component, ...]  # of the fullest node, the largest first; on a CPU without device bytes
    kv: KVCacheCapacity | None  # KV cache of one rollout replica; None without a rollout or with an external one

    @property
    def host_bytes(self) -> int:
        """Host memory of the fullest node."""
        return sum(component.nbytes for component in self.host)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint: weights and optimizer states of all trained roles."""
        trained = (memory for memory in self.roles.values() if memory.role.trains)
        return sum(
            memory.role.layout.ranks_per_stage * sum(_share_of_save(memory.role, stage.states))
            for memory in trained
            for stage in memory.stages
        )


def plan_memory(job: PlannedJob, device_bytes: int | None = None, node_size: int = 0) -> MemoryPlan:
    """Plan the memory of a job.

    Activations are those of the largest micro-batches that the configuration allows; states are exact.

    Args:
        device_bytes: memory of one device, which sizes the rollout engine's KV cache; None = unknown: the KV cache then
            has the size given in the configuration, or 0.
        node_size: devices of a node, which several pools may share; 0 = each pool has nodes of its own.
    """
    roles = {role.name: _role_memory(job, role) for role in job.roles}
    devices = _Devices(job, roles, device_bytes)
    phases = tuple(devices.fullest(phase) for phase in job.phases)
    return MemoryPlan(roles, phases, _host(job, roles, node_size), devices.kv)


def _role_memory(job: PlannedJob, role: PlannedRole) -> RoleMemory:
    counter, layout = StateCounter(role), role.layout
    stages = []
    for stage in range(layout.pp):
        rank = layout.rank(pp=stage)
        activations = {planned.phase: pass_activations(job, role, planned, stage) for planned in role.passes}
        layers = tuple(layout.stage_layers(role.model.num_layers, stage))
        stages.append(StageMemory(stage, rank, layers, counter.of(rank), activations))
    return RoleMemory(role, tuple(stages))


class _Devices:
    """Memory of each device, phase by phase."""

    def __init__(self, job: PlannedJob, roles: Mapping[str, RoleMemory], device_bytes: int | None) -> None:
        self.job, self.roles = job, roles
        self.kv: KVCacheCapacity | None = None
        self._hybrid_kv: KVCacheCapacity | None = None
        self._engine = 0
        rollout = job.rollout
        if rollout is not None and not rollout.is_external:
            sizes = (rollout.model, rollout.tp, 0, rollout.config.dtype)
            self._engine = rollout_weight_bytes(*sizes, fp8=rollout.holds_fp8)
            self.kv = self._kv_cache(rollout, job.engine_devices, device_bytes)
            if job.hybrid_devices:
                shared = replace(rollout, config=replace(rollout.config, nnodes=0, free_cache_engine=True))
                self._hybrid_kv = self._kv_cache(shared, job.hybrid_devices, device_bytes)

    def _kv_cache(
        self, rollout: PlannedRollout, devices: Iterable[int], device_bytes: int | None
    ) -> KVCacheCapacity | None:
        """Return the KV cache of a replica on some of these devices, next to the other roles."""
        other_roles = max(sum(c.nbytes for c in self._role_components("gen", device)) for device in devices)
        return kv_cache_capacity(rollout, self._engine, other_roles, device_bytes, self.job.device)

    def fullest(self, phase: str) -> PhaseMemory:
        """Return the device with the highest memory use in a phase, among the devices that take part in it."""
        by_kind: dict[tuple[int, ...], PhaseMemory] = {}
        for device in self._devices_of(phase):
            key = self._kind(device)
            if key not in by_kind:
                parts = [part for part in self._on(phase, device) if part.nbytes]
                parts.sort(key=lambda part: -part.nbytes)
                by_kind[key] = PhaseMemory(phase, device, tuple(parts) or (Component("", "nothing", 0),))
        return max(by_kind.values(), key=lambda memory: memory.nbytes)

    def _devices_of(self, phase: str) -> Iterator[int]:
        """Yield the devices that take part in a phase; the others hold no more than in their own phases."""
        job = self.job
        sections = {role.section for role in job.roles if role.pass_of(phase) is not None}
        if phase in ("gen", "update_weights"):
            sections.add(ROLLOUT)
        if phase == "update_weights" or (phase == "gen" and job.hybrid_devices):
            sections.add(ACTOR)
        for pool in job.pools:
            if any(job.pool_of(section) == pool for section in sections):
                yield from pool.numbers

    def _kind(self, device: int) -> tuple[int, ...]:
        """Return the stages of all roles on a device and whether it has an engine.

        Devices of equal kind hold the same memory.
        """
        stages = [
            role.layout.coordinate(rank).pp if rank is not None else -1
            for role in self.job.roles
            for rank in [self.job.rank_on(role, device)]
        ]
        return (*stages, int(self._has_engine(device)))

    def _on(self, phase: str, device: int) -> Iterator[Component]:
        yield from self._role_components(phase, device)
        if self._has_engine(device):
            yield from self._engine_components(phase, device)
        rollout = self.job.rollout
        if phase == "update_weights" and rollout is not None:
            # A sender has two buffers, a receiver at most one; both may be on one device.
            bucket = self.job.bucket_bytes
            largest = max(stage.states.weights for stage in self.roles["actor"].stages)
            sent = min(2 * bucket, largest) if self.job.rank_on(self.job.role("actor"), device) is not None else 0
            received = min(bucket, self._engine) if self._has_engine(device) else 0
            yield Component("sync", "buckets", sent + received)
            if self._has_engine(device) and rollout.holds_fp8:
                yield Component("sync", "matrices before FP8", min(INCOMPLETE_BUCKETS * bucket, 2 * self._engine))

    def _role_components(self, phase: str, device: int) -> Iterator[Component]:
        for memory in self.roles.values():
            rank = self.job.rank_on(memory.role, device)
            if rank is not None:
                stage = memory.stages[memory.role.layout.coordinate(rank).pp]
                yield from _stage_components(memory.role, stage, phase)

    def _engine_components(self, phase: str, device: int) -> Iterator[Component]:
        rollout = self.job.rollout
        assert rollout is not None
        is_hybrid = device in self.job.hybrid_devices
        stays = not is_hybrid and (bool(rollout.own_devices) or not rollout.config.free_cache_engine)
        kv = self._hybrid_kv if is_hybrid else self.kv
        if phase in ("gen", "update_weights") or stays:
            yield Component("rollout", "weights", self._engine)
        if kv is not None and (phase == "gen" or stays):
            yield Component("rollout", "kv_cache", kv.nbytes)

    def _has_engine(self, device: int) -> bool:
        return device in self.job.engine_devices or device in self.job.hybrid_devices


def _stage_components(role: PlannedRole, stage: StageMemory, phase: str) -> Iterator[Component]:
    """Yield the memory of a role on a device in a phase: its pass, and states that are not offloaded."""
    megatron, states = role.megatron, stage.states
    planned = role.pass_of(phase)
    sends = role.name == "actor" and phase == "update_weights"
    updates = planned is not None and planned.updates
    if planned is not None or sends or not megatron.param_offload:
        yield Component(role.name, "weights", states.weights)
        if stage.stage == 0 and not role.trains_tower:
            yield Component(role.name, "vision tower", tower_bytes(role.model, role.dtype_bytes))
    activations = stage.activations[phase] if planned is not None else None
    # The optimizer of a single step is onloaded after the activations are freed.
    single_step = planned is not None and megatron.optimizer_offload and planned.optimizer_steps == 1
    steps = updates and not (single_step and activations is not None and activations.total > states.optimizer)
    if role.trains:
        if updates or not megatron.grad_offload:
            yield Component(role.name, "gradients", states.gradients)
        if steps or not megatron.optimizer_offload:
            yield Component(role.name, "optimizer", states.optimizer)
    if role.reference_head and stage.stage == role.layout.pp - 1:
        head = padded_vocab(role) // role.layout.tp * role.model.hidden_size * role.dtype_bytes
        yield Component(role.name, "reference head", head)
    if stage.stage == role.layout.pp - 1 and (updates or not megatron.param_offload):
        yield Component(role.name, "teacher heads", teacher_head_bytes(role))
    if activations is not None and not (single_step and steps):
        if activations.at_logits:
            yield Component(role.name, "activations", activations.layers + activations.ends)
            yield Component(role.name, "logits", activations.logits)
        else:
            yield Component(role.name, "activations", activations.layers + activations.recomputed)
            yield Component(role.name, "working", activations.working)


def teacher_head_bytes(role: PlannedRole) -> int:
    """Return the bytes of the teachers' output layers on a rank of the last stage."""
    return padded_vocab(role) // role.layout.tp * role.teacher_heads if role.teacher_heads else 0


def _host(job: PlannedJob, roles: Mapping[str, RoleMemory], node_size: int) -> tuple[Component, ...]:
    """Return the host memory of the fullest node: offloaded states, reference weights, saves, routes, tokens.

    While the reference computes, host memory also holds the actor's weights, as an offload does.
    """
    nodes, devices = [], defaultdict(list)
    for device in range(job.devices):
        devices[job.slot(device, node_size).node].append(device)
    for node, on_node in devices.items():
        totals: dict[tuple[str, str], int] = defaultdict(int)
        if node == 0 and isinstance(job.config, TrainConfig):
            totals["driver", "token columns"] = needed_store_bytes(job.config)
        for device in on_node:
            for memory in roles.values():
                role, rank = memory.role, job.rank_on(memory.role, device)
                if rank is None:
                    continue
                stage = role.layout.coordinate(rank).pp
                states = memory.stages[stage].states
                if role.teacher_heads and role.megatron.param_offload and stage == role.layout.pp - 1:
                    totals[role.name, "teacher heads"] += teacher_head_bytes(role)
                if role.name == "actor" and (routes := _routes(job, role)):
                    totals[role.name, "routes"] += routes
                if stage == 0 and (features := _image_features(job, role)):
                    totals[role.name, "image features"] += features
                if role.megatron.param_offload:
                    totals[role.name, "weights"] += _in_chunks(states.weights)
                if role.megatron.optimizer_offload:
                    totals[role.name, "optimizer"] += _in_chunks(states.optimizer)
                if role.holds_reference:
                    totals[role.name, "reference copy"] += _in_chunks(states.weights)
                if role.holds_proximal:
                    totals[role.name, "proximal copy"] += _in_chunks(states.weights)
                if (role.holds_reference or role.holds_proximal) and not role.megatron.param_offload:
                    totals[role.name, "swapped weights"] += _in_chunks(states.weights)
                weights, optimizer = _share_of_save(role, states)  # a background save copies what is on the device
                copied = weights * (not role.megatron.param_offload) + optimizer * (not role.megatron.optimizer_offload)
                if role.saves_in_background and copied:
                    totals[role.name, "checkpoint copy"] += _in_chunks(copied)
        parts = [Component(owner, name, size) for (owner, name), size in totals.items()]
        nodes.append(tuple(sorted(parts, key=lambda part: -part.nbytes)))
    return max(nodes, key=lambda parts: sum(part.nbytes for part in parts))


def _image_features(job: PlannedJob, role: PlannedRole) -> int:
    """Return the bytes of the image features of a step on a rank, if images fill its prompts."""
    if role.model.vision is None or job.rollout is None:
        return 0
    tokens = -(-job.rollout.prompts // role.layout.dp) * job.longest_prompt
    return tokens * (1 + role.model.vision.deepstack) * role.model.hidden_size * role.dtype_bytes


def _routes(job: PlannedJob, role: PlannedRole) -> int:
    """Return the bytes of the experts that a rank's update replays: two per token, expert layer and selected expert.

    All ranks of a data-parallel rank have its samples, padded to the longest.
    """
    config, rollout, experts = job.config, job.rollout, role.model.experts
    if not isinstance(config, TrainConfig) or rollout is None or experts is None:
        return 0
    if not config.actor_rollout_ref.actor.router_replay.enable:
        return 0
    return 2 * sum(experts.layers) * experts.per_token * rollout.longest * rollout.samples // role.layout.dp


def _share_of_save(role: PlannedRole, states: RankStates) -> tuple[int, int]:
    """Return the bytes of weights and of optimizer state that a rank writes to a checkpoint."""
    replicas = role.layout.dp * role.layout.cp  # they share the weights to write
    optimizer = states.optimizer // (1 if role.megatron.use_distributed_optimizer else replicas)
    return (states.weights - states.frozen) // replicas, optimizer


def _in_chunks(size: int) -> int:
    return -(-size // HOST_CHUNK) * HOST_CHUNK
