#!/usr/bin/env python3
"""Write the reference page of all error codes from the source.

    python tools/list_errors.py > docs/reference/errors.md

Each call with ``code="group.fault"`` names a problem; the message beside it has the cause and the remedy.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megarl"
OTHER_CODES = {"ApiError", "Refused"}
"""Errors of the chat endpoint, whose codes are those of OpenAI's API."""
CODE = re.compile(r"[a-z][a-z0-9]*(\.[a-z0-9]+(-[a-z0-9]+)*)+")
PLACEHOLDER = re.compile(r"\{[^}]*\}|<br>")
HEAD = """<!-- Written by tools/list_errors.py: edit the messages in the source. -->
# Error codes

Each error message ends with a code in brackets, such as `[{example}]`. The sentences may improve between releases; a
code stays, so search for it. Words in braces stand for values. [Error messages](faq.md) explains frequent ones.
"""


@cache
def tree_of(module: str) -> ast.Module | None:
    """Parse a module of the package; None if it is another package's."""
    path = ROOT.joinpath(*module.split("."))
    file = path.with_suffix(".py")
    file = file if file.is_file() else path / "__init__.py"
    return ast.parse(file.read_text(encoding="utf-8")) if module.startswith(PACKAGE) and file.is_file() else None


@cache
def constant(module: str, name: str) -> str | None:
    """Return the text of a module's constant, which it may import; None if there is no such text."""
    tree = tree_of(module)
    for node in tree.body if tree else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [element for target in targets for element in ast.walk(target) if isinstance(element, ast.Name)]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for target, value in zip(names, values, strict=False):
                if target.id == name and isinstance(value, ast.Constant | ast.JoinedStr):
                    return template(value, module)
        elif isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return constant(node.module, name)
    return None


def template(node: ast.expr, module: str, scope: ast.AST | None = None) -> str:
    """Return the text of an expression, with names in braces for values that are known at run time only."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value, module, scope) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return template(node.value, module, scope)
    if isinstance(node, ast.BinOp) and is_text(node):
        return template(node.left, module, scope) + template(node.right, module, scope)
    if isinstance(node, ast.IfExp):
        return template(node.body, module, scope) + " / " + template(node.orelse, module, scope)
    if isinstance(node, ast.Name):
        text = constant(module, node.id)
        return text if text is not None else local(node, module, scope) or f"{{{node.id}}}"
    if isinstance(node, ast.Attribute):
        return f"{{{node.attr}}}"
    names = [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    return f"{{{names[0]}}}" if len(set(names)) == 1 else "{…}"


def is_text(node: ast.expr) -> bool:
    """Whether an expression is a literal text, or a sum with one."""
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def local(name: ast.Name, module: str, scope: ast.AST | None) -> str | None:
    """Return the text that a function assigned to a variable before its use."""
    if scope is None:
        return None
    before = [
        (node.lineno, node.value)
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and node.lineno < name.lineno
        for target in node.targets
        if isinstance(target, ast.Name)
        and target.id == name.id
        and isinstance(node.value, ast.JoinedStr | ast.Constant)
    ]
    return template(max(before, key=lambda entry: entry[0])[1], module) if before else None


def messages(module: str) -> Iterator[tuple[str, str]]:
    """Find the codes of a module, each with its message."""
    tree = tree_of(module)
    assert tree is not None
    nodes = list(ast.walk(tree))
    scopes = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    for call in nodes:
        if not isinstance(call, ast.Call) or (isinstance(call.func, ast.Name) and call.func.id in OTHER_CODES):
            continue
        for code in [word.value for word in call.keywords if word.arg == "code"]:
            if not (isinstance(code, ast.Constant) and isinstance(code.value, str)) or not code.value:
                continue
            around = [scope for scope in scopes if scope.lineno <= call.lineno <= (scope.end_lineno or 0)]
            around.sort(key=lambda scope: (scope.end_lineno or 0) - scope.lineno)
            texts = [template(argument, module, around[0] if around else None) for argument in call.args]
            if isinstance(call.func, ast.Name) and call.func.id == "Problem":
                texts = [f"{texts[0]}: {texts[2]}"]
            text = max(texts, key=len, default="")
            if not PLACEHOLDER.sub("", text).strip():  # the text comes from elsewhere
                docs = [
                    ast.get_docstring(scope) for scope in around[: 2 if around and around[0].name == "__init__" else 1]
                ]
                text = next((doc.splitlines()[0] for doc in docs if doc), "")
            yield code.value, text


def page() -> str:
    """Return the page."""
    groups: dict[str, dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for code, text in messages(module):
            if not CODE.fullmatch(code):
                raise SystemExit(f"{file}: code={code!r} must be group.fault, in lower case with hyphens")
            groups[code.partition(".")[0]][code][" ".join(text.split())] = None
    lines = [HEAD.format(example=min(groups["layout"], default="layout.x"))]
    for group, codes in sorted(groups.items()):
        lines += [f"## {group}", "", "| code | messages |", "|---|---|"]
        for code, texts in sorted(codes.items()):
            shown = "<br>".join(_escaped(text) for text in texts if text)
            lines.append(f"| `{code}` | {shown} |")
        lines.append("")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return re.sub(r"([|<>*_`\[\]\\])", r"\\\1", text)


if __name__ == "__main__":
    sys.stdout.write(page())
