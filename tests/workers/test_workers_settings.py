"""A role's configuration against its model."""

from dataclasses import replace

import pytest
from support.expected_errors import raises

from megarl.config import AdapterKeys, MegatronConfig
from megarl.models import ParallelLayout, parse_model_config
from megarl.models.model_config import Experts
from megarl.workers.settings import check_adapters, check_role, check_router_replay, layout_of

MODEL = parse_model_config(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 12,
        "num_key_value_heads": 2,
        "vocab_size": 503,
    }
)


def test_every_size_reaches_the_layout():
    config = MegatronConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=3,
        virtual_pipeline_model_parallel_size=4,
        context_parallel_size=5,
        expert_model_parallel_size=6,
        expert_tensor_parallel_size=7,
        data_parallel_size=8,
        num_layers_in_first_pipeline_stage=9,
        num_layers_in_last_pipeline_stage=10,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert layout_of(config) == ParallelLayout(2, 3, 8, 5, 6, 7, 4, 9, 10, True, True)
    assert layout_of(MegatronConfig()) == ParallelLayout()


@pytest.mark.parametrize(
    ("keys", "code", "wrong", "right"),
    [
        (
            {"pipeline_model_parallel_size": 5},
            "layout.pp-layers",
            "pipeline_model_parallel_size=5",
            "1, 2, 3, 4, 6, 12",
        ),
        (
            {"recompute_granularity": "full", "recompute_num_layers": 5},
            "layout.recompute-layers",
            "recompute_num_layers=5",
            "1, 2, 3, 4, 6, 12",
        ),
        (
            {
                "recompute_granularity": "full",
                "recompute_num_layers": 4,
                "pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 8,
            },
            "",
            "",
            "",
        ),
        ({"recompute_granularity": "full", "recompute_num_layers": 5, "recompute_method": "block"}, "", "", ""),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
            "layout.recompute-modules",
            "recompute_modules=['moe']",
            "core_attn, mlp, layernorm",
        ),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}, "", "", ""),
    ],
)
def test_layout_that_does_not_fit_the_model_raises(keys, code, wrong, right):
    config = MegatronConfig(**keys)
    if not code:
        check_role(MODEL, config, "megatron")
        return
    with raises(code, f"megatron.{wrong}", f": {right}"):
        check_role(MODEL, config, "megatron")


def test_activation_of_experts_is_recomputed_in_transformer_engine_only():
    model = replace(MODEL, experts=Experts(8, 2, 64, (True,) * MODEL.num_layers))
    selective = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    check_role(model, MegatronConfig(**selective), "megatron")
    with raises("config.recompute-moe-act", "megatron.recompute_modules=['moe_act']", "megatron.dtype=float32"):
        check_role(model, MegatronConfig(dtype="float32", **selective), "megatron")
    with raises("config.recompute-moe-act", "megatron.recompute_modules=['moe_act']", "model.lora_rank=8"):
        check_adapters(model, AdapterKeys(lora_rank=8), MegatronConfig(**selective), "model")


def test_norms_on_outputs_are_not_recomputed():
    config = MegatronConfig(recompute_granularity="selective", recompute_modules=["core_attn", "layernorm"])
    with raises("layout.recompute-modules", "recompute_modules=['layernorm']", ": core_attn, mlp"):
        check_role(replace(MODEL, input_norms=False, output_norms=True), config, "megatron")


@pytest.mark.parametrize(
    ("field", "correction_bias", "code"),
    [
        ("moe_z_loss_coeff", None, "model.no-experts"),
        ("moe_router_bias_update_rate", None, "model.no-experts"),
        ("moe_router_bias_update_rate", False, "model.no-correction-bias"),
        ("moe_z_loss_coeff", False, ""),
        ("moe_router_bias_update_rate", True, ""),
    ],
)
def test_balance_of_a_model_without_the_routers_raises(field, correction_bias, code):
    model = MODEL
    if correction_bias is not None:
        experts = Experts(4, 2, 24, layers=(True,) * MODEL.num_layers, correction_bias=correction_bias)
        model = replace(MODEL, experts=experts)
        check_router_replay(model, "R2")
    config = MegatronConfig(override_transformer_config={field: 0.01})
    if not code:
        check_role(model, config, "megatron")
        return
    with raises(code, f"megatron.override_transformer_config.{field}=0.01"):
        check_role(model, config, "megatron")


def test_routing_replay_of_a_dense_model_raises():
    check_router_replay(MODEL, "disabled")
    with raises("model.no-experts", "router_replay.mode=R2", "Qwen2ForCausalLM"):
        check_router_replay(MODEL, "R2")


def test_bias_updates_of_a_frozen_model_raise():
    keys = AdapterKeys(lora_rank=4)
    frozen = MegatronConfig(override_transformer_config={"moe_router_bias_update_rate": 0.01})
    check_adapters(MODEL, keys, MegatronConfig(), "model")
    with raises("adapter.frozen-router-bias", "bias_update_rate=0.01", "lora_rank=4"):
        check_adapters(MODEL, keys, frozen, "model")
