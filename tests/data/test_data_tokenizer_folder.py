"""Any JSON in the files of a tokenizer loads or ends in megarl's error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megarl.base.errors import DataError, ModelError
from megarl.data.tokenization import Prompt, PromptEncoder
from megarl.data.tokenizers import end_token_of, load_tokenizer, open_tokenizer

VALUES: tuple[Any, ...] = (None, True, 0, -1, 10**30, 1.5, "", "text", [], [[1]], {}, {"a": {"b": []}})
FILES = ("tokenizer.json", "tokenizer_config.json")
DEEP = ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000)


@pytest.fixture
def folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def variants(document):
    """The document without each field, and with each value in its place; also one level below."""
    for name, value in document.items():
        yield f"{name} is missing", {key: kept for key, kept in document.items() if key != name}
        for other in VALUES:
            yield f"{name}={other!r}", {**document, name: other}
        if isinstance(value, dict) and len(value) < 12:
            for text, changed in variants(value):
                yield f"{name}.{text}", {**document, name: changed}
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for text, changed in variants(value[0]):
                yield f"{name}[0].{text}", {**document, name: [changed, *value[1:]]}


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_any_value_in_a_field(folder, name):
    original, results = json.loads((folder / name).read_text(encoding="utf-8")), []
    prompt = Prompt([{"role": "user", "content": "ab"}])
    for change, changed in variants(original):
        (folder / name).write_text(json.dumps(changed), encoding="utf-8")
        try:
            PromptEncoder(load_tokenizer(str(folder)), vocab_size=50).encode(prompt, "row")
            results.append(True)
        except (ModelError, DataError):
            results.append(False)
        except Exception as error:
            pytest.fail(f"{name}, {change}: {error!r}")
    assert results.count(True) > 20 and results.count(False) > 5


@pytest.mark.parametrize("text", [*DEEP, "", "{}", "[]", "5", "null", "{", "\x00"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_with_any_json_is_refused_with_its_folder(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        load_tokenizer(str(folder))
    assert caught.value.code.startswith("tokenizer.") and str(folder) in caught.value.text


def test_end_token_of_a_folder(folder, tmp_path):
    assert end_token_of(folder) == open_tokenizer(folder).convert_tokens_to_ids("<|end|>") == 2
    for name in FILES:
        (folder / name).unlink()
    assert end_token_of(folder) is None
