"""Fields of Megatron's TransformerConfig: names and types from the installed source."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from config_cases import problems_of, with_keys

from megarl.config import TrainConfig
from megarl.config.build import build
from megarl.config.checks import transformer_fields
from megarl.config.checks.transformer_field_table import OWNED, REJECTED, REJECTED_VALUES, SUPPORTED
from megarl.config.checks.transformer_fields import TransformerField, override_problems

CRITIC = "critic.megatron"
OVERLAP = {"overlap_p2p_comm": True}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"attention_backend": "unfused"},
        {"apply_rope_fusion": False, "moe_permute_fusion": True},
        {"overlap_p2p_comm": True, "deallocate_pipeline_outputs": False},
        {
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "moe_z_loss_coeff": 0.001,
            "moe_router_bias_update_rate": 0,
        },
        {"fp8": None, "fp8_margin": 0, "moe_enable_routing_replay": False},  # Megatron's defaults
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
        ({"batch_p2p_comm": True}, "mix up the two directions"),
        ({"apply_rope_fusoin": True}, "did you mean apply_rope_fusion"),
        ({"apply_rope_fusion": 1}, "must be bool, not 1"),
        ({"fp8": "hybrid"}, "is not supported: megarl trains in float32 or bfloat16"),
        ({"fp8_recipe": "blockwise"}, "as FP8 and FP4 need"),
        ({"fp8_margin": False}, "as FP8 and FP4 need"),
        ({"moe_enable_routing_replay": True}, "set router_replay.mode"),
        ({"moe_aux_loss_coeff": 0.01}, "needs moe_router_load_balancing_type=seq_aux_loss"),
        ({"moe_aux_loss_coeff": -1}, "a number of at least 0, not -1"),
        ({"moe_z_loss_coeff": True}, "a number of at least 0, not"),
        ({"moe_router_load_balancing_type": "aux_loss"}, "depends on the division into micro-batches"),
        ({"moe_router_load_balancing_type": "seq"}, "one of none, seq_aux_loss"),
        ({"moe_input_jitter_eps": 0.1}, "highest scores"),
        ({"deterministic_mode": True}, "no deterministic mode"),
        ({"tp_comm_overlap": True}, "no setup or test of this overlap"),
        ({"window_size": [128, 0]}, "config.json"),
        ({"cuda_graph_warmup_steps": 2}, "differ in their numbers of tokens"),
        ({"attention_backend": "flashy"}, "one of flash, fused, unfused, auto"),
        ({"attention_backend": "local"}, "cannot be local: that is Megatron's own attention"),
        ({"attention_backend": 1}, "one of flash, fused, unfused, auto"),
        ({"grad_scale_func": "f"}, "megarl sets it while it runs"),
    ],
)
def test_invalid_fields(overrides: dict[str, Any], words: str) -> None:
    ((name, text),) = override_problems(overrides)
    assert name in overrides and words in text


def test_a_field_of_another_release_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    added = ast.parse("field: int = 3").body[0]
    assert isinstance(added, ast.AnnAssign)
    field = TransformerField(added.annotation, added.value)
    newer = {**transformer_fields.transformer_fields(), "moe_new_trick": field}
    monkeypatch.setattr(transformer_fields, "transformer_fields", lambda: newer)
    assert list(override_problems({"moe_new_trick": 3})) == []
    ((name, text),) = override_problems({"moe_new_trick": 4})
    assert (name, text) == (
        "moe_new_trick",
        "is not supported: megarl does not know this field of the installed Megatron-Core; remove the key",
    )


def test_each_field_has_one_class() -> None:
    assert not SUPPORTED & OWNED.keys() and not SUPPORTED & REJECTED.keys() and not OWNED.keys() & REJECTED.keys()
    assert REJECTED_VALUES.keys() <= SUPPORTED


def test_overlapped_exchange_needs_an_interleaved_pipeline() -> None:
    values = {f"{CRITIC}.pipeline_model_parallel_size": 2, f"{CRITIC}.override_transformer_config": OVERLAP}
    (problem,) = problems_of(values).values()
    assert problem.path == f"{CRITIC}.override_transformer_config.overlap_p2p_comm"
    assert problem.text == "needs virtual_pipeline_model_parallel_size of at least 2"
    build(TrainConfig, with_keys({**values, f"{CRITIC}.virtual_pipeline_model_parallel_size": 2}))
