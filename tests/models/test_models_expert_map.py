"""Experts and latent attention in the weight map: shards in any layout, and errors."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_weights import assemble, labelled_checkpoint
from support.expected_errors import raises
from support.valid_layouts import valid_layouts

from megarl.base.errors import ConfigError, ModelError
from megarl.models import ParallelLayout, WeightMap, canonical_name, check_layout, parse_model_config

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 37,
    "max_position_embeddings": 64,
}
LATENTS = {"kv_lora_rank": 5, "q_lora_rank": 7, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
MODELS = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 8,
        "shared_expert_intermediate_size": 12,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "mlp_only_layers": [1]},
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **LATENTS,
    },
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "num_experts": 8},
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
        "head_dim": 4,
        "use_qk_norm": True,
    },
}
EXPERT_LAYERS = {
    "mixtral": {0, 1, 2, 3},
    "qwen2_moe": {1, 3},
    "qwen3_moe": {0, 2, 3},
    "deepseek_v3": {1, 2, 3},
    "olmoe": {0, 1, 2, 3},
    "glm4_moe": {2, 3},
}


def config_of(model, **changes):
    return parse_model_config(SIZES | MODELS[model] | changes)


def test_critic_of_a_family_without_scalar_head_in_transformers_is_read():
    critic = config_of("glm4_moe").as_reward_model(pad_token_id=0)
    assert parse_model_config(critic.raw) == critic and critic.is_value_model


CASES = [(model, layout) for model in MODELS for layout in valid_layouts(config_of(model), 16)]


@settings(max_examples=30)
@given(st.sampled_from(CASES))
def test_each_rank_holds_its_shard_of_its_experts(case):
    model, layout = case
    config = config_of(model)
    weight_map = WeightMap(config)
    checkpoint = labelled_checkpoint(weight_map.hf_shapes())
    block, gate, up, down = ("mlp", "gate_proj", "up_proj", "down_proj")
    if model == "mixtral":
        block, gate, up, down = ("block_sparse_moe", "w1", "w3", "w2")
    for rank in range(layout.world_size):
        among, stage = layout.expert_coordinate(rank), layout.coordinate(rank).pp
        held = {p.name: assemble(p, checkpoint) for p in weight_map.megatron_params(layout, rank)}
        expected = {}
        for layer in EXPERT_LAYERS[model] & set(layout.stage_layers(4, stage)):
            for expert in np.split(np.arange(8), layout.ep)[among.ep]:
                theirs = f"model.layers.{layer}.{block}.experts.{expert}."
                ours = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}."
                halves = [np.split(checkpoint[f"{theirs}{x}.weight"], layout.expert_tp)[among.etp] for x in (gate, up)]
                expected[f"{ours}linear_fc1.weight"] = np.concatenate(halves)
                output = np.split(checkpoint[f"{theirs}{down}.weight"], layout.expert_tp, axis=1)[among.etp]
                expected[f"{ours}linear_fc2.weight"] = output
        assert {name for name in held if ".experts." in name} == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_array_equal(held[name], tensor, err_msg=name)


@settings(max_examples=30)
@given(st.sampled_from(CASES))
def test_replicas_contribute_each_element_once(case):
    model, layout = case
    weight_map = WeightMap(config_of(model))
    seen = defaultdict(lambda: {name: np.zeros(shape, int) for name, shape in weight_map.hf_shapes().items()})
    written = seen["written"]
    held = [{p.name: p for p in weight_map.megatron_params(layout, rank)} for rank in range(layout.world_size)]
    for rank in range(layout.world_size):
        for param, replica, is_writer in weight_map.contributions(layout, rank):
            assert held[rank][param.name] == param
            for piece in param.pieces:
                box = tuple(map(slice, piece.start, piece.stop))
                seen[replica][piece.hf_name][box] += 1
                written[piece.hf_name][box] += is_writer
        assert weight_map.export_params(layout, rank) == [
            param for param, replica, _ in weight_map.contributions(layout, rank) if replica == 0
        ]
    # There may be fewer replicas of experts than of the rest; the first of each is a whole model.
    for replica, counts in seen.items():
        for name, count in counts.items():
            assert (count == 1).all() or (replica not in (0, "written") and (count == 0).all()), name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_engine_stacks_its_experts(model, tp, ep):
    weight_map = WeightMap(config_of(model))
    checkpoint = labelled_checkpoint(weight_map.hf_shapes())
    block, names = ("block_sparse_moe", "w1 w3 w2") if model == "mixtral" else ("mlp", "gate_proj up_proj down_proj")
    gate, up, down = names.split()
    width, share, sharing = (16 if model in ("mixtral", "olmoe") else 8), 8 // ep, tp // ep
    seen = set()
    for tp_rank in range(tp):
        # The ranks of a group are neighbours; they split what the group's experts are made of.
        group, part = divmod(tp_rank, sharing)
        params = {p.name: p for p in weight_map.rollout_params(tp, tp_rank, ep)}
        first = params[f"model.layers.3.{block}.experts.w13_weight"]
        assert first.shape == (share, 2 * width // sharing, 8)
        for place in range(share):
            theirs = f"model.layers.3.{block}.experts.{group * share + place}."
            rows = [np.split(checkpoint[f"{theirs}{x}.weight"], sharing)[part] for x in (gate, up)]
            np.testing.assert_array_equal(stack(first, checkpoint)[place], np.concatenate(rows))
            second = stack(params[f"model.layers.3.{block}.experts.w2_weight"], checkpoint)[place]
            np.testing.assert_array_equal(second, np.split(checkpoint[f"{theirs}{down}.weight"], sharing, axis=1)[part])
        seen |= {piece.hf_name for p in params.values() for piece in p.pieces}
    assert seen == set(checkpoint)


@pytest.mark.parametrize(("tp", "ep"), [(2, 4), (4, 3), (16, 16)])
def test_experts_that_do_not_divide_over_the_engine_are_rejected(tp, ep):
    with pytest.raises(ValueError, match=f"ep={ep} must divide tensor parallelism tp={tp} and the 8 experts"):
        WeightMap(config_of("qwen3_moe")).rollout_params(tp, 0, ep)


def stack(param, checkpoint):
    local = np.zeros(param.shape, int)
    for piece in param.pieces:
        box = tuple(slice(a, a + n) for a, n in zip(piece.at, piece.local_shape, strict=True))
        local[box] = checkpoint[piece.hf_name][tuple(map(slice, piece.start, piece.stop))]
    return local


def test_only_the_correction_bias_is_float32():
    weight_map = WeightMap(config_of("deepseek_v3"))
    exact = [name for name in weight_map.hf_shapes() if weight_map.is_float32(name)]
    assert exact == [f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2, 3)]


def test_transformer_engine_names_of_grouped_experts():
    name = canonical_name("decoder.layers.2.mlp.experts.linear_fc1.weight11")
    assert name == "decoder.layers.2.mlp.experts.local_experts.11.linear_fc1.weight"


def test_latent_head_sizes():
    config = config_of("deepseek_v3", head_dim=2)  # transformers writes the rotated part's width there
    assert (config.head_dim, config.num_key_value_heads, config.latent.v_dim) == (6, 4, 3)
    shapes = WeightMap(config).hf_shapes()
    assert shapes["model.layers.0.self_attn.kv_b_proj.weight"] == (4 * (4 + 3), 5)
    assert shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == (5 + 2, 8)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (8, 4 * 3)


@pytest.mark.parametrize(
    ("model", "layout", "fault", "parts"),
    [
        ("mixtral", {"dp": 3, "ep": 3}, "ep-experts", ["expert_model_parallel_size=3", "8 experts", "model: 1"]),
        ("mixtral", {"dp": 4, "ep": 8}, "ep-experts", ["expert_model_parallel_size=8", "4 groups", "model: 1, 2, 4"]),
        ("qwen3_moe", {"dp": 3, "etp": 3}, "etp-expert-width", ["expert_tensor_parallel_size=3", "an expert, 8"]),
        ("qwen3_moe", {"tp": 2, "etp": 4}, "etp-expert-width", ["expert_tensor_parallel_size=4", "model: 1, 2"]),
        ("qwen2_moe", {"tp": 4, "dp": 4, "ep": 8}, "ep-experts", ["expert_model_parallel_size=8", "parallel_size=4"]),
        ("dense", {"dp": 2, "ep": 2}, "ep-without-experts", ["expert_model_parallel_size=2", "model: 1"]),
        ("dense", {"dp": 2, "etp": 2}, "ep-without-experts", ["expert_tensor_parallel_size=2", "model: 1"]),
    ],
)
def test_layouts_that_do_not_fit_the_experts_are_rejected(model, layout, fault, parts):
    config = config_of("qwen3_moe", mlp_only_layers=[0, 1, 2, 3]) if model == "dense" else config_of(model)
    with raises(f"layout.{fault}", "critic.megatron.", *parts, error=ConfigError):
        check_layout(config, ParallelLayout(**layout), "critic.megatron")


@pytest.mark.parametrize(
    ("model", "change", "fault", "parts"),
    [
        ("mixtral", {"num_local_experts": 0}, "field-value", ["num_local_experts=0"]),
        ("mixtral", {"num_experts_per_tok": 9}, "experts-per-token", ["num_experts_per_tok=9", "8 experts"]),
        ("mixtral", {"sliding_window": 32}, "sliding-window", ["sliding_window=32", "max_position_embeddings=64"]),
        ("qwen3_moe", {"num_experts": None}, "field-missing", ["num_experts"]),
        ("deepseek_v3", {"n_group": 3}, "expert-groups", ["n_group=3"]),
        ("deepseek_v3", {"topk_group": 3}, "expert-groups", ["topk_group=3"]),
        ("deepseek_v3", {"n_group": 8, "num_experts_per_tok": 1}, "expert-groups", ["n_group=8", "of 1", "2 best"]),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "experts-per-token", ["num_experts_per_tok=5", "4 experts"]),
        ("deepseek_v3", {"scoring_func": "softmax"}, "unsupported-setting", ["scoring_func='softmax'"]),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "unsupported-quantization", ["'fp8'"]),
        ("olmoe", {"clip_qkv": 8.0}, "unsupported-setting", ["clip_qkv=8.0"]),
        ("deepseek_v3", {"kv_lora_rank": None}, "field-missing", ["kv_lora_rank"]),
        (
            "deepseek_v3",
            {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "random"},
            "unsupported-setting",
            ["topk_method='random'"],
        ),
    ],
)
def test_expert_config_errors_are_named(model, change, fault, parts):
    with raises(f"model.{fault}", "config.json", *parts, error=ModelError):
        config_of(model, **change)
