"""Frequencies and factors equal transformers' bit for bit."""

import math

import pytest
import torch
from transformers import DeepseekV3Config, Glm4MoeConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from megarl.models import parse_model_config
from megarl.models.rope import attention_factor, inverse_frequencies, softmax_scale

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        YARN,
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2},
        {**YARN, "truncate": False, "attention_factor": 1.3},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_scaled_frequencies_equal_transformers(scaling, family):
    if family == "llama":
        theirs, name = LlamaConfig(**SIZES, rope_parameters=dict(scaling)), "LlamaForCausalLM"
    else:
        theirs, name = DeepseekV3Config(**SIZES, rope_parameters=dict(scaling)), "DeepseekV3ForCausalLM"
    ours = parse_model_config({**theirs.to_dict(), "architectures": [name]})
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs)
    assert torch.equal(inverse_frequencies(ours), frequencies)
    assert attention_factor(ours) == factor


@pytest.mark.parametrize("rope", [None, {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}])
def test_frequencies_of_a_part_of_a_head_equal_transformers(rope):
    theirs = Glm4MoeConfig(**SIZES, head_dim=64, num_key_value_heads=2, rope_parameters=rope and dict(rope))
    ours = parse_model_config({**theirs.to_dict(), "architectures": ["Glm4MoeForCausalLM"]})
    frequencies, _ = Glm4MoeRotaryEmbedding.compute_default_rope_parameters(theirs)
    assert torch.equal(inverse_frequencies(ours), frequencies)
    assert ours.rotary_dim == 2 * len(frequencies) == (32 if rope is None else 16)


def test_latent_attention_softmax_scale():
    plain = DeepseekV3Config(**SIZES, rope_parameters=dict(YARN))
    sharp = DeepseekV3Config(**SIZES, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0})
    scales = [softmax_scale(parse_model_config({**c.to_dict(), "architectures": ["DeepseekV3ForCausalLM"]}))
              for c in (plain, sharp)]  # fmt: skip
    assert scales == pytest.approx([192**-0.5, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2])
