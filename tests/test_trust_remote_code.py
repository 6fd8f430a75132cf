"""No call loads a model, tokenizer or config of transformers with code of a model folder."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("megarl", "tools", "benchmarks", "examples")


def test_every_from_pretrained_declines_code_of_the_model_folder():
    """Explicitly: the default of a library may change."""
    calls, open_calls = 0, []
    for path in (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr in ("from_pretrained", "from_config"):
                calls += 1
                values = [ast.unparse(word.value) for word in node.keywords if word.arg == "trust_remote_code"]
                if values != ["False"]:
                    open_calls.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert calls > 10 and open_calls == []
