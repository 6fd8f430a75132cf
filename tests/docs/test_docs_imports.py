"""docs/images/imports.svg, the import graph of the rooms, is up to date."""

import re
import subprocess
import sys

from support.doc_pages import ROOT

PICTURE = ROOT / "docs" / "images" / "imports.svg"


def test_import_graph_is_up_to_date():
    drawn = subprocess.run(
        [sys.executable, "tools/draw_imports.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert PICTURE.read_text(encoding="utf-8") == drawn, "run: python tools/draw_imports.py > docs/images/imports.svg"


def test_every_arrow_is_an_import():
    """Checked in the text of the files, independent of the library that builds the graph."""
    shown = set(re.findall(r"<title>(\w+) imports (\w+)</title>", PICTURE.read_text(encoding="utf-8")))
    for source, target in shown:
        folder = ROOT / "megarl" / source
        files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
        assert any(f"megarl.{target}" in file.read_text(encoding="utf-8") for file in files), (source, target)
    assert {("trainer", "cluster"), ("workers", "megatron"), ("cluster", "workers")} <= shown
