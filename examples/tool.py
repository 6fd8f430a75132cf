"""A custom tool: a calculator.

megarl train --config-name quickstart_grpo data.max_response_length=24 \
  actor_rollout_ref.rollout.multi_turn.enable=true \
  actor_rollout_ref.rollout.multi_turn.tool_config_path=examples/tools.yaml
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from megarl.agents import Conversation
from megarl.agents.tools import Tool, ToolError, ToolResult

OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator(Tool):
    """Evaluates sums, differences, products and quotients of numbers."""

    async def call(self, arguments: Mapping[str, Any], conversation: Conversation) -> ToolResult:
        """Return the value; ``calculations`` is summed per conversation and reported as ``agent/calculations/mean``.

        Raises:
            ToolError: the expression is invalid; the message becomes the tool's result.
        """
        text = arguments["expression"]
        try:
            value = evaluate(ast.parse(text, mode="eval").body)
        except (SyntaxError, ZeroDivisionError, TypeError) as error:
            raise ToolError(f"{text!r} has no value: {error}") from error
        return ToolResult(f"{value:.{self.config.get('digits', 6)}g}", {"calculations": 1.0})


def evaluate(node: ast.expr) -> float:
    """Evaluate an expression of numbers only, so that a model cannot run code.

    Raises:
        TypeError: the expression has another kind of node.
        ZeroDivisionError: a divisor is zero.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right))
    raise TypeError(f"{ast.unparse(node)} is neither a number nor + - * /")
