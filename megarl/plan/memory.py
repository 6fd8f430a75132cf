"""Bytes on the devices in each phase of a training step, in the memory of the nodes, and room for keys and values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megarl.plan.job import PlannedJob, PlannedRole
from megarl.plan.kv_room import KVRoom, kv_room
from megarl.plan.passes import PassActivations, padded_vocab, pass_activations
from megarl.plan.states import RankStates, StateCounter, rollout_weight_bytes

HOST_CHUNK = 2**28
"""Bytes of the pieces in which host memory is taken for what leaves a device."""


class Component(NamedTuple):
    """Something that takes memory.

    Attributes:
        owner: a role, or ``rollout``, or ``sync``.
        name: ``weights``, ``gradients``, ``optimizer``, ``activations`` (kept for the backward), ``logits`` or
            ``working`` (whichever the fullest moment has), ``kv_cache``, ``buckets``, ``reference head``; in host
            memory also ``reference copy`` and ``swapped weights``.
        nbytes: how much.
    """

    owner: str
    name: str
    nbytes: int


@dataclass(frozen=True)
class StageMemory:
    """A role's model on the ranks of one pipeline stage.

    Attributes:
        stage: which.
        rank: the one of its ranks that has most.
        layers: global numbers of its decoder layers.
        states: of that rank.
        activations: by the phase that the role computes in.
    """

    stage: int
    rank: int
    layers: tuple[int, ...]
    states: RankStates
    activations: Mapping[str, PassActivations]


@dataclass(frozen=True)
class RoleMemory:
    """A role's model, stage by stage."""

    role: PlannedRole
    stages: tuple[StageMemory, ...]

    @property
    def largest(self) -> StageMemory:
        """The stage whose ranks have the largest states."""
        return max(self.stages, key=lambda stage: stage.states.total)


@dataclass(frozen=True)
class PhaseMemory:
    """The fullest device in a phase.

    Attributes:
        phase: which.
        device: its number.
        components: what is on it, the largest first; nothing of it is away in host memory.
    """

    phase: str
    device: int
    components: tuple[Component, ...]

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(component.nbytes for component in self.components)

    @property
    def dominant(self) -> Component:
        """What takes most."""
        return self.components[0]


@dataclass(frozen=True)
class MemoryPlan:
    """What a job needs.

    Attributes:
        roles: by the role's name.
        phases: the fullest device of each phase, in the order of a training step.
        host: what the fullest node keeps in its own memory, the largest first; on a CPU the devices' bytes besides.
        kv: room for keys and values of one rollout replica; None without a rollout, or where it is elsewhere.
    """

    roles: Mapping[str, RoleMemory]
    phases: tuple[PhaseMemory, ...]
    host: tuple[Component, ...]
    kv: KVRoom | None

    @property
    def peak(self) -> PhaseMemory:
        """The phase in which a device holds most."""
        return max(self.phases, key=lambda phase: phase.nbytes)

    @property
    def host_bytes(self) -> int:
        """Of the fullest node."""
        return sum(component.nbytes for component in self.host)


def plan_memory(job: PlannedJob, device_bytes: int | None = None) -> MemoryPlan:
    """Works out what a job needs.

    Activations are those of the largest micro-batches that the configuration allows; states are exact.

    Args:
        job: the job.
        device_bytes: memory of one device, of which the rollout engine takes a share for its cache; None = not known:
            the cache is then counted where the configuration says its size, and else as nothing.
    """
    roles = {role.name: _role_memory(job, role) for role in job.roles}
    devices = _Devices(job, roles, device_bytes)
    phases = tuple(devices.fullest(phase) for phase in job.phases)
    return MemoryPlan(roles, phases, _host(job, roles), devices.kv)


def _role_memory(job: PlannedJob, role: PlannedRole) -> RoleMemory:
    counter, layout = StateCounter(role), role.layout
    stages = []
    for stage in range(layout.pp):
        rank = layout.rank(pp=stage)
        activations = {one.phase: pass_activations(job, role, one, stage) for one in role.passes}
        layers = tuple(layout.stage_layers(role.model.num_layers, stage))
        stages.append(StageMemory(stage, rank, layers, counter.of(rank), activations))
    return RoleMemory(role, tuple(stages))


class _Devices:
    """What is on each device, phase by phase."""

    def __init__(self, job: PlannedJob, roles: Mapping[str, RoleMemory], device_bytes: int | None) -> None:
        self.job, self.roles = job, roles
        self.kv: KVRoom | None = None
        self._engine = 0
        rollout = job.rollout
        if rollout is not None and not rollout.is_elsewhere:
            self._engine = rollout_weight_bytes(rollout.model, rollout.tp, 0, rollout.config.dtype)
            beside = max(sum(c.nbytes for c in self._of_roles("gen", device)) for device in range(job.devices))
            self.kv = kv_room(rollout, self._engine, beside, device_bytes, job.device)

    def fullest(self, phase: str) -> PhaseMemory:
        """The device that holds most in a phase."""
        found: dict[tuple[int, ...], PhaseMemory] = {}
        for device in range(self.job.devices):
            key = self._kind(device)
            if key not in found:
                parts = [part for part in self._on(phase, device) if part.nbytes]
                parts.sort(key=lambda part: -part.nbytes)
                found[key] = PhaseMemory(phase, device, tuple(parts) or (Component("", "nothing", 0),))
        return max(found.values(), key=lambda one: one.nbytes)

    def _kind(self, device: int) -> tuple[int, ...]:
        """Devices of one kind hold the same: the stages of all roles that live there, and whether an engine does."""
        stages = [
            role.layout.coordinate(rank).pp if rank is not None else -1
            for role in self.job.roles
            for rank in [_rank_on(role, device)]
        ]
        return (*stages, int(self._has_engine(device)))

    def _on(self, phase: str, device: int) -> Iterator[Component]:
        yield from self._of_roles(phase, device)
        if self._has_engine(device):
            yield from self._of_engine(phase)
        if phase == "update_weights" and self.job.rollout is not None:
            # Each side holds two buckets at most, and both sides may be on one device.
            sides = int(_rank_on(self.job.role("actor"), device) is not None) + int(self._has_engine(device))
            largest = max(stage.states.weights for stage in self.roles["actor"].stages)
            yield Component("sync", "buckets", sides * min(2 * self.job.bucket_bytes, largest))

    def _of_roles(self, phase: str, device: int) -> Iterator[Component]:
        for memory in self.roles.values():
            rank = _rank_on(memory.role, device)
            if rank is not None:
                stage = memory.stages[memory.role.layout.coordinate(rank).pp]
                yield from _of_stage(memory.role, stage, phase)

    def _of_engine(self, phase: str) -> Iterator[Component]:
        rollout = self.job.rollout
        assert rollout is not None
        stays = not rollout.config.free_cache_engine
        if phase in ("gen", "update_weights") or stays:
            yield Component("rollout", "weights", self._engine)
        if self.kv is not None and (phase == "gen" or stays):
            yield Component("rollout", "kv_cache", self.kv.nbytes)

    def _has_engine(self, device: int) -> bool:
        rollout = self.job.rollout
        return rollout is not None and not rollout.is_elsewhere and device < rollout.replicas * rollout.tp


def _rank_on(role: PlannedRole, device: int) -> int | None:
    """The role's rank on a device; None if it has none there."""
    return device if device < role.layout.world_size else None


def _of_stage(role: PlannedRole, stage: StageMemory, phase: str) -> Iterator[Component]:
    """What a role has on a device in a phase: its own work, or what does not leave between its phases."""
    megatron, states = role.megatron, stage.states
    one = role.pass_of(phase)
    sends = role.name == "actor" and phase == "update_weights"
    updates = one is not None and one.updates
    if one is not None or sends or not megatron.param_offload:
        yield Component(role.name, "weights", states.weights)
    kept = stage.activations[phase] if one is not None else None
    # An optimizer that comes for one step only comes when activations are gone.
    apart = one is not None and megatron.optimizer_offload and one.optimizer_steps == 1
    steps = updates and not (apart and kept is not None and kept.total > states.optimizer)
    if role.trains:
        if updates or not megatron.grad_offload:
            yield Component(role.name, "gradients", states.gradients)
        if steps or not megatron.optimizer_offload:
            yield Component(role.name, "optimizer", states.optimizer)
    if role.reference_head and stage.stage == role.layout.pp - 1:
        head = padded_vocab(role) // role.layout.tp * role.model.hidden_size * role.dtype_bytes
        yield Component(role.name, "reference head", head)
    if kept is not None and not (apart and steps):
        if kept.at_logits:
            yield Component(role.name, "activations", kept.layers + kept.ends)
            yield Component(role.name, "logits", kept.logits)
        else:
            yield Component(role.name, "activations", kept.layers + kept.again)
            yield Component(role.name, "working", kept.working)


def _host(job: PlannedJob, roles: Mapping[str, RoleMemory]) -> tuple[Component, ...]:
    """What the fullest node keeps in host memory: what is offloaded, and the reference's weights twice over.

    While the reference computes, its weights and the actor's own, swapped out, are both there.
    """
    nodes = []
    for node in range(job.nodes):
        totals: dict[tuple[str, str], int] = defaultdict(int)
        for device in range(node * job.devices_per_node, (node + 1) * job.devices_per_node):
            for memory in roles.values():
                role, rank = memory.role, _rank_on(memory.role, device)
                if rank is None:
                    continue
                states = memory.stages[role.layout.coordinate(rank).pp].states
                if role.megatron.param_offload:
                    totals[role.name, "weights"] += _in_chunks(states.weights)
                if role.megatron.optimizer_offload:
                    totals[role.name, "optimizer"] += _in_chunks(states.optimizer)
                if role.holds_reference:
                    totals[role.name, "reference copy"] += states.parameters * role.dtype_bytes
                    totals[role.name, "swapped weights"] += states.parameters * role.dtype_bytes
        parts = [Component(owner, name, size) for (owner, name), size in totals.items()]
        nodes.append(tuple(sorted(parts, key=lambda part: -part.nbytes)))
    return max(nodes, key=lambda parts: sum(part.nbytes for part in parts))


def _in_chunks(size: int) -> int:
    """Host memory for so many bytes that leave a device: it is taken in pieces."""
    return -(-size // HOST_CHUNK) * HOST_CHUNK
