"""Tools that a policy can call in a trajectory.

``tool`` has the base class, its registry and the reader of ``multi_turn.tool_config_path``; ``calling`` parses and runs
tool calls.
"""

from megarl.agents.tools.calling import (
    ToolAnswer,
    ToolCall,
    answer_call,
    clip_text,
    find_parser,
    register_tool_parser,
)
from megarl.agents.tools.tool import Tool, ToolEntry, ToolError, ToolResult, find_tool, load_tools, register_tool

__all__ = [
    "Tool",
    "ToolAnswer",
    "ToolCall",
    "ToolEntry",
    "ToolError",
    "ToolResult",
    "answer_call",
    "clip_text",
    "find_parser",
    "find_tool",
    "load_tools",
    "register_tool",
    "register_tool_parser",
]
