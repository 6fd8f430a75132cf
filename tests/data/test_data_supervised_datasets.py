"""Preference pairs and conversations: sequences of a row, and errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.expected_errors import raises
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megarl.data import LabelledResponses, PairDataset, SFTDataset
from megarl.data.supervised_datasets import mismatch_shift

QUESTION = [{"role": "user", "content": "a?"}]


def answer(text):
    return {"role": "assistant", "content": text}


def rows(chosen, rejected, **more):
    return [{"prompt": QUESTION, "chosen": chosen, "rejected": rejected, **more}]


def texts(dataset, tokenizer):
    sample = dataset[0]
    return [tokenizer.decode(sample[name]) for name in ("chosen", "rejected")]


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (rows("yes", "no"), {}),
        (rows([answer("yes")], [answer("no")]), {}),
        (rows([*QUESTION, answer("yes")], [*QUESTION, answer("no")]), {"prompt_key": None}),
    ],
    ids=["texts", "messages", "conversations"],
)
def test_pair_sequence_equals_a_rollout(tokenizer, write, made, options):
    dataset = PairDataset(write(made), tokenizer, 20, **options)
    ends = ("yes<|end|>", "no<|end|>")
    assert [text.replace(" ", "") for text in texts(dataset, tokenizer)] == [
        f"<|user|>a?<|end|><|assistant|>{end}" for end in ends
    ]


def test_pair_batch_has_complete_sequences_and_margins(tokenizer, write):
    made = [*rows("yes", "no", gap=0.5), *rows("y", "never", gap=2.0)]
    dataset = PairDataset(write(made), tokenizer, 20, margin_key="gap")
    batch = dataset.collate([dataset[0], dataset[1]])
    tensors = batch.tensors
    assert tensors["margins"].tolist() == [0.5, 2.0] and batch.non_tensor_batch["index"].tolist() == [0, 1]
    width = tensors["chosen"].shape[1]
    real = tensors["attention_mask"].bool()
    for row in range(2):
        assert tensors["chosen"][row][real[row, :width]].tolist() == dataset[row]["chosen"]
        assert tensors["rejected"][row][real[row, width:]].tolist() == dataset[row]["rejected"]


def test_long_pair_sequence_is_rejected_or_truncated(tokenizer, write):
    file = write(rows("yes", "never mind"))
    with raises("data.sequence-too-long", "row 0", "rejected", "5 + 11", "at most 12"):
        PairDataset(file, tokenizer, 12)
    dataset = PairDataset(file, tokenizer, 12, truncation="left")
    assert dataset.truncated == 1 and len(dataset[0]["rejected"]) == 12
    assert dataset[0]["rejected"][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(("truncation", "boundaries"), [("left", (5, 1)), ("right", (5, 5))])
def test_prompt_tokens_of_truncated_pairs(truncation, boundaries, tokenizer, write):
    file = write(rows("yes", "never mind"))
    dataset = PairDataset(file, tokenizer, 12, truncation=truncation, with_prompt_tokens=True)
    tensors = dataset.collate([dataset[0]]).tensors
    assert (tensors["chosen_prompt_tokens"].item(), tensors["rejected_prompt_tokens"].item()) == boundaries
    whole = tokenizer("never mind", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    assert dataset[0]["rejected"][boundaries[1] :] == whole[: 12 - boundaries[1]]


@pytest.mark.parametrize(("limit", "truncation", "lost"), [(11, "left", "prompt"), (5, "right", "response")])
def test_truncation_must_leave_prompt_and_response(limit, truncation, lost, tokenizer, write):
    file = write(rows("yes", "never mind"))
    PairDataset(file, tokenizer, limit, truncation=truncation)  # a reward model reads the sequence as a whole
    with raises("data.truncation-leaves-nothing", f"data.truncation={truncation}", f"no {lost}"):
        PairDataset(file, tokenizer, limit, truncation=truncation, with_prompt_tokens=True)


@pytest.mark.parametrize(
    ("made", "options", "code", "value"),
    [
        (rows([*QUESTION, answer("yes")], "no"), {}, "data.several-messages", "'chosen' holds 2"),
        (rows([answer("yes"), QUESTION[0]], "no"), {}, "data.no-assistant-message", "'chosen'"),
        (rows([answer("yes")], [answer("no")]), {"prompt_key": None}, "data.no-assistant-message", "'chosen'"),
        (rows([*QUESTION, answer("yes")], "no"), {"prompt_key": None}, "data.not-messages", "'rejected'"),
        (rows("yes", "no", gap=float("nan")), {"margin_key": "gap"}, "data.not-number", "'gap' is nan"),
        (rows("yes", None), {}, "data.column-type", "'rejected'"),
    ],
)
def test_malformed_pair_is_named(
    tokenizer,
    write,
    made,
    options,
    code,
    value,
):
    with raises(code, value):
        PairDataset(write(made), tokenizer, 20, **options)


LONG = "0123456789" * 30_000
"""Each character is a token. To tokenize megabytes takes minutes and gigabytes of memory."""


@pytest.mark.parametrize(
    ("truncation", "prompt", "response", "kept"),
    [
        ("left", LONG, "no", ("56789<|end|><|assistant|>", "no<|end|>")),
        ("right", "a?", LONG, ("<|user|>a?<|end|><|assistant|>", "01234")),
    ],
)
def test_megabytes_are_cut_as_if_they_were_tokenized(
    truncation,
    prompt,
    response,
    kept,
    tokenizer,
    write,
    tokenized,
):
    row = {"prompt": prompt, "response": response, "chosen": response, "rejected": "no", "good": True}
    file, options = write([row]), {"truncation": truncation}
    sample = SFTDataset(file, tokenizer, 10, **options)[0]
    assert tuple(tokenizer.decode(sample[name]) for name in ("prompt_ids", "response_ids")) == kept
    pieces = write([row | {"response": [answer(response)]}], "pieces.parquet")
    assert SFTDataset(pieces, tokenizer, 10, **options)[0] == sample
    pair = PairDataset(file, tokenizer, 10, **options, with_prompt_tokens=True)[0]
    tokens = pair["chosen_prompt_tokens"]
    assert tuple(map(tokenizer.decode, (pair["chosen"][:tokens], pair["chosen"][tokens:]))) == kept
    labelled = LabelledResponses(file, tokenizer, 10, answer_keys=("response",), label_key="good", **options)[0]
    assert tuple(tokenizer.decode(labelled[name]) for name in ("prompt_ids", "response_ids")) == kept
    assert max(tokenized) < 20_000


@pytest.mark.parametrize("truncation", ["error", "left", "right"])
def test_megabytes_that_cannot_be_cut_are_refused_without_tokenization(truncation, tokenizer, write, tokenized):
    row = {"prompt": LONG, "response": LONG, "chosen": LONG, "rejected": "no"}
    file = write([row])
    code = "data.sequence-too-long" if truncation == "error" else "data.truncation-leaves-nothing"
    with raises(code, "row 0", "at least ", " + at least "):
        SFTDataset(file, tokenizer, 10, truncation=truncation)
    with raises(code, "row 0", "chosen", "at least ", " + at least "):
        PairDataset(file, tokenizer, 10, truncation=truncation, with_prompt_tokens=True)
    talk = write([{"messages": [{"role": "user", "content": "a"}, answer(LONG)]}], "talk.parquet")
    with raises("data.conversation-too-long", "row 0", "at least ", "data.max_length=10"):
        SFTDataset(talk, tokenizer, 10, messages_key="messages", truncation=truncation)
    assert max(tokenized) < 20_000


TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bc"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e"},
]


def test_conversation_trains_on_every_assistant_message(tokenizer, write):
    dataset = SFTDataset(write([{"messages": TALK}]), tokenizer, 30, messages_key="messages")
    row = dataset[0]
    assert tokenizer.decode(row["prompt_ids"]) == "<|system|>S<|end|><|user|>a<|end|><|assistant|>"
    assert tokenizer.decode(row["response_ids"]) == "bc<|end|><|user|>d<|end|><|assistant|>e<|end|>"
    trained = [i for i, m in zip(row["response_ids"], row["response_mask"], strict=True) if m]
    assert tokenizer.decode(trained) == "bc<|end|>e<|end|>"
    # all tokens are those of the template on the whole conversation
    whole = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert row["prompt_ids"] + row["response_ids"] == list(whole)


def test_conversation_equals_prompt_and_response(tokenizer, write):
    pair = {"prompt": TALK[:2], "response": "bc", "messages": TALK[:3]}
    files = write([pair])
    assert SFTDataset(files, tokenizer, 30)[0] == SFTDataset(files, tokenizer, 30, messages_key="messages")[0]


@pytest.mark.parametrize(
    ("messages", "code", "value"),
    [
        (TALK[:2], "data.no-assistant-message", ["system", "user"]),
        (TALK[2:], "data.no-assistant-message", ["assistant", "user", "assistant"]),
        ("text", "data.not-messages", "'messages'"),
        ([*TALK, {"role": "assistant", "content": "e" * 20}], "data.sequence-too-long", "30"),
    ],
)
def test_malformed_conversation_is_named(tokenizer, write, messages, code, value):
    with raises(code, "row 0", value):
        SFTDataset(write([{"messages": messages}]), tokenizer, 30, messages_key="messages")


def test_a_message_may_begin_with_a_line_break(write):
    """A merge of two line breaks would extend over the generation prompt, after which the policy writes only one."""
    core = Tokenizer(models.BPE({text: n for n, text in enumerate(["\n", "\n\n", *"aeu:"])}, [("\n", "\n")]))
    merging = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="e")
    merging.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:\n{{ m['content'] }}e{% endfor %}"
        "{% if add_generation_prompt %}a:\n{% endif %}"
    )
    talk = [{"role": role, "content": "\nu"} for role in ("user", "assistant", "user", "assistant")]
    row = SFTDataset(write([{"messages": talk}]), merging, 30, messages_key="messages")[0]
    tokens = merging.convert_ids_to_tokens(row["prompt_ids"] + row["response_ids"])
    user, assistant = ["u", ":", "\n\n", "u", "e"], ["a", ":", "\n", "\n", "u", "e"]
    assert tokens == (user + assistant) * 2
    assert row["response_mask"] == [1] * 3 + [0] * 8 + [1] * 3


def test_template_that_changes_earlier_turns_is_an_error(tokenizer, write):
    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] if loop.last or m['role'] == 'user' else '' }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with raises("tokenizer.template-rewrites-turns", "message 2"):
        SFTDataset(write([{"messages": TALK[1:]}]), forgetful, 30, messages_key="messages")


def labelled(*rows):
    made = [([{"role": "user", "content": prompt}], response, label) for prompt, response, label in rows]
    return [{"prompt": prompt, "response": response, "label": label} for prompt, response, label in made]


def parts(tensors, name, row):
    """Prompt and response of a sequence of a batch, without padding."""
    width = tensors["kto_sequence"].shape[1]
    real = tensors["attention_mask"][row].bool()
    real = real[:width] if name == "kto_sequence" else real[width:]
    ids, boundary = tensors[name][row][real].tolist(), int(tensors[f"{name}_prompt_tokens"][row])
    return ids[:boundary], ids[boundary:]


@pytest.mark.parametrize(("good", "bad"), [(True, False), (1, 0), (1.0, 0.0)])
def test_labelled_responses_and_their_mismatched_sequences(good, bad, tokenizer, write):
    file = write(labelled(("a?", "yes", good), ("b?", "no", bad), ("never?", "mind", good)))
    dataset = LabelledResponses(file, tokenizer, 30, label_key="label", answer_keys=("response",))
    batch = dataset.collate([dataset[row] for row in range(len(dataset))])
    tensors = batch.tensors
    assert tensors["desirable"].tolist() == [1, 0, 1] and batch.non_tensor_batch["index"].tolist() == [0, 1, 2]
    own = [parts(tensors, "kto_sequence", row) for row in range(3)]
    mismatched = [parts(tensors, "kl_sequence", row) for row in range(3)]
    answers = [tokenizer.decode(response).replace(" ", "") for _, response in own]
    assert answers == ["yes<|end|>", "no<|end|>", "mind<|end|>"]
    assert mismatched == [(own[row][0], own[row - 1][1]) for row in range(3)]


def test_a_pair_gives_a_desirable_and_an_undesirable_response(tokenizer, write):
    """The mismatched response of a row is never the other response of its pair."""
    pairs = [{**rows("y", "never")[0], "prompt": [{"role": "user", "content": text}]} for text in ("a?", "b?", "c?")]
    file = write(pairs)
    dataset, whole = LabelledResponses(file, tokenizer, 30), PairDataset(file, tokenizer, 30)
    assert len(dataset) == 6 and sum(dataset.rows_of_files()) == 6
    for row in range(3):
        for member, name in enumerate(("chosen", "rejected")):
            sample = dataset[2 * row + member]
            assert sample["prompt_ids"] + sample["response_ids"] == whole[row][name]
            assert sample["desirable"] == (name == "chosen") and sample["index"] == row
    tensors = dataset.collate([dataset[item] for item in range(6)]).tensors
    prompts = [parts(tensors, "kto_sequence", row)[0] for row in range(6)]
    for row in range(6):
        prompt, response = parts(tensors, "kl_sequence", row)
        assert prompt == prompts[row] and response == parts(tensors, "kto_sequence", row - 2)[1]


@pytest.mark.parametrize(("truncation", "kept"), [("left", (1, 11)), ("right", (5, 7))])
def test_mismatched_sequences_are_truncated(truncation, kept, tokenizer, write):
    """The second prompt with the first response has 5 + 11 tokens."""
    file = write(labelled(("a?", "never mind", True), ("b?", "yes", False)))
    options = {"label_key": "label", "answer_keys": ("response",), "truncation": truncation}
    dataset = LabelledResponses(file, tokenizer, 12, **options)
    tensors = dataset.collate([dataset[0], dataset[1]]).tensors
    lengths = tuple(map(len, parts(tensors, "kl_sequence", 1)))
    assert lengths == kept
    # An error of length is about the rows' own sequences only.
    file = write(labelled(("a?", "never mind", True), ("never mind?", "y", False)))
    dataset = LabelledResponses(file, tokenizer, 16, label_key="label", answer_keys=("response",))
    tensors = dataset.collate([dataset[0], dataset[1]]).tensors
    assert sum(map(len, parts(tensors, "kl_sequence", 1))) == 16


@pytest.mark.parametrize("label", ["yes", 2, None, -1.0])
def test_labels_are_true_or_false(label, tokenizer, write):
    code = "data.null-value" if label is None else "data.label-value"
    with raises(code, "column 'label'", "row 0"):
        LabelledResponses(
            write(labelled(("a?", "yes", label))), tokenizer, 30, label_key="label", answer_keys=("response",)
        )


def test_mismatch_shift_avoids_the_own_prompt():
    first, second, third = [1], [2], [3, 4]
    assert mismatch_shift([first]) == 0 and mismatch_shift([first, first]) == 1
    assert mismatch_shift([first, second, third]) == 1
    assert mismatch_shift([first, first, second, second, third, third]) == 2
    assert mismatch_shift([first, first, first, second]) == 1  # two rows keep their prompt with any shift


@pytest.mark.parametrize("column", ["prompt", "response", "chosen", "rejected", "messages"])
def test_a_token_that_the_model_lacks_is_named_at_the_start(tokenizer, write, column):
    size = tokenizer.convert_tokens_to_ids("Z")
    question = [{"role": "user", "content": "e"}]
    row = {"prompt": question, "response": "a", "chosen": "b", "rejected": "c", "messages": [*question, answer("d")]}
    made: list[Any] = [row, copy.deepcopy(row)]

    def build(options):
        kind = PairDataset if column in ("chosen", "rejected") else SFTDataset
        kind(write(made), tokenizer, 20, **options)

    options = {"messages_key": "messages"} if column == "messages" else {}
    build({**options, "vocab_size": size})
    made[1][column] = "Z" if isinstance(row[column], str) else [*row[column][:-1], {**row[column][-1], "content": "Z"}]
    build(options)
    with raises("tokenizer.beyond-vocabulary", "row 1", f"token {size} ('Z')"):
        build({**options, "vocab_size": size})


def test_the_end_of_a_response_is_the_one_that_was_trained(tokenizer, write):
    messages = [*QUESTION, answer("d")]
    file = write([{"prompt": QUESTION, "response": "a", "chosen": "b", "rejected": "c", "messages": messages}])
    other = copy.deepcopy(tokenizer)
    other.eos_token = "<|pad|>"  # the template ends a turn with <|end|>
    end, pad = (tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|pad|>"))
    assert SFTDataset(file, other, 20).end_token == PairDataset(file, other, 20).end_token == pad
    assert SFTDataset(file, other, 20, messages_key="messages").end_token == end
    other.chat_template = tokenizer.chat_template.replace("<|end|>{% endfor", "<|end|>  {% endfor")
    assert SFTDataset(file, other, 20, messages_key="messages").end_token == end
    other.chat_template = tokenizer.chat_template.replace("<|end|>{% endfor", "!{% endfor")
    assert SFTDataset(file, other, 20, messages_key="messages").end_token is None
