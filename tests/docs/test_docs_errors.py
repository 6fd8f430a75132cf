"""Every error of the package has a code, and docs/reference/errors.md lists all codes."""

import ast
from pathlib import Path

import list_errors
from support.doc_pages import ROOT

PACKAGE = ROOT / "megarl"


def classes_of_errors():
    """Subclasses of MegarlError, by name."""
    classes = {
        node.name: node
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    result = {"MegarlError": classes["MegarlError"]}
    while True:
        found = {
            name: node
            for name, node in classes.items()
            if name not in result and any(isinstance(base, ast.Name) and base.id in result for base in node.bases)
        }
        if not found:
            return result
        result |= found


def has_own_constructor(node):
    return any(isinstance(member, ast.FunctionDef) and member.name == "__init__" for member in node.body)


def test_every_error_has_a_code():
    errors = classes_of_errors()
    assert {"ConfigError", "DataError", "ModelError", "CheckpointError", "WeightSyncError"} <= errors.keys()
    fixed = {name for name, node in errors.items() if has_own_constructor(node)} - {"MegarlError"}
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            if call.func.id in errors.keys() - fixed or call.func.id == "Problem":
                keywords = {word.arg for word in call.keywords}
                if not keywords & {"code", None}:
                    wrong.append(f"{file.relative_to(ROOT)}:{call.lineno}: {call.func.id} without code=")
    assert not wrong, "\n".join(wrong)


def test_the_page_is_current():
    page = Path(ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    assert page == list_errors.page(), "python tools/list_errors.py > docs/reference/errors.md"
