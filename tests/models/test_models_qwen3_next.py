"""Qwen3-Next and Qwen3.5 (text): published configurations, tensors of transformers, shards, and errors."""

import numpy as np
import pytest
import torch
import transformers
from reference_weights import assemble, labelled_checkpoint
from support.expected_errors import raises

from megarl.base.errors import ModelError
from megarl.models import ParallelLayout, WeightMap, check_layout, parse_model_config, read_model_config
from megarl.models.hf_checkpoint import HFReader
from megarl.models.rope import inverse_frequencies

PUBLISHED = {  # Qwen3-Next-80B-A3B, with fewer and narrower layers
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 6,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 5,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 40,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 50,
}
FAMILIES = {
    "Qwen3Next": {},
    "Qwen3Next dense": {"num_experts": 0},
    "Qwen3_5": {},
    "Qwen3_5Moe": {},
}


def pair(name):
    """The configuration of transformers and ours, for a family."""
    family = name.split()[0]
    kind = "Qwen3NextConfig" if family == "Qwen3Next" else f"{family}TextConfig"
    fields = {key: value for key, value in {**PUBLISHED, **FAMILIES[name]}.items() if key != "model_type"}
    theirs = getattr(transformers, kind)(**{**fields, "architectures": [f"{family}ForCausalLM"]})
    return theirs, parse_model_config(theirs.to_dict())


def test_a_published_configuration():
    config = parse_model_config(PUBLISHED)
    assert config.linear.layers == (True, True, True, False) * 2 and config.attention_layers == (3, 7)
    assert (config.linear.key_heads, config.linear.values_per_key, config.linear.mixed_width) == (4, 2, 2 * 24 + 40)
    assert config.output_gate and config.zero_centered_norms and config.qk_norm and config.rotary_dim == 4
    assert config.experts.normalize and config.experts.shared_gate and config.experts.shared_ffn_hidden_size == 40
    assert parse_model_config({**PUBLISHED, "num_experts": 0}).experts is None


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_are_those_of_transformers(name, tmp_path):
    """As transformers writes them: its modules stack the experts, its files do not."""
    from safetensors import safe_open

    theirs, ours = pair(name)
    getattr(transformers, f"{name.split()[0]}ForCausalLM")(theirs).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert WeightMap(ours).hf_shapes() == written


@pytest.mark.parametrize("name", FAMILIES)
def test_frequencies_are_those_of_transformers(name):
    theirs, ours = pair(name)
    family = "Qwen3Next" if name.startswith("Qwen3Next") else "Qwen3_5Text"
    module = "qwen3_next" if family == "Qwen3Next" else "qwen3_5"
    rotary = getattr(getattr(transformers.models, module), f"modeling_{module}")
    expected = getattr(rotary, f"{family}RotaryEmbedding")(theirs).inv_freq
    assert torch.equal(inverse_frequencies(ours), expected)
    if family == "Qwen3Next":  # fields of transformers 4, as in the published file
        assert torch.equal(inverse_frequencies(parse_model_config(PUBLISHED)), expected)


def by_kind(name, hf, layer):
    """Queries, keys, values, gates, learning rates and decays ``[heads, rows, hidden]`` of the input projections."""
    prefix, dims = f"model.layers.{layer}.linear_attn.", (6, 6, 10, 10)
    if name.startswith("Qwen3Next"):
        qkvz = hf[prefix + "in_proj_qkvz.weight"].reshape(4, 32, -1)
        ba = hf[prefix + "in_proj_ba.weight"].reshape(4, 4, -1)
        return [*np.split(qkvz, np.cumsum(dims)[:-1], axis=1), ba[:, :2], ba[:, 2:]]
    parts = np.split(hf[prefix + "in_proj_qkv.weight"], [24, 48])
    parts += [hf[prefix + f"in_proj_{kind}.weight"] for kind in "zba"]
    return [part.reshape(4, -1, part.shape[1]) for part in parts]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_stacks_its_heads_by_kind(name, tp):
    """As Megatron-Core's layer: query, key, value and gate of the rank's heads; learning rates and decays."""
    _, ours = pair(name)
    weight_map = WeightMap(ours)
    hf = labelled_checkpoint(weight_map.hf_shapes())
    convolution = np.split(hf["model.layers.0.linear_attn.conv1d.weight"], [24, 48])
    gated = hf["model.layers.3.self_attn.q_proj.weight"].reshape(2, 4, 2, 16, 32)
    for rank in range(tp):
        params = {param.name: param for param in weight_map.megatron_params(ParallelLayout(tp=tp), rank)}
        heads = slice(rank * 4 // tp, (rank + 1) * 4 // tp)

        def check(name, parts, params=params):
            expected = np.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts])
            np.testing.assert_array_equal(assemble(params[f"decoder.layers.{name}"], hf), expected)

        kinds = [part[heads] for part in by_kind(name, hf, 0)]
        check("0.self_attention.in_proj_qkvz.weight", kinds[:4])
        check("0.self_attention.in_proj_ba.weight", kinds[4:])
        check("0.self_attention.conv1d.weight", [part.reshape(4, -1, 1, 4)[heads] for part in convolution])
        values = slice(rank * 8 // tp, (rank + 1) * 8 // tp)
        for vector in ("A_log", "dt_bias"):
            mine = hf[f"model.layers.0.linear_attn.{vector}"][values]
            np.testing.assert_array_equal(assemble(params[f"decoder.layers.0.self_attention.{vector}"], hf), mine)
        groups = range(rank * 2 // tp, (rank + 1) * 2 // tp)
        key, value = (hf[f"model.layers.3.self_attn.{kind}_proj.weight"].reshape(2, 1, 16, 32) for kind in "kv")
        parts = [part for n in groups for part in (gated[n, :, 0], gated[n, :, 1], key[n], value[n])]
        check("3.self_attention.linear_qkv.weight", parts)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_of_one_rank_has_the_order_of_the_checkpoint(name):
    _, ours = pair(name)
    weight_map = WeightMap(ours)
    hf = labelled_checkpoint(weight_map.hf_shapes())
    prefix = "model.layers.0.linear_attn."
    params = (param for param in weight_map.rollout_params(1, 0) if param.name.startswith(prefix))
    held = {param.name: assemble(param, hf) for param in params}
    for fused, kinds in (("in_proj_qkvz", ("qkvz", "qkv", "z")), ("in_proj_ba", ("ba", "b", "a"))):
        stored = [hf[f"{prefix}in_proj_{kind}.weight"] for kind in kinds if f"{prefix}in_proj_{kind}.weight" in hf]
        np.testing.assert_array_equal(held[f"{prefix}{fused}.weight"], np.concatenate(stored))
    np.testing.assert_array_equal(held[prefix + "conv1d.weight"], hf[prefix + "conv1d.weight"])


def test_the_text_model_of_a_multimodal_folder_is_a_folder_of_its_own(tmp_path):
    """As in docs/how_to/add_a_model.md; a model of a multimodal folder is written with that folder's names."""
    theirs, _ = pair("Qwen3_5")
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    tokens = {f"{kind}_token_id": 40 + n for n, kind in enumerate(("image", "video", "vision_start", "vision_end"))}
    whole = transformers.Qwen3_5Config(text_config=theirs.to_dict(), vision_config=vision, **tokens)
    transformers.Qwen3_5ForConditionalGeneration(whole).save_pretrained(tmp_path / "whole")
    with raises("model.rotary-width", "mrope_section=[11, 11, 10]"):  # the heads are too narrow for images
        read_model_config(tmp_path / "whole")
    source = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto")
    text = transformers.Qwen3_5ForCausalLM(source.config).to(source.dtype)
    text.load_state_dict(source.state_dict())
    text.save_pretrained(tmp_path / "text")
    reader = HFReader(tmp_path / "text")  # complete, in the right shapes
    assert reader.config.architecture == "Qwen3_5ForCausalLM"


def test_a_reward_model_has_the_name_of_the_text_class():
    critic = pair("Qwen3_5")[1].as_reward_model()
    assert hasattr(transformers, critic.architecture) and critic.is_value_model
    assert parse_model_config(critic.raw) == critic
    assert critic.base_architecture == "Qwen3_5"


@pytest.mark.parametrize(
    ("change", "fault", "parts"),
    [
        (
            {"layer_types": ["linear_attention"] * 7 + ["sliding_attention"]},
            "layer-kind",
            ["'sliding_attention'", "'full_attention'"],
        ),
        ({"layer_types": ["full_attention"]}, "layer-types-count", ["layer_types has 1", "num_hidden_layers=8"]),
        ({"layer_types": ["linear_attention"] * 8}, "no-full-attention", ["layer_types", "'full_attention'"]),
        ({"linear_num_key_heads": 3}, "linear-heads", ["linear_num_key_heads=3", "linear_num_value_heads=8"]),
        ({"linear_conv_kernel_dim": 1}, "field-value", ["linear_conv_kernel_dim=1", ">= 2"]),
        ({"attention_bias": True}, "unsupported-setting", ["attention_bias=True"]),
        ({"hidden_act": "gelu"}, "unsupported-setting", ["hidden_act='gelu'"]),
        ({"head_dim": None}, "field-missing", ["head_dim"]),
    ],
)
def test_configuration_errors_are_named(change, fault, parts):
    with raises(f"model.{fault}", *parts, error=ModelError):
        parse_model_config({**PUBLISHED, **change})


def test_layouts_that_do_not_fit_are_named():
    config = parse_model_config({**PUBLISHED, "num_key_value_heads": 8})
    check_layout(config, ParallelLayout(tp=4, pp=2, dp=2, ep=2), "actor")
    with raises("layout.tp-heads", "actor.tensor_model_parallel_size=8", "linear_num_key_heads=4", "1, 2, 4"):
        check_layout(config, ParallelLayout(tp=8), "actor")
    with raises("layout.cp-linear-attention", "actor.context_parallel_size=2", "gated delta net", "set it to 1"):
        check_layout(config, ParallelLayout(cp=2), "actor")
