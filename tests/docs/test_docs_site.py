"""The documentation site that mkdocs builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; warnings (dead links and anchors, pages missing in the navigation) are errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def test_every_page_is_built(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        html = (site / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text(encoding="utf-8")
        title = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert title and re.sub(r"[`*]", "", title[1]) in re.sub(r"<[^>]+>", "", html), page.name


def test_site_loads_nothing_from_the_network(site: Path) -> None:
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\s\">]+)")
    for page in site.rglob("*.html"):
        external = [url for url in loaded.findall(page.read_text(encoding="utf-8")) if "canonical" not in url]
        assert not external, f"{page.name} loads {external}"
