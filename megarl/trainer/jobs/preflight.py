"""Preflight: checks of user code, algorithm, engine, rewards and agents before any process starts.

:mod:`megarl.trainer.jobs.early_checks` has the checks that need no torch; the command line runs them first.

A check raises a :class:`~megarl.base.errors.ConfigError`, ``ModelError``, ``DataError`` or ``RewardError`` that names
the key, its value and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megarl.agents import check_agent_loops
from megarl.algorithms import ADVANTAGES, POLICY_LOSSES, SCHEDULES, warmup_steps
from megarl.base.errors import ConfigError
from megarl.base.formatting import count_noun
from megarl.config import EvaluateConfig, GenerateConfig, OptimConfig, TrainConfig
from megarl.config.batch import BatchPlan
from megarl.config.problems import InvalidConfigError, Problem
from megarl.config.schema.algorithm import ScheduledWeightConfig
from megarl.config.schema.distillation import TeacherServerConfig
from megarl.config.schema.jobs import SupervisedConfig
from megarl.data.tokenizers import load_tokenizer
from megarl.models import ModelConfig, ParallelLayout, check_layout, read_model_config
from megarl.models.hf_folder import tensor_entries
from megarl.models.tower_class import check_tower_shapes
from megarl.rollout import check_engine_model
from megarl.rollout.settings import context_tokens, engine_options
from megarl.rollout.sglang.options import CACHE_TOKENS
from megarl.rollout.sglang.teacher import TeacherServers
from megarl.samples.reward_functions import check_rewards
from megarl.trainer.callbacks import load_callbacks
from megarl.trainer.jobs.early_checks import check_prompt_rows
from megarl.trainer.phases.data_loading import collate_function, mixture_weights, reads_its_files, user_sampler
from megarl.trainer.roles.role_builder import run_updates
from megarl.workers.settings import schedule_steps


def check_train(config: TrainConfig) -> None:
    """Check user code, algorithm, engine, reward functions and agents of a training job."""
    load_callbacks(config.trainer.callbacks)
    check_data_classes(config)
    check_algorithm(config)
    check_towers(config)
    check_teacher_tokenizers(config)
    _check_teacher_servers(config)
    check_answers(config, read_model_config(config.actor_rollout_ref.model.path))


def check_towers(config: TrainConfig | EvaluateConfig) -> None:
    """Check the tensors of the vision towers of all models, except that of an evaluated policy.

    Raises:
        ModelError: a tensor is missing or has another shape; names it.
    """
    paths = {str(config.reward.model.path)} if config.reward.model.enable else set[str]()
    if isinstance(config, TrainConfig):
        paths.add(config.actor_rollout_ref.model.path)
        if config.uses_critic:
            paths.add(str(config.critic.model.path))
        if config.distillation.enabled:
            paths |= {str(teacher.model_path) for teacher in config.distillation.local_teachers.values()}
    for path in sorted(paths):
        vision = read_model_config(path).vision
        if vision is not None:
            entries = tensor_entries(Path(path), required=True)
            check_tower_shapes(path, vision, {name: entry.shape for name, entry in entries.items()})


def check_data_classes(config: TrainConfig) -> None:
    """Check the weights of a mixture, and the user's dataset, sampler and collate function."""
    data = config.data
    mixture_weights(data)
    if data.custom_cls.path is not None and not reads_its_files(data.custom_cls):
        check_prompt_rows(config)
    user_sampler(data.sampler)
    collate_function(data)


def check_algorithm(config: TrainConfig) -> None:
    """Check that estimator and loss load."""
    ADVANTAGES.find(config.algorithm.adv_estimator)
    POLICY_LOSSES.find(config.actor_rollout_ref.actor.policy_loss.loss_mode)


def check_teacher_tokenizers(config: TrainConfig) -> None:
    """Check that the teachers of a distillation have the policy's vocabulary; servers are not asked.

    Raises:
        ModelError, ConfigError: a tokenizer cannot be loaded or differs; names the key and a differing token.
    """
    if not config.distillation.enabled:
        return
    student = str(config.actor_rollout_ref.model.tokenizer_path)
    vocabulary = load_tokenizer(student).get_vocab()
    for name, teacher in config.distillation.local_teachers.items():
        other = load_tokenizer(str(teacher.model_path)).get_vocab()
        if differing := sorted(dict(vocabulary.items() ^ other.items())):
            token = differing[0]
            raise ConfigError(
                f"distillation.teacher_models.{name}.model_path={teacher.model_path}: its tokenizer differs from that "
                f"of the policy ({student}) in {len(differing)} tokens; {token!r} has id {other.get(token)} there and "
                f"{vocabulary.get(token)} here. A teacher needs the policy's vocabulary",
                code="teacher.other-vocabulary",
            )


def _check_teacher_servers(config: TrainConfig) -> None:
    """Check that the servers of teachers answer, have the policy's vocabulary, and take its sequences."""
    policy, data, distillation = config.actor_rollout_ref.model, config.data, config.distillation
    for name, teacher in distillation.teacher_models.items() if distillation.enabled else ():
        if teacher.server.urls:
            check_teacher_server(
                f"distillation.teacher_models.{name}.server",
                teacher.server,
                load_tokenizer(str(policy.tokenizer_path)),
                read_model_config(policy.path).vocab_size,
                data.max_prompt_length + data.max_response_length,
            )


def check_teacher_server(
    key: str, server: TeacherServerConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int, longest: int
) -> None:
    """Check that every server of a teacher has the policy's tokens, by the text of each, and takes its sequences.

    Args:
        vocab_size: tokens of the policy's model; a server ends at one that its own lacks.
        longest: most tokens of prompt and response.

    Raises:
        TeacherError: a server does not answer, has no tokenizer, its model lacks a token, or its context is short.
        ConfigError: a token has another text there.
    """
    ids = sorted(tokenizer.get_vocab().values())
    texts = [tokenizer.decode([token]) for token in ids]
    for url in server.urls:
        servers = TeacherServers(key, replace(server, urls=[url], max_attempts=1))
        try:
            others = servers.token_texts(ids)
            differing = [
                number for number, (text, other) in enumerate(zip(texts, others, strict=True)) if text != other
            ]
            if differing:
                first = differing[0]
                raise ConfigError(
                    f"{key}.urls: {url} has another tokenizer than the policy: {count_noun(len(differing), 'token')} "
                    f"differ; token {ids[first]} is {others[first]!r} there and {texts[first]!r} here. A teacher needs "
                    "the policy's vocabulary",
                    code="teacher.other-vocabulary",
                )
            servers.check_token(vocab_size - 1)
            servers.check_length(longest)
        finally:
            servers.close()


def check_answers(config: TrainConfig | EvaluateConfig, model: ModelConfig) -> None:
    """Check layout, reward functions and agents of a job that generates and scores."""
    check_generation(config, model)
    check_rewards(config)


def check_generation(config: TrainConfig | EvaluateConfig | GenerateConfig, model: ModelConfig) -> None:
    """Check layout, engine and agents of a job that generates."""
    _check_context(config, model)
    check_engine(config, model)
    check_agent_loops(config)


def _check_context(config: TrainConfig | EvaluateConfig | GenerateConfig, model: ModelConfig) -> None:
    """Check that the longest response leaves room for a prompt; prompts are compared when they are measured."""
    context = context_tokens(config.actor_rollout_ref.rollout, model)
    if config.data.max_response_length >= context:
        raise ConfigError(
            f"data.max_response_length={config.data.max_response_length} leaves no room for a prompt in the context of "
            f"{context} tokens (max_position_embeddings of {config.actor_rollout_ref.model.path}, or SGLang's "
            f"{CACHE_TOKENS}); lower it",
            code="data.no-prompt-room",
        )


def check_engine(config: TrainConfig | EvaluateConfig | GenerateConfig, model: ModelConfig) -> None:
    """Check that the rollout engine supports the model in its layout."""
    policy = config.actor_rollout_ref
    rollout, model = policy.rollout, model.with_trained_tower(policy.trains_tower)
    layout = ParallelLayout(tp=rollout.tensor_model_parallel_size)
    check_layout(model, layout, "actor_rollout_ref.rollout", of_engine=True)
    options = engine_options(rollout, config.trainer.device, return_routes=policy.replays_engine_routes)
    check_engine_model(rollout.name, model, options)


def check_schedules(config: TrainConfig | SupervisedConfig, batches: BatchPlan, total_steps: int) -> None:
    """Check that the schedules of learning rates and reward weights fit into the run.

    Raises:
        InvalidConfigError: lists every schedule that does not fit, by key.
    """
    if isinstance(config, SupervisedConfig):
        schedules = [(config.role, config.optim, "optim")]
    elif config.trainer.val_only:
        schedules = []
    else:
        schedules = [("actor", config.actor_rollout_ref.actor.optim, "actor_rollout_ref.actor.optim")]
        if config.uses_critic:
            schedules.append(("critic", config.critic.optim, "critic.optim"))
    problems: list[Problem] = []
    for phase, optim, path in schedules:
        problems += _schedule(optim, path, run_updates(config, batches, phase, total_steps))
    if isinstance(config, TrainConfig) and not config.trainer.val_only:
        algorithm = config.algorithm
        problems += _weight(algorithm.ref_quality_score, "algorithm.ref_quality_score", total_steps)
        problems += _weight(algorithm.repr_align.ref_alignment, "algorithm.repr_align.ref_alignment", total_steps)
    if problems:
        raise InvalidConfigError(problems)


def _schedule(optim: OptimConfig, path: str, updates: int) -> Iterator[Problem]:
    total, warmup, decay, warmup_key, decay_key = schedule_steps(optim, updates)
    if total > updates:
        text = f"must be at most the run's {updates} optimizer steps; auto = as many"
        yield Problem(f"{path}.total_training_steps", total, text, code="algorithm.schedule-too-long")
    elif warmup > total:
        yield Problem(
            f"{path}.{warmup_key}",
            getattr(optim, warmup_key),
            f"must be at most the schedule's {total} optimizer steps",
            code="algorithm.warmup-too-long",
        )
    elif optim.lr_decay_style != "constant" and warmup == total:
        text = (
            f"the warm-up of {warmup} optimizer steps leaves none of the schedule's {total} to lr_decay_style="
            f"{optim.lr_decay_style}; lower it"
        )
        yield Problem(f"{path}.{warmup_key}", getattr(optim, warmup_key), text, code="algorithm.no-decay-steps")
    elif optim.lr_decay_style == "wsd" and warmup + decay > total:
        text = (
            f"a decay of {decay} optimizer steps does not fit behind a warm-up of {warmup} into {total}; "
            f"at most {total - warmup}"
        )
        yield Problem(f"{path}.{decay_key}", getattr(optim, decay_key), text, code="algorithm.decay-too-long")


def _weight(weight: ScheduledWeightConfig, path: str, total_steps: int) -> Iterator[Problem]:
    if not weight.enable:
        return
    warmup = warmup_steps(weight.warmup_ratio, total_steps)
    if weight.schedule == "step" and 0 < warmup < weight.steps:
        text = f"{warmup} of the run's {total_steps} training steps have no room for so many stairs; at most {warmup}"
        yield Problem(f"{path}.steps", weight.steps, text, code="algorithm.too-many-stairs")
    try:
        SCHEDULES.find(weight.schedule)
    except ConfigError as error:
        yield Problem(f"{path}.schedule", weight.schedule, error.text, code=error.code)
