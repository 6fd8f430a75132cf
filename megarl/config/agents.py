"""Sections for agents: multi-turn conversations, tools, search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.keys import key
from megarl.config.problems import Problem

if TYPE_CHECKING:
    from megarl.config.schema import AnswersConfig


@dataclass
class MultiTurnConfig:
    """Conversations of several turns with tools; see docs/agents.md."""

    enable: bool = key(False, "Lead conversations with `tool_agent` where neither row nor `agent` names another loop.")
    max_assistant_turns: int | None = key(None, "Turns that the policy takes at most; null = no limit.", at_least=1)
    max_user_turns: int | None = key(None, "Turns that the tools take at most; null = no limit.", at_least=1)
    max_parallel_calls: int = key(
        1, "Calls of one turn that are made; the others are answered with an error.", at_least=1
    )
    max_tool_response_length: int = key(256, "Longest result of a tool, in tokens; a longer one is cut.", at_least=1)
    tool_response_truncate_side: str = key(
        "middle",
        "What is kept of a longer result: its left, its right, or both ends.",
        choices=("left", "middle", "right"),
    )
    tool_config_path: str | None = key(None, "YAML file that lists the tools; null = none.")
    format: str = key(
        "hermes",
        "How the model writes calls: hermes (also Qwen), llama3_json, or a parser that one's own module registers.",
    )


@dataclass
class AgentConfig:
    """Which loop leads a conversation, and how many at a time."""

    default_agent_loop: str | None = key(
        None,
        "Loop of rows without `agent_name`: single_turn_agent, tool_agent, search_agent, external_agent, a name from "
        "`agent_loop_config_path`, or path.py:Class; null = by `external_agent`, `do_search` and `multi_turn.enable`.",
    )
    external_agent: str | None = key(
        None,
        "Function that leads conversations over the run's chat endpoint, with any framework: path.py:function or "
        "package.module.function; null = none.",
    )
    agent_loop_config_path: str | None = key(
        None, "YAML list of one's own loops: `name`, `_target_` (path.py:Class) and options; null = none."
    )
    max_concurrency: int = key(4096, "Conversations under way at a time.", at_least=1)
    timeout_s: float | None = key(
        None,
        "Seconds that one conversation may take; a longer one fails, is masked and counted; null = no limit.",
        above=0,
    )


@dataclass
class EndpointConfig:
    """The policy over OpenAI's chat interface while it is trained; see docs/agents.md."""

    enable: bool = key(False, "Serve it; with `agent.external_agent` it is served in any case.")
    host: str = key("127.0.0.1", "Where to listen; beyond loopback everybody who has the token gets in, unencrypted.")
    port: int = key(0, "Port; 0 = any free one, which `access_file` tells.", at_least=0, at_most=65535)
    access_file: str | None = key(
        None,
        "File that tells clients `base_url`, `api_key` and `model`, readable by its owner only; "
        "null = `outputs/<experiment_name>/endpoint.json`.",
    )
    wait_s: float = key(
        600.0,
        "Seconds that a request from outside waits for the run to generate; then it is told to come back.",
        above=0,
    )


@dataclass
class RetrieverConfig:
    """The retrieval server that `search_agent` asks."""

    url: str | None = key(None, "Address of POST requests, such as http://127.0.0.1:8000/retrieve; null = none.")
    topk: int = key(3, "Documents per query.", at_least=1)
    timeout_s: float = key(30.0, "Seconds that one request may take.", above=0)
    retries: int = key(3, "Further attempts after a request that failed; then the conversation fails.", at_least=0)


def agent_problems(config: AnswersConfig) -> Iterator[Problem]:
    """What cannot work about the agents of a job."""
    rollout = config.actor_rollout_ref.rollout
    path = "actor_rollout_ref.rollout"
    searches = config.do_search or rollout.agent.default_agent_loop == "search_agent"
    if searches and config.retriever.url is None:
        yield Problem.at(config, "retriever.url", "search_agent needs a server, such as http://127.0.0.1:8000/retrieve")
    if config.retriever.url is not None and not config.retriever.url.startswith(("http://", "https://")):
        yield Problem.at(config, "retriever.url", "must begin with http:// or https://")
    uses_tools = rollout.multi_turn.enable or rollout.agent.default_agent_loop == "tool_agent"
    leads = rollout.agent.default_agent_loop in (None, "tool_agent") and not config.do_search
    if uses_tools and leads and rollout.multi_turn.tool_config_path is None:
        yield Problem.at(config, f"{path}.multi_turn.tool_config_path", "tool_agent needs a YAML file with its tools")
    if config.do_search and config.data.max_obs_length >= config.data.max_response_length:
        text = "must be below data.max_response_length, which holds what is found and what the policy writes"
        yield Problem.at(config, "data.max_obs_length", text)
    if rollout.agent.default_agent_loop == "external_agent" and rollout.agent.external_agent is None:
        yield Problem.at(config, f"{path}.agent.external_agent", "external_agent needs a function, path.py:function")
    if rollout.agent.external_agent and config.do_search and rollout.agent.default_agent_loop is None:
        text = "and do_search both lead conversations; choose by agent.default_agent_loop"
        yield Problem.at(config, f"{path}.agent.external_agent", text)
    if not rollout.endpoint.host.strip():
        yield Problem.at(config, f"{path}.endpoint.host", "must not be empty; 127.0.0.1 is this machine alone")
    for name, file in (
        (f"{path}.multi_turn.tool_config_path", rollout.multi_turn.tool_config_path),
        (f"{path}.agent.agent_loop_config_path", rollout.agent.agent_loop_config_path),
    ):
        if file is not None and not Path(file).expanduser().is_file():
            yield Problem.at(config, name, "there is no such file")
