"""Imports SGLang once for several processes, and only the models of the tests."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

from megarl.base.child_process import environment_variables

MODELS = {
    *("deepseek_v2", "gemma3_causal", "glm4_moe", "llama", "olmo2", "olmoe"),
    *("qwen2", "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"),
}
"""Modules of ``sglang.srt.models``; SGLang refuses the models of the others."""


def import_tested_models_only() -> None:
    """Name the other modules in SGLang's variable of disabled models: they take a process 3 s of CPU time."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    others = sorted({path.stem for path in folder.glob("*.py")} - MODELS)
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))


def import_sglang() -> None:
    """Import SGLang's front end and schedulers with the variables that they read."""
    from megarl.rollout.sglang.forks import SERVER_MODULES  # loads the shim
    from megarl.rollout.sglang.in_process import _process_settings_restored
    from megarl.rollout.sglang.options import SGLangOptions, environment

    with environment_variables(environment(SGLangOptions())), _process_settings_restored():
        for name in ("sglang", "sglang.srt.entrypoints.engine", *SERVER_MODULES):
            importlib.import_module(name)
