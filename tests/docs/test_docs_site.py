"""The site, as mkdocs builds it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with warnings as errors: dead links and anchors, pages that the navigation lacks."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_is_built(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        html = (site / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text()
        title = re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)
        assert title and re.sub(r"[`*]", "", title[1]) in re.sub(r"<[^>]+>", "", html), page.name


def test_it_is_read_without_a_network(site: Path) -> None:
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\s\">]+)")
    for page in site.rglob("*.html"):
        outside = [url for url in loaded.findall(page.read_text()) if "canonical" not in url]
        assert not outside, f"{page.name} loads {outside}"
