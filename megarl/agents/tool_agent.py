"""The tool agent loop: generate a turn, run its tool calls, append the results, until a turn has no call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from megarl.agents.event_loop import in_tokenizer_thread
from megarl.agents.loop import AgentLoop, Transcript, encode_messages, register_agent_loop
from megarl.agents.tools.calling import (
    PARSERS,
    ToolCall,
    answer_call,
    check_truncate_side,
    clip_content,
)
from megarl.agents.tools.tool import Content, ToolEntry, load_tools
from megarl.agents.types import AgentError, Conversation, Generate, Message, Trajectory, TrajectoryEnd
from megarl.base.errors import ConfigError
from megarl.data.tokenization import TOOLS_COLUMN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import GenerationJobConfig


@dataclass(frozen=True)
class ToolOptions:
    """Options of tool calls, named like the keys of ``multi_turn``.

    Attributes:
        max_parallel_calls: maximum number of calls run per turn; further calls are answered with an error.
        tool_response_truncate_side: part of a longer result that is kept: ``left``, ``right``, or both ends
            (``middle``).
    """

    format: str = "hermes"
    max_parallel_calls: int = 1
    max_tool_response_length: int = 256
    tool_response_truncate_side: str = "middle"


@register_agent_loop("tool_agent")
class ToolLoop(AgentLoop):
    """Runs conversations in which the policy calls tools; its chat template must support them.

    Raises:
        ConfigError: an option has an unknown value.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Mapping[str, ToolEntry],
        options: ToolOptions | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = tools
        self.options = options or ToolOptions()
        self.parse = PARSERS[self.options.format]
        check_truncate_side(self.options.tool_response_truncate_side)
        self.template_kwargs = dict(template_kwargs or {})
        self.schemas = [entry.tool.declaration for entry in tools.values()]

    @classmethod
    def check(cls, config: GenerationJobConfig, **options: Any) -> None:
        """Check that the configuration names a tool file."""
        _tool_file(config)

    @classmethod
    def create(cls, config: GenerationJobConfig, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Self:
        """Build the loop with the tools of ``multi_turn.tool_config_path``."""
        multi_turn = config.actor_rollout_ref.rollout.multi_turn
        configured = ToolOptions(
            multi_turn.format,
            multi_turn.max_parallel_calls,
            multi_turn.max_tool_response_length,
            multi_turn.tool_response_truncate_side,
        )
        tools = load_tools(_tool_file(config))
        return cls(tokenizer, tools, replace(configured, **options), config.data.apply_chat_template_kwargs)

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Generate turns until one has no tool call or a limit is reached."""
        schemas, tools = self._declared_tools(conversation)
        prompt_ids = await encode_messages(self.tokenizer, conversation, schemas, self.template_kwargs)
        transcript = Transcript(conversation, prompt_ids)
        counts: Counter[str] = Counter(tool_call_counts=0, malformed_calls=0)
        reason = await self._turns(transcript, generate, tools, counts)
        return transcript.end(reason, {name: float(value) for name, value in counts.items()})

    async def _turns(
        self, transcript: Transcript, generate: Generate, tools: Mapping[str, ToolEntry], counts: Counter[str]
    ) -> TrajectoryEnd:
        limits = transcript.conversation.limits
        while True:
            turn = await transcript.generate(generate)
            calls = self.parse(self.tokenizer.decode(turn.token_ids, skip_special_tokens=False))
            if not calls or turn.finish_reason == "length":
                return "length" if turn.finish_reason == "length" else "stop"
            if limits.assistant_turns is not None and transcript.assistant_turns >= limits.assistant_turns:
                return "turns"
            if limits.user_turns is not None and transcript.user_turns >= limits.user_turns:
                return "turns"
            results = await self._tool_results(calls, tools, transcript.conversation, counts)
            messages = await in_tokenizer_thread(partial(self._messages, results))
            if not await transcript.observe_messages(self.tokenizer, messages, self.template_kwargs):
                return "length"

    def _messages(self, results: Sequence[Content]) -> list[Message]:
        """Return the results of a turn's calls as messages, their texts cut to the limit."""
        longest, side = self.options.max_tool_response_length, self.options.tool_response_truncate_side
        contents = [clip_content(self.tokenizer, result, longest, side) for result in results]
        return [{"role": "tool", "content": content} for content in contents]

    async def _tool_results(
        self,
        calls: Sequence[ToolCall],
        tools: Mapping[str, ToolEntry],
        conversation: Conversation,
        counts: Counter[str],
    ) -> list[Content]:
        """Run the calls of a turn; return one content per call, in their order."""
        limit = self.options.max_parallel_calls
        excess = ToolCall(problem=f"only {limit} calls are answered per turn; this call was not run")
        answers = await asyncio.gather(
            *(answer_call(call if number < limit else excess, tools, conversation) for number, call in enumerate(calls))
        )
        counts["tool_call_counts"] += len(calls)
        for answer in answers:
            counts["malformed_calls"] += answer.malformed
            counts.update(answer.metrics)
        return [answer.content for answer in answers]

    def _declared_tools(
        self, conversation: Conversation
    ) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, ToolEntry]]:
        """Return the schemas declared in the prompt and their tools: the row's selection, or all tools.

        Raises:
            AgentError: the row declares an unknown tool.
        """
        selection = conversation.facts.get(TOOLS_COLUMN)
        if selection is None:
            return self.schemas, self.tools
        names = [schema["function"]["name"] for schema in selection]
        missing = sorted(set(names) - self.tools.keys())
        if missing:
            text = f"the row's column 'tools' has {missing}; the tools that can be called are {sorted(self.tools)}"
            raise AgentError(text, code="tool.not-callable")
        return selection, {name: self.tools[name] for name in names}


def _tool_file(config: GenerationJobConfig) -> str:
    path: str | None = config.actor_rollout_ref.rollout.multi_turn.tool_config_path
    if path is None:
        key = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
        raise ConfigError(f"{key} is null; tool_agent needs a YAML file with at least one tool", code="tool.no-file")
    return path
