"""Rules of the house that a linter cannot express."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megarl"


def imported(path: Path) -> set[str]:
    """Full dotted names that a file imports from other packages, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", sorted((PACKAGE / "trainer").rglob("*.py")), ids=lambda path: path.name)
def test_the_driver_communicates_through_the_cluster_only(path):
    assert not {name for name in imported(path) if name.split(".")[:2] == ["torch", "distributed"]}


@pytest.mark.parametrize("room", ["algorithms", "models", "config"])
def test_pure_rooms_start_no_process(room):
    for path in (PACKAGE / room).rglob("*.py"):
        modules = {".".join(name.split(".")[:2]) for name in imported(path)}
        assert not modules & {"torch.distributed", "torch.multiprocessing", "multiprocessing"}, path


def test_nothing_is_called_utils():
    assert not [path for path in PACKAGE.rglob("*.py") if path.stem in {"utils", "util", "helpers", "common", "misc"}]


def test_modules_of_the_tests_are_told_apart_by_name() -> None:
    """All folders of tests are on one path: of two modules of one name, whichever was imported first is found."""
    modules = [path for path in (ROOT / "tests").rglob("*.py") if path.stem != "conftest"]
    assert not [name for name, count in Counter(path.stem for path in modules).items() if count > 1]
    assert not [path for path in modules if any("conftest" in name.split(".") for name in imported(path))]


def test_files_that_the_docs_name_are_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    rooms = "megarl|tests|tools|benchmarks|configs|launch"
    named = re.compile(rf"`((?:{rooms})/[\w/.]+)`|\]\((?!http)([\w/.]+)(?:#[\w-]+)?\)")
    for page in pages:
        for path, link in named.findall(page.read_text()):
            assert (ROOT / path if path else page.parent / link).exists(), f"{page.name}: {path or link}"
