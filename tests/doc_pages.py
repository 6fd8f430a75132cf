"""Pages of the documentation: shell commands with the marks that say how tests run them, links and anchors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

QUICKSTART = "run: the quickstart"
"""Mark, as an HTML comment above a block: the command that the blocks marked below find done."""
ALONE, AFTER_QUICKSTART, ONE_STEP = "run", "run: after quickstart", "run: after quickstart, one step"
"""Marks of blocks that are run: as they stand, but jobs only to the checks of their configuration; the same where the
quickstart has been; there, and jobs for one step."""
NOT_RUN = "not run here: "
"""Mark of a block that no test runs, with the reason behind it."""

_FENCE = re.compile(r"^ *(`{3,}|~{3,})(\S*)")
_MARK = re.compile(r"^ *<!-- (.*) -->$")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: file, relative to the repository.
        line: of its first fence, from 1.
        language: after the fence; may be empty.
        code: without indentation.
        mark: text of the comment just above; empty where there is none.
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
    """All Markdown files that people read."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("examples/**/*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The page's blocks of code, in order."""
    lines = page.read_text().splitlines()
    fence, begin = "", 0
    for number, line in enumerate(lines):
        found = _FENCE.match(line)
        if not fence and found:
            fence, begin = found[1], number
        elif fence and line.strip() == fence:
            indent = len(lines[begin]) - len(lines[begin].lstrip())
            code = "\n".join(text[indent:] for text in lines[begin + 1 : number]) + "\n"
            above = next((text for text in reversed(lines[:begin]) if text.strip()), "")
            mark = _MARK.match(above)
            language = _FENCE.match(lines[begin])
            assert language is not None
            yield Block(str(page.relative_to(ROOT)), begin + 1, language[2], code, mark[1] if mark else "")
            fence = ""
    assert not fence, f"{page}:{begin + 1}: a block that does not end"


def shell_blocks() -> list[Block]:
    """All blocks of shell commands."""
    return [block for page in pages() for block in blocks(page) if block.language in ("bash", "sh", "shell", "console")]


def prose(page: Path) -> str:
    """The page without blocks and pieces of code."""
    kept, fence = [], ""
    for line in page.read_text().splitlines():
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif fence:
            fence = "" if line.strip() == fence else fence
        else:
            kept.append(line)
    return re.sub(r"`[^`\n]*`", "", "\n".join(kept))


def links(page: Path) -> list[str]:
    """Targets of the page's links and images."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """What a link may name behind ``#``, by GitHub's rule for headings, which the site follows as well."""
    names: set[str] = set()
    fence = ""
    for line in page.read_text().splitlines():
        found = _FENCE.match(line)
        if found:
            fence = found[1] if not fence else ("" if line.strip() == fence else fence)
        elif not fence and (heading := re.match(r"#{1,6} (.+)", line)):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            names.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return names
