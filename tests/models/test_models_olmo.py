"""OLMo 2 and 3: published configurations, tensors of transformers, frequencies by kind of layer, and errors."""

import pytest
import torch
import transformers
from support.expected_errors import raises

from megarl.base.errors import ModelError
from megarl.models import WeightMap, parse_model_config
from megarl.models.rope import attention_factor, inverse_frequencies, window_frequencies

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 65536,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
}
PUBLISHED = {  # the fields of OLMo 3 7B in which it differs from OLMo 2
    **SIZES,
    "architectures": ["Olmo3ForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_theta": 500000,
    "rope_scaling": YARN,
    "sliding_window": 4096,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}


def test_a_published_configuration():
    config = parse_model_config(PUBLISHED)
    assert config.window.size == 4096 and config.window.layers == (True, True, True, False)
    assert [config.has_window(layer) for layer in range(4)] == [True, True, True, False]
    assert (config.input_norms, config.output_norms, config.qk_norm_over_heads) == (False, True, True)
    assert parse_model_config({k: v for k, v in PUBLISHED.items() if k != "layer_types"}).window == config.window


@pytest.mark.parametrize("family", ["Olmo2", "Olmo3"])
def test_tensors_are_those_of_transformers(family):
    config = getattr(transformers, f"{family}Config")(**SIZES)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    ours = parse_model_config({**config.to_dict(), "architectures": [f"{family}ForCausalLM"]})
    assert WeightMap(ours).hf_shapes() == {name: tuple(t.shape) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("old", [True, False], ids=["rope_scaling", "rope_parameters"])
def test_only_layers_with_full_attention_have_a_rotary_scaling(old):
    theirs = transformers.Olmo3Config(**{k: v for k, v in PUBLISHED.items() if k != "architectures"})
    rotary = transformers.models.olmo3.modeling_olmo3.Olmo3RotaryEmbedding(theirs)
    ours = parse_model_config(PUBLISHED if old else {**theirs.to_dict(), "architectures": ["Olmo3ForCausalLM"]})
    assert torch.equal(inverse_frequencies(ours), rotary.full_attention_inv_freq)
    assert torch.equal(window_frequencies(ours), rotary.sliding_attention_inv_freq)
    assert not torch.equal(inverse_frequencies(ours), window_frequencies(ours))
    assert attention_factor(ours) == rotary.full_attention_attention_scaling


def test_without_a_window_all_layers_have_full_attention():
    config = parse_model_config({**PUBLISHED, "layer_types": ["full_attention"] * 4})
    assert config.window is None and window_frequencies(config) is None


@pytest.mark.parametrize(
    ("change", "fault", "parts"),
    [
        (
            {"layer_types": ["full_attention"] * 3 + ["linear_attention"]},
            "layer-kind",
            ["'linear_attention'", "'sliding_attention'"],
        ),
        ({"layer_types": ["sliding_attention"]}, "layer-types-count", ["layer_types", "num_hidden_layers=4"]),
        ({"sliding_window": 0}, "field-value", ["sliding_window=0"]),
        ({"attention_bias": True}, "unsupported-setting", ["attention_bias=True"]),
        ({"rope_parameters": {"rope_type": "default"}}, "rope-sections", ["rope_parameters", "'full_attention'"]),
        (
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": {**YARN, "rope_theta": 1e4}}},
            "unsupported-rope",
            ["rope_type='yarn'", "'sliding_attention'"],
        ),
    ],
)
def test_configuration_errors_are_named(change, fault, parts):
    with raises(f"model.{fault}", *parts, error=ModelError):
        parse_model_config({**PUBLISHED, **change})
