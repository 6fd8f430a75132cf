"""Reward functions from the configuration: which functions score, their limits, and their reward manager."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from megarl.agents.types import TRAINING_REWARD, VALIDATION_REWARD
from megarl.base.errors import RewardError
from megarl.base.logs import ProcessLogs
from megarl.base.packages import require_package
from megarl.config.schema.jobs import GenerationJobConfig, ScoredJobConfig, TrainConfig
from megarl.config.schema.rewards import (
    CUSTOM_REWARD,
    CustomRewardConfig,
    RewardConfig,
    RewardKwargsConfig,
    RewardManagerConfig,
    ValRewardConfig,
)
from megarl.rewards import FunctionSpec, RewardManager, Scorer, ScoreTerm, custom_reward_spec
from megarl.rewards.calling import LoadedFunction
from megarl.rewards.manager import FailurePolicy, LengthShaping
from megarl.rewards.pool import InDriverRunner, Runner
from megarl.rewards.registry import ISOLATED, FunctionTraits, SourceMap, check_signature, load_reward_function
from megarl.rewards.sandbox import isolation_problem
from megarl.rewards.scorer import ScorerSpec
from megarl.rewards.shaping import OverlongPenalty

AUTO = "auto"
MAX_PROCESSES = 32
_CASES_WITHOUT_LIMIT = 100
_MARGIN_S = 30.0
"""Time added to the limit of a function with internal limits."""


class RewardPlan(NamedTuple):
    """Reward functions of a job.

    Attributes:
        terms: weighted terms of the score.
        functions: indexed by the numbers in ``terms``.
        first: numbers of the functions that every batch calls.
    """

    terms: list[ScoreTerm]
    functions: list[FunctionSpec]
    first: list[int]


def function_manager(
    config: ScoredJobConfig, tokenizer: PreTrainedTokenizerBase, logs: ProcessLogs | None = None
) -> RewardManager:
    """Build the reward manager of the configuration; starts no process.

    Args:
        logs: of the reward processes; None = output of the driver.

    Raises:
        RewardError: a function cannot be imported, or has another signature than a reward function.
    """
    keys, plan = config.reward, reward_plan(config)
    shaping, overlong = keys.reward_kwargs, keys.reward_kwargs.overlong_buffer_cfg
    max_length = shaping.max_resp_len or config.data.max_response_length
    penalty = None
    if overlong.enable:
        penalty = OverlongPenalty(max_length, overlong.len, overlong.penalty_factor, overlong.log)
    spec = _scorer_spec(config, plan, logs)
    runner: Runner = _in_driver(plan, keys) if spec is None else spec.pool()
    return RewardManager(
        Scorer(plan.terms, runner),
        tokenizer,
        FailurePolicy(keys.on_error, keys.max_failure_ratio),
        LengthShaping(penalty, shaping.length_reward_weight),
        starts_processes=not _scores_in_runners(keys, spec),
    )


def runner_scorers(
    config: GenerationJobConfig, logs: ProcessLogs | None = None, nodes: int = 1
) -> dict[str, ScorerSpec]:
    """Return the scorers of the agent runners for training and validation samples.

    Empty if the reward phase scores: for functions that take batches, by configuration, and in jobs without a reward.

    Args:
        nodes: number of nodes that the agent runners share.

    Raises:
        RewardError: see :func:`function_manager`.
    """
    if not isinstance(config, ScoredJobConfig):
        return {}
    training = _runner_scorer(config, logs, nodes)
    separate = val_reward_config(config)
    validation = training if separate is None else _runner_scorer(separate, logs, nodes)
    scorers = {TRAINING_REWARD: training, VALIDATION_REWARD: validation}
    return {name: spec for name, spec in scorers.items() if spec is not None}


def _runner_scorer(config: ScoredJobConfig, logs: ProcessLogs | None, nodes: int) -> ScorerSpec | None:
    keys = config.reward
    if keys.function_weight == 0:
        return None
    runners = config.actor_rollout_ref.rollout.agent.num_workers
    total = num_processes(keys) * (min(nodes, runners) if keys.num_workers is None else 1)
    processes = -(-total // runners)
    spec = _scorer_spec(config, reward_plan(config, processes * runners), logs, processes)
    return spec if _scores_in_runners(keys, spec) else None


def _scores_in_runners(keys: RewardConfig, spec: ScorerSpec | None) -> bool:
    return keys.launch_reward_fn_async and spec is not None and spec.takes_samples


def val_reward_config(config: ScoredJobConfig) -> TrainConfig | None:
    """Return the configuration whose only reward is the validation function; None without such a function."""
    if not isinstance(config, TrainConfig):
        return None
    custom = config.reward.validation_function
    if custom.path is None:
        return None
    keys = dataclasses.replace(
        config.reward,
        functions={},
        function_weight=1.0,
        custom_reward_function=CustomRewardConfig(custom.path, custom.name, custom.reward_kwargs),
        reward_manager=RewardManagerConfig(),
        reward_kwargs=RewardKwargsConfig(),
        validation_function=ValRewardConfig(),
    )
    return dataclasses.replace(config, reward=keys)


def check_rewards(config: ScoredJobConfig) -> None:
    """Check the rewards of training and validation before any process starts.

    Raises:
        RewardError: a function cannot be imported or called, this machine has no sandbox, or an API key is missing.
        ConfigError: the package of a function is missing.
    """
    if (validation := val_reward_config(config)) is not None:
        check_rewards(validation)
    keys = config.reward
    if keys.function_weight == 0:
        return  # no function is called
    plan = reward_plan(config)
    for number, spec in enumerate(plan.functions):
        traits = _traits(spec)
        if number not in plan.first:
            continue
        _check_manager(keys, spec, traits)
        if spec.spec in ISOLATED and keys.num_workers == 0:
            raise RewardError(
                f"reward function {spec.spec!r} executes text of the policy, and reward.num_workers=0 would "
                "execute it in the driver; set at least 1",
                code="reward.needs-process",
            )
        is_local = spec.spec == "code" and keys.sandbox.url is None
        if is_local and (problem := isolation_problem(keys.sandbox.allow_unfiltered)):
            raise RewardError(f"reward function 'code': {problem}", code="sandbox.no-isolation")
        if spec.spec == "math":
            require_package("math_verify", "math", "reward function 'math'")
        if spec.spec == "judge" and keys.judge.api_key_env and keys.judge.api_key_env not in os.environ:
            raise RewardError(
                f"reward.judge.api_key_env={keys.judge.api_key_env}: the environment variable is not set",
                code="judge.api-key-unset",
            )


def reward_plan(config: ScoredJobConfig, processes: int | None = None) -> RewardPlan:
    """List the configured functions without loading them.

    All ``processes`` share the concurrent requests to services; None = as many as configured.
    """
    keys, custom = config.reward, config.reward.custom_reward_function
    weights: Mapping[str, float] = keys.functions or {CUSTOM_REWARD if custom.path else keys.name: 1.0}
    plan = RewardPlan([], [], [])
    numbers: dict[str, int] = {}

    def number_of(name: str) -> int:
        if name not in numbers:
            numbers[name] = len(plan.functions)
            plan.functions.append(_spec(config, name, max(1, processes or num_processes(keys))))
        return numbers[name]

    for name, weight in weights.items():
        label = _label(name)
        if label in {term.label for term in plan.terms}:
            raise RewardError(
                f"reward.functions has two functions named {label!r}; rename one",
                code="reward.duplicate-function",
            )
        if name == AUTO:
            sources = SourceMap(keys.data_sources)
            for spec in sources.specs():
                number_of(spec)
            plan.terms.append(ScoreTerm(label, float(weight), _by_source(sources, numbers)))
        else:
            plan.first.append(number_of(name))
            plan.terms.append(ScoreTerm(label, float(weight), _always(numbers[name])))
    return plan


def _by_source(sources: SourceMap, numbers: Mapping[str, int]) -> Callable[[str], int]:
    return lambda data_source: numbers[sources.find(data_source)]


def _always(number: int) -> Callable[[str], int]:
    return lambda data_source: number


def _label(name: str) -> str:
    """Name of a function without its file or module."""
    if ":" in name:
        return name.rpartition(":")[2]
    return name.rpartition(".")[2] if "." in name else name


def _spec(config: ScoredJobConfig, name: str, workers: int) -> FunctionSpec:
    keys, custom = config.reward, config.reward.custom_reward_function
    user_arguments = dict(keys.function_kwargs.get(name, {}))
    if name == CUSTOM_REWARD:
        spec = custom_reward_spec(str(custom.path), custom.name)
        return FunctionSpec(spec, dict(custom.reward_kwargs), keys.timeout_s, keys.max_concurrency)
    if name == "judge":
        limit, share = keys.judge.timeout_s + _MARGIN_S, -(-keys.judge.max_concurrent // workers)
        return FunctionSpec(name, _judge_arguments(keys) | user_arguments, limit, share)
    if name == "code":
        sandbox = keys.sandbox
        arguments: dict[str, Any] = {
            "url": sandbox.url,
            "memory_limit_mb": sandbox.memory_limit_mb,
            "timeout_s": sandbox.timeout_s,
            "max_processes": sandbox.max_processes,
            "disk_mb": sandbox.disk_mb,
            "max_cases": sandbox.max_cases,
            "continuous": sandbox.continuous,
            "allow_unfiltered": sandbox.allow_unfiltered,
        }
        limit = (sandbox.max_cases or _CASES_WITHOUT_LIMIT) * 2 * sandbox.timeout_s + _MARGIN_S
        share = -(-sandbox.max_concurrent // workers) if sandbox.url else 1
        return FunctionSpec(name, arguments | user_arguments, limit, share)
    return FunctionSpec(name, user_arguments, keys.timeout_s, keys.max_concurrency)


def _judge_arguments(keys: RewardConfig) -> dict[str, Any]:
    judge = keys.judge
    template = judge.template
    if judge.template_path is not None:
        template = Path(judge.template_path).expanduser().read_text(encoding="utf-8")
    arguments = {
        "base_url": judge.base_url,
        "model": judge.model,
        "score_pattern": judge.score_pattern,
        "score_range": list(judge.score_range),
        "max_tokens": judge.max_tokens,
        "temperature": judge.temperature,
        "timeout_s": judge.timeout_s,
        "api_key_env": judge.api_key_env,
    }
    return arguments if template is None else arguments | {"template": template}


def num_processes(keys: RewardConfig) -> int:
    """Return the number of reward processes, by default of each node; 0 = the driver calls the functions."""
    return min(len(os.sched_getaffinity(0)), MAX_PROCESSES) if keys.num_workers is None else keys.num_workers


def _scorer_spec(
    config: ScoredJobConfig, plan: RewardPlan, logs: ProcessLogs | None, processes: int | None = None
) -> ScorerSpec | None:
    """Describe the pool of reward processes; None = the driver calls the functions."""
    keys = config.reward
    count = num_processes(keys) if processes is None else processes
    if count == 0:
        return None
    traits = [_traits(spec) for spec in plan.functions]
    return ScorerSpec(plan.terms, plan.functions, traits, count, keys.max_retries, plan.first, logs)


def _in_driver(plan: RewardPlan, keys: RewardConfig) -> InDriverRunner:
    functions = [LoadedFunction(load_reward_function(spec.spec, spec.kwargs), spec) for spec in plan.functions]
    return InDriverRunner(functions, keys.max_retries)


def _traits(spec: FunctionSpec) -> FunctionTraits:
    """Load a function and read its signature; a function that fails here would fail in a reward process too."""
    return check_signature(load_reward_function(spec.spec, spec.kwargs), spec.spec, spec.kwargs)


def _check_manager(keys: RewardConfig, spec: FunctionSpec, traits: FunctionTraits) -> None:
    """Check that the configured verl reward manager fits the signature of the function."""
    manager = keys.reward_manager.name
    if manager is not None and (manager == "batch") != traits.batch:
        takes = "a batch (data_sources, ...)" if traits.batch else "a sample (data_source, ...)"
        right = "batch" if traits.batch else "naive"
        raise RewardError(
            f"reward.reward_manager.name={manager}, but reward function {spec.spec!r} takes {takes}; set {right} or "
            "auto",
            code="reward.manager-signature",
        )
