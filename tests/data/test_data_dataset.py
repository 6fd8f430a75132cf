import copy
import json
import logging
from functools import partial

import numpy as np
import pytest
from support.expected_errors import raises
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from megarl.data import RLHFDataset, SFTDataset, lengths, sequence_lengths

TEMPLATE_TOKENS = 3  # <|user|>, <|end|>, <|assistant|>


def texts(batch, name, lengths, tokenizer, left):
    rows = batch.batch[name].tolist()
    return [
        tokenizer.decode(row[len(row) - n :] if left else row[:n])
        for row, n in zip(rows, lengths.tolist(), strict=True)
    ]


def collated(dataset):
    return dataset.collate([dataset[item] for item in range(len(dataset))])


def test_prompts_are_templated_and_left_padded(write, question_rows, tokenizer):
    dataset = RLHFDataset(write(question_rows(3)), tokenizer, max_prompt_length=10)
    batch = collated(dataset)
    assert set(batch.batch.keys()) == {"prompts", "attention_mask"}
    prompt_lengths, response_lengths = sequence_lengths(batch)
    assert prompt_lengths.tolist() == [TEMPLATE_TOKENS + n for n in (1, 2, 3)]
    assert response_lengths.tolist() == [0, 0, 0]
    shown = texts(batch, "prompts", prompt_lengths, tokenizer, left=True)
    assert shown == [f"<|user|>{'x' * n}<|end|><|assistant|>" for n in (1, 2, 3)]
    assert batch.batch["prompts"][0, :2].tolist() == [tokenizer.pad_token_id] * 2
    assert {name: values[2] for name, values in batch.non_tensor_batch.items()} == {
        "raw_prompt": [{"role": "user", "content": "xxx"}],
        "data_source": "toy",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 2},
        "agent_name": None,
        "index": 2,
    }


def test_template_arguments_and_null_fields(write, question_rows, tokenizer):
    rows = question_rows(2)
    rows[0]["prompt"][0]["name"] = "someone"  # gives the other row a null `name`
    dataset = RLHFDataset(write(rows), tokenizer, 20, apply_chat_template_kwargs={"extra": "ok"})
    assert tokenizer.decode(dataset[1]["prompt_ids"]).endswith("<|assistant|>ok")
    assert dataset[1]["raw_prompt"] == [{"role": "user", "content": "xx"}]


def call(arguments):
    call_ = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call_]}, {"role": "user", "content": "go"}]


def test_arguments_of_calls_have_no_nulls_of_other_rows(write, question_rows, tokenizer, monkeypatch, tmp_path):
    """A struct of a parquet file has the fields of all rows; a null in JSON lines is a value."""
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template + "{% endfor %}")
    rows = question_rows(2)
    rows[0]["prompt"] += call({"x": 1, "deep": [{"a": 1}]})
    rows[1]["prompt"] += call({"y": 2, "deep": [{"b": 2}]})
    rows[1]["extra_info"]["own"] = None
    dataset = RLHFDataset(write(rows), tokenizer, 90)
    assert tokenizer.decode(dataset[0]["prompt_ids"]) == '{"x": 1, "deep": [{"a": 1}]}'
    assert dataset[1]["raw_prompt"][1:] == call({"deep": [{"b": 2}], "y": 2})
    assert dataset[0]["extra_info"] == {"split": "train", "index": 0, "own": None}  # as verl passes it to rewards
    rows[0]["prompt"] = rows[0]["prompt"][:1] + call({"x": None})
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert tokenizer.decode(RLHFDataset(str(lines), tokenizer, 90)[0]["prompt_ids"]) == '{"x": null}'


def with_texts(rows):
    return [row | {"prompt": row["prompt"][0]["content"]} for row in rows]


def test_text_prompt_is_one_user_message(write, question_rows, tokenizer):
    messages = RLHFDataset(write(question_rows(3)), tokenizer, 10)
    texts_ = RLHFDataset(write(with_texts(question_rows(3)), "texts.parquet"), tokenizer, 10)
    assert [texts_[row] for row in range(3)] == [messages[row] for row in range(3)]


def test_text_prompt_without_the_chat_template_is_its_tokens(write, question_rows, tokenizer):
    write_path = write(with_texts(question_rows(3)))
    dataset = RLHFDataset(write_path, tokenizer, 3, apply_chat_template=False)
    assert [tokenizer.decode(dataset[row]["prompt_ids"]) for row in range(3)] == ["x", "xx", "xxx"]
    assert dataset[1]["raw_prompt"] == [{"role": "user", "content": "xx"}]
    with raises("data.prompt-too-long", "row 2", "3 tokens", "at most 2"):
        RLHFDataset(write_path, tokenizer, 2, apply_chat_template=False)
    with raises("data.plain-text-prompt", "row 0", "data.system_prompt"):
        RLHFDataset(write_path, tokenizer, 9, apply_chat_template=False, system_prompt="Be brief.")
    source = [row | {"response": "4"} for row in with_texts(question_rows(2))]
    trained = SFTDataset(write(source, "sft.parquet"), tokenizer, 9, apply_chat_template=False)
    assert tokenizer.decode(trained[1]["prompt_ids"] + trained[1]["response_ids"]) == "xx4<|end|>"


@pytest.mark.parametrize("first", [["<bos>"], ["<mask>", "<sop>"]])
def test_a_rendered_text_has_its_first_tokens_once(write, question_rows, tokenizer, first):
    """The tokenizer writes them before every text, one as Llama's, two as GLM's."""
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": first})
    ids = own.convert_tokens_to_ids(first)
    single = " ".join([*first, "$A"])
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=list(zip(first, ids, strict=True))
    )
    rows = with_texts(question_rows(2))
    rows[1]["prompt"] = "".join(first) + rows[1]["prompt"]
    dataset = RLHFDataset(write(rows), own, 9, apply_chat_template=False)
    assert [dataset[row]["prompt_ids"] for row in range(2)] == [
        ids + own.convert_tokens_to_ids(["x"]),
        ids + own.convert_tokens_to_ids(["x", "x"]),
    ]


def test_messages_are_rendered_without_the_chat_template_of_texts(tmp_path, question_rows, tokenizer):
    rows = [*with_texts(question_rows(1)), question_rows(2)[1]]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    dataset = RLHFDataset(str(tmp_path / "mixed.jsonl"), tokenizer, 9, apply_chat_template=False)
    shown = [tokenizer.decode(dataset[row]["prompt_ids"]) for row in range(2)]
    assert shown == ["x", "<|user|>xx<|end|><|assistant|>"]


def test_optional_tensors_may_be_missing(write, question_rows, tokenizer):
    rows = [{k: v for k, v in row.items() if k not in ("ability", "extra_info")} for row in question_rows(2)]
    batch = collated(RLHFDataset(write(rows), tokenizer, 20))
    assert batch.non_tensor_batch["ability"].tolist() == [None, None]
    assert batch.non_tensor_batch["extra_info"].tolist() == [{}, {}]
    for row, name in zip(rows, ("search_agent", None), strict=True):
        row["agent_name"] = name
    assert collated(RLHFDataset(write(rows), tokenizer, 20)).non_tensor_batch["agent_name"].tolist() == [
        "search_agent",
        None,
    ]


def test_overlong_prompt_is_an_error_at_start(write, question_rows, tokenizer):
    path = write(question_rows(6))
    with raises("data.prompt-too-long") as caught:
        RLHFDataset(path, tokenizer, max_prompt_length=6)
    assert str(caught.value) == (
        f"{path}, row 3: the prompt has 7 tokens, at most 6 are allowed (3 of 6 prompts are too long, the longest has "
        "9); raise data.max_prompt_length, set data.truncation=left, right or middle, or "
        "data.filter_overlong_prompts=True [data.prompt-too-long]"
    )
    assert len(RLHFDataset(path, tokenizer, max_prompt_length=9)) == 6


@pytest.mark.parametrize(("truncation", "last"), [("left", "xxxx<|end|><|assistant|>"), ("right", "<|user|>xxxxx")])
def test_truncation(write, question_rows, tokenizer, truncation, last):
    dataset = RLHFDataset(write(question_rows(6)), tokenizer, max_prompt_length=6, truncation=truncation)
    assert [len(dataset[item]["prompt_ids"]) for item in range(6)] == [4, 5, 6, 6, 6, 6]
    assert tokenizer.decode(dataset[5]["prompt_ids"]) == last
    assert dataset.dropped == 0


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_filtering_counts_dropped_prompts(write, question_rows, tokenizer, truncation, caplog):
    rows = question_rows(6)[::-1]
    with caplog.at_level(logging.WARNING):
        dataset = RLHFDataset(write(rows), tokenizer, 6, truncation=truncation, filter_overlong_prompts=True)
    assert dataset.dropped == 3
    assert "dropped 3 of 6 prompts" in caplog.text
    batch = collated(dataset)
    assert batch.non_tensor_batch["index"].tolist() == [3, 4, 5]
    assert [model["ground_truth"] for model in batch.non_tensor_batch["reward_model"]] == ["2", "1", "0"]


DIGITS = "".join(f"{number:07d}" for number in range(50_000))
"""350,000 characters, each a token; to tokenize megabytes takes minutes and gigabytes of memory."""


@pytest.mark.parametrize("as_text", [False, True])
def test_megabytes_of_a_prompt_are_not_tokenized(write, question_rows, tokenizer, tokenized, as_text):
    rows = question_rows(4)
    rows[2]["prompt"][0]["content"] = DIGITS
    if as_text:
        rows = with_texts(rows)
    path, template = write(rows), not as_text
    dataset = RLHFDataset(path, tokenizer, 6, apply_chat_template=template, filter_overlong_prompts=True)
    assert [sample["index"] for sample in map(dataset.__getitem__, range(2))] == [0, 1]
    assert dataset.dropped == (1 if as_text else 2)  # the template has three tokens
    with raises("data.prompt-too-long", "row 2", "at least", "at most 7"):
        RLHFDataset(path, tokenizer, 7, apply_chat_template=template)
    assert max(tokenized) < 20_000


@pytest.mark.parametrize(
    ("truncation", "shown", "text"),
    [
        ("left", "9999<|end|><|assistant|>", "049999"),
        ("right", "<|user|>00000", "000000"),
        ("middle", "<|user|>009<|end|><|assistant|>", "000999"),
    ],
)
def test_megabytes_are_cut_as_if_they_were_tokenized(
    write, question_rows, tokenizer, tokenized, truncation, shown, text
):
    rows = question_rows(1)
    rows[0]["prompt"][0]["content"] = DIGITS
    cut = RLHFDataset(write(rows), tokenizer, 6, truncation=truncation)[0]
    plain = RLHFDataset(
        write(with_texts(rows), "texts.parquet"), tokenizer, 6, truncation=truncation, apply_chat_template=False
    )[0]
    assert [tokenizer.decode(sample["prompt_ids"]) for sample in (cut, plain)] == [shown, text]
    assert max(tokenized) < 20_000


def test_filtering_everything_is_an_error(write, question_rows, tokenizer):
    with raises("data.all-prompts-too-long", "all 3 prompts", "2 tokens", "the shortest has 4"):
        RLHFDataset(write(question_rows(3)), tokenizer, 2, filter_overlong_prompts=True)


@pytest.mark.parametrize("unknown", [None, "<unk>"])
@pytest.mark.parametrize("kind", [RLHFDataset, SFTDataset])
def test_a_tokenizer_that_knows_nothing_of_the_prompts_is_rejected(write, question_rows, tokenizer, unknown, kind):
    vocabulary = {"<|end|>": 0, "Unrelated": 1, **({unknown: 2} if unknown else {})}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token=unknown))
    stranger = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", unk_token=unknown)
    stranger.chat_template = tokenizer.chat_template
    rows = [{**row, "response": "x"} for row in question_rows(3)]
    with raises("tokenizer.unknown-text", "train.parquet, row 0"):
        kind(write(rows), stranger, 50)


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_a_prompt_with_a_token_that_the_model_lacks_is_named_at_the_start(write, question_rows, tokenizer, truncation):
    rows, size = question_rows(3), tokenizer.convert_tokens_to_ids("Z")  # the rows' "x" is before it
    make = partial(RLHFDataset, tokenizer=tokenizer, max_prompt_length=20, truncation=truncation, vocab_size=size)
    assert len(make(write(rows))[2]["prompt_ids"]) == 6
    rows[1]["prompt"][0]["content"] = "aZ"
    with raises("tokenizer.beyond-vocabulary", "train.parquet, row 1", f"token {size} ('Z')", f"{size} tokens"):
        make(write(rows))
    assert len(RLHFDataset(write(rows), tokenizer, 20, vocab_size=len(tokenizer))) == 3


def test_rows_are_not_measured_again_for_a_tokenizer_within_the_vocabulary(write, question_rows, tokenizer):
    rows = question_rows(3)
    rows[1]["prompt"][0]["role"] = "tool"  # which the template refuses
    size = max(tokenizer.get_vocab().values()) + 1
    assert len(RLHFDataset(write(rows), tokenizer, 20, truncation="left", vocab_size=size)) == 3
    with raises("tokenizer.template-rejects", "no tools here"):
        RLHFDataset(write(rows), tokenizer, 20, truncation="left", vocab_size=size - 1)


@pytest.mark.parametrize(("truncation", "longest"), [("error", 6), ("left", 6), ("left", 20)])
def test_a_prompt_that_leaves_no_room_for_a_response_is_named_at_the_start(
    write, question_rows, tokenizer, truncation, longest
):
    path = write(question_rows(3))  # of 4, 5 and 6 tokens
    make = partial(RLHFDataset, path, tokenizer, longest, truncation=truncation)
    assert len(make(prompt_room=6)) == 3
    with raises("data.no-response-room") as caught:
        make(prompt_room=5)
    assert str(caught.value) == (
        f"{path}, row 2: the prompt has 6 tokens, and data.max_response_length leaves room for 5 in the context of the "
        "model (max_position_embeddings) or of its engine; lower data.max_response_length, or let "
        "data.max_prompt_length=5 and data.filter_overlong_prompts=true drop longer prompts [data.no-response-room]"
    )
    assert len(RLHFDataset(path, tokenizer, 5, truncation="left", prompt_room=5)) == 3
    dropped = RLHFDataset(path, tokenizer, 5, filter_overlong_prompts=True, prompt_room=5)
    assert len(dropped) == 2 and dropped.dropped == 1


def test_prompt_rejected_by_the_template(write, question_rows, tokenizer):
    rows = question_rows(3)
    rows[1]["prompt"][0]["role"] = "tool"
    with raises("tokenizer.template-rejects", "train.parquet, row 1", ["tool"], "no tools here"):
        RLHFDataset(write(rows), tokenizer, 20)
    lazy = RLHFDataset(write(rows), tokenizer, 20, truncation="left")
    with raises("tokenizer.template-rejects", "train.parquet, row 1", "no tools here"):
        lazy[1]


def test_bad_arguments(write, question_rows, tokenizer, monkeypatch):
    path = write(question_rows(1))
    with raises("data.unknown-truncation", "data.truncation=center", "error, left, right, middle"):
        RLHFDataset(path, tokenizer, 20, truncation="center")
    monkeypatch.setattr(tokenizer, "chat_template", None)
    monkeypatch.setattr(tokenizer, "name_or_path", "base")
    with raises("tokenizer.no-chat-template") as caught:
        RLHFDataset(path, tokenizer, 20)
    assert str(caught.value) == (
        "the tokenizer 'base' has no chat template; add one to its tokenizer_config.json [tokenizer.no-chat-template]"
    )


def sft_rows(*pairs):
    return [{"prompt": [{"role": "user", "content": question}], "response": answer} for question, answer in pairs]


def test_sft_rows_end_with_the_end_of_sequence_token(write, tokenizer):
    batch = collated(SFTDataset(write(sft_rows(("1+1", "2"), ("9+9", "18"), ("?", ""))), tokenizer, max_length=20))
    prompt_lengths, response_lengths = sequence_lengths(batch)
    assert response_lengths.tolist() == [2, 3, 1]
    assert texts(batch, "responses", response_lengths, tokenizer, left=False) == ["2<|end|>", "18<|end|>", "<|end|>"]
    assert texts(batch, "prompts", prompt_lengths, tokenizer, left=True)[1] == "<|user|>9+9<|end|><|assistant|>"
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert batch.non_tensor_batch["index"].tolist() == [0, 1, 2]


def pieces(*said):
    return [{"role": role, "content": content} for role, content in said]


def test_sft_trains_on_assistant_pieces_only(write, tokenizer):
    talk = pieces(("assistant", "12"), ("environment", "345"), ("assistant", "6"))
    batch = collated(SFTDataset(write(sft_rows(("1+1", talk), ("?", pieces(("assistant", "7"))))), tokenizer, 20))
    _, lengths = sequence_lengths(batch)
    assert texts(batch, "responses", lengths, tokenizer, left=False) == ["123456<|end|>", "7<|end|>"]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]]
    cut = SFTDataset(write(sft_rows(("1", talk))), tokenizer, 7, truncation="right")[0]
    assert cut["response_mask"] == [1, 1, 0] and tokenizer.decode(cut["response_ids"]) == "123"


@pytest.mark.parametrize(
    ("response", "code", "value"),
    [
        (pieces(("tool", "12")), "data.no-assistant-message", ["tool"]),
        (pieces(("assistant", None)), "data.response-piece", "content"),
        ([], "data.no-assistant-message", []),
    ],
)
def test_unusable_sft_pieces_are_rejected(write, tokenizer, response, code, value):
    with raises(code, "row 1", value):
        SFTDataset(write(sft_rows(("1", pieces(("assistant", "1"))), ("2", response))), tokenizer, 20)


def test_sft_has_the_columns_of_a_rollout(write, tokenizer):
    batch = collated(SFTDataset(write(sft_rows(("1+1", "2"))), tokenizer, max_length=20))
    assert set(batch.batch.keys()) == {"prompts", "responses", "attention_mask", "response_mask"}


@pytest.mark.parametrize(
    ("truncation", "prompt", "response"),
    [("left", "2345<|end|><|assistant|>", "6789<|end|>"), ("right", "<|user|>12345<|end|><|assistant|>", "678")],
)
def test_sft_truncation_cuts_the_whole_sequence(write, tokenizer, truncation, prompt, response):
    rows = write(sft_rows(("12345", "6789")))
    limit = {"left": 11, "right": 11}[truncation]
    sample = SFTDataset(rows, tokenizer, limit, truncation=truncation)[0]
    assert tokenizer.decode(sample["prompt_ids"]) == prompt
    assert tokenizer.decode(sample["response_ids"]) == response


@pytest.mark.parametrize(
    ("truncation", "limit", "code", "value"),
    [
        ("error", 12, "data.sequence-too-long", "8 + 5 tokens, at most 12"),
        ("right", 8, "data.truncation-leaves-nothing", "no response"),
        ("left", 5, "data.truncation-leaves-nothing", "no prompt"),
    ],
)
def test_overlong_sft_rows_are_rejected(write, tokenizer, truncation, limit, code, value):
    rows = write(sft_rows(("", ""), ("12345", "6789")))
    with raises(code, "row 1", value, "data.max_length"):
        SFTDataset(rows, tokenizer, limit, truncation=truncation)


def test_sft_needs_responses_and_an_end_of_sequence_token(write, question_rows, tokenizer):
    with raises("data.missing-column", "'response'"):
        SFTDataset(write(question_rows(2)), tokenizer, 20)
    with raises("data.null-value", "'response'", "row 1"):
        SFTDataset(write(sft_rows(("1", "1"), ("2", None))), tokenizer, 20)
    with raises("data.column-type", "'response'", "int64"):
        SFTDataset(write(sft_rows(("1", 1), ("2", 2))), tokenizer, 20)
    path = write(sft_rows(("1", "1")))
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    with raises("tokenizer.no-eos-token", "eos_token"):
        SFTDataset(path, endless, 20)


def test_truncation_in_the_middle(write, question_rows, tokenizer):
    dataset = RLHFDataset(write(question_rows(6)), tokenizer, max_prompt_length=5, truncation="middle")
    assert tokenizer.decode(dataset[5]["prompt_ids"]) == "<|user|>xx<|end|><|assistant|>"
    with raises("data.truncation-middle", "data.truncation=middle"):
        SFTDataset(write(sft_rows(("1", "1"))), tokenizer, 20, truncation="middle")


def test_system_prompts(write, question_rows, tokenizer):
    rows = question_rows(3)
    rows[0]["system"], rows[1]["system"], rows[2]["system"] = "a", None, None
    rows[2]["prompt"].insert(0, {"role": "system", "content": "b"})
    dataset = RLHFDataset(write(rows), tokenizer, 20, system_prompt="c")
    shown = [tokenizer.decode(dataset[row]["prompt_ids"]) for row in range(3)]
    assert [text.partition("<|end|>")[0] for text in shown] == ["<|system|>a", "<|system|>c", "<|system|>b"]
    assert dataset[1]["raw_prompt"] == [{"role": "system", "content": "c"}, {"role": "user", "content": "xx"}]
    assert "system" not in dataset[1]
    rows[2]["system"] = "twice"
    with raises("data.two-system-messages", "row 2", "'system'"):
        RLHFDataset(write(rows), tokenizer, 20)


def test_several_turns_in_a_prompt(write, question_rows, tokenizer):
    rows = question_rows(1)
    turns = [("user", "1"), ("assistant", "2"), ("user", "3")]
    rows[0]["prompt"] = [{"role": role, "content": content} for role, content in turns]
    sample = RLHFDataset(write(rows), tokenizer, 20)[0]
    assert tokenizer.decode(sample["prompt_ids"]) == (
        "<|user|>1<|end|><|assistant|>2<|end|><|user|>3<|end|><|assistant|>"
    )


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("as_text", ["list", "each", "no", "name"])
def test_tools_of_a_row(write, question_rows, tokenizer, monkeypatch, as_text):
    template = "{% if tools %}{{ tools | map(attribute='function.name') | join(',') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", template + tokenizer.chat_template)
    rows = question_rows(3)
    tools = {"list": json.dumps([TOOL]), "each": [json.dumps(TOOL)], "no": [TOOL], "name": ["add"]}[as_text]
    rows[0]["tools"], rows[1]["tools"], rows[2]["tools"] = tools, None, tools
    dataset = RLHFDataset(write(rows), tokenizer, 20, tool_schemas={"add": TOOL} if as_text == "name" else {})
    batch = collated(dataset)
    assert [tokenizer.decode(dataset[row]["prompt_ids"])[:3] for row in (0, 2)] == ["add", "add"]
    assert tokenizer.decode(dataset[1]["prompt_ids"]).startswith("<|user|>")
    assert batch.non_tensor_batch["tools"].tolist() == [[TOOL], None, [TOOL]]
    with raises("data.prompt-too-long", "row 2", "9 tokens", "at most 8"):  # 3 of the tools are counted
        RLHFDataset(write(rows), tokenizer, 8, tool_schemas={"add": TOOL})


def test_nulls_of_a_schema_stay_if_they_are_json(write, question_rows, tokenizer):
    def tool(**properties):
        return {"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}

    rows = question_rows(3)
    rows[0]["tools"], rows[1]["tools"] = [tool(a={"type": "string"})], [tool(b={"enum": ["c"]})]
    dataset = RLHFDataset(write(rows), tokenizer, 90)
    assert [dataset[row]["tools"] for row in range(3)] == [rows[0]["tools"], rows[1]["tools"], None]
    rows[0]["tools"], rows[1]["tools"] = json.dumps([tool(a={"default": None})]), json.dumps([tool()])
    assert RLHFDataset(write(rows), tokenizer, 90)[0]["tools"] == [tool(a={"default": None})]


@pytest.mark.parametrize(
    ("tools", "code", "values"),
    [
        (["subtract"], "data.unknown-tool", ("'subtract'", ["add"])),
        ("[{", "data.not-json", ()),
        ('{"a": 1}', "data.column-type", ({"a": 1},)),
        (['{"type": "function"}'], "data.tool-schema", ('{"type": "function"}',)),
    ],
)
def test_malformed_tools_are_rejected(write, question_rows, tokenizer, tools, code, values):
    rows = question_rows(2)
    rows[0]["tools"], rows[1]["tools"] = None, tools
    with raises(code, "row 1: column 'tools'", *values):
        RLHFDataset(write(rows), tokenizer, 20, tool_schemas={"add": TOOL})


def test_other_columns_are_passed_on(write, question_rows, tokenizer, caplog):
    rows = question_rows(2)
    rows[1] |= {"metadata": {"level": 3}, "interaction_kwargs": {"name": "a"}, "uid": "x", "source": "other"}
    rows[0] |= {"metadata": None, "interaction_kwargs": None, "uid": None, "source": "one"}
    with caplog.at_level(logging.WARNING):
        batch = collated(RLHFDataset(write(rows), tokenizer, 20, reward_fn_key="source"))
    assert batch.non_tensor_batch["metadata"].tolist() == [None, {"level": 3}]
    assert batch.non_tensor_batch["interaction_kwargs"].tolist() == [None, {"name": "a"}]
    assert batch.non_tensor_batch["data_source"].tolist() == ["one", "other"]
    assert "uid" not in batch.non_tensor_batch and "columns uid are ignored" in caplog.text


def test_max_samples(write, question_rows, tokenizer):
    path = write(question_rows(6))
    assert [sample["index"] for sample in RLHFDataset(path, tokenizer, 20, max_samples=2)] == [0, 1]
    drawn = RLHFDataset([path, path], tokenizer, 20, max_samples=5, sample_seed=3)
    rows = [drawn[item]["index"] for item in range(5)]
    assert rows == sorted(set(rows)) and rows != [0, 1, 2, 3, 4]
    assert drawn.rows_of_files() == [sum(row < 6 for row in rows), sum(row >= 6 for row in rows)]
    assert len(RLHFDataset(path, tokenizer, 20, max_samples=7, sample_seed=3)) == 6
    # a prompt of a row that is not wanted may be as long as it likes
    assert len(RLHFDataset(path, tokenizer, 5, max_samples=2)) == 2


def test_numbers_of_rows(write, question_rows, tokenizer):
    rows = question_rows(4)
    dataset = RLHFDataset(write(rows), tokenizer, 6, filter_overlong_prompts=True)
    assert dataset.numbers("extra_info.index").tolist() == [0, 1, 2]
    with raises("data.not-number", "row 0", "'extra_info.split'"):
        dataset.numbers("extra_info.split")
    with raises("data.missing-column", "'level'"):
        dataset.numbers("level")


def test_lengths_are_measured_by_processes_and_cached(write, question_rows, tokenizer, tmp_path, monkeypatch):
    rows = question_rows(2) * 3000
    path = write(rows)
    cache = str(tmp_path / "cache")

    def build(**changes):
        arguments = {"filter_overlong_prompts": True, "cache_dir": cache, "workers": 2} | changes
        return RLHFDataset(path, tokenizer, 4, **arguments)

    first = build()
    assert len(first) == 3000 and first.dropped == 3000
    (kept,) = (tmp_path / "cache").glob("lengths-*.npy")
    assert np.load(kept)[:, 0].tolist() == [4, 5] * 3000
    monkeypatch.setattr(lengths, "_measure", lambda *arguments: pytest.fail("measured again"))
    assert len(build()) == 3000
    with pytest.raises(BaseException, match="measured again"):
        build(system_prompt="another")
    with pytest.raises(BaseException, match="measured again"):
        build(apply_chat_template_kwargs={"extra": "ok"})


def test_rejected_row_of_a_large_data_set_is_named(write, question_rows, tokenizer, tmp_path):
    rows = question_rows(1) * 5000
    rows[4321] = {**rows[4321], "prompt": [{"role": "tool", "content": "x"}]}
    with raises("tokenizer.template-rejects", "train.parquet, row 4321", "no tools here"):
        RLHFDataset(write(rows), tokenizer, 20, cache_dir=str(tmp_path / "cache"), workers=1)
    assert not list((tmp_path / "cache").glob("*"))
