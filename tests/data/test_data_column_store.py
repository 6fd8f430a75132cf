import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.data import (
    COLUMNS,
    Column,
    DataProto,
    attention_mask_of,
    declare_column,
    pad_left,
    pad_right,
    sequence_lengths,
    token_counts,
)
from megarl.data.column_store import ragged_columns
from megarl.data.columns import column_widths

QUICK = settings(max_examples=25)


def assert_equal(first, second):
    assert len(first) == len(second)
    assert set(first.batch.keys()) == set(second.batch.keys())
    for name in first.batch.keys():  # noqa: SIM118
        mine, theirs = first.batch[name], second.batch[name]
        assert mine.dtype == theirs.dtype, name
        assert mine.shape == theirs.shape, name
        assert torch.equal(mine, theirs), name
    assert {k: v.tolist() for k, v in first.non_tensor_batch.items()} == {
        k: v.tolist() for k, v in second.non_tensor_batch.items()
    }
    assert first.meta_info == second.meta_info


def sent(batch):
    return pickle.loads(pickle.dumps(batch, protocol=5))


def batch_of(prompt_lengths, response_lengths, pad=0, spare=0, seed=0):
    """Random tokens and log-probs of the given lengths, with ``spare`` additional padding columns."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(prompt_lengths)
    widths = [max(lengths) + spare for lengths in (prompt_lengths, response_lengths)]
    mask = attention_mask_of(prompt_lengths, response_lengths, *widths)
    real = mask.bool()
    ids = torch.randint(1, 1000, (rows, sum(widths)), generator=generator).masked_fill(~real, pad)
    log_probs = -torch.rand(rows, widths[1], generator=generator)
    response_mask = mask[:, widths[0] :].clone()
    response_mask[:, 1:2] = 0  # not trained on, but a real token
    return DataProto.from_dict(
        {
            "prompts": ids[:, : widths[0]],
            "responses": ids[:, widths[0] :],
            "attention_mask": mask,
            "response_mask": response_mask,
            "old_log_probs": log_probs.masked_fill(~real[:, widths[0] :], 0.0),
            "ref_log_prob": log_probs.masked_fill(~real[:, widths[0] :], 0.0).bfloat16(),
        },
        {"raw_prompt": [[{"role": "user", "content": str(row)}] for row in range(rows)]},
        {"step": 1},
    )


lengths = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5)


@QUICK
@given(lengths, st.sampled_from([0, 151643]), st.integers(0, 3))
def test_round_trip_restores_the_rectangles(rows, pad, spare):
    batch = batch_of(*zip(*rows, strict=True), pad=pad, spare=spare)
    assert_equal(sent(batch), batch)
    prompt, response = sequence_lengths(sent(batch))
    assert list(zip(prompt.tolist(), response.tolist(), strict=True)) == rows


def test_payload_size_depends_on_tokens_not_on_padding():
    short = len(pickle.dumps(batch_of([100] * 8, [100] * 8)))
    padded = len(pickle.dumps(batch_of([100] * 8, [100] * 8, spare=5000)))
    assert padded < short + 200
    tokens, more = batch_of([100] * 8, [500] * 8), batch_of([100] * 8, [1500] * 8)
    per_token = (len(pickle.dumps(more)) - len(pickle.dumps(tokens))) / (8 * 1000)
    # responses below 1000 in int16, response_mask in int8, old_log_probs in float32, ref_log_prob in bfloat16
    assert per_token == pytest.approx(2 + 1 + 4 + 2, rel=0.01)


@QUICK
@given(lengths, st.sampled_from([0, 151643]), st.data())
def test_parts_equal_the_selected_rows(rows, pad, data):
    """Before and after transport; rows may repeat, and a part may be empty."""
    batch = batch_of(*zip(*rows, strict=True), pad=pad, spare=2)
    batch = batch.with_columns({"representations": torch.rand(len(batch), 3), "x": torch.rand(len(batch), 2)})
    plan = data.draw(st.lists(st.lists(st.integers(0, len(batch) - 1), max_size=4), max_size=3))
    for part, selected in zip(batch.parts(plan), plan, strict=True):
        assert len(part) == len(selected)
        assert_equal(sent(part), batch[selected])
        assert_equal(part, batch[selected])
        assert_equal(sent(part), batch[selected])


@pytest.mark.parametrize("value", [0, -1, 127, -129, 2**15, 2**31 - 1, -(2**31), 2**31, -(2**63)])
def test_integers_of_every_size_arrive(value):
    batch = batch_of([1], [3]).with_columns({"responses": torch.tensor([[1, value, 5]])})
    assert_equal(sent(batch), batch)


def test_parts_without_an_attention_mask_or_tensors():
    batch = DataProto.from_dict({"values": torch.rand(3, 4)}, {"name": ["a", "b", "c"]}, {"step": 1})
    assert_equal(sent(batch.parts([[2, 0]])[0]), batch[[2, 0]])
    (part,) = DataProto.from_dict(None, {"name": ["a", "b"]}).parts([[1]])
    assert sent(part).non_tensor_batch["name"].tolist() == ["b"] and not part.tensors
    with pytest.raises(IndexError, match="outside a batch of 3"):
        batch.parts([[3]])


def test_a_part_with_several_paddings_is_rejected():
    batch = batch_of([1, 1, 1], [1, 3, 1])
    values = batch.padded("old_log_probs")
    values[2, 1:] = torch.tensor([1.0, 2.0])
    batch = batch.with_columns({"old_log_probs": values})
    with raises("batch.values-in-padding", "'old_log_probs'", "row 2"):
        batch.parts([[0, 1]])


@QUICK
@given(lengths, st.sampled_from([0, 151643]), st.data())
def test_received_batches_behave_like_padded_ones(rows, pad, data):
    """Selected, joined and sent again, with columns whose own lengths were trimmed; rows of a part may be shorter."""
    batch = batch_of(*zip(*rows, strict=True), pad=pad, spare=1)
    values = torch.rand(len(batch), batch.tensors["responses"].shape[1]).round()  # may end with padding values
    values[batch.tensors["attention_mask"][:, batch.tensors["prompts"].shape[1] :] == 0] = 0
    result = sent(DataProto.from_dict({"values": values}))
    received = sent(batch).union(result)
    batch = batch.with_columns({"values": values})
    order = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=6))
    assert_equal(sent(received[order]), batch[order])
    prompts, responses = sequence_lengths(batch[order])
    for name, alignment in (("prompts", "prompt"), ("responses", "response"), ("values", "response"),
                            ("old_log_probs", "response"), ("attention_mask", "sequence")):  # fmt: skip
        padded = batch[order].tensors[name]
        for row, entries in enumerate(received[order].unpadded(name)):
            start = padded.shape[1] - prompts[row] if alignment == "prompt" else 0
            stop = padded.shape[1] if alignment == "prompt" else responses[row]
            if alignment == "sequence":
                width = batch.tensors["prompts"].shape[1]
                start, stop = width - prompts[row], width + responses[row]
            assert torch.equal(entries, padded[row, start:stop])
            assert torch.equal(batch[order].unpadded(name)[row], entries)
    parts = list(received)
    assert_equal(DataProto.concat([sent(part) for part in parts]), batch)
    assert_equal(DataProto.concat([parts[0], *list(batch)[1:]]), batch)


def test_columns_of_samples_have_no_padded_tensors():
    rows = {"prompts": [[5, 6], np.array([7], np.int32)], "responses": [[1], [300, 2, 3]],
            "rollout_log_probs": [[-0.5], np.array([-1, -2, -3], np.float32)]}  # fmt: skip
    batch = DataProto(ragged_columns(rows, {"prompts": 9, "responses": 9}))
    expected = DataProto.from_dict({
        "prompts": torch.tensor([[5, 6], [9, 7]]), "responses": torch.tensor([[1, 9, 9], [300, 2, 3]]),
        "rollout_log_probs": torch.tensor([[-0.5, 0, 0], [-1, -2, -3]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]),
    })  # fmt: skip
    assert [part.tolist() for part in sequence_lengths(batch)] == [[2, 1], [1, 3]]
    assert token_counts(batch) == [3, 4] and column_widths(batch.tensors.shapes) == (2, 3)
    assert batch.tensors.ragged.keys() == batch.tensors.keys()
    assert_equal(sent(batch), expected)
    assert_equal(batch, expected)


def test_values_at_the_ends_of_rows_take_one_number_per_row():
    lengths = [3, 1, 5, 2]
    rows = {"prompts": [np.array([1, 2])] * 4, "responses": [np.arange(1, length + 1) for length in lengths]}
    batch = DataProto(ragged_columns(rows, {}))
    ends = torch.tensor([0.5, -1.0, 0.0, 2.0])
    scored = batch.with_ends({"token_level_scores": ends})
    expected = torch.zeros(sum(lengths))
    expected[torch.tensor(lengths).cumsum(0) - 1] = ends
    dense = batch.with_packed({"token_level_scores": expected})
    assert torch.equal(scored.ends("token_level_scores"), ends)
    assert dense.ends("token_level_scores") is None and scored.ends("responses") is None
    assert len(pickle.dumps(scored)) < len(pickle.dumps(dense))
    joined = DataProto.concat([scored, scored[[1]]])
    assert joined.ends("token_level_scores").tolist() == [*ends.tolist(), -1.0]
    order = [2, 0, 0, 3]
    for first, second in (
        (scored, dense),
        (sent(scored), dense),
        (sent(scored[order]), dense[order]),
        (joined, DataProto.concat([dense, dense[[1]]])),
        (DataProto.concat([scored, dense], np.array([7, 1])), DataProto.concat([dense, dense], np.array([7, 1]))),
    ):
        assert torch.equal(first.packed("token_level_scores"), second.packed("token_level_scores"))
        assert_equal(first, second)


@pytest.mark.parametrize("change", [lambda batch: batch, sent, lambda batch: batch.parts([[0, 1]])[0]])
def test_a_padded_tensor_is_a_copy(change):
    batch = change(batch_of([2, 1], [3, 1]).with_columns({"rm_scores": torch.tensor([1.0, 2.0])}))
    for name in batch.tensors:
        before = batch.padded(name)
        batch.padded(name).zero_()
        batch.batch[name].zero_()
        assert torch.equal(batch.tensors[name], before) and torch.equal(sent(batch).padded(name), before), name
    with raises("batch.missing-column", "'response'", "did you mean 'responses'?"):
        batch.padded("response")
    with raises("batch.read-only", "'rm_scores'", "with_columns"):
        batch.batch["rm_scores"] = torch.zeros(2)


def test_reading_and_splitting_does_not_change_the_columns():
    batch = batch_of([2, 1], [3, 1])
    for whole in (batch, sent(batch)):
        stored = dict(whole.tensors.stored)
        assert dict(whole.batch) and len(whole.parts([[1], [0]])) == 2 and pickle.dumps(whole)
        assert all(whole.tensors.stored[name] is column for name, column in stored.items())


def test_rows_without_padding_need_an_attention_mask():
    with raises("batch.missing-column", "'values'", "'attention_mask'"):
        DataProto.from_dict({"values": torch.ones(1, 2)}).unpadded("values")


def test_pickled_chunk_does_not_send_the_complete_storage():
    batch = DataProto.from_dict({"anything": torch.zeros(64, 1000)})
    assert len(pickle.dumps(batch[3])) < 6000


def test_columns_without_attention_mask_are_trimmed():
    values = pad_right([[0.5, 0.0, -1.0], [0.0], []], dtype=torch.float32)
    wide = torch.nn.functional.pad(values, (0, 4000))
    batch = DataProto.from_dict(
        {"old_log_probs": wide, "prompts": torch.nn.functional.pad(torch.ones(3, 2).long(), (4000, 0))}
    )
    assert_equal(sent(batch), batch)
    assert len(pickle.dumps(batch)) < 2000
    nothing = DataProto.from_dict({"values": torch.zeros(2, 0)})
    assert_equal(sent(nothing), nothing)


def test_prompts_alone():
    tensors = {"prompts": pad_left([[1, 2, 3], [4]], 9), "attention_mask": attention_mask_of([3, 1], [0, 0], 3, 0)}
    batch = DataProto.from_dict(tensors)
    assert_equal(sent(batch), batch)
    assert [part.tolist() for part in sequence_lengths(batch)] == [[3, 1], [0, 0]]


@pytest.mark.parametrize(
    "tensors",
    [
        {"x": torch.arange(6).reshape(2, 3)},
        {"x": torch.zeros(2, 2, 2, dtype=torch.bool)},
        {"x": torch.ones(2, dtype=torch.float16), "attention_mask": torch.tensor([[1, 0, 1], [0, 0, 0]])},
        {"x": torch.zeros(0, 3), "values": torch.zeros(0, 5)},
        {"x": torch.zeros(2, 0)},
    ],
)
def test_undeclared_columns_keep_their_padding(tensors):
    batch = DataProto.from_dict(tensors)
    assert_equal(sent(batch), batch)


def test_batches_without_tensors():
    assert_equal(
        sent(DataProto.from_dict({"a": torch.zeros(2)}, {"x": [1, 2]})),
        DataProto.from_dict({"a": torch.zeros(2)}, {"x": [1, 2]}),
    )
    only_objects = sent(DataProto.from_dict(None, {"x": [1, None]}, {"a": 1}))
    assert not only_objects.batch
    assert only_objects.non_tensor_batch["x"].tolist() == [1, None]


def test_attention_mask_values_other_than_one_survive():
    batch = batch_of([2], [2])
    batch = batch.with_columns({"attention_mask": torch.tensor([[2, 1, 1, 3]])})
    assert_equal(sent(batch), batch)


def test_empty_batch_keeps_its_columns():
    batch = batch_of([2, 3], [2, 1])[:0]
    assert_equal(sent(batch), batch)


@pytest.mark.parametrize("mask", [[1, 0, 1, 1, 0], [0, 1, 1, 0, 1], [1, 1, 0, 1, 0]])
def test_mask_with_holes_is_rejected(mask):
    batch = batch_of([3, 3], [2, 2])
    batch = batch.with_columns({"attention_mask": torch.tensor([[1] * 5, mask])})
    with raises("batch.mask-holes", "'attention_mask'", "row 1"):
        pickle.dumps(batch)


def test_values_in_the_padding_are_an_error():
    batch = batch_of([3, 3], [2, 4])
    values = batch.padded("old_log_probs")
    values[0, 3] = -1.0
    batch = batch.with_columns({"old_log_probs": values})
    with raises("batch.values-in-padding", "'old_log_probs'", "row 0"):
        pickle.dumps(batch)


def test_sequence_lengths_names_required_columns():
    with raises("batch.missing-column", "'attention_mask'", "['responses']"):
        sequence_lengths(DataProto.from_dict({"responses": torch.ones(2, 2, dtype=torch.int64)}))


def test_custom_column():
    column = Column("test_wire_top_log_probs", "response", torch.float32, 0, "Three log-probs of each token.")
    batch = batch_of([1, 1], [1, 4], spare=1000)
    values = torch.rand(2, 1004, 3)
    values[0, 1:], values[1, 4:] = 0, 0
    whole = len(pickle.dumps(batch))
    batch = batch.with_columns({column.name: values})
    declare_column(column)
    payload = pickle.dumps(batch)
    del COLUMNS[column.name]  # the receiver need not know it
    assert len(payload) < whole + 400
    assert torch.equal(pickle.loads(payload).batch[column.name], values)
    with raises("batch.column-declared", "'prompts'"):
        declare_column(Column("prompts", "row", torch.int64, 0, ""))


def test_read_only_buffers_are_copied():
    buffers = []
    batch = DataProto.from_dict({"x": torch.arange(4.0)})
    payload = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    restored = pickle.loads(payload, buffers=[bytes(buffer) for buffer in buffers])
    assert restored.padded("x").add_(1).tolist() == [1, 2, 3, 4]
    assert restored.padded("x").tolist() == [0, 1, 2, 3]


def test_packed_tokens_of_read_only_buffers_are_copied_when_they_are_read():
    buffers = []
    rows = {"prompts": [[1], [2, 3]], "responses": [[4, 5], [6]], "rollout_log_probs": [[-1.0, -2.0], [-3.0]]}
    payload = pickle.dumps(DataProto(ragged_columns(rows, {})), protocol=5, buffer_callback=buffers.append)
    shared = [bytes(buffer) for buffer in buffers]
    restored = pickle.loads(payload, buffers=shared)
    assert restored.packed("rollout_log_probs").mul_(2).tolist() == [-2, -4, -6]
    assert restored.padded("rollout_log_probs").tolist() == [[-1, -2], [-3, 0]]
    assert pickle.loads(payload, buffers=shared).packed("rollout_log_probs").tolist() == [-1, -2, -3]


@QUICK
@given(st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=4))
def test_padded_rectangles(rows):
    width = max(map(len, rows), default=0)
    assert pad_left(rows, 7).tolist() == [[7] * (width - len(row)) + row for row in rows]
    assert pad_right(rows, 7).tolist() == [row + [7] * (width - len(row)) for row in rows]
    lengths = [len(row) for row in rows]
    mask = attention_mask_of(lengths, lengths, width, width)
    assert mask.shape == (len(rows), 2 * width)
    assert mask.tolist() == [[0] * (width - n) + [1] * (2 * n) + [0] * (width - n) for n in lengths]


def test_attention_mask_of_checks_lengths():
    with raises("batch.length-range", "response", "0 and 2", "1 to 3"):
        attention_mask_of([1, 1], [1, 3], 1, 2)
    with raises("batch.length-counts", 1, 2):
        attention_mask_of([1], [1, 3], 1, 3)
