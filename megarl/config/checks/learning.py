"""Checks of learning: estimator, losses, KL, selection, rollout correction, optimizers, adapters and distillation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from urllib.parse import urlsplit

from megarl.base.algorithm_names import ADV_ESTIMATORS, FORWARD_KL_TOPK, FULL_KL, GIGPO, estimator_needs
from megarl.config.keys import keys_of
from megarl.config.problems import Problem
from megarl.config.schema.algorithm import (
    LOGLINEAR,
    GiGPOConfig,
    RolloutCorrectionConfig,
    UnknownRejection,
    rejection_rules,
    weight_bounds,
)
from megarl.config.schema.distillation import TeacherConfig
from megarl.config.schema.jobs import PreferenceConfig, SupervisedConfig, TrainConfig
from megarl.config.schema.model import AdapterKeys, LoraConfig, OptimConfig

_CORRECTION = "algorithm.rollout_correction"
_POLICY = "actor_rollout_ref.model"
_IN_PRESETS = ("lora_A_init_method",)
"""Keys that the presets with verl's defaults set, for runs without adapters too."""
_TEACHERS, _LOSS = "distillation.teacher_models", "distillation.distillation_loss"


def estimator(config: TrainConfig) -> Iterator[Problem]:
    """Check that the job has the inputs of the advantage estimator: groups, critic, baselines."""
    name, enabled, n = config.algorithm.adv_estimator, config.critic.enable, config.actor_rollout_ref.rollout.n
    label = f"algorithm.adv_estimator={name}"
    if estimator_needs(name, "group_ids") and n == 1 and config.uses_task_rewards:
        text = f"{label} compares the responses of a group; set at least 2"
        yield Problem("actor_rollout_ref.rollout.n", n, text, code="algorithm.group-of-one")
    if enabled is False and estimator_needs(name, "values"):
        yield Problem("critic.enable", enabled, f"{label} needs a critic; leave it auto", code="algorithm.needs-critic")
    if enabled and name in ADV_ESTIMATORS and not estimator_needs(name, "values"):
        text = f"{label} reads no values; leave it auto"
        yield Problem("critic.enable", enabled, text, code="algorithm.unused-critic")
    yield from _sum_pi_squared(config, label)
    if name in ADV_ESTIMATORS and name != GIGPO:
        defaults = GiGPOConfig()
        for item in keys_of(GiGPOConfig):
            value = getattr(config.algorithm.gigpo, item.name)
            if value != getattr(defaults, item.name):
                text = f"has no effect with {label}; remove it, or set {GIGPO}"
                yield Problem(f"algorithm.gigpo.{item.name}", value, text, code="algorithm.gigpo-unused")
    if config.algorithm.whiten_rewards and config.uses_baselines:
        text = f"{label} compares with the scores of greedy responses, which are not whitened; set false"
        yield Problem("algorithm.whiten_rewards", True, text, code="algorithm.whiten-baseline")
    if config.trainer.critic_warmup and not config.uses_critic:
        text = f"{label} has no critic to warm up; set 0"
        yield Problem("trainer.critic_warmup", config.trainer.critic_warmup, text, code="algorithm.critic-warmup")


def _sum_pi_squared(config: TrainConfig, label: str) -> Iterator[Problem]:
    """Check that the actor computes the sum of squared probabilities if, and only if, the estimator may read it."""
    name = config.algorithm.adv_estimator
    path = "actor_rollout_ref.actor.calculate_sum_pi_squared"
    enabled = config.actor_rollout_ref.actor.calculate_sum_pi_squared
    needs = estimator_needs(name, "sum_pi_squared")
    if enabled is False and needs:
        text = f"{label} needs the sum of squared probabilities; leave it auto"
        yield Problem(path, enabled, text, code="algorithm.needs-sum-pi-squared")
    if enabled and name in ADV_ESTIMATORS and not needs:
        text = f"{label} reads no squared probabilities; leave it auto"
        yield Problem(path, enabled, text, code="algorithm.unused-sum-pi-squared")
    if not config.uses_sum_pi_squared:
        return
    reader = label if needs else f"{path}=true"
    if config.algorithm.rollout_correction.bypass_mode:
        text = f"leaves out the pass of the actor that {reader} needs; set false"
        yield Problem(f"{_CORRECTION}.bypass_mode", True, text, code="algorithm.bypass-sum-pi-squared")
    if config.estimates_proximal_policy:
        text = f"leaves out the pass of the actor that {reader} needs; set recompute"
        yield Problem("async_training.proximal", LOGLINEAR, text, code="async.loglinear-sum-pi-squared")


def losses(config: TrainConfig) -> Iterator[Problem]:
    """Check the policy loss, and that an exact KL can be computed."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    loss, path = actor.policy_loss, "actor_rollout_ref.actor.policy_loss"
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        text = f"must be below {path}.clip_cov_ub={loss.clip_cov_ub:g}"
        yield Problem(f"{path}.clip_cov_lb", loss.clip_cov_lb, text, code="algorithm.clip-cov-bounds")
    if config.actor_rollout_ref.ref.megatron is None:
        return
    text = (
        "compares whole distributions, which do not leave a process; leave actor_rollout_ref.ref.megatron null, so "
        "that the reference shares the actor's processes"
    )
    if algorithm.uses_full_kl:
        yield Problem("algorithm.kl_penalty", algorithm.kl_penalty, text, code="algorithm.full-kl-layout")
    if actor.uses_full_kl:
        path = "actor_rollout_ref.actor.kl_loss_type"
        yield Problem(path, actor.kl_loss_type, text, code="algorithm.full-kl-layout")


def selection(config: TrainConfig) -> Iterator[Problem]:
    """Check dynamic sampling and best-of-n."""
    groups, best, n = config.algorithm.filter_groups, config.algorithm.best_of_n, config.actor_rollout_ref.rollout.n
    if groups.enable and n == 1:
        text = "algorithm.filter_groups compares the responses of a group; set at least 2"
        yield Problem("actor_rollout_ref.rollout.n", n, text, code="algorithm.group-of-one")
    if groups.enable and groups.metric == "seq_final_reward":
        text = "is known only after the reference's log-probs; set score, or a number of the reward function"
        yield Problem("algorithm.filter_groups.metric", groups.metric, text, code="algorithm.filter-metric")
    per_round, per_step = config.data.gen_batch_size, config.data.train_batch_size
    if not groups.enable and per_round not in (None, per_step):
        text = (
            f"only algorithm.filter_groups generates other numbers of prompts than data.train_batch_size={per_step}; "
            "leave it auto"
        )
        yield Problem("data.gen_batch_size", per_round, text, code="algorithm.rounds-without-filter")
    if best.enable and best.keep >= n:
        text = f"must be less than actor_rollout_ref.rollout.n={n}"
        yield Problem("algorithm.best_of_n.keep", best.keep, text, code="algorithm.best-of-n-keep")


def reference_shaping(config: TrainConfig) -> Iterator[Problem]:
    """Check the alignment of representations with the reference."""
    align = config.algorithm.repr_align
    path, inner = "algorithm.repr_align", "algorithm.repr_align.ref_alignment"
    if align.enable and not align.ref_alignment.enable:
        text = f"there is nothing to align with; set {inner}.enable=true"
        yield Problem(f"{path}.enable", align.enable, text, code="algorithm.repr-align-partner")
    if align.ref_alignment.enable and not align.enable:
        text = f"has no effect without {path}.enable=true; set false, or enable both"
        yield Problem(f"{inner}.enable", align.ref_alignment.enable, text, code="algorithm.repr-align-disabled")
    if align.enable and config.algorithm.rollout_correction.bypass_mode:
        text = "needs the policy's entropy, which algorithm.rollout_correction.bypass_mode=true does not compute"
        yield Problem(f"{path}.enable", align.enable, text, code="algorithm.bypass-repr-align")


def router_replay(config: TrainConfig) -> Iterator[Problem]:
    """Check that something records the routes that the update replays."""
    path, mode = "actor_rollout_ref.actor.router_replay.mode", config.actor_rollout_ref.actor.router_replay.mode
    if mode == "R2" and config.algorithm.rollout_correction.bypass_mode:
        text = f"needs the pass for old log-probs, which {_CORRECTION}.bypass_mode=true leaves out; set false or R3"
        yield Problem(path, mode, text, code="algorithm.bypass-router-replay")
    if mode == "R2" and config.estimates_proximal_policy:
        text = (
            "needs the pass for old log-probs, which async_training.proximal=loglinear leaves out; set recompute or R3"
        )
        yield Problem(path, mode, text, code="async.loglinear-router-replay")


def rollout_correction(config: TrainConfig) -> Iterator[Problem]:
    """Check the rollout correction, its bounds and its inputs."""
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    comparisons = {"rollout_is": correction.rollout_is, "rollout_rs": correction.rollout_rs}
    active = [name for name, value in comparisons.items() if value is not None]
    if correction.bypass_mode:
        active.append("bypass_mode")
    if active and not rollout.calculate_log_probs:
        text = f"{_CORRECTION}.{active[0]} needs the engine's log-probs; set true"
        path = "actor_rollout_ref.rollout.calculate_log_probs"
        yield Problem(path, False, text, code="rollout.log-probs-needed")
    yield from _bounds(correction)
    if not correction.bypass_mode:
        return
    for name, value in comparisons.items():
        if value is not None:
            text = f"{_CORRECTION}.bypass_mode=true leaves nothing to compare the engine's log-probs with; set one only"
            yield Problem(f"{_CORRECTION}.{name}", value, text, code="algorithm.bypass-correction")
    if not config.actor_rollout_ref.actor.state_masking:
        text = "trains on tokens without a log-prob of the engine; set actor_rollout_ref.actor.state_masking=true"
        yield Problem(f"{_CORRECTION}.bypass_mode", correction.bypass_mode, text, code="algorithm.bypass-state-masking")


def _bounds(correction: RolloutCorrectionConfig) -> Iterator[Problem]:
    path, threshold = f"{_CORRECTION}.rollout_is_threshold", correction.rollout_is_threshold
    try:
        weight_bounds(correction)
    except ValueError as error:
        yield Problem(path, threshold, str(error), code="algorithm.weight-bounds")
    path, bounds = f"{_CORRECTION}.rollout_rs_threshold", correction.rollout_rs_threshold
    if correction.rollout_rs is None and bounds is not None:
        text = f"has no effect without {_CORRECTION}.rollout_rs; set null"
        yield Problem(path, bounds, text, code="algorithm.threshold-without-rejection")
        return
    try:
        rejection_rules(correction)
    except UnknownRejection as error:
        path = f"{_CORRECTION}.rollout_rs"
        yield Problem(path, correction.rollout_rs, str(error), code="algorithm.unknown-rejection")
    except ValueError as error:
        yield Problem(path, bounds, str(error), code="algorithm.rejection-bounds")


def optimizers(config: TrainConfig | SupervisedConfig) -> Iterator[Problem]:
    """Check optimizer and learning-rate schedule of every trained role."""
    if isinstance(config, SupervisedConfig):
        yield from _optimizer(config.optim, "optim")
        return
    yield from _optimizer(config.actor_rollout_ref.actor.optim, "actor_rollout_ref.actor.optim")
    if config.uses_critic:
        yield from _optimizer(config.critic.optim, "critic.optim")


def preference_loss(config: PreferenceConfig) -> Iterator[Problem]:
    """Check that the preference loss reads the label smoothing, target margin, weights and labels that are set."""
    loss, smoothed = config.loss, ("dpo", "simpo")
    if loss.label_smoothing and loss.type not in smoothed:
        text = f"has no effect with loss.type={loss.type}; leave it 0, or use {' or '.join(smoothed)}"
        yield Problem("loss.label_smoothing", loss.label_smoothing, text, code="algorithm.preference-key-unused")
    if loss.simpo_gamma is not None and loss.type != "simpo":
        text = f"has no effect with loss.type={loss.type}; leave it auto, or use simpo"
        yield Problem("loss.simpo_gamma", loss.simpo_gamma, text, code="algorithm.preference-key-unused")
    if loss.uses_pairs:
        unread: dict[str, object] = {
            "loss.desirable_weight": loss.desirable_weight,
            "loss.undesirable_weight": loss.undesirable_weight,
            "data.label_key": config.data.label_key,
        }
        for path, value in unread.items():
            if value is not None:
                text = f"has no effect with loss.type={loss.type}; leave it auto, or use kto"
                yield Problem(path, value, text, code="algorithm.preference-key-unused")
    elif config.data.train_batch_size < 2:
        text = "loss.type=kto estimates the KL from responses to other prompts of the step; set at least 2"
        yield Problem("data.train_batch_size", config.data.train_batch_size, text, code="algorithm.kto-batch-of-one")


def _optimizer(optim: OptimConfig, path: str) -> Iterator[Problem]:
    if optim.min_lr > optim.lr:
        text = f"must not exceed {path}.lr={optim.lr:g}"
        yield Problem(f"{path}.min_lr", optim.min_lr, text, code="algorithm.min-lr-above-lr")
    if optim.total_training_steps is not None and optim.lr_warmup_steps > optim.total_training_steps:
        text = f"must not exceed {path}.total_training_steps={optim.total_training_steps}"
        yield Problem(f"{path}.lr_warmup_steps", optim.lr_warmup_steps, text, code="algorithm.warmup-too-long")
    if 1 in optim.betas:
        yield Problem(f"{path}.betas", optim.betas, "both must be below 1", code="algorithm.adam-betas")


def adapters(config: TrainConfig | SupervisedConfig) -> Iterator[Problem]:
    """Check the adapters of each role that trains."""
    if isinstance(config, SupervisedConfig):
        yield from _role(config.model, "model")
        lora = config.model.lora
        for name in ("adapt_vision_tower", "freeze_vision_model", "freeze_vision_projection"):
            value = getattr(lora, name)
            if config.model.lora_rank and value != getattr(LoraConfig, name):
                text = "this job trains on texts alone, and computes no vision tower; remove the key"
                yield Problem(f"model.lora.{name}", value, text, code="image.text-job")
        if isinstance(config, PreferenceConfig):
            yield from _reference(config.model, "model", config.loss.uses_reference)
        else:
            yield from _no_reference(config.model, "model")
        return
    policy = config.actor_rollout_ref.model
    yield from _role(policy, _POLICY)
    yield from _role(config.critic.model, "critic.model")
    yield from _no_reference(config.critic.model, "critic.model")
    yield from _reference(policy, _POLICY, config.uses_reference)


def _role(model: AdapterKeys, path: str) -> Iterator[Problem]:
    if not model.target_modules:
        text = "names no layer; set all-linear"
        yield Problem(f"{path}.target_modules", model.target_modules, text, code="adapter.no-target-modules")
    if model.lora_rank:
        return
    for section, holder, cls in ((path, model, AdapterKeys), (f"{path}.lora", model.lora, LoraConfig)):
        for item in keys_of(cls):
            value = getattr(holder, item.name)
            if item.section is None and value != item.default and item.name not in _IN_PRESETS:
                text = f"has no effect with {path}.lora_rank=0, which trains all weights; set a rank, such as 32"
                yield Problem(f"{section}.{item.name}", value, text, code="adapter.rank-zero")


def _reference(model: AdapterKeys, path: str, is_used: bool) -> Iterator[Problem]:
    key, reference = f"{path}.lora.reference", model.lora.reference
    if reference != "adapter" or not model.lora_rank:
        return
    if model.lora_adapter_path is None:
        text = f"needs {path}.lora_adapter_path: without one the first adapters are zero, which is base"
        yield Problem(key, reference, text, code="adapter.reference-needs-path")
    elif not is_used:
        yield Problem(key, reference, "this run has no reference policy; leave base", code="adapter.no-reference")


def _no_reference(model: AdapterKeys, path: str) -> Iterator[Problem]:
    if model.lora.reference != "base" and model.lora_rank:
        text = "this role has no reference; leave base"
        yield Problem(f"{path}.lora.reference", model.lora.reference, text, code="adapter.no-reference")


def distillation(config: TrainConfig) -> Iterator[Problem]:
    """Check the teachers and the loss of a run with distillation."""
    if config.distillation.enabled:
        yield from _teachers(config)
        yield from _loss(config)
        if not config.uses_task_rewards:
            yield from _without_rewards(config)


def _teachers(config: TrainConfig) -> Iterator[Problem]:
    teachers = config.distillation.teacher_models
    if not teachers:
        text = f"names no teacher; set {_TEACHERS}.teacher_model.model_path"
        yield Problem(_TEACHERS, {}, text, code="teacher.no-teacher")
    names: dict[str, str] = {}
    for name, teacher in teachers.items():
        if teacher.server.urls:
            yield from _server(config, f"{_TEACHERS}.{name}", teacher)
        elif not teacher.model_path:
            text = "must be set: the folder of the teacher's model; or set server.urls, of running SGLang servers"
            yield Problem(f"{_TEACHERS}.{name}.model_path", None, text, code="teacher.no-model-path")
        selector = teacher.key or name
        if selector in names:
            text = f"is the key of {_TEACHERS}.{names[selector]} too; each value selects one teacher"
            yield Problem(f"{_TEACHERS}.{name}.key", teacher.key, text, code="teacher.duplicate-key")
        names.setdefault(selector, name)


def _server(config: TrainConfig, path: str, teacher: TeacherConfig) -> Iterator[Problem]:
    """Check a teacher that is a server: it has one temperature, and returns no hidden states."""
    rollout, loss = config.actor_rollout_ref.rollout, config.distillation.distillation_loss
    for url in teacher.server.urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            text = "is no URL of a server, such as http://10.0.0.3:30000"
            yield Problem(f"{path}.server.urls", url, text, code="config.bad-url")
    for field in fields(teacher):
        value = getattr(teacher, field.name)
        if field.name not in ("server", "key") and value != getattr(TeacherConfig(), field.name):
            shown = value if isinstance(value, str | int) else "set"
            text = f"has no effect on servers ({path}.server.urls); remove it"
            yield Problem(f"{path}.{field.name}", shown, text, code="teacher.no-effect-on-servers")
    if rollout.temperature != 1:
        text = f"is the temperature of teacher and student, and {path}.server.urls have log-probs of 1; set 1"
        key = "actor_rollout_ref.rollout.temperature"
        yield Problem(key, rollout.temperature, text, code="teacher.server-temperature")
    if loss.loss_mode == FULL_KL:
        text = f"needs the teacher's model in this run, and {path} is a server; set k2, or {path}.model_path"
        yield Problem(f"{_LOSS}.loss_mode", loss.loss_mode, text, code="teacher.full-kl-needs-model")


def _loss(config: TrainConfig) -> Iterator[Problem]:
    loss = config.distillation.distillation_loss
    if loss.loss_mode in ("kl", "k1") and not loss.use_policy_gradient:
        text = f"has a gradient that does not depend on the teacher; set {_LOSS}.use_policy_gradient=true, or k2 or k3"
        yield Problem(f"{_LOSS}.loss_mode", loss.loss_mode, text, code="teacher.loss-without-gradient")
    if loss.use_policy_gradient and config.estimates_proximal_policy:
        text = "reads old log-probs, which async_training.proximal=loglinear does not compute; set false"
        yield Problem(f"{_LOSS}.use_policy_gradient", True, text, code="teacher.loglinear-policy-gradient")
    if loss.loss_mode == FORWARD_KL_TOPK and loss.use_policy_gradient:
        text = f"moves the sampled token only, and {_LOSS}.loss_mode={FORWARD_KL_TOPK} compares {loss.topk}; set false"
        yield Problem(f"{_LOSS}.use_policy_gradient", True, text, code="teacher.topk-policy-gradient")
    if loss.loss_mode == FULL_KL:
        yield from _full_kl(config)


def _full_kl(config: TrainConfig) -> Iterator[Problem]:
    """Check that the exact KL is a loss, and that no other exact KL is computed in the same pass."""
    loss, actor = config.distillation.distillation_loss, config.actor_rollout_ref.actor
    if loss.use_policy_gradient:
        text = f"weighs the sampled token, on which the KL of {_LOSS}.loss_mode={FULL_KL} does not depend; set false"
        yield Problem(f"{_LOSS}.use_policy_gradient", True, text, code="teacher.full-kl-policy-gradient")
    if actor.uses_full_kl:
        text = f"would be the second exact KL, next to {_LOSS}.loss_mode={FULL_KL}; set low_var_kl, or k2 there"
        yield Problem("actor_rollout_ref.actor.kl_loss_type", actor.kl_loss_type, text, code="teacher.second-full-kl")


def _without_rewards(config: TrainConfig) -> Iterator[Problem]:
    """Check that no other part of the loss is set: the policy learns from its teachers alone."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    text = f"has no effect with {_LOSS}.use_task_rewards=false, which trains on the distillation loss alone"
    for path, value, off in (
        ("actor_rollout_ref.actor.use_kl_loss", actor.use_kl_loss, False),
        ("actor_rollout_ref.actor.entropy_coeff", actor.entropy_coeff, 0.0),
        ("algorithm.use_kl_in_reward", algorithm.use_kl_in_reward, False),
        (f"{_LOSS}.distillation_loss_coef", config.distillation.distillation_loss.distillation_loss_coef, 1.0),
    ):
        if value != off:
            yield Problem(path, value, text, code="teacher.no-task-rewards")
    if config.uses_critic:
        name = algorithm.adv_estimator
        text = f"its critic would train for nothing: {text}; set grpo"
        yield Problem("algorithm.adv_estimator", name, text, code="teacher.unused-critic")
