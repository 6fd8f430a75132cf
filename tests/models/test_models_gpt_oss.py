"""gpt-oss: published configurations, tensors of transformers, YaRN in all layers, and errors."""

import peft
import pytest
import torch
import transformers
from support.expected_errors import raises

from megarl.base.errors import ModelError
from megarl.models import ParallelLayout, WeightMap, check_layout, parse_model_config
from megarl.models.adapters import AdapterMap, LoraOptions
from megarl.models.hf_folder import file_shapes, stacked_parts
from megarl.models.rope import attention_factor, inverse_frequencies, window_frequencies

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
PUBLISHED = {  # gpt-oss-20b
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
SMALL = {
    **PUBLISHED,
    "hidden_size": 32,
    "intermediate_size": 24,
    "head_dim": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size": 50,
}


def test_a_published_configuration():
    config = parse_model_config(PUBLISHED)
    assert config.window.size == 128 and config.window.layers == (True, False) * 12
    assert (config.sinks, config.qkv_bias, config.output_bias) == (True, True, True)
    assert (config.experts.count, config.experts.per_token, config.experts.ffn_hidden_size) == (32, 4, 2880)
    assert (config.experts.clamped.alpha, config.experts.clamped.limit) == (1.702, 7.0)
    assert parse_model_config({k: v for k, v in PUBLISHED.items() if k != "layer_types"}).window == config.window
    # The number of weights in the model card (https://arxiv.org/abs/2508.10925), table 1.
    assert sum(torch.Size(shape).numel() for shape in WeightMap(config).hf_shapes().values()) == pytest.approx(
        20.91e9, abs=0.005e9
    )


def test_a_configuration_loses_its_quantization():
    assert "quantization_config" not in parse_model_config(PUBLISHED).raw


def theirs():
    fields = {name: value for name, value in SMALL.items() if name not in ("architectures", "quantization_config")}
    return transformers.GptOssConfig(**fields)


@pytest.mark.parametrize("head", ["CausalLM", "SequenceClassification"])
def test_tensors_are_those_of_transformers(head):
    config = theirs()
    config.num_labels = 1
    model = getattr(transformers, f"GptOssFor{head}")(config)
    ours = parse_model_config({**config.to_dict(), "architectures": [f"GptOssFor{head}"]})
    shapes = WeightMap(ours, value_head=ours.is_value_model).hf_shapes()
    assert file_shapes(shapes, stacked_parts(ours)) == {name: tuple(t.shape) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("old", [True, False], ids=["rope_scaling", "rope_parameters"])
def test_all_layers_have_the_rotary_scaling(old):
    config = theirs()
    rotary = transformers.models.gpt_oss.modeling_gpt_oss.GptOssRotaryEmbedding(config)
    ours = parse_model_config(SMALL if old else {**config.to_dict(), "architectures": ["GptOssForCausalLM"]})
    assert torch.equal(inverse_frequencies(ours), rotary.inv_freq)
    assert window_frequencies(ours) is None
    assert attention_factor(ours) == rotary.attention_scaling


def test_all_linear_layers_are_those_of_peft():
    options = LoraOptions(rank=2, alpha=4.0)
    ours = AdapterMap(WeightMap(parse_model_config(SMALL)), options).hf_shapes()
    model = peft.get_peft_model(
        transformers.GptOssForCausalLM(theirs()), peft.LoraConfig(r=2, target_modules="all-linear")
    )
    expected = {name: tuple(tensor.shape) for name, tensor in peft.get_peft_model_state_dict(model).items()}
    assert {f"base_model.model.{name}": shape for name, shape in ours.items()} == expected


def test_experts_have_no_adapters():
    weights = WeightMap(parse_model_config(SMALL))
    with raises("adapter.unsupported-target", "target_modules", "experts.0.down_proj'", "o_proj, q_proj"):
        AdapterMap(weights, LoraOptions(rank=2, alpha=4.0, targets=("down_proj",)))


def test_ranks_do_not_share_an_expert():
    config = parse_model_config(SMALL)
    check_layout(config, ParallelLayout(tp=2, ep=2, etp=1), "megatron")
    with raises("layout.etp-expert-biases", "set megatron.expert_tensor_parallel_size=1"):
        check_layout(config, ParallelLayout(tp=2), "megatron")


@pytest.mark.parametrize(
    ("change", "fault", "parts"),
    [
        ({"attention_bias": False}, "unsupported-setting", ["attention_bias=False", "only True"]),
        ({"rope_scaling": None}, "field-missing", ["rope_parameters"]),
        ({"rms_norm_eps": None}, "field-missing", ["rms_norm_eps"]),
        ({"layer_types": ["sliding_attention"]}, "layer-types-count", ["layer_types has 1"]),
        ({"num_experts_per_tok": 5}, "experts-per-token", ["num_experts_per_tok=5", "4 experts"]),
        ({"quantization_config": {"quant_method": "fp8"}}, "unsupported-quantization", ["'fp8'", "only 'mxfp4'"]),
    ],
)
def test_configuration_errors_are_named(change, fault, parts):
    with raises(f"model.{fault}", *parts, error=ModelError):
        parse_model_config({**SMALL, **change})
