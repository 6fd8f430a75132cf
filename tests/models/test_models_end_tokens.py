"""End-of-sequence tokens of the three files that name some, and the generation config of an export."""

import json

import pytest
import transformers
from support.expected_errors import raises

from megarl.models.end_tokens import generation_config_with, read_end_tokens


@pytest.fixture
def folder(real_model_folder, tmp_path):
    """A function that writes a config, and a generation config unless it is None, with end-of-sequence tokens."""
    raw = json.loads((real_model_folder() / "config.json").read_text(encoding="utf-8"))

    def make(config, generation=None):
        (tmp_path / "config.json").write_text(json.dumps({**raw, "eos_token_id": config}), encoding="utf-8")
        if generation is not None:
            settings = {} if generation == {} else {"eos_token_id": generation}
            (tmp_path / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "ids", "disagree"),
    [
        (2, None, 2, (2,), False),
        (2, [2, 7], 2, (2, 7), False),  # more tokens in the generation config: Qwen, Llama 3
        (2, [5, 7], 5, (2, 5, 7), True),
        (2, 2, 7, (2, 7), True),  # a base model with the tokenizer of its chat model
        ([1, 2], {}, 1, (1, 2), False),
        ([1, 2], {}, 3, (1, 2, 3), True),
        (None, 3, 3, (3,), False),
        (None, None, 3, (3,), True),
        (4, None, None, (4,), False),
    ],
)
def test_a_sequence_ends_at_the_tokens_of_any_file(folder, config, generation, tokenizer, ids, disagree):
    ends = read_end_tokens(folder(config, generation), tokenizer)
    assert ends.ids == ids and ends.disagree == disagree


@pytest.mark.parametrize("value", [[[1]], "1", 1.5, True, [1, None], {"a": 1}, -1])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_other_values_than_token_ids_are_named_with_their_file(folder, file, value):
    path = folder(*((value, None) if file == "config.json" else (1, value)))
    with raises("model.field-value", file, "eos_token_id="):
        read_end_tokens(path)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "model.malformed-json"),
        ("[]", "model.not-json-object"),
        ("5", "model.not-json-object"),
        ('{"a": ' * 100_000, "model.malformed-json"),
    ],
)
def test_malformed_generation_config_is_named(folder, text, code):
    path = folder(1)
    (path / "generation_config.json").write_text(text, encoding="utf-8")
    with raises(code, path / "generation_config.json"):
        read_end_tokens(path)


@pytest.mark.parametrize(("config", "generation"), [(2, None), (2, 2), (2, [3, 2]), (None, None), ([4, 5], {})])
def test_transformers_stops_an_export_at_the_trained_token_and_at_the_earlier_ones(folder, config, generation):
    path = folder(config, generation)
    before = transformers.GenerationConfig.from_model_config(transformers.AutoConfig.from_pretrained(path))
    if generation is not None:
        before = transformers.GenerationConfig.from_pretrained(path)
    earlier = before.eos_token_id if isinstance(before.eos_token_id, list) else [before.eos_token_id]
    (text,) = generation_config_with(path, 9).values()
    (path / "generation_config.json").write_text(text, encoding="utf-8")
    after = transformers.GenerationConfig.from_pretrained(path)
    # A generation config without the field stops nowhere in transformers; then that of the config counts.
    stops = {token for token in earlier if token is not None} or read_end_tokens(path).config
    assert after.eos_token_id[0] == 9 and {*after.eos_token_id} == {9, *stops}
    assert generation_config_with(path, 9) == {}


def test_other_fields_of_the_generation_config_stay(folder):
    path = folder(2)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 2}), encoding="utf-8")
    (text,) = generation_config_with(path, 9).values()
    assert json.loads(text) == {"temperature": 0.6, "eos_token_id": [9, 2]}
