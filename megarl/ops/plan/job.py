"""The planned job: each role's model, devices, layout and passes, read from a configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megarl.base.algorithm_names import FULL_KL
from megarl.base.formatting import DTYPE_BYTES
from megarl.config import AdapterKeys, MegatronConfig, TrainConfig
from megarl.config.batch import BatchPlan, MicroBatches, PhasePlan, plan_batches, teacher_phase
from megarl.config.schema.jobs import ROLLOUT, TEACHERS, PreferenceConfig, SupervisedConfig, own_pools
from megarl.config.schema.rollout import TrainingRolloutConfig
from megarl.models import ModelConfig, ParallelLayout, read_model_config
from megarl.models.adapters import LoraOptions
from megarl.sharding.placement import Slot
from megarl.workers.settings import check_adapters, check_role, hidden_forms, layout_of, lora_options, teacher_heads

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
    def trains_tower(self) -> bool:
        """Whether the vision tower is trained, too."""
        return self.model.trains_tower

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

        Pools of one node each share it if the hardware's node has enough devices (``node_size``).
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
    if config.reward.model.enable:
        roles.append(_reward_model(config, batches))
    roles += [_teacher(config, batches, name) for name in config.distillation.local_teachers]
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
    own = model.hidden_size * DTYPE_BYTES[policy.actor.megatron.dtype]  # a hidden state of the reference
    passes = [_pass(config, batches.phase("old_log_prob"), "old_log_prob", with_entropy=True)]
    if swaps_reference:
        compared = own if computes_kl else 0
        passes.append(_pass(config, batches.phase("ref_log_prob"), "ref", kl_hidden_bytes=compared))
    entropy, forms = policy.actor.entropy_coeff != 0, hidden_forms(config.distillation).values()
    compared = own if learns_kl else max((form.token_bytes for form in forms), default=0)
    update = _pass(config, batches.phase("actor"), "update_actor", with_entropy=entropy, kl_hidden_bytes=compared)
    passes.append(update)
    return _role(
        "actor",
        "actor_rollout_ref.actor.megatron",
        model.with_trained_tower(policy.trains_tower),
        policy.actor.megatron,
        tuple(passes),
        trains=True,
        # With adapters the reference is the model without them, or with other adapters, which are small.
        holds_reference=swaps_reference and not policy.model.lora_rank,
        holds_proximal=config.holds_proximal_policy and not policy.model.lora_rank,
        reference_head=learns_kl or computes_kl,
        teacher_heads=sum(head.row_bytes for head in teacher_heads(config.distillation)),
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
    keys, phase = config.reward.model, batches.phase("reward_model")
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
    model = read_model_config(str(keys.path))
    return _role("reward_model", "reward.model.megatron", model, keys.megatron, (planned,), value_head=True)


def _teacher(config: TrainConfig, batches: BatchPlan, name: str) -> PlannedRole:
    """Plan a teacher; several have equal parts of the samples."""
    teachers = config.distillation.teacher_models
    teacher, phase = teachers[name], batches.phase(teacher_phase(name))
    phase = replace(phase, samples_per_mini_batch=-(-phase.samples_per_mini_batch // len(teachers)))
    path = f"distillation.teacher_models.{name}.megatron"
    model = read_model_config(str(teacher.model_path))
    planned = _pass(config, phase, "teacher")
    planned = replace(planned, hidden_only=config.distillation.distillation_loss.reads_teacher_hidden)
    return _role(phase.name, path, model, teacher.megatron, (planned,))


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
    **options: Any,
) -> PlannedRole:
    """Check and build a role; ``options`` are further fields of :class:`PlannedRole`."""
    check_role(model, megatron, path)
    lora = None
    if adapters is not None:
        check_adapters(model, adapters, megatron, adapters_path, value_head=value_head)
        lora = lora_options(adapters, seed=0)
        model = model.with_trained_tower(adapters.trains_tower) if lora is not None else model
    layout = layout_of(megatron)
    return PlannedRole(name, path, model, layout, megatron, value_head, trains, passes, lora=lora, **options)


def _pass(
    config: TrainConfig, phase: PhasePlan, name: str, *, with_entropy: bool = False, kl_hidden_bytes: int = 0
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
        full_kl=kl_hidden_bytes > 0,
        longest=longest,
        kl_hidden_bytes=kl_hidden_bytes,
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
