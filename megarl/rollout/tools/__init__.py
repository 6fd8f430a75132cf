"""Tools that a policy may call: what one is, files that list them, parsers of calls, and calling.

``tool`` is the base class and its registry, ``tool_file`` reads ``multi_turn.tool_config_path``, ``parsers`` finds
calls in a turn's text, ``calling`` makes them.
"""

from megarl.rollout.tools.calling import Answered, answer_call, clip_text
from megarl.rollout.tools.parsers import ToolCall, find_parser, register_tool_parser
from megarl.rollout.tools.tool import Tool, ToolError, ToolResult, find_tool, register_tool
from megarl.rollout.tools.tool_file import EquippedTool, load_tools

__all__ = [
    "Answered",
    "EquippedTool",
    "Tool",
    "ToolCall",
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
