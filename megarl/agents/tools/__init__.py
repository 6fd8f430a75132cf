"""Tools that a policy can call in a trajectory.

``tool`` has the base class, its registry and the reader of ``multi_turn.tool_config_path``; ``calling`` parses and runs
tool calls.
"""

from megarl.agents.tools.calling import (
    PARSERS,
    ToolAnswer,
    ToolCall,
    answer_call,
    clip_text,
    register_tool_parser,
)
from megarl.agents.tools.tool import Tool, ToolEntry, ToolError, ToolResult, load_tools, register_tool

__all__ = [
    "PARSERS",
    "Tool",
    "ToolAnswer",
    "ToolCall",
    "ToolEntry",
    "ToolError",
    "ToolResult",
    "answer_call",
    "clip_text",
    "load_tools",
    "register_tool",
    "register_tool_parser",
]
