"""All pages: links, marks of command blocks, and the navigation of the site."""

from urllib.parse import urlsplit

import pytest
import yaml
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from support.doc_pages import (
    AFTER_QUICKSTART,
    ALONE,
    NOT_RUN,
    ONE_STEP,
    QUICKSTART,
    ROOT,
    anchors,
    blocks,
    links,
    pages,
    shell_blocks,
)

IDS = [str(page.relative_to(ROOT)) for page in pages()]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", pages(), ids=IDS)
def test_links_resolve(page):
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
def test_links_of_docs_stay_in_docs(page):
    local = [link for link in links(page) if not urlsplit(link).scheme and urlsplit(link).path]
    assert all((page.parent / urlsplit(link).path).resolve().is_relative_to(ROOT / "docs") for link in local)


def test_command_blocks_have_marks():
    marks = (QUICKSTART, ALONE, AFTER_QUICKSTART, ONE_STEP)
    wrong = [
        f"{block.name}: {block.mark!r}"
        for block in shell_blocks()
        if block.mark not in marks and not (block.mark.startswith(NOT_RUN) and len(block.mark) > len(NOT_RUN) + 8)
    ]
    expected = ", ".join(f"<!-- {mark} -->" for mark in (*marks, f"{NOT_RUN}reason"))
    assert not wrong, f"command blocks without a mark above them; expected one of {expected}: {wrong}"


def test_code_blocks_name_their_language():
    unknown = [
        f"{block.name}: {block.language!r}" for page in pages() for block in blocks(page) if not _is_language(block)
    ]
    assert not unknown, f"code blocks without a language that the site can color: {unknown}"


def _is_language(block):
    try:
        return bool(block.language) and get_lexer_by_name(block.language) is not None
    except ClassNotFound:
        return False


def test_every_page_is_in_the_navigation_and_in_the_index():
    files = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    named = _files(SITE["nav"])
    assert sorted(named) == sorted(files)
    listed = {link.partition("#")[0] for link in links(ROOT / "docs" / "index.md")}
    assert files - listed == {"index.md"}, "the table of docs/index.md"


def _files(nav):
    if isinstance(nav, str):
        return [nav]
    values = nav if isinstance(nav, list) else list(nav.values()) if isinstance(nav, dict) else []
    return [file for value in values for file in _files(value)]
