"""Checks of generation: prompts to answer, sampling, agent loops and the chat endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config.problems import Problem
from megarl.config.schema.jobs import SEARCH, EvaluateConfig, GenerateConfig, GenerationJobConfig, TrainConfig
from megarl.config.schema.rollout import TokenFilterConfig, TrainingRolloutConfig

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
