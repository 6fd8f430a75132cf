"""Files that the pages name: they exist, and a breakpoint is a function."""

import importlib
import inspect
import itertools
import re

import pytest
from support.doc_pages import ROOT, pages

FOLDERS = ("megarl", "tests", "tools", "launch", "configs", "benchmarks", "examples", "docs")
_PATH = re.compile(r"(?<![\w.:/~<-])[\w{},./-]+/[\w{},.-]+\.(?:py|sh|yaml)\b")
_BREAKPOINT = re.compile(r"^# from (\S+) import (\w+);; b (\w+)\.(\w+);; c$", re.M)
OTHERS = ("examples/grpo_trainer/", "rewards/mine.py")
"""Files of other projects and of users."""


def expanded(path):
    """Expand braces as a shell does: ``a/{b,c}.py`` is ``a/b.py`` and ``a/c.py``."""
    parts = [part[1:-1].split(",") if part.startswith("{") else [part] for part in re.split(r"(\{[^}]*\})", path)]
    yield from map("".join, itertools.product(*parts))


def exists(path):
    first = path.partition("/")[0]
    return (ROOT / path).exists() if first in FOLDERS else (ROOT / "megarl" / path).exists()


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    rooms = {*FOLDERS, *(folder.name for folder in (ROOT / "megarl").iterdir())}
    named = [
        path
        for found in _PATH.findall(page.read_text(encoding="utf-8"))
        for path in expanded(found)
        if path.partition("/")[0] in rooms and not path.startswith(OTHERS)
    ]
    assert [path for path in named if not exists(path)] == []


def test_expansion_of_braces():
    assert list(expanded("a/{b,c}.py")) == ["a/b.py", "a/c.py"] and list(expanded("a/b.py")) == ["a/b.py"]
    assert exists("data/protocol.py") and not exists("data/utils.py") and not exists("examples/loss.py")


def test_breakpoints_are_functions():
    found = [match for page in pages() for match in _BREAKPOINT.findall(page.read_text(encoding="utf-8"))]
    assert len(found) == 2
    for module, name, owner, function in found:
        stopped_in = getattr(getattr(importlib.import_module(module), name), function)
        assert name == owner and inspect.unwrap(stopped_in) is stopped_in, "pdb would stop in the decorator"
