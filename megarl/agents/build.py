"""Building the agent loops of a configuration, and checking them before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megarl.agents.loop import AGENT_LOOPS, AgentLoop
from megarl.agents.tools.calling import PARSERS
from megarl.agents.tools.tool import load_tools
from megarl.agents.types import ConversationLimits, SessionProvider
from megarl.base.errors import ConfigError
from megarl.base.user_code import is_spec
from megarl.config.schema.rollout import AgentConfig, MultiTurnConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import GenerationJobConfig

_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


def default_agent_loop(config: GenerationJobConfig) -> str:
    """Return the loop of rows without ``agent_name``."""
    agent: AgentConfig = config.actor_rollout_ref.rollout.agent
    multi_turn: MultiTurnConfig = config.actor_rollout_ref.rollout.multi_turn
    if agent.default_agent_loop is not None:
        return agent.default_agent_loop
    if agent.external_agent is not None:
        return "external_agent"
    if multi_turn.search.enable:
        return "search_agent"
    return "tool_agent" if multi_turn.enable else "single_turn_agent"


def conversation_limits(config: GenerationJobConfig) -> ConversationLimits:
    """Return the configured limits of a conversation."""
    multi_turn: MultiTurnConfig = config.actor_rollout_ref.rollout.multi_turn
    agent: AgentConfig = config.actor_rollout_ref.rollout.agent
    return ConversationLimits(
        response_tokens=config.data.max_response_length,
        assistant_turns=multi_turn.max_assistant_turns,
        user_turns=multi_turn.max_user_turns,
        seconds=agent.timeout_s,
        prompt_tokens=config.data.max_prompt_length,
    )


def check_agent_loops(config: GenerationJobConfig) -> None:
    """Check the configured loops, tools and tool-call parser before any process starts.

    Loops named by rows are checked with the data, see :func:`check_agent_names`.

    Raises:
        ConfigError: a file is missing or malformed, or a class, a parser or a loop's requirement is missing.
    """
    entries = read_loop_file(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    for name in dict.fromkeys((*entries, default_agent_loop(config))):
        _checked_class(config, entries, name)
    multi_turn: MultiTurnConfig = config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.tool_config_path is not None:
        load_tools(multi_turn.tool_config_path)
    PARSERS[multi_turn.format]  # raises for an unknown format; a module that was loaded above may have registered it


def check_agent_names(
    config: GenerationJobConfig, names: Mapping[str | None, int], locate: Callable[[int], str]
) -> None:
    """Check the loops named by rows in their column ``agent_name``, before any process starts.

    Rows may name registered loops and entries of ``agent_loop_config_path`` only: a file or module named by a row would
    be executed, and data may come from elsewhere.

    Args:
        names: each name with the first row that has it; None = the default loop.
        locate: returns file and row number of a row, for the error message.

    Raises:
        ConfigError: a loop or one of its requirements is missing, or a row names code; names the first row with that
            loop.
    """
    entries = read_loop_file(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    for name, row in names.items():
        if not name:
            continue
        if is_spec(str(name)) and name not in entries and name != default_agent_loop(config):
            raise ConfigError(
                f"{locate(row)}: agent_name={name!r} is code, which data must not choose; give the class a name in "
                f"{_KEY}, or set it as actor_rollout_ref.rollout.agent.default_agent_loop",
                code="agent.row-names-code",
            )
        try:
            _checked_class(config, entries, str(name))
        except ConfigError as error:
            hint = f"; the loops of {_KEY} are {', '.join(sorted(entries))}" if entries else ""
            text = f"{locate(row)}: agent_name={name!r}: {error.text}{hint}"
            raise ConfigError(text, code=error.code) from error


def _checked_class(
    config: GenerationJobConfig, entries: Mapping[str, Mapping[str, Any]], name: str
) -> tuple[type[AgentLoop], dict[str, Any]]:
    """Return the class of a loop and its options, checked."""
    options = dict(entries.get(name, {}))
    loop = AGENT_LOOPS.find(str(options.pop("_target_", name)))
    with _naming_options(name, options):
        loop.check(config, **options)
    return loop, options


@contextmanager
def _naming_options(name: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Convert the TypeError of unsuitable options into a ConfigError that names loop and options."""
    try:
        yield
    except TypeError as error:
        text = f"agent loop {name!r} cannot be built with the options {options}: {error}"
        raise ConfigError(text, code="agent.loop-options") from error


def build_agent_loops(
    config: GenerationJobConfig,
    tokenizer: PreTrainedTokenizerBase,
    names: Iterable[str],
    endpoint: SessionProvider | None = None,
) -> dict[str, AgentLoop]:
    """Build loops: names that :func:`check_agent_names` has checked, or the default loop.

    Raises:
        ConfigError: a loop is unknown or refuses its options.
    """
    entries = read_loop_file(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    loops = {}
    for name in names:
        loop, options = _checked_class(config, entries, name)
        with _naming_options(name, options):
            loops[name] = loop.create(config, tokenizer, **options)
        loops[name].endpoint = endpoint
    return loops


def read_loop_file(path: str | None) -> dict[str, Mapping[str, Any]]:
    """Read ``agent_loop_config_path``: entries by name, with ``_target_`` (the class) and the class's options.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    if path is None:
        return {}
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{_KEY}={path}: there is no such file", code="agent.loop-file-missing")
    try:
        content = yaml.safe_load(file.read_bytes())  # YAML is UTF-8, whatever the locale
    except yaml.YAMLError as error:
        raise ConfigError(f"{_KEY}={path} is no YAML file: {error}", code="agent.loop-file-yaml") from error
    if not isinstance(content, list):
        text = f"{_KEY}={path} must be a list of entries with 'name' and '_target_', got {content!r:.200}"
        raise ConfigError(text, code="agent.loop-file-entries")
    entries: dict[str, Mapping[str, Any]] = {}
    for number, entry in enumerate(content):
        if not isinstance(entry, Mapping) or not {"name", "_target_"} <= entry.keys():
            text = f"{path}, entry {number} must have 'name' and '_target_', got {entry!r:.200}"
            raise ConfigError(text, code="agent.loop-file-entries")
        if entry["name"] in entries:
            raise ConfigError(f"{path}, entry {number}: two loops are named {entry['name']!r}", code="agent.loop-twice")
        entries[str(entry["name"])] = {key: value for key, value in entry.items() if key != "name"}
    return entries
