"""Two names of one setting in a ``config.json``: read as transformers reads them, or refused."""

import pytest
import torch
import transformers
from support.expected_errors import raises
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.models import parse_model_config
from megarl.models.rope import attention_factor, inverse_frequencies, window_frequencies

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
CONFLICT, SYNONYMS = "model.rope-conflict", "model.synonyms-differ"
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
SIGMOID = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}


def read(model_type, **fields):
    """The file as megarl and as transformers read it."""
    fields = {name: value for name, value in (SIZES | fields).items() if value is not None}
    theirs = transformers.CONFIG_MAPPING[model_type](**fields)
    architecture = type(theirs).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    return parse_model_config({**fields, "architectures": [architecture]}), theirs


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": dict(PLAIN), "rope_scaling": dict(YARN)},
        {"rope_parameters": dict(PLAIN), "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {**PLAIN, "rope_theta": 1e6}, "rope_scaling": {**YARN, "rope_theta": 1e6}},
        {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_theta": 1e3},
        {"rope_parameters": {**YARN, "rope_theta": 1e4}, "rope_scaling": dict(YARN)},
        {"rope_parameters": {**YARN, "type": "linear", "rope_theta": 1e6}},
        {"rope_parameters": {**YARN, "rope_theta": 1e6}, "original_max_position_embeddings": 16},
    ],
)
def test_rotary_parameters_under_two_names_are_those_of_transformers(fields):
    ours, theirs = read("llama", **fields)
    frequencies, factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs)
    assert torch.equal(inverse_frequencies(ours), frequencies) and attention_factor(ours) == factor


def test_a_scaling_beside_sections_belongs_to_full_attention():
    sections = {"full_attention": {**PLAIN, "rope_theta": 1e6}, "sliding_attention": dict(PLAIN)}
    ours, theirs = read("gemma3_text", rope_parameters=sections, rope_scaling=dict(YARN))
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, layer_type="full_attention")
    assert torch.equal(inverse_frequencies(ours), frequencies) and attention_factor(ours) == factor
    plain = transformers.LlamaConfig(**SIZES, rope_parameters={**PLAIN, "rope_type": "linear", "factor": 1.0})
    assert torch.equal(window_frequencies(ours), ROPE_INIT_FUNCTIONS["linear"](plain)[0])


@pytest.mark.parametrize(
    ("model_type", "fields", "code", "lost"),
    [
        (
            "llama",
            {"rope_parameters": {**PLAIN, "rope_theta": 1e6}, "rope_scaling": YARN},
            CONFLICT,
            "rope_theta=1000000",
        ),
        ("llama", {"rope_parameters": {**YARN, "factor": 8.0}, "rope_scaling": YARN}, CONFLICT, "factor=8"),
        (
            "llama",
            {"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 4.0}},
            CONFLICT,
            "rope_type='yarn'",
        ),
        (
            "glm4_moe",
            {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}, "rope_scaling": YARN, **SIGMOID},
            CONFLICT,
            "partial_rotary_factor=0.25",
        ),
        ("llama", {"rope_parameters": {"full_attention": YARN}}, "model.rope-sections", "full_attention"),
        ("olmo3", {"rope_theta": 1e6}, "model.unsupported-setting", "rope_theta=1000000"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {**YARN, "truncate": False}, "sliding_attention": PLAIN}},
            "model.unsupported-rope",
            "truncate=False",
        ),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN, "truncate": False}},
            "model.unsupported-rope",
            "truncate=False",
        ),
        ("mixtral", {"num_local_experts": 4, "num_experts": 8}, SYNONYMS, "num_experts=8 and num_local_experts=4"),
        ("glm4_moe", {**SIGMOID, "num_local_experts": 4}, SYNONYMS, "num_local_experts=4"),
        ("deepseek_v3", {"num_nextn_predict_layers": 1, "num_mtp_layers": 2}, SYNONYMS, "num_mtp_layers=2"),
    ],
)
def test_names_that_contradict_each_other_are_refused(model_type, fields, code, lost):
    name = transformers.CONFIG_MAPPING[model_type].__name__.removesuffix("Config")
    with raises(code, lost):
        parse_model_config({**SIZES, "architectures": [f"{name}ForCausalLM"], **fields})


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("mixtral", {"num_experts": 6}),
        ("qwen3_moe", {"num_local_experts": 6, **EXPERTS}),
        ("olmoe", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": None}),
        ("glm4_moe", {**SIGMOID, "n_routed_experts": None, "num_local_experts": 6}),
        ("glm4_moe", {**SIGMOID, "n_routed_experts": 6, "num_local_experts": 6}),
    ],
)
def test_the_number_of_experts_has_every_name_that_transformers_reads(model_type, fields):
    ours, theirs = read(model_type, **fields)
    assert ours.experts.count == theirs.num_local_experts == 6


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "olmo3", "mixtral", "olmoe", "glm4_moe", "qwen3", "mistral"])
def test_absent_fields_have_the_default_of_the_family(model_type):
    experts = {"olmoe": {"num_experts": 4, "num_experts_per_tok": 2}, "glm4_moe": SIGMOID}
    fields = {"sliding_window": 128} if model_type == "mistral" else experts.get(model_type, {})
    ours, theirs = read(model_type, **fields)
    parameters = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert (ours.rms_norm_eps, ours.rope_theta) == (theirs.rms_norm_eps, parameters["rope_theta"])
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
