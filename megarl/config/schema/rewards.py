"""The `reward` section: reward functions, their services, and the reward model."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.keys import derived_key, key, section
from megarl.config.schema.model import MegatronConfig, OwnDevicesConfig

BUILT_IN_REWARDS = (
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
"""Values of `reward.name`: auto (by data source), and megarl's reward functions."""
CUSTOM_REWARD = "custom"
"""Name of `reward.custom_reward_function` in `reward.functions`."""


@dataclass(frozen=True)
class ScoringModelConfig(OwnDevicesConfig):
    """Reward model: a Megatron role that scores whole sequences; see docs/how_to/reward_model.md."""

    enable: bool = key(False, "Score responses with a reward model.")
    path: str | None = key(
        None,
        "Folder of a Hugging Face model with a scalar head (`...ForSequenceClassification`, one label) and its "
        "tokenizer; required with `enable`; null = none.",
    )
    input_tokenizer: str | None = key(
        None,
        "Folder of the policy's tokenizer if it differs from the reward model's: responses are decoded with it, and "
        "the conversation is encoded with the reward model's tokenizer and chat template. null = the reward model "
        "reads the token ids of prompt and response unchanged.",
    )
    weight: float = key(1.0, "Weight of the reward model's score in the sum.")
    megatron: MegatronConfig = section(MegatronConfig, inherits=True)
    use_dynamic_bsz: bool = key(True, "Fill micro-batches up to `max_token_len_per_gpu` tokens.")
    max_token_len_per_gpu: int = key(
        16384, "Tokens per micro-batch and device; read with `use_dynamic_bsz`.", at_least=1
    )
    micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples per micro-batch and data-parallel rank; required without `use_dynamic_bsz`; null = none.",
        at_least=1,
    )
    max_length: int | None = derived_key(
        "Longest sequence of the reward model, in tokens; longer ones are cut at the left and counted; auto = "
        "`data.max_prompt_length` + `data.max_response_length`.",
        at_least=2,
    )


@dataclass(frozen=True)
class OverlongBufferConfig:
    """DAPO's soft penalty for responses near the longest length (arXiv:2503.14476, equation 13)."""

    enable: bool = key(False, "Apply the penalty.")
    len: int = key(0, "Tokens before `max_resp_len` over which the penalty grows.", at_least=0)
    penalty_factor: float = key(1.0, "Penalty at `max_resp_len`, subtracted from the score.", at_least=0)
    log: bool = key(False, "Record it as `overlong_reward` and `overlong`.")


@dataclass(frozen=True)
class RewardKwargsConfig:
    """Terms added to the score of the reward functions."""

    overlong_buffer_cfg: OverlongBufferConfig = section(OverlongBufferConfig)
    max_resp_len: int | None = derived_key(
        "Longest response in tokens, for `overlong_buffer_cfg`; auto = `data.max_response_length`.", at_least=1
    )
    length_reward_weight: float = key(
        0.0, "Weight of Kimi k1.5's length reward within a group (arXiv:2501.12599); 0 = none."
    )


@dataclass(frozen=True)
class SandboxConfig:
    """Sandbox for the programs that `code` scores."""

    url: str | None = key(
        None, "Address of a SandboxFusion service, including `/run_code`; null = the sandbox on this machine."
    )
    max_concurrent: int = key(64, "Service: concurrent requests over all processes.", at_least=1)
    memory_limit_mb: int = key(1024, "Memory of a program with all its processes, in MiB.", at_least=32)
    timeout_s: float = key(10.0, "Seconds that one test case may take.", above=0)
    max_cases: int | None = key(10, "Test cases to run, from the first; null = all.", at_least=1)
    continuous: bool = key(True, "Score the share of test cases that pass; false = 1 if all pass, else 0.")
    max_processes: int = key(16, "Local sandbox: concurrent processes and threads.", at_least=1)
    disk_mb: int = key(16, "Local sandbox: files, which stay in memory, in MiB.", at_least=1)
    allow_unfiltered: bool = key(
        False,
        "Local sandbox: run programs also where the kernel or libseccomp gives no filter of system calls; see "
        "docs/how_to/security.md.",
    )


@dataclass(frozen=True)
class JudgeConfig:
    """Language model as judge, behind an OpenAI-compatible chat endpoint; used by `judge`."""

    base_url: str | None = key(
        None, "Address without `/chat/completions`, such as http://127.0.0.1:8000/v1; null = none."
    )
    model: str | None = derived_key("Name of the model at the endpoint; auto = the only one that it serves.")
    template: str | None = derived_key(
        "Prompt of the judge, with {prompt}, {response} and {ground_truth}; auto = megarl's."
    )
    template_path: str | None = key(None, "File that holds `template`; null = none.")
    score_pattern: str = key(
        r"Score:\s*(-?\d+(?:\.\d+)?)", "Regular expression whose first group is the score; the last match counts."
    )
    score_range: list[float] = key([0.0, 10.0], "Lowest and highest score, which become 0 and 1.", length=2)
    max_tokens: int = key(1024, "Tokens of a judgement.", at_least=1)
    temperature: float = key(0.0, "Sampling temperature of a judgement.", at_least=0)
    timeout_s: float = key(60.0, "Seconds for the endpoint to respond.", above=0)
    max_concurrent: int = key(64, "Concurrent requests over all processes.", at_least=1)
    api_key_env: str | None = key(None, "Environment variable that holds the API key; null = send none.")


@dataclass(frozen=True)
class CustomRewardConfig:
    """Custom reward function."""

    path: str | None = key(None, "Python file that holds the function; null = none, `reward.name` scores.")
    name: str = key(
        "compute_score", "Name of the function; called as fn(data_source, solution_str, ground_truth, extra_info)."
    )
    reward_kwargs: dict[str, Any] = key({}, "Extra arguments of the function, by name.")


@dataclass(frozen=True)
class ValRewardConfig(CustomRewardConfig):
    """Custom reward function of validation during training, instead of the training's rewards."""

    path: str | None = key(
        None, "Python file that holds the function; null = validation scores like training, with all its rewards."
    )


@dataclass(frozen=True)
class RewardManagerConfig:
    """Calling convention of a reward function."""

    name: str | None = derived_key(
        "verl's name for it: batch = one call per batch, the others = one per sample; auto = by the signature of the "
        "function.",
        choices=("naive", "batch", "dapo", "prime"),
    )


@dataclass(frozen=True)
class RewardConfig:
    """Reward functions and the handling of their failures; see docs/how_to/rewards.md."""

    name: str = key(
        "auto",
        "Reward function; auto = by the row's `data_source`. Not read if `custom_reward_function.path` or "
        "`functions` is set.",
        choices=BUILT_IN_REWARDS,
        custom="function",
    )
    functions: dict[str, Any] = key(
        {},
        "Several functions and their weights, such as {gsm8k: 1.0, format: 0.2}; the score is the weighted sum. "
        "`custom` is `custom_reward_function`. Empty = one function.",
    )
    data_sources: dict[str, Any] = key(
        {}, "For auto: function by data source or pattern, such as {my_data*: math}; overrides megarl's table."
    )
    function_kwargs: dict[str, Any] = key(
        {},
        "Extra arguments by function, such as {gsm8k: {method: flexible}}; for a custom function see "
        "`custom_reward_function`.",
    )
    function_weight: float | None = derived_key(
        "Weight of the reward function's score in the sum with the reward model's; 0 = no function is called. auto = "
        "1, but 0 with `model.enable` and neither `custom_reward_function.path` nor `functions`.",
    )
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig)
    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    reward_kwargs: RewardKwargsConfig = section(RewardKwargsConfig)
    num_workers: int | None = derived_key(
        "Processes that call functions, shared evenly by the agent runners; auto = one per core of a node with agent "
        "runners, at most 32 per node; 0 = call them in the driver, which cannot stop a function that hangs.",
        at_least=0,
    )
    launch_reward_fn_async: bool = key(
        True,
        "The agent runners call functions as soon as a sample has ended, while others are generated; the scores are "
        "the same. Functions that take batches, and num_workers=0, score after generation, in the driver's processes.",
    )
    timeout_s: float = key(
        30.0,
        "Seconds that a function may take for a sample, or for a batch if it takes batches; then the sample is masked "
        "and counted. `judge` and `code` have separate limits.",
        above=0,
    )
    max_concurrency: int = key(16, "Concurrent calls of a coroutine function, per process.", at_least=1)
    max_retries: int = key(
        3, "Retries of a score that failed for reasons outside the sample (infrastructure).", at_least=0
    )
    on_error: str = key(
        "raise",
        "Handling of a reward that raises or is not a number: stop and show the sample, or mask and count it.",
        choices=("raise", "mask"),
    )
    max_failure_ratio: float = key(
        0.25, "Share of a batch that may be masked; above it the run saves and stops.", at_least=0, at_most=1
    )
    sandbox: SandboxConfig = section(SandboxConfig)
    judge: JudgeConfig = section(JudgeConfig)
    model: ScoringModelConfig = section(ScoringModelConfig)


@dataclass(frozen=True)
class TrainingRewardConfig(RewardConfig):
    """Reward functions and the handling of their failures, with a separate function for validation."""

    validation_function: ValRewardConfig = section(ValRewardConfig)
