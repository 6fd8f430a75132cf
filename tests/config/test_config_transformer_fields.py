"""Fields of Megatron's TransformerConfig: names and types from the installed source."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.checks.transformer_fields import override_problems


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"attention_backend": "unfused"},
        {"apply_rope_fusion": False, "moe_permute_fusion": True},
        {"fp8": "hybrid"},
        {"fp8": None},
        {"fp8_margin": 1},
        {"init_method_std": 1},
        {"window_size": [128, 0]},
        {"cuda_graph_warmup_steps": 2, "config_logger_dir": "x"},
    ],
)
def test_valid_fields(overrides: dict[str, Any]) -> None:
    assert list(override_problems(overrides)) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_layers": 3}, "config.json"),
        ({"recompute_granularity": "full"}, "is the key recompute_granularity"),
        ({"params_dtype": "float32"}, "is the key dtype"),
        ({"apply_rope_fusoin": True}, "did you mean apply_rope_fusion"),
        ({"apply_rope_fusion": 1}, "must be bool, not 1"),
        ({"fp8_margin": 1.5}, "must be int"),
        ({"fp8_margin": True}, "must be int"),
        ({"fp8": "e9"}, "'hybrid'"),
        ({"attention_backend": "flashy"}, "one of flash, fused, unfused, local, auto"),
        ({"grad_scale_func": "f"}, "Callable"),
        ({"window_size": ["a", 1]}, "must be"),
    ],
)
def test_invalid_fields(overrides: dict[str, Any], words: str) -> None:
    ((name, text),) = override_problems(overrides)
    assert name in overrides and words in text
