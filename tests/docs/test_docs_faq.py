"""Each message that the page explains is one that the code says."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from doc_pages import ROOT

HEADINGS = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "faq.md").read_text(), re.MULTILINE)


@cache
def said() -> str:
    """All texts in the package's code, a line each, with "…" for what is put in."""
    lines = []
    for file in (ROOT / "megarl").rglob("*.py"):
        tree = ast.parse(file.read_text())
        lines += [_text(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)]
    return "\n".join(line for line in lines if line)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) if isinstance(value, ast.Constant) else "…" for value in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_code_says_it(heading: str) -> None:
    if heading.startswith("unknown key"):  # put together from two texts
        assert "unknown key" in said() and "; did you mean …" in said()
        return
    pattern = ".*".join(re.escape(part) for part in heading.split("…"))
    assert re.search(pattern, said()), heading


def test_there_are_messages() -> None:
    assert len(HEADINGS) > 20
