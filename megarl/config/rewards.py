"""What answers are worth: the `reward_model` and `custom_reward_function` sections."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.keys import key, section
from megarl.config.problems import Problem
from megarl.config.reward_model import ScoringModelConfig

if TYPE_CHECKING:
    from megarl.config.schema import ScoredConfig

BUILT_IN = (
    "auto",
    "arithmetic",
    "gsm8k",
    "math",
    "math_dapo",
    "search_em",
    "search_subem",
    "search_f1",
    "search_format_em",
    "format",
    "code",
    "judge",
    "agent_score",
)
"""Values of `reward_model.name`: by data source, and the functions that come with megarl."""
CUSTOM = "custom"
"""In `reward_model.functions`: the function that `custom_reward_function` names."""


@dataclass
class OverlongBufferConfig:
    """DAPO's soft punishment of answers that come near the longest length (arXiv:2503.14476, equation 13)."""

    enable: bool = key(False, "Punish them.")
    len: int = key(0, "Tokens before `max_resp_len` over which the punishment grows.", at_least=0)
    penalty_factor: float = key(1.0, "Punishment at `max_resp_len`, taken from the score.", at_least=0)
    log: bool = key(False, "Record it as `overlong_reward` and `overlong`.")


@dataclass
class RewardKwargsConfig:
    """What is added to the functions' score."""

    overlong_buffer_cfg: OverlongBufferConfig = section(OverlongBufferConfig)
    max_resp_len: int | None = key(
        None, "Longest answer in tokens, for `overlong_buffer_cfg`; null = `data.max_response_length`.", at_least=1
    )
    length_reward_weight: float = key(
        0.0, "Weight of Kimi k1.5's length reward within the answers to a prompt (arXiv:2501.12599); 0 = none."
    )


@dataclass
class SandboxFusionConfig:
    """Where programs run that are scored by `code`."""

    url: str | None = key(
        None, "Address of a SandboxFusion service, `/run_code` included; null = the sandbox on this machine."
    )
    max_concurrent: int = key(64, "Requests under way at a time, over all processes.", at_least=1)
    memory_limit_mb: int = key(1024, "Memory of a program, in MiB; in the local sandbox of each process.", at_least=32)


@dataclass
class SandboxConfig:
    """Limits of programs that are scored by `code`."""

    timeout_s: float = key(10.0, "Seconds that one test case may take.", above=0)
    max_cases: int | None = key(10, "Test cases that are tried, from the first; null = all.", at_least=1)
    continuous: bool = key(True, "Score the share of cases that pass; false = 1 if all pass, else 0.")
    max_processes: int = key(16, "Local sandbox: processes and threads at a time.", at_least=1)
    disk_mb: int = key(16, "Local sandbox: files, which are kept in memory, in MiB.", at_least=1)


@dataclass
class JudgeConfig:
    """A language model as judge, behind an endpoint with OpenAI's chat interface; used by `judge`."""

    base_url: str | None = key(None, "Address up to and without `/chat/completions`, such as http://127.0.0.1:8000/v1.")
    model: str | None = key(None, "Model, as the endpoint calls it.")
    template: str | None = key(
        None, "What the judge is asked, with {prompt}, {response} and {ground_truth}; null = megarl's own."
    )
    template_path: str | None = key(None, "File that holds `template`; null = none.")
    score_pattern: str = key(
        r"Score:\s*(-?\d+(?:\.\d+)?)", "Regular expression whose first group is the score; the last match counts."
    )
    score_range: list[float] = key([0.0, 10.0], "Lowest and highest score, which become 0 and 1.", length=2)
    max_tokens: int = key(1024, "Tokens of a judgement.", at_least=1)
    temperature: float = key(0.0, "Of a judgement.", at_least=0)
    timeout_s: float = key(60.0, "Seconds for the endpoint to answer.", above=0)
    max_concurrent: int = key(64, "Requests under way at a time, over all processes.", at_least=1)
    api_key_env: str | None = key(None, "Environment variable that holds the key; null = send none.")


@dataclass
class RewardModelConfig(ScoringModelConfig):
    """The reward, and what happens when it fails; see docs/rewards.md."""

    name: str = key(
        "auto",
        "Reward function; auto = by the row's `data_source`. Not read where `custom_reward_function.path` or "
        "`functions` is set.",
        choices=BUILT_IN,
        custom="function",
    )
    functions: dict[str, Any] = key(
        {},
        "Several functions and their weights, such as {gsm8k: 1.0, format: 0.2}; the score is the weighted sum. "
        "`custom` is `custom_reward_function`. Empty = one function.",
    )
    data_sources: dict[str, Any] = key(
        {}, "For auto: function by data source or pattern, such as {my_data*: math}; goes before what megarl knows."
    )
    function_kwargs: dict[str, Any] = key(
        {}, "Extra arguments by function, such as {gsm8k: {method: flexible}}; of one's own: `custom_reward_function`."
    )
    reward_manager: str | None = key(
        None,
        "verl's name for how functions are called: batch = with the whole batch, the others = by sample; null = as the "
        "function's signature says.",
        choices=("naive", "batch", "dapo", "prime"),
    )
    reward_kwargs: RewardKwargsConfig = section(RewardKwargsConfig)
    num_workers: int | None = key(
        None,
        "Processes that call functions; null = one per core, 32 at most; 0 = call them in the driver, where nothing "
        "can stop one that hangs.",
        at_least=0,
    )
    timeout_s: float = key(
        30.0,
        "Seconds that a function may take for a sample, or for a batch if it takes batches; then the sample is masked "
        "and counted. `judge` and `code` have limits of their own.",
        above=0,
    )
    max_concurrency: int = key(16, "Calls of a coroutine function under way at a time, per process.", at_least=1)
    max_retries: int = key(
        3, "Further attempts where a score could not be computed for reasons that are not the sample's.", at_least=0
    )
    on_error: str = key(
        "raise",
        "A reward that raises or is not a number: stop with the sample shown, or mask the sample and count it.",
        choices=("raise", "mask"),
    )
    max_failure_ratio: float = key(
        0.25, "Share of a batch that may be masked; above it the run saves and stops.", at_least=0, at_most=1
    )
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig)
    sandbox: SandboxConfig = section(SandboxConfig)
    judge: JudgeConfig = section(JudgeConfig)


@dataclass
class CustomRewardConfig:
    """A reward function of one's own."""

    path: str | None = key(None, "Python file that holds the function; null = use `reward_model.name`.")
    name: str = key(
        "compute_score", "Its name; it is called as fn(data_source, solution_str, ground_truth, extra_info)."
    )
    reward_kwargs: dict[str, Any] = key({}, "Extra arguments of the function, by name.")


def reward_problems(config: ScoredConfig) -> Iterator[Problem]:
    """What cannot work about the rewards of a job."""
    reward, path = config.reward_model, "reward_model"
    weights = reward.functions
    if any(isinstance(weight, bool) or not isinstance(weight, int | float) for weight in weights.values()):
        yield Problem.at(config, f"{path}.functions", "must give each function a number, its weight")
    if CUSTOM in weights and config.custom_reward_function.path is None:
        yield Problem.at(config, f"{path}.functions", "has 'custom', and custom_reward_function.path is not set")
    if config.custom_reward_function.path is not None and weights and CUSTOM not in weights:
        yield Problem.at(config, f"{path}.functions", "leaves out custom_reward_function; give 'custom' a weight")
    if any(not isinstance(name, str) for name in reward.data_sources.values()):
        yield Problem.at(config, f"{path}.data_sources", "must give each data source the name of a function")
    if any(not isinstance(kwargs, dict) for kwargs in reward.function_kwargs.values()):
        yield Problem.at(config, f"{path}.function_kwargs", "must give each function a mapping of arguments")
    overlong, longest = reward.reward_kwargs.overlong_buffer_cfg, reward.reward_kwargs.max_resp_len
    if overlong.enable and not 0 < overlong.len <= (longest or config.data.max_response_length):
        text = "must be above 0 and at most the longest answer (max_resp_len, or data.max_response_length)"
        yield Problem.at(config, f"{path}.reward_kwargs.overlong_buffer_cfg.len", text)
    for name, url in (("sandbox_fusion.url", reward.sandbox_fusion.url), ("judge.base_url", reward.judge.base_url)):
        if url is not None and not url.startswith(("http://", "https://")):
            yield Problem.at(config, f"{path}.{name}", "must begin with http:// or https://")
    yield from _judge_problems(config, reward.judge)


def _judge_problems(config: ScoredConfig, judge: JudgeConfig) -> Iterator[Problem]:
    path = "reward_model.judge"
    if config.reward_model.name == "judge" or "judge" in config.reward_model.functions:
        for name in ("base_url", "model"):
            if getattr(judge, name) is None:
                yield Problem.at(config, f"{path}.{name}", "must be set for the reward function 'judge'")
    if judge.score_range[0] >= judge.score_range[1]:
        yield Problem.at(config, f"{path}.score_range", "its first entry must be below its second")
    try:
        groups = re.compile(judge.score_pattern).groups
    except re.error as error:
        yield Problem.at(config, f"{path}.score_pattern", f"is no regular expression: {error}")
    else:
        if groups == 0:
            yield Problem.at(config, f"{path}.score_pattern", "must have a group for the score")
    if judge.template is not None and judge.template_path is not None:
        yield Problem.at(config, f"{path}.template_path", "and template are two templates; set one")
    if judge.template_path is not None and not Path(judge.template_path).expanduser().is_file():
        yield Problem.at(config, f"{path}.template_path", "there is no such file")
