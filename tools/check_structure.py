"""Structure of the package: import cycles, names that occur twice, counts of modules and lines.

    python tools/check_structure.py            prints the numbers; exit code 1 if a rule is broken
    python tools/check_structure.py --room config

Rules: no import cycle between modules; no public class or function name twice; no first sentence of a docstring with
more than 20 words. Entry points (``main`` of a command, ``run`` of a job) may share a name: the command line finds
them by name.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megarl"
ENTRY_POINTS = {"main", "run"}
MAX_WORDS = 20
"""Limit for the first sentence of a docstring."""


def module_paths(package: Path = PACKAGE) -> dict[str, Path]:
    """Dotted name of every module of the package, and its file."""
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported_modules(path: Path, modules: Iterable[str]) -> set[str]:
    """Modules of the package that a file imports anywhere, annotations included."""
    known, found = set(modules), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in known else node.module)
    return found & known


def reads_in_locale(path: Path) -> list[int]:
    """Lines of a file that open text without naming its encoding; ruff sees only files whose type it can infer."""
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _opens_text(node) and not {"encoding", None} & {k.arg for k in node.keywords}
    )


def _opens_text(call: ast.Call) -> bool:
    """Whether a call opens text and passes no encoding by position."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("read_text", "write_text"):
        return len(call.args) < 1 + (name == "write_text")
    modes = [
        value.value for value in (*call.args, *(k.value for k in call.keywords)) if isinstance(value, ast.Constant)
    ]
    is_text = any(re.fullmatch(r"[rwax]\+?t?\+?", mode) for mode in modes if isinstance(mode, str))
    is_plain_read = (
        isinstance(call.func, ast.Name) and len(call.args) == 1 and "mode" not in (k.arg for k in call.keywords)
    )
    return name in ("open", "fdopen") and (is_text or is_plain_read)


def import_cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            cut = stack.index(node)
            component = sorted(stack[cut:])
            del stack[cut:]
            if len(component) > 1:
                cycles.append(component)

    sys.setrecursionlimit(10_000)
    for node in graph:
        if node not in index:
            visit(node)
    return cycles


def public_names(paths: Mapping[str, Path]) -> dict[str, list[str]]:
    """Modules that define each public top-level class or function."""
    places = defaultdict(list)
    for module, path in paths.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
                "_"
            ):
                places[node.name].append(module)
    return dict(places)


def first_sentence(docstring: str) -> str:
    """Return a docstring's text up to the first full stop before a capital letter, or up to a blank line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`:*\"'(])", paragraph)[0]


def long_first_sentences(module: str, source: str) -> list[str]:
    """Describe the docstrings of a module whose first sentence has more than :data:`MAX_WORDS` words."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            sentence = first_sentence(ast.get_docstring(node) or "")
            words = len(sentence.split())
            if words > MAX_WORDS:
                problems.append(f"{module}, line {getattr(node, 'lineno', 1)}: {words} words: {sentence}")
    return problems


def main() -> int:
    """Print the structure; return 1 if a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", help="only modules below megarl.ROOM")
    room = parser.parse_args().room
    paths = {
        name: path
        for name, path in module_paths().items()
        if room is None or f"{name}.".startswith(f"{PACKAGE.name}.{room}.")
    }
    graph = {name: imported_modules(path, paths) - {name} for name, path in paths.items()}
    cycles = import_cycles(graph)
    names = public_names(module_paths())
    twice = {
        name: places
        for name, places in names.items()
        if len(places) > 1 and name not in ENTRY_POINTS and any(place in paths for place in places)
    }
    stems = defaultdict(list)
    for name, path in paths.items():
        if path.name != "__init__.py":
            stems[path.stem].append(name)
    repeated = {stem: places for stem, places in stems.items() if len(places) > 1}
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths.values())
    print(f"{len(paths)} modules, {lines} lines")
    print(f"import cycles: {len(cycles)}")
    for cycle in cycles:
        print(f"  {len(cycle)} modules: {', '.join(cycle)}")
    print(f"public names defined more than once: {len(twice)}")
    for name, places in sorted(twice.items()):
        print(f"  {name}: {', '.join(places)}")
    print(f"module names used more than once: {len(repeated)}")
    for stem, places in sorted(repeated.items()):
        print(f"  {stem}: {', '.join(places)}")
    sentences = [
        line for name, path in paths.items() for line in long_first_sentences(name, path.read_text(encoding="utf-8"))
    ]
    print(f"first sentences of more than {MAX_WORDS} words: {len(sentences)}")
    for line in sentences:
        print(f"  {line}")
    return int(bool(cycles or twice or sentences))


if __name__ == "__main__":
    sys.exit(main())
