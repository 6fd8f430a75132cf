"""The planned job: model, devices and layout of each role, and its passes in every phase of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from megarl.base.algorithm_names import FULL_KL
from megarl.config import AdapterKeys, MegatronConfig, TrainConfig
from megarl.config.batch import BatchPlan, MicroBatches, PhasePlan, plan_batches, teacher_phase
from megarl.config.schema.jobs import ROLLOUT, TEACHERS, PreferenceConfig, SupervisedConfig, own_pools
from megarl.config.schema.rollout import TrainingRolloutConfig
from megarl.models import ModelConfig, ParallelLayout, read_model_config
from megarl.models.adapters import LoraOptions
from megarl.sharding.placement import Slot
from megarl.workers.settings import check_adapters, check_role, layout_of, lora_options

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

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


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
        full_kl: whether the exact KL to the reference, over the whole vocabulary, is computed.
        longest: maximum tokens of a sequence; 0 = same as ``tokens``.
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
        """Bytes per element of the engine's weights."""
        return DTYPE_BYTES[self.config.dtype]

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


def planned_job(config: TrainConfig | SupervisedConfig, *, device: str = "cuda") -> PlannedJob:
    """Plan a job from its configuration; reads only each model's ``config.json``.

    Args:
        config: complete and checked, as ``megarl.config.build`` returns it.
        device: device to use for ``trainer.device=auto``.

    Raises:
        InvalidConfigError, ConfigError, ModelError: a batch does not divide, a layout does not fit its model, or a
            model folder cannot be read; the message names the key.
    """
    device = device if config.trainer.device == "auto" else config.trainer.device
    return _train_job(config, device) if isinstance(config, TrainConfig) else _supervised_job(config, device)


def _train_job(config: TrainConfig, device: str) -> PlannedJob:
    batches, policy, data = plan_batches(config), config.actor_rollout_ref, config.data
    rollout = policy.rollout
    model = read_model_config(policy.model.path)
    roles = [_actor(config, batches, model)]
    if config.uses_critic:
        roles.append(_critic(config, batches))
    if config.uses_reference and policy.ref.megatron is not None:
        ref = _pass(config, batches.phase("ref_log_prob"), "ref")
        roles.append(_role("reference", "actor_rollout_ref.ref.megatron", model, policy.ref.megatron, (ref,)))
    if config.reward_model.enable:
        roles.append(_reward_model(config, batches))
    if config.distillation.enabled:
        roles += [_teacher(config, batches, name) for name in config.distillation.teacher_models]
    engine = PlannedRollout(
        model=model,
        config=rollout,
        replicas=rollout.replicas or 1,
        tp=rollout.tensor_model_parallel_size,
        longest=data.max_prompt_length + data.max_response_length,
        prompts=batches.prompts_per_step,
        samples_per_prompt=config.responses_per_prompt,
    )
    pools: list[PlannedPool] = []
    first = config.trainer.num_devices
    for section, keys in own_pools(config).items():
        pools.append(PlannedPool(section, keys.nnodes, keys.n_gpus_per_node or 1, first))
        first += keys.own_devices
    return PlannedJob(
        roles=tuple(roles),
        rollout=engine,
        batches=batches,
        nodes=config.trainer.nnodes,
        devices_per_node=config.trainer.n_gpus_per_node,
        device=device,
        longest_prompt=data.max_prompt_length,
        longest_response=data.max_response_length,
        bucket_bytes=config.sync.bucket_megabytes * 2**20,
        config=config,
        own_pools=tuple(pools),
    )


def _actor(config: TrainConfig, batches: BatchPlan, model: ModelConfig) -> PlannedRole:
    policy = config.actor_rollout_ref
    learns_kl = policy.actor.use_kl_loss and policy.actor.kl_loss_type == FULL_KL
    swaps_reference = config.uses_reference and policy.ref.megatron is None
    computes_kl = swaps_reference and config.algorithm.uses_full_kl
    passes = [_pass(config, batches.phase("old_log_prob"), "old_log_prob", with_entropy=True)]
    if swaps_reference:
        passes.append(_pass(config, batches.phase("ref_log_prob"), "ref", full_kl=computes_kl))
    entropy = policy.actor.entropy_coeff != 0
    passes.append(_pass(config, batches.phase("actor"), "update_actor", with_entropy=entropy, full_kl=learns_kl))
    return _role(
        "actor",
        "actor_rollout_ref.actor.megatron",
        model,
        policy.actor.megatron,
        tuple(passes),
        trains=True,
        # With adapters the reference is the model without them, or with other adapters, which are small.
        holds_reference=swaps_reference and not policy.model.lora_rank,
        holds_proximal=config.holds_proximal_policy and not policy.model.lora_rank,
        reference_head=learns_kl or computes_kl,
        saves_in_background=config.trainer.save_freq > 0 and policy.actor.checkpoint.async_save,
        adapters=policy.model,
        adapters_path="actor_rollout_ref.model",
    )


def _critic(config: TrainConfig, batches: BatchPlan) -> PlannedRole:
    phase, model = batches.phase("critic"), read_model_config(str(config.critic.model.path))
    values = _pass(config, phase, "values")
    # Values of the whole step are computed at once, with the token budget of the update.
    values = replace(values, updates=False, optimizer_steps=0, samples=batches.samples_per_step)
    update = _pass(config, phase, "update_critic")
    return _role(
        "critic",
        "critic.megatron",
        model,
        config.critic.megatron,
        (values, update),
        value_head=True,
        trains=True,
        saves_in_background=config.trainer.save_freq > 0 and config.critic.checkpoint.async_save,
        adapters=config.critic.model,
        adapters_path="critic.model",
    )


def _reward_model(config: TrainConfig, batches: BatchPlan) -> PlannedRole:
    keys, phase = config.reward_model, batches.phase("reward_model")
    micro, share, longest = phase.micro, phase.samples_per_rank, keys.max_length
    assert longest is not None, "filled in"
    tokens = _tokens(micro, share, longest)
    planned = PlannedPass(
        phase="reward",
        updates=False,
        tokens=tokens,
        outputs=max(1, min(share, tokens)),
        micro_batches=_micro_batches(micro, share, tokens, longest),
        optimizer_steps=0,
        samples=phase.samples_per_mini_batch,
        longest=longest,
    )
    model = read_model_config(str(keys.model.path))
    return _role("reward_model", "reward_model.megatron", model, keys.megatron, (planned,), value_head=True)


def _teacher(config: TrainConfig, batches: BatchPlan, name: str) -> PlannedRole:
    """Plan a teacher; several have equal parts of the samples."""
    teachers = config.distillation.teacher_models
    teacher, phase = teachers[name], batches.phase(teacher_phase(name))
    phase = replace(phase, samples_per_mini_batch=-(-phase.samples_per_mini_batch // len(teachers)))
    path = f"distillation.teacher_models.{name}.megatron"
    model = read_model_config(str(teacher.model_path))
    return _role(phase.name, path, model, teacher.megatron, (_pass(config, phase, "teacher"),))


def _supervised_job(config: SupervisedConfig, device: str) -> PlannedJob:
    batches, longest = plan_batches(config), config.data.max_length
    phase, count = batches.phase(config.role), config.sequences_per_row
    scores = config.role == "reward_model"
    tokens = _tokens(phase.micro, phase.samples_per_rank, count * longest)
    planned = PlannedPass(
        phase="update",
        updates=True,
        tokens=tokens,
        outputs=max(1, min(count * phase.samples_per_rank, tokens)) if scores else tokens,
        micro_batches=_micro_batches(phase.micro, phase.samples_per_rank, tokens, count * longest),
        optimizer_steps=phase.optimizer_steps,
        samples=phase.samples_per_mini_batch * count,
        longest=longest,
    )
    has_reference = isinstance(config, PreferenceConfig) and config.loss.uses_reference
    passes: tuple[PlannedPass, ...] = (planned,)
    if has_reference:
        passes = (replace(planned, phase="ref", updates=False, optimizer_steps=0), planned)
    model = read_model_config(config.model.path)
    role = _role(
        config.role,
        "megatron",
        model,
        config.megatron,
        passes,
        value_head=scores,
        trains=True,
        holds_reference=has_reference and not config.model.lora_rank,
        saves_in_background=config.trainer.save_freq > 0 and config.trainer.checkpoint.async_save,
        adapters=config.model,
        adapters_path="model",
    )
    return PlannedJob(
        roles=(role,),
        rollout=None,
        batches=batches,
        nodes=config.trainer.nnodes,
        devices_per_node=config.trainer.n_gpus_per_node,
        device=device,
        longest_prompt=0,
        longest_response=longest,
        bucket_bytes=0,
        config=config,
    )


def _role(
    name: str,
    path: str,
    model: ModelConfig,
    megatron: MegatronConfig,
    passes: tuple[PlannedPass, ...],
    *,
    value_head: bool = False,
    trains: bool = False,
    adapters: AdapterKeys | None = None,
    adapters_path: str = "",
    **options: bool,
) -> PlannedRole:
    """Check and build a role; ``options`` are further fields of :class:`PlannedRole`."""
    check_role(model, megatron, path)
    lora = None
    if adapters is not None:
        check_adapters(model, adapters, megatron, adapters_path, value_head=value_head)
        lora = lora_options(adapters, seed=0)
    layout = layout_of(megatron)
    return PlannedRole(name, path, model, layout, megatron, value_head, trains, passes, lora=lora, **options)


def _pass(
    config: TrainConfig, phase: PhasePlan, name: str, *, with_entropy: bool = False, full_kl: bool = False
) -> PlannedPass:
    data = config.data
    longest, share = data.max_prompt_length + data.max_response_length, phase.samples_per_rank
    tokens = _tokens(phase.micro, share, longest)
    return PlannedPass(
        phase=name,
        updates=phase.updates,
        tokens=tokens,
        outputs=_outputs(phase.micro, share, tokens, data.max_response_length),
        micro_batches=_micro_batches(phase.micro, share, tokens, longest),
        optimizer_steps=phase.optimizer_steps,
        samples=phase.samples_per_mini_batch * max(1, phase.optimizer_steps),
        with_entropy=with_entropy,
        full_kl=full_kl,
        longest=longest,
    )


def _tokens(micro: MicroBatches, share: int, longest: int) -> int:
    """Return the maximum tokens of a micro-batch: its budget or its longest samples, capped by the rank's share."""
    maximum = micro.max_tokens if micro.samples is None else micro.samples * longest
    assert maximum is not None, "one of the two is set"
    return min(maximum, share * longest)


def _outputs(micro: MicroBatches, share: int, tokens: int, longest_response: int) -> int:
    """Return the maximum response tokens of a micro-batch; each sample has at least one prompt token."""
    samples = share if micro.samples is None else micro.samples
    return max(1, min(samples * longest_response, tokens - -(-tokens // (longest_response + 1))))


def _micro_batches(micro: MicroBatches, share: int, tokens: int, longest: int) -> int:
    """Return the maximum number of micro-batches; first-fit packing fills all but the last at least half."""
    each = max(1, tokens // longest) if micro.samples is None else micro.samples
    count = -(-share // each)
    return -(-count // micro.multiple) * micro.multiple
