"""Fields of Megatron's TransformerConfig: names and types from the installed source."""

import ast

import pytest
from config_cases import check_problem, problems_of, with_keys

from megarl.config import TrainConfig
from megarl.config.build import build
from megarl.config.checks import transformer_fields
from megarl.config.checks.transformer_fields import (
    OWNED,
    REJECTED,
    REJECTED_VALUES,
    SUPPORTED,
    TransformerField,
    override_problems,
)

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
def test_valid_fields(overrides):
    assert list(override_problems(overrides)) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"num_layers": 3}, "config.owned-transformer-field: config.json"),
        ({"recompute_granularity": "full"}, "config.owned-transformer-field: recompute_granularity"),
        ({"params_dtype": "float32"}, "config.owned-transformer-field: key dtype"),
        ({"batch_p2p_comm": True}, "config.owned-transformer-field"),
        ({"apply_rope_fusoin": True}, "config.unknown-transformer-field: apply_rope_fusion"),
        ({"apply_rope_fusion": 1}, "config.transformer-field-value: bool"),
        ({"fp8": "hybrid"}, "config.unsupported-transformer-field"),
        ({"fp8_recipe": "blockwise"}, "config.unsupported-transformer-field"),
        ({"fp8_margin": False}, "config.unsupported-transformer-field"),
        ({"moe_enable_routing_replay": True}, "config.unsupported-transformer-field: router_replay.mode"),
        (
            {"moe_aux_loss_coeff": 0.01},
            "config.transformer-field-without-effect: moe_router_load_balancing_type=seq_aux_loss",
        ),
        ({"moe_aux_loss_coeff": -1}, "config.transformer-field-value: at least 0"),
        ({"moe_z_loss_coeff": True}, "config.transformer-field-value: at least 0"),
        ({"moe_router_load_balancing_type": "aux_loss"}, "config.transformer-field-value"),
        ({"moe_router_load_balancing_type": "seq"}, "config.transformer-field-value: none, seq_aux_loss"),
        ({"moe_input_jitter_eps": 0.1}, "config.owned-transformer-field"),
        ({"deterministic_mode": True}, "config.unsupported-transformer-field"),
        ({"tp_comm_overlap": True}, "config.unsupported-transformer-field"),
        ({"window_size": [128, 0]}, "config.owned-transformer-field: config.json"),
        ({"cuda_graph_warmup_steps": 2}, "config.owned-transformer-field"),
        ({"attention_backend": "flashy"}, "config.transformer-field-value: flash, fused, unfused, auto"),
        ({"attention_backend": "local"}, "config.transformer-field-value: local"),
        ({"attention_backend": 1}, "config.transformer-field-value: flash, fused, unfused, auto"),
        ({"grad_scale_func": "f"}, "config.owned-transformer-field"),
    ],
)
def test_invalid_fields(overrides, expected):
    (problem,) = override_problems(overrides)
    assert {problem.path} == {f"override_transformer_config.{name}" for name in overrides}
    check_problem(problem, expected)


def test_a_field_of_another_release_is_rejected(monkeypatch):
    added = ast.parse("field: int = 3").body[0]
    assert isinstance(added, ast.AnnAssign)
    field = TransformerField(added.annotation, added.value)
    newer = {**transformer_fields.transformer_fields(), "moe_new_trick": field}
    monkeypatch.setattr(transformer_fields, "transformer_fields", lambda: newer)
    assert list(override_problems({"moe_new_trick": 3})) == []
    (problem,) = override_problems({"moe_new_trick": 4})
    assert problem == (
        "override_transformer_config.moe_new_trick",
        4,
        "is not supported: megarl does not know this field of the installed Megatron-Core; remove the key",
        "config.unsupported-transformer-field",
        "",
    )


def test_each_field_has_one_class():
    assert not SUPPORTED & OWNED.keys() and not SUPPORTED & REJECTED.keys() and not OWNED.keys() & REJECTED.keys()
    assert REJECTED_VALUES.keys() <= SUPPORTED


def test_overlapped_exchange_needs_an_interleaved_pipeline():
    values = {f"{CRITIC}.pipeline_model_parallel_size": 2, f"{CRITIC}.override_transformer_config": OVERLAP}
    (problem,) = problems_of(values).values()
    assert problem.path == f"{CRITIC}.override_transformer_config.overlap_p2p_comm"
    check_problem(problem, "layout.overlap-p2p-comm: virtual_pipeline_model_parallel_size")
    build(TrainConfig, with_keys({**values, f"{CRITIC}.virtual_pipeline_model_parallel_size": 2}))
