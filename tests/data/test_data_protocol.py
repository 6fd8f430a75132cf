import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises
from tensordict import TensorDict

from megarl.data import DataProto, attention_mask_of, pad_left, pad_right

QUICK = settings(max_examples=25)


def numbered(rows, **meta):
    """A batch whose row i holds i in a tensor and in an object column."""
    return DataProto.from_dict(
        {"number": torch.arange(rows), "square": torch.arange(rows)[:, None] ** 2},
        {"name": [f"row{row}" for row in range(rows)]},
        meta,
    )


def rows_of(batch):
    """The row numbers of a batch made by ``numbered``, after checking that all columns agree."""
    numbers = batch.batch["number"].tolist()
    assert batch.batch["square"].flatten().tolist() == [number**2 for number in numbers]
    assert batch.non_tensor_batch["name"].tolist() == [f"row{number}" for number in numbers]
    assert len(batch) == len(numbers)
    return numbers


def test_from_dict_rejects_columns_of_different_length():
    with raises("batch.column-rows", "column 'b'", 3, 2):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with raises("batch.column-rows", "non-tensor column 'names'", 1):
        DataProto.from_dict({"a": torch.zeros(2)}, {"names": ["x"]})
    with raises("batch.column-type", "'a'"):
        DataProto.from_dict({"a": [1, 2]})
    with raises("batch.column-twice", "['a']"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"a": [1, 2]})


@pytest.mark.parametrize(
    ("tensors", "code", "values"),
    [
        ({"prompts": torch.zeros(2, dtype=torch.int64)}, "batch.column-shape", ("'prompts'", [2], "[b, P]")),
        ({"prompts": torch.zeros(2, 3)}, "batch.column-dtype", ("'prompts'", torch.float32, torch.int64)),
        (
            {"values": torch.zeros(2, 3), "returns": torch.zeros(2, 4)},
            "batch.column-width",
            ("'values'", "'returns'", "response"),
        ),
        (
            {
                "prompts": torch.zeros(2, 3, dtype=torch.int64),
                "values": torch.zeros(2, 2),
                "attention_mask": torch.ones(2, 4, dtype=torch.int64),
            },
            "batch.column-width",
            ("'attention_mask'", 4, "3 + 2"),
        ),
    ],
)
def test_declared_columns_must_have_their_shape(tensors, code, values):
    with raises(code, *values):
        DataProto.from_dict(tensors)


def test_nested_lists_stay_one_value_per_row():
    batch = DataProto.from_single_dict({"a": torch.zeros(2), "raw_prompt": [[1, 2], [3, 4]], "n": np.array([5, 6])})
    assert batch.non_tensor_batch["raw_prompt"].shape == (2,)
    assert batch.non_tensor_batch["raw_prompt"][1] == [3, 4]
    assert type(batch.non_tensor_batch["n"][0]) is int


def test_a_tensordict_of_verl_is_a_batch():
    batch = DataProto(TensorDict({"responses": torch.tensor([[1, 2], [3, 0]])}, batch_size=[2]))
    assert len(batch) == 2 and batch.batch["responses"].tolist() == [[1, 2], [3, 0]]
    assert len(DataProto(TensorDict({}, batch_size=[0]))) == 0


def test_batch_of_objects_only():
    batch = DataProto.from_dict(None, {"name": ["a", "b", "c"]})
    assert len(batch) == 3
    assert batch.reorder([2, 0, 1]).non_tensor_batch["name"].tolist() == ["c", "a", "b"]
    assert len(DataProto()) == 0


def test_indexing():
    batch = numbered(5, step=3)
    assert rows_of(batch[2]) == [2]
    assert rows_of(batch[-1]) == [4]
    assert rows_of(batch[1:4]) == [1, 2, 3]
    assert rows_of(batch[::-2]) == [4, 2, 0]
    assert rows_of(batch[[3, 3, -5]]) == [3, 3, 0]
    assert rows_of(batch[torch.tensor([1, 0])]) == [1, 0]
    assert rows_of(batch[batch.batch["number"] > 2]) == [3, 4]
    assert rows_of(batch[np.zeros(5, dtype=bool)]) == []
    assert batch[2].meta_info == {"step": 3}
    assert [rows_of(row) for row in batch] == [[0], [1], [2], [3], [4]]
    with pytest.raises(IndexError, match="outside a batch of 5"):
        batch[5]
    with raises("batch.mask-shape", 5, [4]):
        batch[np.ones(4, dtype=bool)]


def test_select_and_pop_name_the_missing_key():
    batch = numbered(3, step=1)
    assert set(batch.select(["number"]).batch.keys()) == {"number"}
    assert set(batch.select(["number"], []).non_tensor_batch) == set()
    with raises("batch.missing-column") as caught:
        batch.select(["numbr"])
    assert str(caught.value) == (
        "tensor column 'numbr' is not in the batch; did you mean 'number'? there are ['number', 'square'] "
        "[batch.missing-column]"
    )
    with raises("batch.missing-column", "non-tensor column 'x'"):
        batch.pop(["number"], ["x"])
    taken = batch.pop(["number"], ["name"])
    assert len(taken) == 3
    assert set(taken.batch.keys()) == {"number"}
    assert set(batch.batch.keys()) == {"square"}
    assert batch.non_tensor_batch == {}
    assert batch.meta_info == {"step": 1}


def test_union():
    batch = numbered(3, step=1)
    joined = batch.union(DataProto.from_dict({"cube": torch.arange(3) ** 3, "number": torch.arange(3)}))
    assert set(joined.batch.keys()) == {"number", "square", "cube"}
    with raises("batch.values-differ", "tensor column 'number'"):
        batch.union(DataProto.from_dict({"number": torch.arange(3) + 1}))
    with raises("batch.values-differ", "non-tensor column 'name'"):
        batch.union(DataProto.from_dict(None, {"name": ["a", "b", "c"]}))
    with raises("batch.values-differ", "meta_info key 'step'"):
        batch.union(numbered(3, step=2))
    with raises("batch.column-rows", "the other batch", 2, 3):
        batch.union(numbered(2))


def test_union_accepts_equal_values_with_nan_or_arrays():
    tensors = {"values": torch.tensor([[float("nan"), 1.0]])}
    objects = {"x": [{"a": np.array([1.0, float("nan")]), "b": [float("nan")]}]}
    batch = DataProto.from_dict(tensors, objects)
    assert len(batch.union(copy.deepcopy(batch))) == 1


def test_with_columns_replaces_and_leaves_the_original():
    batch = numbered(2)
    changed = batch.with_columns({"number": torch.tensor([7, 8])}, {"flag": [True, False]})
    assert changed.batch["number"].tolist() == [7, 8]
    assert batch.batch["number"].tolist() == [0, 1]
    assert "flag" not in batch.non_tensor_batch


@QUICK
@given(st.integers(0, 12), st.integers(1, 4), st.booleans())
def test_repeat(rows, times, interleave):
    repeated = rows_of(numbered(rows).repeat(times, interleave))
    if interleave:
        assert repeated == [row for row in range(rows) for _ in range(times)]
    else:
        assert repeated == list(range(rows)) * times


@QUICK
@given(st.permutations(range(7)))
def test_reorder_and_back(order):
    reordered = numbered(7).reorder(order)
    assert rows_of(reordered) == order
    back = [order.index(row) for row in range(7)]
    assert rows_of(reordered.reorder(torch.tensor(back))) == list(range(7))


@pytest.mark.parametrize("indices", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, -1]])
def test_reorder_rejects_non_permutations(indices):
    with raises("batch.row-order", "3 rows"):
        numbered(3).reorder(indices)


@QUICK
@given(st.integers(1, 5), st.integers(0, 4))
def test_chunk_and_concat_are_inverse(chunks, each):
    batch = numbered(chunks * each, step=1)
    parts = batch.chunk(chunks)
    assert [len(part) for part in parts] == [each] * chunks
    joined = DataProto.concat(parts)
    assert rows_of(joined) == list(range(chunks * each))
    assert joined.meta_info == {"step": 1}


@QUICK
@given(st.lists(st.integers(0, 4), max_size=6))
def test_split_sizes(sizes):
    parts = numbered(sum(sizes)).split(sizes)
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in rows_of(part)] == list(range(sum(sizes)))


def test_chunk_and_split_reject_wrong_sizes():
    with raises("batch.not-divisible", 7, 2):
        numbered(7).chunk(2)
    with raises("batch.split-sizes", [3, 3], 7):
        numbered(7).split([3, 3])


@QUICK
@given(st.integers(1, 9), st.integers(1, 20))
def test_pad_to_divisor_and_unpad(rows, divisor):
    padded, added = numbered(rows).pad_to_divisor(divisor)
    assert len(padded) % divisor == 0
    assert 0 <= added < divisor
    assert rows_of(padded) == [row % rows for row in range(rows + added)]
    assert rows_of(padded.unpad(added)) == list(range(rows))


def test_concat_rejects_conflicts():
    with raises("batch.keys-differ", "tensor columns ['square']"):
        DataProto.concat([numbered(1), numbered(1).select(["number"])])
    with raises("batch.keys-differ", "non-tensor columns ['name']"):
        DataProto.concat([numbered(1), numbered(1).select(None, [])])
    with raises("batch.values-differ", "meta_info key 'step'"):
        DataProto.concat([numbered(1, step=1), numbered(1, step=2)])
    with raises("batch.join-shapes", "'x'", [1, 2], [1, 3]):
        DataProto.concat([DataProto.from_dict({"x": torch.zeros(1, width)}) for width in (2, 3)])
    with raises("batch.no-parts"):
        DataProto.concat([])


def answered(prompts, responses, pad=0):
    tensors = {"prompts": pad_left(prompts, pad), "responses": pad_right(responses, pad)}
    lengths = [list(map(len, prompts)), list(map(len, responses))]
    tensors["attention_mask"] = attention_mask_of(*lengths, tensors["prompts"].shape[1], tensors["responses"].shape[1])
    tensors["values"] = tensors["responses"].float().masked_fill(tensors["responses"] == pad, 0.0)
    return DataProto.from_dict(tensors)


token_rows = st.lists(
    st.tuples(st.lists(st.integers(1, 9), max_size=5), st.lists(st.integers(1, 9), max_size=5)), min_size=1, max_size=4
)


@QUICK
@given(st.lists(token_rows, min_size=1, max_size=3), st.sampled_from([0, 11]))
def test_concat_pads_to_the_widest_part(groups, pad):
    joined = DataProto.concat([answered(*zip(*group, strict=True), pad=pad) for group in groups])
    rows = [row for group in groups for row in group]
    together = answered(*zip(*rows, strict=True), pad=pad)
    attention = together.batch["attention_mask"].bool()
    assert torch.equal(joined.batch["attention_mask"], together.batch["attention_mask"])
    assert torch.equal(joined.batch["values"], together.batch["values"])
    width = together.batch["prompts"].shape[1]
    for name, mask in (("prompts", attention[:, :width]), ("responses", attention[:, width:])):
        assert torch.equal(joined.batch[name][mask], together.batch[name][mask])
        assert joined.batch[name].shape == together.batch[name].shape


@QUICK
@given(st.data(), st.lists(token_rows, min_size=1, max_size=3), st.booleans())
def test_concat_in_an_order_takes_rows_of_the_concatenation(data, groups, ragged):
    parts = [answered(*zip(*group, strict=True)) for group in groups]
    for number, part in enumerate(parts):
        part.non_tensor_batch["name"] = np.array([f"{number}-{row}" for row in range(len(part))], dtype=object)
        if ragged:
            part.parts([range(len(part))])
    whole = DataProto.concat(parts)
    rows = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6)), dtype=np.int64)
    chosen = DataProto.concat(parts, rows)
    assert chosen.non_tensor_batch["name"].tolist() == whole.non_tensor_batch["name"][rows].tolist()
    for name in whole.tensors:
        assert torch.equal(chosen.tensors[name], whole.tensors[name][rows]), name


def test_concat_keeps_the_padding_value():
    full, ragged = answered([[1, 2]], [[3]], pad=11), answered([[1], [2, 3, 4]], [[5], [6, 7]], pad=11)
    joined = DataProto.concat([full, ragged])
    assert joined.batch["prompts"].tolist() == [[11, 1, 2], [11, 11, 1], [2, 3, 4]]
    assert joined.batch["responses"].tolist() == [[3, 11], [5, 11], [6, 7]]
    assert joined.batch["values"].tolist() == [[3, 0], [5, 0], [6, 7]]


def test_concat_of_prompts_alone():
    parts = [
        answered(prompts, [[]] * len(prompts)).select(["prompts", "attention_mask"]) for prompts in ([[1]], [[2, 3]])
    ]
    joined = DataProto.concat(parts)
    assert joined.batch["prompts"].tolist() == [[0, 1], [2, 3]]
    assert joined.batch["attention_mask"].tolist() == [[0, 1], [1, 1]]
