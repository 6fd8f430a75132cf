"""Every page: its links lead somewhere, its commands say how they are run, and the site has it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from doc_pages import AFTER_QUICKSTART, ALONE, NOT_RUN, ONE_STEP, QUICKSTART, ROOT, anchors, links, pages, shell_blocks

IDS = [str(page.relative_to(ROOT)) for page in pages()]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


@pytest.mark.parametrize("page", pages(), ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme in ("http", "https") and "." in parts.netloc, f"{page.name}: {link}"
            continue
        assert not link.startswith("/"), f"{page.name}: {link}, expected a path relative to the page"
        target = page.parent / parts.path if parts.path else page
        assert target.exists(), f"{page.name}: {link}: there is no such file"
        if parts.fragment:
            assert parts.fragment in anchors(target), f"{page.name}: {link}: there is no such heading"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_pages_link_to_nothing_that_the_site_lacks(page: Path) -> None:
    inside = [link for link in links(page) if not urlsplit(link).scheme and urlsplit(link).path]
    assert all((page.parent / urlsplit(link).path).resolve().is_relative_to(ROOT / "docs") for link in inside)


def test_commands_say_how_they_are_run() -> None:
    marks = (QUICKSTART, ALONE, AFTER_QUICKSTART, ONE_STEP)
    wrong = [
        f"{block.name}: {block.mark!r}"
        for block in shell_blocks()
        if block.mark not in marks and not (block.mark.startswith(NOT_RUN) and len(block.mark) > len(NOT_RUN) + 8)
    ]
    expected = ", ".join(f"<!-- {mark} -->" for mark in (*marks, f"{NOT_RUN}why"))
    assert not wrong, f"blocks of commands without a mark above them; expected one of {expected}: {wrong}"


def test_every_page_is_in_the_navigation_and_in_the_readme() -> None:
    files = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    named = _files(SITE["nav"])
    assert sorted(named) == sorted(files)
    in_readme = {link.partition("#")[0].removeprefix("docs/") for link in links(ROOT / "README.md")}
    assert files - in_readme == {"index.md"}, "README.md's table of the documentation"


def _files(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    values = nav if isinstance(nav, list) else list(nav.values()) if isinstance(nav, dict) else []
    return [file for value in values for file in _files(value)]
