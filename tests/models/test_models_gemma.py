"""Gemma 3 (text): a published configuration, tensors of transformers, frequencies, names of classes, and errors."""

import pytest
import torch
import transformers
from support.expected_errors import raises

from megarl.base.errors import ModelError
from megarl.models import WeightMap, parse_model_config
from megarl.models.rope import inverse_frequencies, softmax_scale, window_frequencies

PUBLISHED = {  # Gemma 3 1B, with fewer and narrower layers
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 50,
}


def theirs_of(raw, **changes):
    fields = {key: value for key, value in raw.items() if key not in ("architectures", "model_type")}
    return transformers.Gemma3TextConfig(**fields, **changes)


def test_a_published_configuration():
    config = parse_model_config(PUBLISHED)
    assert config.window.size == 512
    assert config.window.layers == (True, True, True, True, True, False, True, True)
    assert (
        config.tie_word_embeddings
        and not parse_model_config({**PUBLISHED, "tie_word_embeddings": False}).tie_word_embeddings
    )
    assert config.embedding_scale == 8.0
    assert (
        softmax_scale(config)
        == 256**-0.5
        != softmax_scale(parse_model_config({**PUBLISHED, "query_pre_attn_scalar": 168}))
    )


def test_tensors_are_those_of_transformers():
    model = transformers.Gemma3ForCausalLM(theirs_of(PUBLISHED))
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items() if name != "lm_head.weight"}
    assert WeightMap(parse_model_config(PUBLISHED)).hf_shapes() == expected


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}])
@pytest.mark.parametrize("old", [True, False], ids=["rope_scaling", "rope_parameters"])
def test_kinds_of_layers_have_bases_of_their_own(old, scaling):
    raw = {**PUBLISHED, "rope_scaling": scaling}
    theirs = theirs_of(raw)
    rotary = transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding(theirs)
    ours = parse_model_config(raw if old else {**theirs.to_dict(), "architectures": raw["architectures"]})
    assert torch.equal(inverse_frequencies(ours), rotary.full_attention_inv_freq)
    assert torch.equal(window_frequencies(ours), rotary.sliding_attention_inv_freq)


def test_a_reward_model_has_the_name_of_the_text_class():
    critic = parse_model_config(PUBLISHED).as_reward_model()
    assert hasattr(transformers, critic.architecture) and critic.is_value_model
    assert parse_model_config(critic.raw) == critic
    assert critic.base_architecture == "Gemma3"


@pytest.mark.parametrize(
    ("change", "code", "parts"),
    [
        ({"final_logit_softcapping": 30.0}, "model.unsupported-setting", ["final_logit_softcapping=30.0"]),
        ({"attn_logit_softcapping": 50.0}, "model.unsupported-setting", ["attn_logit_softcapping=50.0"]),
        ({"hidden_activation": "gelu"}, "model.unsupported-setting", ["hidden_activation='gelu'", "gelu_pytorch_tanh"]),
        ({"use_bidirectional_attention": True}, "model.unsupported-setting", ["use_bidirectional_attention=True"]),
        ({"head_dim": None}, "model.field-missing", ["head_dim"]),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"depth": 1}},
            "model.not-text-decoder",
            ["Gemma3ForConditionalGeneration", "vision_config"],
        ),
    ],
)
def test_configuration_errors_are_named(change, code, parts):
    with raises(code, *parts, error=ModelError):
        parse_model_config({**PUBLISHED, **change})
