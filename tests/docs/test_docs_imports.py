"""The picture of rooms and their imports is that of the package as it is."""

from __future__ import annotations

import re
import subprocess
import sys

from doc_pages import ROOT

PICTURE = ROOT / "docs" / "images" / "imports.svg"


def test_the_picture_is_up_to_date() -> None:
    drawn = subprocess.run(
        [sys.executable, "tools/draw_imports.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert PICTURE.read_text() == drawn, "run: python tools/draw_imports.py > docs/images/imports.svg"


def test_arrows_are_imports_that_the_files_have() -> None:
    """Told from the text of the files, not by the library that draws."""
    shown = set(re.findall(r"<title>(\w+) imports (\w+)</title>", PICTURE.read_text()))
    for source, target in shown:
        folder = ROOT / "megarl" / source
        files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
        assert any(f"megarl.{target}" in file.read_text() for file in files), (source, target)
    assert {("trainer", "cluster"), ("workers", "megatron"), ("cluster", "workers")} <= shown
