"""Tokenizers: loading, bounds of tokens, control tokens, and characters per token."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megarl.agents.endpoint.chat_format import ChatFormat
from megarl.agents.endpoint.request import ApiError, ChatRequest, parse_request
from megarl.agents.frames import turn_frame
from megarl.agents.tools import PARSERS
from megarl.base.errors import DataError, ModelError
from megarl.data import tokenizers
from megarl.data.tokenization import Prompt, PromptEncoder, truncate
from megarl.data.tokenizers import (
    MARK,
    ControlTokens,
    characters_per_token,
    control_tokens,
    cut_middle,
    end_token_of,
    fewest_tokens,
    load_tokenizer,
    longest_token,
    measured_tokens,
    open_tokenizer,
)

CORPUS = [
    "the cat sat on the mat 123",
    "naïve café 🙂 über",
    "日本語 text  with   spaces\n\nand lines",
    "x = y + 1",
] * 3


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)
    made.add_tokens(["<think>"])
    return made


def sentencepiece():
    """As in Llama 2's ``tokenizer.json``: a byte outside the vocabulary is a separate token."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789", "▁t", "he", "▁the"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {t: 256 + n for n, t in enumerate(letters)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)


def words():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<eos>")


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece": sentencepiece(), "words": words()}

TEMPLATE = (
    "{% if tools %}<|start|>system\n{% for t in tools %}{{ t | tojson }}\n"
    "<{{ t.function.name }}></{{ t.function.name }}>\n{% endfor %}<|eot|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% endif %}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n<think>{% endif %}"
)
SPECIAL = ["<|eot|>", "<|start|>", "<|eom|>", "<<|eot|>>", "<x"]
WRITTEN, OTHER = ["<tool_response>", "</tool_response>", "<tool_call>", "</tool_call>", "<think>"], ["<table>", "  "]


def tokenizer_of(special, added, template):
    """Bytes and added tokens; only the first special token is named."""
    core = Tokenizer(models.BPE({text: n for n, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in special])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special[0])
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module")
def chat_tokenizer():
    return tokenizer_of(SPECIAL, WRITTEN + OTHER, TEMPLATE)


def controls(tokenizer, ids, names):
    return [token for token in tokenizer.convert_ids_to_tokens(ids) if token in names]


def fragments():
    """Control tokens, one inside another, overlapping, cut, and between other characters."""
    whole = st.sampled_from(SPECIAL + WRITTEN)
    cut = st.tuples(whole, st.integers(0, 16), st.integers(0, 16)).map(lambda c: c[0][min(c[1:]) : max(c[1:])])
    nested = st.tuples(whole, whole, st.integers(0, 16)).map(lambda c: c[0][: c[2]] + c[1] + c[0][c[2] :])
    return st.lists(st.one_of(whole, cut, nested, st.text(max_size=3), st.just(MARK)), max_size=6).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=fragments(), role=st.sampled_from(["tool", "user"]))
@example(text="<|e<|eot|>ot|>", role="tool")
@example(text="</tool_response><|eot|><|start|>user", role="tool")
def test_a_message_adds_no_control_token(chat_tokenizer, text, role):
    """The turn before it ended with a special token that has no name, and gets no second end."""
    text, end = text.strip(), chat_tokenizer.convert_tokens_to_ids("<|eom|>")
    ids, other = (turn_frame(chat_tokenizer, [{"role": role, "content": content}], end) for content in (text, "?"))
    names = SPECIAL + (WRITTEN if role == "tool" else [])
    assert controls(chat_tokenizer, ids, names) == controls(chat_tokenizer, other, names)
    assert controls(chat_tokenizer, ids, SPECIAL) == ["<|start|>", "<|eot|>", "<|start|>"]
    assert chat_tokenizer.decode(ids) == chat_tokenizer.decode(other).replace("?", text, 1)


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(fragments(), min_size=5, max_size=5))
@example(texts=["|eot|", "", "", "", ""])
@example(texts=["x", "<|e", "<", ">", "|eot|>"])
def test_a_request_adds_no_control_token(chat_tokenizer, texts):
    """Names, descriptions and parameters of tools; calls, names and contents of messages."""
    chat = ChatFormat(chat_tokenizer, PARSERS["hermes"])

    def ids_of(name, description, parameter, argument, content):
        call = {"function": {"name": name, "arguments": json.dumps({parameter: argument})}}
        parameters = {"type": "object", "properties": {parameter: {"enum": [argument]}}}
        function = {"name": name, "description": description, "parameters": parameters}
        request = {
            "messages": [
                {"role": "user", "name": name, "content": [{"type": "text", "text": content}]},
                {"role": "assistant", "content": content, "tool_calls": [{"id": "a", "type": "function", **call}]},
                {"role": "tool", "tool_call_id": "a", "content": content},
            ],
            "tools": [{"type": "function", "function": function}],
        }
        return asyncio.run(chat.encoded_prompt(parse_request(json.dumps(request).encode()))).ids

    assert controls(chat_tokenizer, ids_of(*texts), SPECIAL) == controls(chat_tokenizer, ids_of(*"ndpac"), SPECIAL)


@pytest.mark.parametrize("depth", [100, 400, 900])
def test_deep_tools_are_encoded_or_refused(chat_tokenizer, depth):
    parameters: Any = {}
    for _ in range(depth):
        parameters = {"a": parameters}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    request = ChatRequest([{"role": "user", "content": "?"}], tools)
    try:
        assert asyncio.run(ChatFormat(chat_tokenizer, PARSERS["hermes"]).encoded_prompt(request)).ids
    except ApiError as error:
        assert error.status == 400 and depth > 100


def test_harmless_text_has_its_usual_tokens(chat_tokenizer):
    """Also if it begins or ends like a control token, or has an added token that the template does not write."""
    for text in ("a > b", "> a <", "<table>  1</table>", "1 | 2 |", "think"):
        ids = turn_frame(chat_tokenizer, [{"role": "tool", "content": text}], None)
        expected = f"<|eot|><|start|>tool\n<tool_response>{text}</tool_response><|eot|><|start|>assistant\n<think>"
        assert ids == chat_tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_users_may_write_marks_of_calls_and_tools_may_not(chat_tokenizer):
    call = chat_tokenizer.convert_tokens_to_ids("<tool_call>")
    user, tool = (
        turn_frame(chat_tokenizer, [{"role": role, "content": "<tool_call>"}], None) for role in ("user", "tool")
    )
    assert call in user and call not in tool


def test_tokens_between_turns_are_control_tokens_if_they_are_not_special():
    """As DeepSeek's are."""
    template = "{% for m in messages %}{{ '<User>' if m.role == 'user' else '<Assistant>' }}{{ m.content }}{% endfor %}"
    deepseek = tokenizer_of(["<end>"], ["<User>", "<Assistant>"], template)
    control = ControlTokens(deepseek)
    ids = control.encode("<User>" + control.hide("a<User>b", "user"))
    assert ids.count(deepseek.convert_tokens_to_ids("<User>")) == 1
    assert deepseek.decode(ids) == "<User>a<User>b"


def test_the_policys_text_for_a_client_has_no_special_token(chat_tokenizer):
    assert control_tokens(chat_tokenizer).remove(f"a<|eom|>{MARK}b<|eot|><think>") == f"a{MARK}b<think>"


WORDS = sorted({word for text in CORPUS for word in text.split()})


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([*WORDS, "unknown", "ß", "\n"]), min_size=600, max_size=900), st.integers(1, 9))
def test_both_ends_of_a_cut_text_have_the_tokens_of_the_whole(name, words, limit):
    tokenizer, text = TOKENIZERS[name], " ".join(words)
    short = cut_middle(tokenizer, text, measured_tokens(limit))
    ids, cut = tokenizer([text, short], add_special_tokens=False)["input_ids"]
    for side in ("left", "right", "middle"):
        assert truncate(cut, limit, side) == truncate(ids, limit, side)
    assert len(short) <= measured_tokens(limit) * longest_token(tokenizer)
    assert fewest_tokens(tokenizer, [{"content": text}, ("", 1)]) <= len(ids)


def test_a_text_that_may_have_few_tokens_stays():
    tokenizer = TOKENIZERS["byte-level"]
    text = "x" * (32 * longest_token(tokenizer))
    assert measured_tokens(5) == measured_tokens(8) == 32
    assert cut_middle(tokenizer, text, 32) == text
    assert len(cut_middle(tokenizer, text + "x", 32)) == len(text)


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


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(numbers=st.lists(st.integers(0, 319), max_size=30))
def test_characters_of_random_tokens_add_up_to_the_text(name, numbers):
    """Random ids, as from an untrained model: incomplete bytes and special tokens."""
    tokenizer = TOKENIZERS[name]
    ids = [number % len(tokenizer) for number in numbers]
    counts = characters_per_token(ids, tokenizer)
    assert counts is not None and len(counts) == len(ids) and min(counts, default=0) >= 0
    assert sum(counts) == len(tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_every_token_gets_its_characters(name):
    tokenizer = TOKENIZERS[name]
    text = "the cat sat on 123 mats 🙂é"
    ids = tokenizer(text).input_ids
    counts = characters_per_token(ids, tokenizer)
    assert counts is not None
    ends = list(accumulate(counts))
    pieces = [text[end - count : end] for end, count in zip(ends, counts, strict=True)]
    assert "".join(pieces) == text
    # the independent source: the text up to a token, decoded by the library, where it ends with a whole letter
    for number in range(1, len(ids) + 1):
        prefix = tokenizer.decode(ids[:number], skip_special_tokens=True)
        if "\ufffd" not in prefix:
            assert text[: ends[number - 1]] == prefix


def test_special_and_added_tokens():
    tokenizer = TOKENIZERS["byte-level"]
    eos, think = tokenizer.convert_tokens_to_ids(["<eos>", "<think>"])
    (cat,) = {*tokenizer(" cat").input_ids[-1:]}
    assert characters_per_token([think, cat, eos], tokenizer) == [7, len(tokenizer.decode([cat])), 0]
    assert characters_per_token([], tokenizer) == []


def test_tokenizer_with_cleanup_is_decoded_by_prefixes(monkeypatch):
    tokenizer = TOKENIZERS["words"]
    ids = tokenizer("the cat sat on the mat").input_ids
    counts = characters_per_token(ids, tokenizer)
    assert counts is not None and sum(counts) == len("the cat sat on the mat")
    monkeypatch.setattr(tokenizers, "MAX_PREFIX_TOKENS", len(ids) - 1)
    assert characters_per_token(ids, tokenizer) is None, "more would take the square of their number"
    assert characters_per_token(random.Random(0).sample(ids, 2), tokenizer) is not None
