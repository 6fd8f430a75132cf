"""Pages of the documentation: marked shell commands, links and anchors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

QUICKSTART = "run: the quickstart"
"""Mark (an HTML comment above a block) of the quickstart command."""
ALONE, AFTER_QUICKSTART, ONE_STEP = "run", "run: after quickstart", "run: after quickstart, one step"
"""Marks of tested blocks: run jobs up to their configuration checks; the same after the quickstart; one step after the
quickstart."""
NOT_RUN = "not run here: "
"""Mark of a block that no test runs; a reason follows."""

_FENCE = re.compile(r"^ *(`{3,}|~{3,})(\S*)")
_MARK = re.compile(r"^ *<!-- (.*) -->$")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        page: file, relative to the repository.
        line: line of the opening fence, from 1.
        language: text after the fence; may be empty.
        code: code without indentation.
        mark: text of the comment directly above, or empty.
    """

    page: str
    line: int
    language: str
    code: str
    mark: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """All Markdown pages."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("examples/**/*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the code blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    fence, begin = "", 0
    for number, line in enumerate(lines):
        opening = _FENCE.match(line)
        if not fence and opening:
            fence, begin = opening[1], number
        elif fence and line.strip() == fence:
            indent = len(lines[begin]) - len(lines[begin].lstrip())
            code = "\n".join(text[indent:] for text in lines[begin + 1 : number]) + "\n"
            above = next((text for text in reversed(lines[:begin]) if text.strip()), "")
            mark = _MARK.match(above)
            language = _FENCE.match(lines[begin])
            assert language is not None
            yield Block(str(page.relative_to(ROOT)), begin + 1, language[2], code, mark[1] if mark else "")
            fence = ""
    assert not fence, f"{page}:{begin + 1}: unclosed code block"


def shell_blocks() -> list[Block]:
    """All blocks of shell commands in all pages."""
    return [block for page in pages() for block in blocks(page) if block.language in ("bash", "sh", "shell", "console")]


def prose(page: Path) -> str:
    """Text of a page without code blocks and inline code."""
    lines, fence = [], ""
    for line in page.read_text(encoding="utf-8").splitlines():
        opening = _FENCE.match(line)
        if opening and not fence:
            fence = opening[1]
        elif fence:
            fence = "" if line.strip() == fence else fence
        else:
            lines.append(line)
    return re.sub(r"`[^`\n]*`", "", "\n".join(lines))


def links(page: Path) -> list[str]:
    """Targets of the links and images of a page."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, by the rule of GitHub and of the site."""
    names: set[str] = set()
    fence = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        marker = _FENCE.match(line)
        if marker:
            fence = marker[1] if not fence else ("" if line.strip() == fence else fence)
        names |= set(re.findall(r'<a id="([^"]+)"></a>', line))
        if not marker and not fence and (heading := re.match(r"#{1,6} (.+)", line)):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            names.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return names
