"""A job as the planner sees it: which model lives on which devices in which layout, and what it computes when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from megarl.config import MegatronConfig, TrainConfig
from megarl.config.batch import BatchPlan, MicroBatches, PhasePlan, plan_batches
from megarl.config.choices import FULL_KL
from megarl.config.rollout import RolloutConfig
from megarl.config.supervised import SupervisedConfig
from megarl.models import ModelConfig, ParallelLayout, read_model_config
from megarl.workers.layouts import check_role, layout_of

PHASES = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "update_critic",
    "update_actor",
    "update_weights",
)
"""The phases of a training step that hold a device, by the names under which they are timed; supervised jobs have
``update`` alone."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class PlannedPass:
    """What a role computes in a phase.

    Attributes:
        phase: one of :data:`PHASES`, or ``update`` of a supervised job.
        updates: whether there is a backward pass and an optimizer step.
        tokens: most tokens of a micro-batch, over all context-parallel ranks.
        outputs: most response tokens among them: those whose logits or values are taken. Of a reward model: sequences.
        micro_batches: of one mini-batch on a data-parallel rank, at most; at least as many as the schedule needs.
        optimizer_steps: in one training step; 0 unless it updates.
        samples: that the role computes in a training step, over all ranks and epochs.
        with_entropy: entropies are taken too.
        full_kl: the exact KL to the reference over the whole vocabulary is taken too.
        longest: most tokens of one sequence; 0 = as ``tokens``.
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
    """A model in a layout of Megatron's.

    Attributes:
        name: ``actor``, ``critic``, ``reference``, ``reward_model``, or the role of a supervised job.
        path: key of the section that says its layout, such as ``critic.megatron``.
        model: its shape.
        layout: its parallel sizes; rank ``r`` lives on device ``r`` modulo the job's devices.
        megatron: the configuration behind the layout: number format, recomputation, offloading.
        value_head: a scalar head stands in place of the output layer.
        trains: there are gradients and an optimizer.
        passes: what it computes, in the order of a training step.
        holds_reference: the reference's weights rest in its host memory and are swapped into its own model, by which
            it computes the phase ``ref`` too.
        reference_head: a copy of the reference's output layer stays on the device, for the exact KL.
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
    reference_head: bool = False

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of weights and activations."""
        return DTYPE_BYTES[self.megatron.dtype]

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between layers are divided over tensor-parallel ranks; always so with experts."""
        return self.layout.tp > 1 and (self.megatron.sequence_parallel or self.model.experts is not None)

    def pass_of(self, phase: str) -> PlannedPass | None:
        """What it computes in a phase; None if nothing."""
        return next((one for one in self.passes if one.phase == phase), None)


@dataclass(frozen=True)
class PlannedRollout:
    """The engine's replicas.

    Attributes:
        model: the policy.
        config: engine, sampling and sizes.
        replicas: how many; replica ``i`` has the devices from ``i * tp`` on.
        tp: tensor-parallel size of a replica.
        longest: most tokens of a conversation, prompt included.
        prompts: of a step, over all replicas.
        answers: conversations that a prompt begins, those that are not learned from included.
    """

    model: ModelConfig
    config: RolloutConfig
    replicas: int
    tp: int
    longest: int
    prompts: int
    answers: int

    @property
    def samples(self) -> int:
        """Conversations that a step leads, over all replicas."""
        return self.prompts * self.answers

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of the engine's weights."""
        return DTYPE_BYTES[self.config.dtype]

    @property
    def is_elsewhere(self) -> bool:
        """Whether somebody else's servers generate, on devices that are not the job's."""
        return bool(self.config.server_urls)


@dataclass(frozen=True)
class PlannedJob:
    """A whole job.

    Attributes:
        roles: the models, each once.
        rollout: the engine; None in a supervised job.
        batches: the batch arithmetic of a training step.
        nodes: machines.
        devices_per_node: devices of each.
        device: ``cuda`` or ``cpu``; what ``auto`` stands for is decided by who plans.
        longest_prompt: most tokens of a prompt; of a supervised job 0.
        longest_response: most tokens of an answer; of a supervised job of the whole sequence.
        bucket_bytes: most that a process sends or receives at a time in a weight sync.
        config: what it was made of.
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

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return self.longest_prompt + self.longest_response

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """The phases that it has, in the order of a training step."""
        if self.rollout is None:
            return ("update",)
        of_roles = {one.phase for role in self.roles for one in role.passes}
        return tuple(phase for phase in PHASES if phase in of_roles or phase in ("gen", "update_weights"))

    def role(self, name: str) -> PlannedRole:
        """A role by its name.

        Raises:
            KeyError: the job has none of that name.
        """
        return {role.name: role for role in self.roles}[name]


def planned_job(config: TrainConfig | SupervisedConfig, *, device: str = "cuda") -> PlannedJob:
    """The job of a configuration; reads models' ``config.json`` and nothing else.

    Args:
        config: complete and checked, as ``megarl.config.build`` returns it.
        device: what ``trainer.device=auto`` stands for.

    Raises:
        InvalidConfigError, ConfigError, ModelError: a batch does not divide, a layout does not fit its model, or a
            model folder cannot be read; names the key.
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
    engine = PlannedRollout(
        model=model,
        config=rollout,
        replicas=rollout.replicas or 1,
        tp=rollout.tensor_model_parallel_size,
        longest=data.max_prompt_length + data.max_response_length,
        prompts=batches.prompts_per_step,
        answers=config.answers_per_prompt,
    )
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
    )


def _actor(config: TrainConfig, batches: BatchPlan, model: ModelConfig) -> PlannedRole:
    policy = config.actor_rollout_ref
    learns_kl = policy.actor.use_kl_loss and policy.actor.kl_loss_type == FULL_KL
    swaps = config.uses_reference and policy.ref.megatron is None
    tells_kl = swaps and config.algorithm.uses_full_kl
    passes = [_pass(config, batches.phase("old_log_prob"), "old_log_prob", with_entropy=True)]
    if swaps:
        passes.append(_pass(config, batches.phase("ref_log_prob"), "ref", full_kl=tells_kl))
    entropy = policy.actor.entropy_coeff != 0
    passes.append(_pass(config, batches.phase("actor"), "update_actor", with_entropy=entropy, full_kl=learns_kl))
    return _role(
        "actor",
        "actor_rollout_ref.actor.megatron",
        model,
        policy.actor.megatron,
        tuple(passes),
        trains=True,
        holds_reference=swaps,
        reference_head=learns_kl or tells_kl,
    )


def _critic(config: TrainConfig, batches: BatchPlan) -> PlannedRole:
    phase, model = batches.phase("critic"), read_model_config(str(config.critic.model.path))
    values = _pass(config, phase, "values")
    # Values are taken of the whole step at once, with the update's budget.
    values = replace(values, updates=False, optimizer_steps=0, samples=batches.samples_per_step)
    update = _pass(config, phase, "update_critic")
    return _role(
        "critic", "critic.megatron", model, config.critic.megatron, (values, update), value_head=True, trains=True
    )


def _reward_model(config: TrainConfig, batches: BatchPlan) -> PlannedRole:
    keys, phase = config.reward_model, batches.phase("reward_model")
    micro, share, longest = phase.micro, phase.samples_per_rank, keys.max_length
    assert longest is not None, "filled in"
    tokens = _tokens(micro, share, longest)
    one = PlannedPass(
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
    return _role("reward_model", "reward_model.megatron", model, keys.megatron, (one,), value_head=True)


def _supervised_job(config: SupervisedConfig, device: str) -> PlannedJob:
    batches, longest = plan_batches(config), config.data.max_length
    phase, count = batches.phase(config.role), config.sequences_per_row
    judges = config.role == "reward_model"
    tokens = _tokens(phase.micro, phase.samples_per_rank, count * longest)
    one = PlannedPass(
        phase="update",
        updates=True,
        tokens=tokens,
        outputs=max(1, min(count * phase.samples_per_rank, tokens)) if judges else tokens,
        micro_batches=_micro_batches(phase.micro, phase.samples_per_rank, tokens, count * longest),
        optimizer_steps=phase.optimizer_steps,
        samples=phase.samples_per_mini_batch * count,
        longest=longest,
    )
    model = read_model_config(config.model.path)
    role = _role(config.role, "megatron", model, config.megatron, (one,), value_head=judges, trains=True)
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
    holds_reference: bool = False,
    reference_head: bool = False,
) -> PlannedRole:
    check_role(model, megatron, path)
    layout = layout_of(megatron)
    return PlannedRole(name, path, model, layout, megatron, value_head, trains, passes, holds_reference, reference_head)


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
    """Most tokens of a micro-batch: its budget, or its samples at their longest; never more than a rank has."""
    most = micro.max_tokens if micro.samples is None else micro.samples * longest
    assert most is not None, "one of the two is set"
    return min(most, share * longest)


def _outputs(micro: MicroBatches, share: int, tokens: int, longest_response: int) -> int:
    """Most response tokens among ``tokens``: each sample has a prompt of one token at least."""
    samples = share if micro.samples is None else micro.samples
    return max(1, min(samples * longest_response, tokens - -(-tokens // (longest_response + 1))))


def _micro_batches(micro: MicroBatches, share: int, tokens: int, longest: int) -> int:
    """Most micro-batches of a rank's share; by first fit, under a budget all but the last are half full at least."""
    each = max(1, tokens // longest) if micro.samples is None else micro.samples
    count = -(-share // each)
    return -(-count // micro.multiple) * micro.multiple
