"""The planned job: model, devices and layout of each role, and its passes in every phase of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megarl.base.formatting import DTYPE_BYTES
from megarl.config import MegatronConfig, TrainConfig
from megarl.config.batch import BatchPlan
from megarl.config.schema.jobs import ROLLOUT, TEACHERS, SupervisedConfig
from megarl.config.schema.rollout import TrainingRolloutConfig
from megarl.models import ModelConfig, ParallelLayout
from megarl.models.adapters import LoraOptions
from megarl.sharding.placement import Slot

PHASES = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "teacher",
    "values",
    "update_critic",
    "update_actor",
    "update_weights",
)
"""Phases of a training step that use devices, by their timer names; supervised jobs have only ``update``."""


@dataclass(frozen=True)
class PlannedPass:
    """A forward pass or update that a role runs in one phase.

    Attributes:
        phase: one of :data:`PHASES`, or ``update`` in a supervised job.
        updates: whether the pass includes a backward pass and an optimizer step.
        tokens: maximum tokens of a micro-batch, over all context-parallel ranks.
        outputs: maximum response tokens of a micro-batch, each with logits or a value; for a reward model, sequences.
        micro_batches: maximum micro-batches of a mini-batch per data-parallel rank, padded for the pipeline.
        optimizer_steps: optimizer steps per training step; 0 for a pass without update.
        samples: samples that the role computes per training step, over all ranks and epochs.
        with_entropy: whether entropies are computed.
        full_kl: whether the exact KL to the reference or to a teacher, over the whole vocabulary, is computed.
        longest: maximum tokens of a sequence; 0 = same as ``tokens``.
        kl_hidden_bytes: bytes of the hidden states per response token from which the exact KL is computed.
        hidden_only: whether the pass returns final hidden states, without logits.
    """

    phase: str
    updates: bool
    tokens: int
    outputs: int
    micro_batches: int
    optimizer_steps: int
    samples: int
    with_entropy: bool = False
    full_kl: bool = False
    longest: int = 0
    kl_hidden_bytes: int = 0
    hidden_only: bool = False


@dataclass(frozen=True)
class PlannedRole:
    """A model and its Megatron layout.

    Attributes:
        name: ``actor``, ``critic``, ``reference``, ``reward_model``, ``teacher_<name>``, or the role of a supervised
            job.
        path: config key of the layout's section, such as ``critic.megatron``.
        model: shape of the model.
        layout: parallel sizes; rank ``r`` runs on device ``r`` of the role's pool.
        megatron: dtype, recomputation and offloading options.
        value_head: whether a scalar head replaces the output layer.
        trains: whether the role has gradients and an optimizer.
        passes: passes in the order of a training step.
        holds_reference: whether host memory keeps the reference weights, which are swapped into this role's model for
            phase ``ref``.
        holds_proximal: whether host memory keeps the weights of the last sync, which are swapped in for phase
            ``old_log_prob``.
        reference_head: whether the device keeps a copy of the reference's output layer, for the exact KL.
        teacher_heads: bytes per token of the vocabulary of all teachers' output layers. For the exact KL the device has
            its part of them, with ``param_offload`` in updates only; 0 without.
        saves_in_background: whether a save copies the state to host memory.
        lora: low-rank adapters, which alone are trained; None without adapters.
    """

    name: str
    path: str
    model: ModelConfig
    layout: ParallelLayout
    megatron: MegatronConfig
    value_head: bool
    trains: bool
    passes: tuple[PlannedPass, ...]
    holds_reference: bool = False
    holds_proximal: bool = False
    reference_head: bool = False
    teacher_heads: int = 0
    saves_in_background: bool = False
    lora: LoraOptions | None = None

    @property
    def dtype_bytes(self) -> int:
        """Bytes per element of weights and activations."""
        return DTYPE_BYTES[self.megatron.dtype]

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensor-parallel ranks split the activations between layers; always true for models with experts."""
        return self.layout.tp > 1 and (self.megatron.sequence_parallel or self.model.experts is not None)

    @property
    def section(self) -> str:
        """Config section of the role's devices."""
        return TEACHERS if self.path.startswith(f"{TEACHERS}.") else self.path.removesuffix(".megatron")

    def pass_of(self, phase: str) -> PlannedPass | None:
        """Return the role's pass in a phase, or None."""
        return next((planned for planned in self.passes if planned.phase == phase), None)


@dataclass(frozen=True)
class PlannedPool:
    """The devices of the trainer, or those of a role alone.

    Attributes:
        section: config section with its keys ``nnodes`` and ``n_gpus_per_node``.
        nodes: number of nodes.
        devices_per_node: devices on each of them.
        first: number of its first device in the job.
    """

    section: str
    nodes: int
    devices_per_node: int
    first: int = 0

    @property
    def numbers(self) -> range:
        """Numbers of its devices."""
        return range(self.first, self.first + self.nodes * self.devices_per_node)


@dataclass(frozen=True)
class PlannedRollout:
    """The replicas of the rollout engine.

    Attributes:
        model: the policy.
        config: engine, sampling and sizes.
        replicas: number of replicas; replica ``i`` starts at device ``i * tp`` of the engines' devices.
        tp: tensor-parallel size of a replica.
        longest: maximum tokens of a trajectory, prompt included.
        prompts: prompts per step, over all replicas.
        samples_per_prompt: trajectories per prompt, including baselines that are not trained on.
    """

    model: ModelConfig
    config: TrainingRolloutConfig
    replicas: int
    tp: int
    longest: int
    prompts: int
    samples_per_prompt: int

    @property
    def own_devices(self) -> int:
        """Devices of the engines alone; 0 = the engines run on the trainer's devices."""
        return self.config.own_devices

    @property
    def samples(self) -> int:
        """Trajectories per step, over all replicas."""
        return self.prompts * self.samples_per_prompt

    @property
    def dtype_bytes(self) -> int:
        """Bytes per element of the weights that the engine receives."""
        return DTYPE_BYTES[self.config.dtype]

    @property
    def holds_fp8(self) -> bool:
        """Whether the engine holds linear layers in FP8; the embedded engine holds rounded weights in its dtype."""
        return self.config.quantization is not None and self.config.name != "embedded"

    @property
    def is_external(self) -> bool:
        """Whether external servers generate, on devices outside the job."""
        return bool(self.config.server_urls)


@dataclass(frozen=True)
class PlannedJob:
    """A job with all of its roles.

    Attributes:
        roles: the models, each once.
        rollout: the engine; None in a supervised job.
        batches: batch sizes of a training step.
        nodes: number of nodes of the trainer.
        devices_per_node: devices of the trainer per node.
        device: ``cuda`` or ``cpu``; the caller resolves ``auto``.
        longest_prompt: maximum tokens of a prompt; 0 in a supervised job.
        longest_response: maximum tokens of a response; in a supervised job, of the whole sequence.
        bucket_bytes: maximum bytes that a process sends or receives at a time in a weight sync.
        config: the configuration of the job.
        own_pools: pools of roles with devices of their own, numbered after the trainer's devices.
    """

    roles: tuple[PlannedRole, ...]
    rollout: PlannedRollout | None
    batches: BatchPlan
    nodes: int
    devices_per_node: int
    device: str
    longest_prompt: int
    longest_response: int
    bucket_bytes: int
    config: TrainConfig | SupervisedConfig
    own_pools: tuple[PlannedPool, ...] = ()

    @cached_property
    def pools(self) -> tuple[PlannedPool, ...]:
        """All pools, the trainer's first."""
        return (PlannedPool("trainer", self.nodes, self.devices_per_node), *self.own_pools)

    def pool_of(self, section: str) -> PlannedPool:
        """Return the devices of a role by its config section."""
        return self._own.get(section, self.pools[0])

    @cached_property
    def _own(self) -> dict[str, PlannedPool]:
        return {pool.section: pool for pool in self.own_pools}

    def rank_on(self, role: PlannedRole, device: int) -> int | None:
        """Return the role's rank on a device, or None."""
        rank = device - self.pool_of(role.section).first
        return rank if 0 <= rank < role.layout.world_size else None

    @property
    def trainer_devices(self) -> int:
        """Number of devices of the trainer's pool."""
        return self.nodes * self.devices_per_node

    @property
    def devices(self) -> int:
        """Number of devices of all pools."""
        return sum(len(pool.numbers) for pool in self.pools)

    @property
    def engine_devices(self) -> range:
        """Numbers of the devices with an engine of the job."""
        if self.rollout is None or self.rollout.is_external:
            return range(0)
        first = self.pool_of(ROLLOUT).first
        return range(first, first + self.rollout.replicas * self.rollout.tp)

    @property
    def hybrid_devices(self) -> range:
        """Numbers of the trainer's devices with hybrid replicas, besides :attr:`engine_devices`."""
        count = self.config.hybrid_replicas if isinstance(self.config, TrainConfig) else 0
        return range(count * self.rollout.tp if self.rollout else 0)

    @property
    def engine_devices_per_node(self) -> int:
        """Devices of the engines per node."""
        return self.pool_of(ROLLOUT).devices_per_node

    def slot(self, device: int, node_size: int) -> Slot:
        """Return the node of a device, and its place there.

        Pools of one node each share it if it has enough devices.

        Args:
            device: number of the device.
            node_size: devices of a node of the hardware.
        """
        if self.nodes == 1 and self.devices <= node_size:
            return Slot(0, device)
        nodes = 0
        for pool in self.pools:
            if device in pool.numbers:
                node, place = divmod(device - pool.first, pool.devices_per_node)
                return Slot(nodes + node, place)
            nodes += pool.nodes
        raise IndexError(f"the job has no device {device}")

    @property
    def longest(self) -> int:
        """Maximum tokens of a sequence."""
        return self.longest_prompt + self.longest_response

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """Phases of the job, in the order of a training step."""
        if self.rollout is None:
            return tuple(planned.phase for planned in self.roles[0].passes)
        role_phases = {planned.phase for role in self.roles for planned in role.passes}
        return tuple(phase for phase in PHASES if phase in role_phases or phase in ("gen", "update_weights"))

    def role(self, name: str) -> PlannedRole:
        """Return a role by name.

        Raises:
            KeyError: the job has no role of that name.
        """
        return {role.name: role for role in self.roles}[name]
