"""Checks of on-policy distillation: teachers, loss, and keys without effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from urllib.parse import urlsplit

from megarl.base.algorithm_names import FORWARD_KL_TOPK, FULL_KL
from megarl.config.problems import Problem
from megarl.config.schema.distillation import TeacherConfig
from megarl.config.schema.jobs import TrainConfig

_TEACHERS, _LOSS = "distillation.teacher_models", "distillation.distillation_loss"


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
