"""The planned job: model, devices and layout of each role, and its passes in every phase of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megarl.base.formatting import DTYPE_BYTES
from megarl.config import MegatronConfig, TrainConfig
from megarl.config.batch import BatchPlan, MicroBatches
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

_BATCHES = {"old_log_prob": "old_log_prob", "ref": "ref_log_prob"}
"""Passes whose batches are not those of their role, by phase, with their names in the batch plan."""


@dataclass(frozen=True)
class PlannedPass:
    """A forward pass or update that a role runs in one phase."""

    phase: str  # one of `PHASES`, or update in a supervised job
    updates: bool  # includes a backward pass and an optimizer step
    tokens: int  # maximum tokens of a micro-batch, over all context-parallel ranks
    outputs: int  # maximum response tokens of a micro-batch, each with logits or a value; for a reward model, sequences
    micro_batches: int  # maximum micro-batches of a mini-batch per data-parallel rank, padded for the pipeline
    optimizer_steps: int  # optimizer steps per training step; 0 for a pass without update
    samples: int  # samples that the role computes per training step, over all ranks and epochs
    with_entropy: bool = False
    full_kl: bool = False  # computes the exact KL to reference or teacher, over the vocabulary
    longest: int = 0  # maximum tokens of a sequence; 0 = same as tokens
    kl_hidden_bytes: int = 0  # bytes of the hidden states per response token from which the exact KL is computed
    hidden_only: bool = False  # returns final hidden states, without logits


@dataclass(frozen=True)
class PlannedRole:
    """A model and its Megatron layout."""

    name: str  # actor, critic, reference, reward_model, teacher_<name>, or the role of a supervised job
    path: str  # config key of the layout's section, such as critic.megatron
    model: ModelConfig  # shape of the model
    layout: ParallelLayout  # parallel sizes; rank r runs on device r of the role's pool
    megatron: MegatronConfig  # dtype, recomputation and offloading options
    value_head: bool  # whether a scalar head replaces the output layer
    trains: bool  # whether the role has gradients and an optimizer
    passes: tuple[PlannedPass, ...]  # passes in the order of a training step
    holds_reference: bool = False  # host memory has the reference's weights, which are swapped in for phase ref
    holds_proximal: bool = False  # host memory has the last sync's weights, swapped in for phase old_log_prob
    reference_head: bool = False  # whether the device keeps a copy of the reference's output layer, for the exact KL
    teacher_heads: int = 0  # bytes per vocabulary entry of all teachers' output layers; offloaded with the weights
    saves_in_background: bool = False  # whether a save copies the state to host memory
    lora: LoraOptions | None = None  # low-rank adapters, which alone are trained; None without adapters

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
    """The devices of the trainer, or those of a role alone."""

    section: str  # config section with its keys nnodes and n_gpus_per_node
    nodes: int
    devices_per_node: int
    first: int = 0  # number of its first device in the job

    @property
    def numbers(self) -> range:
        """Numbers of its devices."""
        return range(self.first, self.first + self.nodes * self.devices_per_node)


@dataclass(frozen=True)
class PlannedRollout:
    """The replicas of the rollout engine."""

    model: ModelConfig  # the policy
    config: TrainingRolloutConfig  # engine, sampling and sizes
    replicas: int  # replica i starts at device i * tp of the engines' devices
    tp: int  # tensor-parallel size of a replica
    longest: int  # maximum tokens of a trajectory, prompt included
    prompts: int  # prompts per step, over all replicas
    samples_per_prompt: int  # trajectories per prompt, including baselines that are not trained on

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
    """A job with all of its roles."""

    roles: tuple[PlannedRole, ...]  # the models, each once
    rollout: PlannedRollout | None  # the engine; None in a supervised job
    batches: BatchPlan
    nodes: int  # of the trainer
    devices_per_node: int  # of the trainer
    device: str  # cuda or cpu; the caller resolves auto
    longest_prompt: int  # maximum tokens of a prompt; 0 in a supervised job
    longest_response: int  # maximum tokens of a response; in a supervised job, of the whole sequence
    bucket_bytes: int  # maximum bytes that a process sends or receives at a time in a weight sync
    config: TrainConfig | SupervisedConfig
    own_pools: tuple[PlannedPool, ...] = ()  # of roles with devices of their own, numbered after the trainer's

    @cached_property
    def pools(self) -> tuple[PlannedPool, ...]:
        """All pools, the trainer's first."""
        return (PlannedPool("trainer", self.nodes, self.devices_per_node), *self.own_pools)

    def pool_of(self, section: str) -> PlannedPool:
        """Return the devices of a role by its config section."""
        return next((pool for pool in self.own_pools if pool.section == section), self.pools[0])

    def micro_batches(self, role: PlannedRole, planned: PlannedPass) -> MicroBatches:
        """Return the sizes of the micro-batches of a role's pass."""
        name = role.name if self.rollout is None else _BATCHES.get(planned.phase, role.name)
        return self.batches.phase(name).micro

    def rank_on(self, role: PlannedRole, device: int) -> int | None:
        """Return the role's rank on a device, or None."""
        rank = device - self.pool_of(role.section).first
        return rank if 0 <= rank < role.layout.world_size else None

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
