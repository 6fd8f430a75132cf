"""Any JSON in the files of a model folder loads or ends in megarl's error, never in another exception."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import shutil
import struct
from typing import Any

import pytest
import transformers
from support.expected_errors import raises

from megarl.base.errors import ConfigError, ModelError
from megarl.convert.source import options_of_folder
from megarl.models import check_model_folder, known_architectures, read_model_config
from megarl.models.adapters import AdapterMap, LoraOptions
from megarl.models.end_tokens import generation_config_with, read_end_tokens
from megarl.models.hf_config import parse_model_config
from megarl.models.hf_folder import identify_model
from megarl.models.hf_writer import exported_config
from megarl.models.peft_folder import AdapterFolder, peft_config
from megarl.models.rope import attention_factor, inverse_frequencies, softmax_scale, window_frequencies
from megarl.models.weight_map import WeightMap

SMALL = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "layer_types": None,
    "mlp_layer_types": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 7, -1, 10**400, 0.0, 1.5, -0.5, 1e308, float("nan"), float("inf")),
    *("", "yarn", "1", "\ud800", [], [[1]], ["text"], [1], [None], {}, {"a": {"b": []}}, {"rope_type": []}),
)
"""One or several of each type of JSON, and the numbers at the borders."""
DEEP = ('{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 100_000 + "]" * 100_000, "[" * 500 + "]" * 500)
MALFORMED = ("model.malformed-json", "model.not-json-object")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "attention_factor": None,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "truncate": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def variants(document, values=VALUES):
    """The document without each field, and with each of the values in its place; also one level below."""
    for name, value in document.items():
        yield f"{name} is missing", {key: kept for key, kept in document.items() if key != name}
        for other in values:
            yield f"{name}={other!r:.40}", {**document, name: other}
        if isinstance(value, dict):
            for text, changed in variants(value, values):
                yield f"{name}.{text}", {**document, name: changed}


def compute(config):
    """Everything that megarl computes from a config on its own."""
    inverse_frequencies(config)
    window_frequencies(config)
    attention_factor(config)
    softmax_scale(config)
    json.dumps(exported_config(config, (), None), indent=2)
    copy.deepcopy(config)
    pickle.dumps(config)


def published(architecture):
    """The config of a family by transformers' defaults, with four small layers, and fields that it leaves out."""
    kind = getattr(transformers, architecture)
    raw = json.loads(kind.config_class().to_json_string(use_diff=False))
    raw |= {name: value for name, value in SMALL.items() if name in raw}
    extra = {"num_nextn_predict_layers": 1, "head_dim": raw.get("head_dim") or 64, "mlp_only_layers": []}
    return {**raw, **extra, "architectures": [architecture], "quantization_config": None, "pad_token_id": 0}


CAUSAL = [name for name in known_architectures() if name.endswith("ForCausalLM") and hasattr(transformers, name)]


def test_every_family_has_a_config_of_transformers():
    assert len(CAUSAL) >= 15


@pytest.mark.parametrize("architecture", CAUSAL)
def test_a_config_with_any_value_in_a_field_is_read_or_refused(architecture):
    raw, results = published(architecture), []
    compute(parse_model_config(raw))
    older = {name: value for name, value in raw.items() if name != "rope_parameters"} | {"rope_theta": 1e4}
    for base, document in (
        (raw, raw),
        *((raw, {"rope_parameters": rope}) for rope in (YARN, LLAMA3)),
        *((older, {"rope_scaling": rope}) for rope in (YARN, LLAMA3)),
    ):
        for change, changed in variants(document):
            try:
                compute(parse_model_config(changed if document is raw else {**base, **changed}, may_be_bare=True))
                results.append(True)
            except ModelError as error:
                assert error.code.startswith("model.")
                assert "config.json" in error.text or "architecture" in error.text
                results.append(False)
            except Exception as error:
                pytest.fail(f"{architecture}, {change}: {error!r}")
    assert True in results and False in results


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("rope_theta", None, "field-missing"),
        ("rope_theta", "10000", "unsupported-setting"),
        ("rope_scaling", "yarn", "field-value"),
        ("rope_scaling", {"rope_type": "yarn", "factor": "4"}, "field-value"),
        ("rope_parameters", [1], "field-value"),
        ("rms_norm_eps", None, "field-missing"),
        ("rms_norm_eps", float("nan"), "field-value"),
        ("tie_word_embeddings", "false", "field-value"),
        ("vocab_size", 10**400, "field-value"),
        ("layer_types", 5, "field-value"),
    ],
)
def test_a_value_of_another_type_is_named(field, value, fault):
    raw = published("Olmo3ForCausalLM")
    del raw["rope_parameters"]
    name, shown = (field, value) if not isinstance(value, dict) else ("factor", "4")
    with raises(f"model.{fault}", f"config.json: {name}" if value is None else f"config.json: {name}={shown!r:.80}"):
        parse_model_config({**raw, "rope_theta": 5e5, field: value})


@pytest.fixture
def folder(real_model_folder, tmp_path):
    return shutil.copytree(real_model_folder("llama"), tmp_path / "model")


@pytest.mark.parametrize("text", [*DEEP, "", "5", "[]", "null", '"text"', "{", '{"a": 1}{', "\x00", "\ud800"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_file_with_any_json_is_named(folder, name, text):
    (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    for read in (read_model_config, read_end_tokens, check_model_folder):
        try:
            read(folder)
        except ModelError as error:
            assert name in error.text and error.code in MALFORMED
    with pytest.raises(ModelError) as caught:
        (check_model_folder if "index" in name else read_end_tokens)(folder)
    assert name in caught.value.text and caught.value.code in MALFORMED


@pytest.mark.parametrize("text", DEEP)
def test_a_field_nested_too_deeply_is_refused(folder, text):
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in (*raw, "an_unknown_field"):
        document = json.dumps({**raw, name: "DEEP"}).replace('"DEEP"', text)
        (folder / "config.json").write_text(document, encoding="utf-8")
        with raises("model.malformed-json", folder / "config.json", "deep"):
            read_model_config(folder)


def test_a_generation_config_with_any_value_in_a_field(folder):
    document = {"eos_token_id": [1, 2], "temperature": 0.5}
    for _, changed in variants(document):
        (folder / "generation_config.json").write_text(json.dumps(changed), encoding="utf-8")
        with contextlib.suppress(ModelError):
            read_end_tokens(folder)
            generation_config_with(folder, 9)


def header_of(file):
    """The JSON header and the data of a safetensors file."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(file, header, data):
    file.write_bytes(struct.pack("<Q", len(header.encode())) + header.encode() + data)


def test_a_safetensors_header_with_any_value_in_a_field(folder):
    file = folder / "model.safetensors"
    header, data = header_of(file)
    name = "model.norm.weight"
    changes = [*variants({name: header[name]}), *variants({"__metadata__": {"format": "pt"}})]
    results = []
    for change, changed in changes:
        write_header(file, json.dumps({**header, **changed} if changed else changed), data)
        try:
            check_model_folder(folder)
            identify_model(folder)
            results.append(True)
        except ModelError as error:
            assert str(folder) in error.text and error.code.startswith("model.")
            results.append(False)
        except Exception as error:
            pytest.fail(f"{change}: {error!r}")
    assert True in results and results.count(False) > 50


@pytest.mark.parametrize("text", [*DEEP, "5", "[]", "null", '{"a": 5}', '{"a": {"data_offsets": [0]}}', '{"a": []}'])
def test_a_safetensors_header_with_any_json_is_named(folder, text):
    write_header(folder / "model.safetensors", text + " " * 8, b"")
    with raises("model.not-safetensors", folder / "model.safetensors"):
        check_model_folder(folder)


def test_an_index_with_any_value_in_a_field(folder):
    header, _ = header_of(folder / "model.safetensors")
    placed = dict.fromkeys((name for name in header if name != "__metadata__"), "model.safetensors")
    index = {"metadata": {"total_size": 5}, "weight_map": {"model.norm.weight": placed["model.norm.weight"]}}
    for change, changed in variants(index, (*VALUES, "../model.safetensors", "a\x00b", "a" * 5000)):
        weight_map = changed.get("weight_map")
        if isinstance(weight_map, dict) and weight_map.keys() <= placed.keys():
            changed = {**changed, "weight_map": {**placed, **weight_map}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(changed), encoding="utf-8")
        try:
            check_model_folder(folder)
        except ModelError as error:
            assert str(folder) in error.text and error.code.startswith("model.")
        except Exception as error:
            pytest.fail(f"{change}: {error!r}")


@pytest.fixture
def adapters(real_model_folder, tmp_path):
    """Adapters as peft itself saves them."""
    import peft

    base = real_model_folder("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    options = LoraOptions(rank=4, alpha=8.0, targets=("q_proj",))
    return tmp_path / "adapter", AdapterMap(WeightMap(read_model_config(base)), options)


def test_an_adapter_config_with_any_value_in_a_field(adapters):
    folder, expected = adapters
    file = folder / "adapter_config.json"
    original = json.loads(file.read_text(encoding="utf-8"))
    assert original["r"] == 4
    AdapterFolder(folder).check(expected)
    for change, changed in variants({**original, **peft_config(expected, "base"), "an_unknown_field": 1}):
        file.write_text(json.dumps(changed), encoding="utf-8")
        try:
            read = AdapterFolder(folder)
            read.check(expected)
            options_of_folder(read, expected.model)
        except ConfigError as error:
            assert str(folder) in error.text and error.code.partition(".")[0] in ("adapter", "model")
        except Exception as error:
            pytest.fail(f"{change}: {error!r}")


@pytest.mark.parametrize("text", [*DEEP, "", "5", "[]", "null", "{", "{}"])
def test_an_adapter_config_with_any_json_is_named(adapters, text):
    folder, expected = adapters
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        AdapterFolder(folder).check(expected)
    assert str(folder) in caught.value.text
    assert caught.value.code in (MALFORMED if text != "{}" else ("adapter.not-lora",))
