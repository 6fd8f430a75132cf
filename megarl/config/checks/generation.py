"""Checks of generation and scoring: prompts, sampling, agent loops, reward functions, judge and reward model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megarl.config.checks.layout import reward_model_layout
from megarl.config.problems import Problem
from megarl.config.schema.jobs import (
    SEARCH,
    EvaluateConfig,
    GenerateConfig,
    GenerationJobConfig,
    ScoredJobConfig,
    TrainConfig,
)
from megarl.config.schema.rewards import CUSTOM_REWARD, JudgeConfig
from megarl.config.schema.rollout import SUPPORT_KEY, TokenFilterConfig, TrainingRolloutConfig

_ROLLOUT = "actor_rollout_ref.rollout"


def evaluation_files(config: EvaluateConfig) -> Iterator[Problem]:
    """Check that an evaluation has data."""
    if not config.data.val_files:
        yield Problem("data.val_files", config.data.val_files, "must name at least one file", code="data.no-val-files")


def generation_prompts(config: GenerateConfig) -> Iterator[Problem]:
    """Check that a generation job has prompts and a valid output file."""
    data = config.data
    if not data.val_files and not data.prompts:
        text = "no prompts: set texts here, or files as data.val_files"
        yield Problem("data.prompts", data.prompts, text, code="data.no-prompts")
    if data.output_path is not None and Path(data.output_path).suffix not in (".jsonl", ".parquet"):
        yield Problem("data.output_path", data.output_path, "must end in .jsonl or .parquet", code="data.output-suffix")


def validation_sampling(config: TrainConfig | EvaluateConfig | GenerateConfig) -> Iterator[Problem]:
    """Check that several responses per prompt can differ."""
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    if sampling.n > 1 and sampling.temperature == 0:
        path = f"{_ROLLOUT}.val_kwargs"
        text = f"{path}.temperature=0 is greedy and gives {sampling.n} equal answers"
        yield Problem(f"{path}.n", sampling.n, text, code="rollout.greedy-duplicates")


def token_filters(config: TrainConfig | EvaluateConfig | GenerateConfig) -> Iterator[Problem]:
    """Check that the engine can filter tokens as configured."""
    rollout = config.actor_rollout_ref.rollout
    deterministic = rollout.engine_kwargs.sglang.deterministic
    if rollout.name != "sglang" or not (config.trainer.device == "cpu" if deterministic is None else deterministic):
        return
    sections: dict[str, TokenFilterConfig] = {f"{_ROLLOUT}.val_kwargs": rollout.val_kwargs}
    if isinstance(rollout, TrainingRolloutConfig):
        sections = {_ROLLOUT: rollout, **sections}
    for path, keys in sections.items():
        if keys.min_p:
            text = f"SGLang's deterministic mode has no min_p; set 0, or {_ROLLOUT}.engine_kwargs.sglang.deterministic"
            yield Problem(f"{path}.min_p", keys.min_p, f"{text}=false", code="sglang.no-min-p")


def sampled_support(config: TrainConfig) -> Iterator[Problem]:
    """Check that log-probs over the sampled support are useful and supported by the rest of the run."""
    rollout = config.actor_rollout_ref.rollout
    if not rollout.support.enable:
        return
    path = f"{SUPPORT_KEY}.enable"
    if not rollout.filters_tokens:
        text = f"samples from the whole vocabulary without a filter; set top_p, top_k or min_p of {_ROLLOUT}, or false"
        yield Problem(path, True, text, code="rollout.support-without-filter")
    if rollout.repetition_penalty != 1:
        text = f"training does not apply {_ROLLOUT}.repetition_penalty={rollout.repetition_penalty}; set 1, or false"
        yield Problem(path, True, text, code="rollout.support-penalty")
    if config.distillation.enabled:
        text = "the loss towards teachers is over the whole vocabulary; set false, or distillation.enabled=false"
        yield Problem(path, True, text, code="rollout.support-distillation")


def agents(config: GenerationJobConfig) -> Iterator[Problem]:
    """Check the settings of agent loops, tools, retrieval and endpoint."""
    rollout, search = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.multi_turn.search
    agent, loop, tools = rollout.agent, rollout.agent.default_agent_loop, rollout.multi_turn.tool_config_path
    if (search.enable or loop == "search_agent") and search.url is None:
        text = "search_agent needs a server, such as http://127.0.0.1:8000/retrieve"
        yield Problem(f"{SEARCH}.url", search.url, text, code="tool.no-retriever")
    if search.url is not None and not search.url.startswith(("http://", "https://")):
        yield Problem(f"{SEARCH}.url", search.url, "must begin with http:// or https://", code="config.bad-url")
    uses_tools = rollout.multi_turn.enable or loop == "tool_agent"
    if uses_tools and loop in (None, "tool_agent") and not search.enable and tools is None:
        text = "tool_agent needs a YAML file with its tools"
        yield Problem(f"{_ROLLOUT}.multi_turn.tool_config_path", tools, text, code="tool.no-file")
    if search.enable and search.max_obs_length >= config.data.max_response_length:
        text = "must be below data.max_response_length, which holds search results and the policy's tokens"
        yield Problem(f"{SEARCH}.max_obs_length", search.max_obs_length, text, code="agent.observation-length")
    if loop == "external_agent" and agent.external_agent is None:
        text = "external_agent needs a function, path.py:function"
        yield Problem(f"{_ROLLOUT}.agent.external_agent", agent.external_agent, text, code="agent.no-external-agent")
    if agent.external_agent and search.enable and loop is None:
        text = "and multi_turn.search.enable both lead trajectories; choose by agent.default_agent_loop"
        yield Problem(f"{_ROLLOUT}.agent.external_agent", agent.external_agent, text, code="agent.two-agent-loops")
    for name, file in (
        ("multi_turn.tool_config_path", tools),
        ("agent.agent_loop_config_path", agent.agent_loop_config_path),
    ):
        if file is not None and not Path(file).expanduser().is_file():
            yield Problem(f"{_ROLLOUT}.{name}", file, "no such file", code="config.no-such-file")


_URLS = ("http://", "https://")


def reward_model(config: TrainConfig | EvaluateConfig) -> Iterator[Problem]:
    """Check the reward model: its path, weights and layout."""
    yield from reward_model_layout(config, config.trainer)
    keys, model = config.reward, config.reward.model
    if not model.enable:
        if keys.function_weight == 0:
            text = "leaves nothing to score with while reward.model.enable=false; leave it auto"
            yield Problem("reward.function_weight", keys.function_weight, text, code="reward.nothing-scores")
        return
    if not model.path:
        text = "must be set with reward.model.enable=true"
        yield Problem("reward.model.path", model.path, text, code="reward.no-model-path")
    if model.weight == 0:
        text = "leaves the reward model without effect; set reward.model.enable=false"
        yield Problem("reward.model.weight", model.weight, text, code="reward.model-without-weight")


def reward_functions(config: ScoredJobConfig) -> Iterator[Problem]:
    """Check the reward functions, their weights and arguments."""
    reward, custom = config.reward, config.reward.custom_reward_function.path
    functions, path = reward.functions, "reward.functions"
    if any(isinstance(weight, bool) or not isinstance(weight, int | float) for weight in functions.values()):
        yield Problem(path, functions, "must give each function a number, its weight", code="reward.weight-not-number")
    if CUSTOM_REWARD in functions and custom is None:
        text = "has 'custom', and reward.custom_reward_function.path is not set; set it"
        yield Problem(path, functions, text, code="reward.custom-without-function")
    if custom is not None and functions and CUSTOM_REWARD not in functions:
        text = "leaves out reward.custom_reward_function; give 'custom' a weight"
        yield Problem(path, functions, text, code="reward.custom-without-weight")
    if any(not isinstance(name, str) for name in reward.data_sources.values()):
        text = "must give each data source the name of a function"
        yield Problem("reward.data_sources", reward.data_sources, text, code="reward.data-source-function")
    if any(not isinstance(kwargs, dict) for kwargs in reward.function_kwargs.values()):
        text = "must give each function a mapping of arguments"
        yield Problem("reward.function_kwargs", reward.function_kwargs, text, code="reward.function-kwargs")
    overlong, longest = reward.reward_kwargs.overlong_buffer_cfg, reward.reward_kwargs.max_resp_len
    if overlong.enable and not 0 < overlong.len <= (longest or config.data.max_response_length):
        text = "must be above 0 and at most the longest response (max_resp_len, or data.max_response_length)"
        path = "reward.reward_kwargs.overlong_buffer_cfg.len"
        yield Problem(path, overlong.len, text, code="reward.overlong-buffer")
    url = reward.sandbox.url
    if url is not None and not url.startswith(_URLS):
        text = "must begin with http:// or https://"
        yield Problem("reward.sandbox.url", url, text, code="config.bad-url")
    yield from _judge(reward.judge, required=reward.name == "judge" or "judge" in functions)


def _judge(judge: JudgeConfig, *, required: bool) -> Iterator[Problem]:
    path = "reward.judge"
    if judge.base_url is not None and not judge.base_url.startswith(_URLS):
        yield Problem(f"{path}.base_url", judge.base_url, "must begin with http:// or https://", code="config.bad-url")
    if required and judge.base_url is None:
        text = "must be set for the reward function 'judge'"
        yield Problem(f"{path}.base_url", None, text, code="judge.not-configured")
    if judge.score_range[0] >= judge.score_range[1]:
        text = "its first entry must be below its second"
        yield Problem(f"{path}.score_range", judge.score_range, text, code="judge.score-range")
    try:
        groups = re.compile(judge.score_pattern).groups
    except re.error as error:
        text = f"is no regular expression: {error}"
        yield Problem(f"{path}.score_pattern", judge.score_pattern, text, code="judge.bad-pattern")
    else:
        if groups == 0:
            text = "must have a group for the score"
            yield Problem(f"{path}.score_pattern", judge.score_pattern, text, code="judge.pattern-without-group")
    file = judge.template_path
    if judge.template is not None and file is not None:
        text = "cannot be set together with template; set one of them"
        yield Problem(f"{path}.template_path", file, text, code="judge.two-templates")
    if file is not None and not Path(file).expanduser().is_file():
        yield Problem(f"{path}.template_path", file, "no such file", code="config.no-such-file")
