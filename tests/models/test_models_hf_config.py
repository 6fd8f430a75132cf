import json
import subprocess
import sys

import pytest
from reference_weights import tiny_config

from megarl.base.errors import ConfigError, ModelError
from megarl.models import ParallelLayout, check_layout, known_architectures, parse_model_config, read_model_config
from megarl.models.model_config import Experts, Latent, SlidingWindow, Traits
from megarl.models.registry import MISSING_PARTS, family_of

QWEN25 = {  # Qwen2.5-0.5B as published, the fields that matter
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

GLM_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def write_config(folder, raw):
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def test_reads_a_published_config(tmp_path):
    config = read_model_config(write_config(tmp_path, QWEN25))
    assert (config.family, config.num_layers, config.hidden_size, config.ffn_hidden_size) == ("qwen2", 24, 896, 4864)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (14, 2, 64)
    assert (config.rope_theta, config.rope_scaling, config.rms_norm_eps) == (1e6, None, 1e-6)
    assert config.tie_word_embeddings and config.qkv_bias and not config.qk_norm
    assert config.raw == QWEN25


def test_separate_head_width_and_key_value_heads():
    raw = {**QWEN25, "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
    config = parse_model_config(raw)
    assert (config.head_dim, config.qkv_bias, config.qk_norm) == (128, False, True)
    del raw["num_key_value_heads"]
    assert parse_model_config(raw).num_key_value_heads == 14


@pytest.mark.parametrize(
    "fields,theta,scaling",
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, 5e5, LLAMA3),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, LLAMA3),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 8.0}},
            5e5,
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32768},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({}, 10000.0, None),
    ],
)
def test_rotary_parameters_of_old_and_new_transformers(fields, theta, scaling):
    raw = {k: v for k, v in QWEN25.items() if k != "rope_theta"} | {"architectures": ["LlamaForCausalLM"]} | fields
    config = parse_model_config(raw)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_agrees_with_configs_of_transformers(family, real_model_folder):
    import transformers

    folder = real_model_folder(family)
    ours, theirs = read_model_config(folder), transformers.AutoConfig.from_pretrained(folder)
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps


@pytest.mark.parametrize(
    "change,parts",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "no weight map", "qwen2_moe, qwen3"]),
        ({"architectures": None}, ["architectures=None", "LlamaForCausalLM"]),
        ({"hidden_size": "896"}, ["hidden_size='896'", "positive integer"]),
        ({"vocab_size": 0}, ["vocab_size=0"]),
        ({"num_hidden_layers": None}, ["num_hidden_layers=None"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=14"]),
        ({"hidden_size": 900}, ["num_attention_heads=14", "hidden_size=900"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["dynamic", "llama3"]),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, ["llama3", "low_freq_factor, high_freq_factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"use_sliding_window": True}, ["use_sliding_window=True"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, ["attention_bias=True"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
    ],
)
def test_config_errors_are_named(tmp_path, change, parts):
    with pytest.raises(ModelError) as error:
        read_model_config(write_config(tmp_path, {**QWEN25, **change}))
    for part in [str(tmp_path), *parts]:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "factor,head_dim,width",
    [(0.5, 66, 33), (0.1, 64, 6), (0.25, 36, 9), (0.01, 64, 0), (1.0, 65, 65), (1.5, 64, 96)],
)
@pytest.mark.parametrize("section", [None, "rope_parameters"])
def test_rotary_width_is_an_even_part_of_a_head(factor, head_dim, width, section):
    fields = {"partial_rotary_factor": factor} if section is None else {section: {"partial_rotary_factor": factor}}
    raw = {**QWEN25, "architectures": ["Glm4MoeForCausalLM"], "head_dim": head_dim, **GLM_EXPERTS, **fields}
    if width == 6:
        assert parse_model_config(raw).rotary_dim == 6
        return
    message = rf"rotary width .* {width} \(head_dim={head_dim} .*partial_rotary_factor={factor:g}\).* 2 to {head_dim}"
    with pytest.raises(ModelError, match=message):
        parse_model_config(raw)


@pytest.mark.parametrize("width", [3, 0])
def test_rotary_width_of_latent_attention_is_even(width):
    heads = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": width, "v_head_dim": 8}
    raw = {**QWEN25, "architectures": ["DeepseekV3ForCausalLM"], **GLM_EXPERTS, **heads}
    with pytest.raises(ModelError, match="qk_rope_head_dim"):
        parse_model_config(raw)


def test_missing_folder_missing_file_and_malformed_file(tmp_path):
    with pytest.raises(ModelError, match="nowhere does not exist"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match="holds a list"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(2, 3, 5), ParallelLayout(4, 6, 1)])
def test_layouts_that_fit(layout):
    check_layout(tiny_config(layers=6, hidden=16, heads=8, groups=4, ffn=16), layout, "critic.megatron")


@pytest.mark.parametrize(
    "layout,model,parts",
    [
        (ParallelLayout(tp=3), {}, ["tensor_model_parallel_size=3", "num_attention_heads=8", "1, 2, 4"]),
        (ParallelLayout(tp=8), {}, ["tensor_model_parallel_size=8", "num_key_value_heads=4", "1, 2, 4"]),
        (ParallelLayout(tp=4), {"ffn": 6}, ["tensor_model_parallel_size=4", "intermediate_size=6", "1, 2"]),
        (ParallelLayout(tp=0), {}, ["tensor_model_parallel_size=0"]),
        (ParallelLayout(pp=7), {}, ["pipeline_model_parallel_size=7", "exceeds", "num_hidden_layers=6", "1, 2, 3, 6"]),
        (ParallelLayout(pp=4), {}, ["pipeline_model_parallel_size=4", "does not divide", "num_hidden_layers=6"]),
    ],
)
def test_layout_error_names_key_value_and_choices(layout, model, parts):
    config = tiny_config(**{"layers": 6, "hidden": 16, "heads": 8, "groups": 4, "ffn": 16, **model})
    with pytest.raises(ConfigError) as error:
        check_layout(config, layout, "critic.megatron")
    for part in ["critic.megatron.", *parts]:
        assert part in str(error.value)


def test_package_imports_without_torch():
    code = "import sys, megarl.models as m; m.known_architectures(); assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_architecture_lists_each_family_once():
    with pytest.raises(ModelError) as error:
        parse_model_config({**QWEN25, "architectures": ["MambaForCausalLM"]})
    listed = str(error.value).partition("families with one: ")[2].partition(";")[0].split(", ")
    assert len(listed) == len(set(listed)) < len(known_architectures()) / 2
    assert {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v3"} <= set(listed)
    assert "ForCausalLM" not in str(error.value).replace("MambaForCausalLM", "")


@pytest.mark.parametrize(
    ("config", "architecture", "kind"),
    [
        ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", "a multimodal model (vision_config)"),
        ("Gemma3Config", "Gemma3ForConditionalGeneration", "a multimodal model (vision_config)"),
        ("LlavaConfig", "LlavaForConditionalGeneration", "a multimodal model (vision_config)"),
        ("Qwen2AudioConfig", "Qwen2AudioForConditionalGeneration", "a multimodal model (audio_config)"),
        ("T5Config", "T5ForConditionalGeneration", "an encoder-decoder model"),
    ],
)
def test_a_model_that_is_no_decoder_of_text_hears_text_only(tmp_path, config, architecture, kind):
    import transformers

    raw = getattr(transformers, config)().to_dict()
    with pytest.raises(ModelError) as error:
        read_model_config(write_config(tmp_path, {**raw, "architectures": [architecture]}))
    for part in (architecture, kind, "text only", "qwen3_moe"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        ("OlmoHybridForCausalLM", "gated delta net layers with learning rates up to 2"),
        ("Gemma2ForCausalLM", "soft caps on attention scores and logits"),
        ("NemotronHForCausalLM", "Mamba"),
    ],
)
def test_the_missing_part_of_an_architecture_is_named(tmp_path, architecture, part):
    with pytest.raises(ModelError) as error:
        read_model_config(write_config(tmp_path, {**QWEN25, "architectures": [architecture]}))
    for word in (str(tmp_path), architecture, part, "does not compute", "qwen3_moe"):
        assert word in str(error.value)


def test_the_missing_part_of_a_multimodal_models_decoder_is_named():
    raw = {"architectures": ["Gemma3nForConditionalGeneration"], "vision_config": {"depth": 1}}
    with pytest.raises(ModelError, match=r"multimodal model .* text only.*decoder also has per-layer embeddings"):
        parse_model_config(raw)


@pytest.mark.parametrize("name", MISSING_PARTS)
def test_architectures_with_missing_parts_exist_in_transformers(name):
    import transformers

    assert hasattr(transformers, f"{name}ForCausalLM") and f"{name}ForCausalLM" not in known_architectures()


def test_a_multimodal_model_without_its_parts_is_refused_by_name():
    with pytest.raises(ModelError, match=r"is a multimodal model, .* text only"):
        parse_model_config({"architectures": ["ChameleonForConditionalGeneration"]})


def test_known_architectures_are_sorted_and_complete():
    known = known_architectures()
    assert known == sorted(known)
    assert {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(known)


def test_language_model_as_reward_model():
    language = parse_model_config({**QWEN25, "pad_token_id": None})
    model = language.as_reward_model(pad_token_id=5)
    assert model.architecture == "Qwen2ForSequenceClassification" and model.is_value_model and not model.has_head_bias
    assert model.raw["architectures"] == ["Qwen2ForSequenceClassification"] and model.pad_token_id == 5
    assert language.raw["architectures"] == ["Qwen2ForCausalLM"] and language.pad_token_id is None
    assert parse_model_config({**QWEN25, "pad_token_id": 3}).as_reward_model(5).pad_token_id == 3
    assert model.as_reward_model(7) is model


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        ({"latent": Latent(4, 4, 2, 2, 2, False), "qk_norm_over_heads": True}, "latent attention with qk_norm_over"),
        ({"latent": Latent(4, 4, 2, 2, 2, False), "window": SlidingWindow(4, (True,), 1e4)}, "latent .* with window"),
        ({"experts": Experts(2, 1, 8, (True,)), "activation": "gelu_tanh"}, "experts with activation='gelu_tanh'"),
    ],
)
def test_traits_that_are_not_computed_together_are_rejected(monkeypatch, traits, message):
    monkeypatch.setattr(family_of("LlamaForCausalLM"), "traits", lambda raw: Traits(**traits))
    with pytest.raises(ModelError, match=message):
        parse_model_config({**QWEN25, "architectures": ["LlamaForCausalLM"]})
