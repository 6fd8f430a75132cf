"""Every error message in docs/faq.md exists in the code."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from doc_pages import ROOT

HEADINGS = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), re.MULTILINE)


@cache
def package_strings() -> str:
    """All string literals of the package, one per line; "…" replaces the fields of f-strings."""
    lines = []
    for file in (ROOT / "megarl").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        lines += [_text(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)]
    return "\n".join(line for line in lines if line)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) if isinstance(value, ast.Constant) else "…" for value in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@pytest.mark.parametrize("heading", HEADINGS)
def test_message_exists_in_the_code(heading: str) -> None:
    if heading.startswith("unknown key"):  # composed of two strings
        assert "unknown key" in package_strings() and "; did you mean …" in package_strings()
        return
    pattern = ".*".join(re.escape(part) for part in heading.split("…"))
    assert re.search(pattern, package_strings()), heading


def test_page_has_messages() -> None:
    assert len(HEADINGS) > 20
