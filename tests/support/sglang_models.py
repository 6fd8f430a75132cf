"""Models that SGLang's processes import in tests: all of them would take each process 4 s of CPU time."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

IMPORTED = {
    *("deepseek_v2", "gemma3_causal", "glm4_moe", "llama", "olmo2", "olmoe"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
}
"""Modules of ``sglang.srt.models``; SGLang refuses the models of the others."""


def import_tested_models_only() -> None:
    """Name the other modules in SGLang's environment variable for models without support."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    others = sorted({path.stem for path in folder.glob("*.py")} - IMPORTED)
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))
