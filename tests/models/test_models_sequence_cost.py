"""The cost of a sequence against torch's own count of operations in transformers' models."""

import pytest
import torch
import transformers
from support.vision_families import FAMILIES, save_family
from torch.utils.flop_counter import FlopCounterMode

from megarl.models import parse_model_config, read_model_config
from megarl.models.sequence_cost import TOKENS, sequence_cost, tower_flops
from megarl.models.tower_class import tower_class

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
MODELS = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Qwen3Moe": {**EXPERTS, "norm_topk_prob": True, "num_experts": 4, "head_dim": 16, "mlp_only_layers": [1]},
    "DeepseekV2": {**EXPERTS, **LATENT, "q_lora_rank": 32, "n_routed_experts": 4, "n_shared_experts": 2,
                   "first_k_dense_replace": 1, "num_key_value_heads": 4},
}  # fmt: skip


def counted(model, tokens):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(tokens)[None] % 100, use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", MODELS)
def test_sequence_cost_equals_the_flops_of_a_forward_pass(family):
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, **MODELS[family]}, attn_implementation="eager", experts_implementation="eager"
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    parsed = parse_model_config({**config.to_dict(), "architectures": [f"{family}ForCausalLM"]})
    cost = sequence_cost(parsed)
    short, long = counted(model, 64), counted(model, 128)
    # Plain attention computes all pairs of tokens, those that the causal mask hides included: twice as many.
    quadratic = (long - 2 * short) / (128**2 - 2 * 64**2) / 2
    assert cost.quadratic == pytest.approx(quadratic, rel=1e-6)
    assert cost.linear == pytest.approx((short - 2 * quadratic * 64**2) / 64, rel=1e-3)
    scalar_head = sequence_cost(parsed, value_head=True)
    assert cost.linear - scalar_head.linear == 2 * 64 * (131 - 1) and cost.quadratic == scalar_head.quadratic


@pytest.mark.parametrize("family", ["Qwen3Next", "Qwen3_5"])
def test_gated_delta_nets_cost_the_same_for_every_token(family):
    """transformers computes all pairs of a chunk of 64 tokens; torch does not count the triangular system.

    It counts a few tokens more in each convolution, for its padding.
    """
    fields = {"head_dim": 32, "layer_types": ["linear_attention"] * 2 + ["full_attention"], "linear_num_key_heads": 2,
              "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 16}  # fmt: skip
    kind = f"{family}{'' if family == 'Qwen3Next' else 'Text'}Config"
    config = getattr(transformers, kind)(**SIZES, **fields, attn_implementation="eager")
    raw = {**config.to_dict(), "architectures": [f"{family}ForCausalLM"], "num_experts": 0}
    config.num_experts = 0
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    cost = sequence_cost(parse_model_config(raw))
    short, long = counted(model, 64), counted(model, 128)
    assert cost.quadratic == pytest.approx((long - 2 * short) / (128**2 - 2 * 64**2) / 2, rel=5e-3)
    half_of_pairs, system = 6 * 64 * (2 * 24 + 16), 6 * 64 * (24 + 16)
    theirs = (short - 2 * cost.quadratic * 64**2) / 64
    assert cost.linear + cost.recurrent + 2 * (half_of_pairs - system) == pytest.approx(theirs, rel=5e-3)
    assert cost.of([10])[0] == pytest.approx(10 * (cost.linear + cost.recurrent) + 100 * cost.quadratic)


def test_pairs_beyond_the_window_cost_nothing():
    raw = SIZES | {"num_hidden_layers": 4, "architectures": ["Olmo3ForCausalLM"], "sliding_window": 8}
    cost = sequence_cost(parse_model_config(raw))
    pair = 4 * 2 * 16
    assert (cost.quadratic, cost.windowed, cost.window) == (pair, 3 * pair, 8)
    assert [cost.attention(length) for length in (3, 8)] == [4 * pair * 3**2, 4 * pair * 8**2]
    visible = sum(min(token + 1, 8) for token in range(500))
    assert cost.attention(500) - pair * 500**2 == pytest.approx(3 * 2 * pair * visible, rel=0.01)


def test_costs_of_sequences():
    assert TOKENS.of([3, 5]) == [3, 5]
    assert TOKENS._replace(quadratic=2).of([3, 5]) == [21, 55]


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_flops_equal_those_of_a_forward_pass(tmp_path, family):
    """For images of whole windows; eager attention, as torch does not count its own kernel for CPUs."""
    save_family(tmp_path, family)
    vision = read_model_config(tmp_path).vision
    config = tower_class(vision).config_class(**vision.settings, attn_implementation="eager")
    tower = tower_class(vision)(config)
    patch = 3 * config.temporal_patch_size * config.patch_size**2
    for rows, columns in ((2, 2), (4, 8), (6, 4)):
        grid = torch.tensor([[1, 2 * rows, 2 * columns]])
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tower(torch.zeros(4 * rows * columns, patch), grid_thw=grid)
        assert counter.get_total_flops() == tower_flops(vision, rows * columns)
