"""Rules for the structure of the package that a linter cannot express."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from check_structure import import_cycles, reads_in_locale

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megarl"


def imported(path):
    """Full dotted names of all imports of a file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize(
    "path",
    sorted(path for room in ("trainer", "samples") for path in (PACKAGE / room).rglob("*.py")),
    ids=lambda path: path.name,
)
def test_driver_communicates_through_the_cluster_room_only(path):
    assert not {name for name in imported(path) if name.split(".")[:2] == ["torch", "distributed"]}


@pytest.mark.parametrize("room", ["algorithms", "models", "config"])
def test_pure_rooms_start_no_process(room):
    for path in (PACKAGE / room).rglob("*.py"):
        modules = {".".join(name.split(".")[:2]) for name in imported(path)}
        assert not modules & {"torch.distributed", "torch.multiprocessing", "multiprocessing"}, path


def test_no_module_is_named_utils():
    assert not [path for path in PACKAGE.rglob("*.py") if path.stem in {"utils", "util", "helpers", "common", "misc"}]


def test_test_modules_have_unique_names():
    """All test folders are on one import path, so of two modules with one name only the first would be imported."""
    modules = [path for path in (ROOT / "tests").rglob("*.py") if path.stem != "conftest"]
    assert not [name for name, count in Counter(path.stem for path in modules).items() if count > 1]
    named = [path for path in modules if "conftest" in path.read_text(encoding="utf-8")]
    assert not [path for path in named if any("conftest" in name.split(".") for name in imported(path))]


def test_files_named_in_the_docs_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    rooms = "megarl|tests|tools|benchmarks|configs|launch"
    named = re.compile(rf"`((?:{rooms})/[\w/.]+)`|\]\((?!http)([\w/.]+)(?:#[\w-]+)?\)")
    for page in pages:
        for path, link in named.findall(page.read_text(encoding="utf-8")):
            assert (ROOT / path if path else page.parent / link).exists(), f"{page.name}: {path or link}"


def test_text_files_name_their_encoding(tmp_path):
    """A text file is UTF-8, whatever the locale."""
    folders = ("megarl", "tools", "tests", "benchmarks", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert {str(path): lines for path in files if (lines := reads_in_locale(path))} == {}
    calls = ("p.read_text()", "p.write_text(x)", "open(p)", "open(p, 'w')", "p.open('a')", "open(p, mode='r+')")
    named = ("p.read_text('utf-8')", "open(p, 'rb')", "service.open(replicas)", "open(p, encoding='utf-8')", "f(**o)")
    (tmp_path / "calls.py").write_text("\n".join((*calls, *named)), encoding="utf-8")
    assert reads_in_locale(tmp_path / "calls.py") == list(range(1, len(calls) + 1))


def test_import_cycles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e"}}
    assert sorted(import_cycles(graph)) == [["a", "b", "c"], ["e", "f"]]


WALL_CLOCK = {
    "megarl/agents/endpoint/chat_format.py": "creation time in OpenAI's format",
    "megarl/base/logs.py": "time of a log line",
    "megarl/base/run_clock.py": "age of this process, once at its start",
    "megarl/ops/acceptance/jobs.py": "unique name of a folder",
    "megarl/ops/doctor/cluster.py": "differences between the clocks of machines",
    "megarl/ops/report/run_files.py": "age of a file",
    "megarl/tracking/backends.py": "time of a record in MLflow",
    "megarl/trainer/state/stopping.py": "deadlines of a scheduler, converted once",
}
"""Modules that read the wall clock, with the reason; its corrections would falsify durations and time limits."""


def reads_wall_clock(source):
    """Whether code calls, passes on or imports ``time.time``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = {f"{node.value.id}.{node.attr}"}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{name.name}" for name in node.names}
        else:
            continue
        if names & {"time.time", "time.time_ns"}:
            return True
    return False


def test_durations_and_time_limits_use_the_monotonic_clock():
    reading = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "megarl").rglob("*.py")
        if re.search(r"\btime\b", source := path.read_text(encoding="utf-8")) and reads_wall_clock(source)
    }
    assert reading == set(WALL_CLOCK), "use time.monotonic, or add the module with its reason"


def test_reads_of_the_wall_clock_are_found():
    assert reads_wall_clock("import time\nstart = time.time()")
    assert reads_wall_clock("import time\ndef f(clock=time.time): pass")
    assert reads_wall_clock("from time import sleep, time")
    assert not reads_wall_clock("import time\ntime.monotonic(), time.perf_counter(), time.sleep(1), time.strftime('')")


def release_marks(tree):
    """Calls of the mark ``release`` in a part of a file."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == "pytest.mark.release"]


def test_every_test_of_a_release_has_a_twin_in_ci():
    """A twin may have cases with the mark, but not the mark itself."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        for mark in release_marks(ast.parse(source)) if "mark.release(" in source else ():
            (twin,) = (keyword.value.value for keyword in mark.keywords if keyword.arg == "twin")
            file, _, name = twin.partition("::")
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
            assert not [mark for mark in function.decorator_list if release_marks(mark) == [mark]], (path, twin)
