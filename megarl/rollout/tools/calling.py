"""Calls of tools: time limits, retries, and results that fit a budget of tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from megarl.errors import ConfigError
from megarl.rollout.agents.loop import AgentError, Conversation
from megarl.rollout.tools.parsers import ToolCall
from megarl.rollout.tools.tool import ToolError, ToolResult
from megarl.rollout.tools.tool_file import EquippedTool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TRUNCATE_SIDES = ("left", "middle", "right")
_CUT = "...(truncated)..."
_PAUSE_S = 0.1


class Answered(NamedTuple):
    """What one call came to.

    Attributes:
        text: for the model, an error's text where the call was wrong.
        wrong: the call could not be read, names no tool, or does not fit it.
        metrics: as the tool told.
    """

    text: str
    wrong: bool
    metrics: Mapping[str, float] = {}


async def answer_call(call: ToolCall, tools: Mapping[str, EquippedTool], conversation: Conversation) -> Answered:
    """Calls a tool; a call that is wrong is answered with what is wrong about it.

    Args:
        call: as parsed.
        tools: by name.
        conversation: in which it stands.

    Raises:
        AgentError: the tool failed, after all its retries: an empty answer would teach the model something false.
    """
    try:
        if call.problem is not None:
            raise ToolError(call.problem)
        if call.name not in tools:
            raise ToolError(f"there is no tool {call.name!r:.80}; the tools are {', '.join(sorted(tools))}")
        equipped = tools[call.name]
        arguments = equipped.tool.check(call.arguments)
        result = await _attempt(equipped, arguments, conversation)
    except ToolError as error:
        return Answered(f"Error: {error}", wrong=True)
    return Answered(result.text, wrong=False, metrics=result.metrics)


async def _attempt(equipped: EquippedTool, arguments: Mapping[str, object], conversation: Conversation) -> ToolResult:
    tool, cause = equipped.tool, ""
    for attempt in range(equipped.retries + 1):
        if attempt:
            await asyncio.sleep(_PAUSE_S * 2 ** (attempt - 1))
        limit = asyncio.timeout(equipped.timeout_s)
        try:
            async with limit:
                result = await tool.call(arguments, conversation)
            return ToolResult(result) if isinstance(result, str) else result
        except ToolError:
            raise
        except Exception as error:
            late = isinstance(error, TimeoutError) and limit.expired()
            cause = f"it took longer than {equipped.timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
            logger.debug("tool %s, attempt %d: %s", tool.name, attempt + 1, cause)
    raise AgentError(f"tool {tool.name} failed {equipped.retries + 1} times; the last: {cause}")


def check_truncate_side(side: str) -> str:
    """The side, if it is one.

    Raises:
        ConfigError: it is not.
    """
    if side not in TRUNCATE_SIDES:
        key = "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side"
        raise ConfigError(f"{key}={side} must be one of {', '.join(TRUNCATE_SIDES)}")
    return side


def clip_text(tokenizer: PreTrainedTokenizerBase, text: str, budget: int, side: str = "middle") -> str:
    """A text cut to a budget of tokens, with a note where something was cut out.

    Args:
        tokenizer: counts.
        text: to be cut.
        budget: most tokens that are kept of it; the note comes on top.
        side: what is kept, in verl's words: its ``left`` part, its ``right`` part, or both ends (``middle``).
    """
    if len(text.encode()) <= budget:  # no token is less than a byte
        return text
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    ids = encoded["input_ids"]
    if len(ids) <= budget:
        return text
    head = {"left": budget, "middle": budget // 2, "right": 0}[side]
    tail = budget - head
    if not tokenizer.is_fast:
        return tokenizer.decode(ids[:head]) + _CUT + (tokenizer.decode(ids[-tail:]) if tail else "")
    offsets = encoded["offset_mapping"]  # cut in the text itself: decoding could change what is kept
    kept_head = text[: offsets[head - 1][1]] if head else ""
    kept_tail = text[offsets[-tail][0] :] if tail else ""
    return kept_head + _CUT + kept_tail
