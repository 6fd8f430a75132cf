"""Reads the planned job from a configuration: roles, layouts, devices and passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.base.algorithm_names import FULL_KL
from megarl.base.formatting import DTYPE_BYTES
from megarl.config import AdapterKeys, MegatronConfig, TrainConfig
from megarl.config.batch import BatchPlan, MicroBatches, PhasePlan, plan_batches, teacher_phase
from megarl.config.schema.jobs import PreferenceConfig, SupervisedConfig, own_pools
from megarl.models import ModelConfig, read_model_config
from megarl.ops.plan.job import PlannedJob, PlannedPass, PlannedPool, PlannedRole, PlannedRollout
from megarl.workers.settings import check_adapters, check_role, hidden_forms, layout_of, lora_options, teacher_heads


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
        model,
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
