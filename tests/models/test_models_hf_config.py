import json
import subprocess
import sys

import pytest
from reference_weights import tiny_config
from support.expected_errors import raises

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
    ("fields", "theta", "scaling"),
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
    ("change", "fault", "parts"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "no-weight-map", ["GPT2LMHeadModel", "qwen2_moe, qwen3"]),
        ({"architectures": None}, "no-architecture", ["architectures=None", "LlamaForCausalLM"]),
        ({"hidden_size": "896"}, "field-value", ["hidden_size='896'", "positive integer"]),
        ({"vocab_size": 0}, "field-value", ["vocab_size=0"]),
        ({"num_hidden_layers": None}, "field-missing", ["num_hidden_layers"]),
        ({"num_key_value_heads": 3}, "kv-heads", ["num_key_value_heads=3", "num_attention_heads=14"]),
        ({"hidden_size": 900}, "head-dim", ["num_attention_heads=14", "hidden_size=900"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "unsupported-rope", ["dynamic", "llama3"]),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, "field-missing", ["low_freq_factor, high_freq_factor"]),
        ({"partial_rotary_factor": 0.5}, "unsupported-setting", ["partial_rotary_factor=0.5"]),
        ({"use_sliding_window": True}, "unsupported-setting", ["use_sliding_window=True"]),
        ({"hidden_act": "gelu"}, "unsupported-setting", ["hidden_act='gelu'", "silu"]),
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, "unsupported-setting", ["attention_bias"]),
        ({"quantization_config": {"bits": 4}}, "unsupported-quantization", ["quantization_config"]),
    ],
)
def test_config_errors_are_named(tmp_path, change, fault, parts):
    with raises(f"model.{fault}", tmp_path, *parts, error=ModelError):
        read_model_config(write_config(tmp_path, {**QWEN25, **change}))


@pytest.mark.parametrize(
    ("factor", "head_dim", "width"),
    [(0.5, 66, 33), (0.1, 64, 6), (0.25, 36, 9), (0.01, 64, 0), (1.0, 65, 65), (1.5, 64, 96)],
)
@pytest.mark.parametrize("section", [None, "rope_parameters"])
def test_rotary_width_is_an_even_part_of_a_head(factor, head_dim, width, section):
    fields = {"partial_rotary_factor": factor} if section is None else {section: {"partial_rotary_factor": factor}}
    raw = {**QWEN25, "architectures": ["Glm4MoeForCausalLM"], "head_dim": head_dim, **GLM_EXPERTS, **fields}
    if width == 6:
        assert parse_model_config(raw).rotary_dim == 6
        return
    named = (f" {width} ", f"head_dim={head_dim}", f"partial_rotary_factor={factor:g}", f"2 to {head_dim}")
    with raises("model.rotary-width", *named):
        parse_model_config(raw)


@pytest.mark.parametrize(("width", "code"), [(3, "model.rotary-width"), (0, "model.field-value")])
def test_rotary_width_of_latent_attention_is_even(width, code):
    heads = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": width, "v_head_dim": 8}
    raw = {**QWEN25, "architectures": ["DeepseekV3ForCausalLM"], **GLM_EXPERTS, **heads}
    with raises(code, "qk_rope_head_dim"):
        parse_model_config(raw)


def test_missing_folder_missing_file_and_malformed_file(tmp_path):
    with raises("model.folder-missing") as caught:
        read_model_config(tmp_path / "nowhere")
    assert str(caught.value) == (
        f"model folder {tmp_path / 'nowhere'} does not exist; expected a folder with config.json and *.safetensors. "
        "A run downloads a model only with hub.enable=true; `hf download NAME --local-dir FOLDER` also downloads one "
        "[model.folder-missing]"
    )
    with raises("model.no-config-json", tmp_path):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with raises("model.malformed-json", tmp_path / "config.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with raises("model.not-json-object", tmp_path / "config.json", "list"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(2, 3, 5), ParallelLayout(4, 6, 1)])
def test_layouts_that_fit(layout):
    check_layout(tiny_config(layers=6, hidden=16, heads=8, groups=4, ffn=16), layout, "critic.megatron")


@pytest.mark.parametrize(
    ("layout", "model", "code", "parts"),
    [
        (ParallelLayout(tp=8), {}, "layout.tp-heads", ["parallel_size=8", "num_key_value_heads=4", "1, 2, 4"]),
        (ParallelLayout(tp=4), {"ffn": 6}, "layout.tp-heads", ["parallel_size=4", "intermediate_size=6", "1, 2"]),
        (ParallelLayout(tp=0), {}, "layout.tp-heads", ["tensor_model_parallel_size=0"]),
        (ParallelLayout(pp=7), {}, "layout.pp-layers", ["parallel_size=7", "num_hidden_layers=6", "1, 2, 3, 6"]),
        (ParallelLayout(pp=4), {}, "layout.pp-layers", ["pipeline_model_parallel_size=4", "num_hidden_layers=6"]),
    ],
)
def test_layout_error_names_key_value_and_choices(layout, model, code, parts):
    config = tiny_config(**{"layers": 6, "hidden": 16, "heads": 8, "groups": 4, "ffn": 16, **model})
    with raises(code, "critic.megatron.", *parts, error=ConfigError):
        check_layout(config, layout, "critic.megatron")


def test_heads_that_tensor_parallelism_does_not_divide():
    config = tiny_config(layers=6, hidden=16, heads=8, groups=4, ffn=16)
    with raises("layout.tp-heads") as caught:
        check_layout(config, ParallelLayout(tp=3), "critic.megatron")
    assert str(caught.value) == (
        "critic.megatron.tensor_model_parallel_size=3 must divide the model's num_attention_heads=8; "
        "valid for this model: 1, 2, 4 [layout.tp-heads]"
    )


def test_package_imports_without_torch():
    code = "import sys, megarl.models as m; m.known_architectures(); assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_architecture_lists_each_family_once():
    with raises("model.no-weight-map", "'MambaForCausalLM'", "external_lib", "docs/how_to/add_a_model.md") as error:
        parse_model_config({**QWEN25, "architectures": ["MambaForCausalLM"]})
    listed = str(error.value).partition("families with one: ")[2].partition(";")[0].split(", ")
    assert len(listed) == len(set(listed)) < len(known_architectures()) / 2
    assert {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v3"} <= set(listed)
    assert "ForCausalLM" not in str(error.value).replace("MambaForCausalLM", "")


@pytest.mark.parametrize(
    ("config", "architecture", "kind"),
    [
        ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration", "a multimodal model (vision_config)"),
        ("Gemma3Config", "Gemma3ForConditionalGeneration", "a multimodal model (vision_config)"),
        ("LlavaConfig", "LlavaForConditionalGeneration", "a multimodal model (vision_config)"),
        ("Qwen2AudioConfig", "Qwen2AudioForConditionalGeneration", "a multimodal model (audio_config)"),
        ("T5Config", "T5ForConditionalGeneration", "an encoder-decoder model"),
    ],
)
def test_a_model_that_is_no_decoder_of_text_hears_text_only(tmp_path, config, architecture, kind):
    import transformers

    raw = getattr(transformers, config)().to_dict()
    with raises("model.not-text-decoder", architecture, kind, "qwen3_moe", "qwen2_5_vl"):
        read_model_config(write_config(tmp_path, {**raw, "architectures": [architecture]}))


@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        ("OlmoHybridForCausalLM", "gated delta net layers with learning rates up to 2"),
        ("Gemma2ForCausalLM", "soft caps on attention scores and logits"),
        ("NemotronHForCausalLM", "Mamba"),
    ],
)
def test_the_missing_part_of_an_architecture_is_named(tmp_path, architecture, part):
    with raises("model.no-weight-map", tmp_path, architecture, part, "qwen3_moe"):
        read_model_config(write_config(tmp_path, {**QWEN25, "architectures": [architecture]}))


def test_the_missing_part_of_a_multimodal_models_decoder_is_named():
    raw = {"architectures": ["Gemma3nForConditionalGeneration"], "vision_config": {"depth": 1}}
    with raises("model.not-text-decoder", "vision_config", "per-layer embeddings"):
        parse_model_config(raw)


@pytest.mark.parametrize("name", MISSING_PARTS)
def test_architectures_with_missing_parts_exist_in_transformers(name):
    import transformers

    assert hasattr(transformers, f"{name}ForCausalLM") and f"{name}ForCausalLM" not in known_architectures()


def test_a_multimodal_model_without_its_parts_is_refused_by_name():
    with raises("model.not-text-decoder", "'ChameleonForConditionalGeneration'", "multimodal"):
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
    ("traits", "named"),
    [
        ({"latent": Latent(4, 4, 2, 2, 2, False), "qk_norm_over_heads": True}, ["latent", "qk_norm_over_heads"]),
        ({"latent": Latent(4, 4, 2, 2, 2, False), "window": SlidingWindow(4, (True,), 1e4)}, ["latent", "window"]),
        ({"experts": Experts(2, 1, 8, (True,)), "activation": "gelu_tanh"}, ["experts", "activation='gelu_tanh'"]),
    ],
)
def test_traits_that_are_not_computed_together_are_rejected(monkeypatch, traits, named):
    monkeypatch.setattr(family_of("LlamaForCausalLM"), "traits", lambda raw: Traits(**traits))
    with raises("model.unsupported-combination", *named):
        parse_model_config({**QWEN25, "architectures": ["LlamaForCausalLM"]})
