import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import COLUMNS, DataProto
from megarl.data.column_store import ragged_columns
from megarl.data.ragged import ChunkReference, RemoteValues, RowValues
from megarl.data.remote_columns import attach_chunks, detach_chunks, fetch_values, separate, write_values

LENGTHS = [3, 0, 5, 1, 2, 4]


class MemoryChunk(ChunkReference):
    """A chunk in this process that counts its reads."""

    reads = 0

    def __init__(self, chunk):
        self.chunk = {name: values.copy() for name, values in chunk.items()}
        for values in self.chunk.values():
            values.flags.writeable = False  # as in shared memory

    @classmethod
    def fetch(cls, references):
        MemoryChunk.reads += len(references)
        return [reference.chunk for reference in references]


def batch_of(lengths=LENGTHS):
    random = np.random.default_rng(0)
    rows = {
        "prompts": [random.integers(1, 100, 2) for _ in lengths],
        "responses": [random.integers(1, 1 << 20, length) for length in lengths],
        "response_mask": [np.ones(length, np.int8) for length in lengths],
        "old_log_probs": [random.normal(size=length).astype(np.float32) for length in lengths],
        "teacher_topk_log_probs": [random.normal(size=(length, 2)).astype(np.float32) for length in lengths],
    }
    ids = np.array([f"u{row}" for row in range(len(lengths))], dtype=object)
    batch = DataProto(ragged_columns(rows, {}), {"uid": ids}, {"step": 3})
    return batch.with_packed({"values": torch.arange(sum(lengths)).bfloat16()})


def remote_batch(parts=((4, 0), (1, 2, 5), (3,))):
    return write_values(batch_of(), parts, MemoryChunk)


def remote_names(batch):
    return {name for name, column in batch.tensors.ragged.items() if isinstance(column.values, RemoteValues)}


def assert_equal(batch, expected):
    assert list(batch.tensors) == list(expected.tensors) and len(batch) == len(expected)
    for name in expected.tensors:
        assert batch.tensors[name].dtype == expected.tensors[name].dtype
        torch.testing.assert_close(batch.tensors[name], expected.tensors[name], rtol=0, atol=0)
    assert batch.non_tensor_batch["uid"].tolist() == expected.non_tensor_batch["uid"].tolist()


def test_written_columns_have_the_same_values():
    batch = remote_batch()
    assert remote_names(batch) == set(batch.tensors) - {"attention_mask"}
    assert_equal(batch, batch_of())
    for name in remote_names(batch):
        torch.testing.assert_close(batch.packed(name), batch_of().packed(name), rtol=0, atol=0)
    batch.packed("values").add_(1)  # fetched values are the reader's own


OPERATIONS = {
    "reverse": lambda batch: batch.reorder(range(len(batch))[::-1]),
    "take": lambda batch: batch[[*range(0, len(batch), 2), 0]],
    "slice": lambda batch: batch[1:],
    "repeat": lambda batch: batch.repeat(2),
    "concat": lambda batch: DataProto.concat([batch[len(batch) // 2 :], batch]),
    "split": lambda batch: DataProto.concat([batch[:1], batch[1:]]),
    "select": lambda batch: batch.select(["prompts", "responses", "attention_mask", "values"]),
    "union": lambda batch: batch.select(["prompts", "responses", "attention_mask"]).union(batch),
    "pad": lambda batch: batch.pad_to_divisor(4)[0],
}


@given(st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=4))
@settings(max_examples=60, deadline=None)
def test_operations_on_rows_do_not_read_values(names):
    batch, local = remote_batch(), batch_of()
    MemoryChunk.reads = 0
    for name in names:
        batch, local = OPERATIONS[name](batch), OPERATIONS[name](local)
    assert MemoryChunk.reads == 0 and remote_names(batch) == set(batch.tensors) - {"attention_mask"}
    assert_equal(batch, local)


def test_local_and_remote_parts_are_joined_by_value():
    joined = DataProto.concat([remote_batch(), batch_of()])
    assert not remote_names(joined)
    assert_equal(joined, DataProto.concat([batch_of(), batch_of()]))


def test_a_detached_batch_travels_with_the_references_of_its_rows():
    batch = remote_batch()[[4, 3, 0]]
    detached, tuples = detach_chunks(batch)
    assert [len(chunks) for chunks in tuples] == [3], "all columns share the three chunks"
    assert detach_chunks(batch[1:])[1][0] is tuples[0], "parts of a batch share them too"
    MemoryChunk.reads = 0
    received = pickle.loads(pickle.dumps(detached))
    with pytest.raises(RuntimeError, match="reference tuple 0 "):
        received.packed("responses")
    received = attach_chunks(received, tuples)
    assert MemoryChunk.reads == 0 and remote_names(received) == remote_names(batch)
    whole = fetch_values(received)
    assert MemoryChunk.reads == 2, "one chunk has none of these rows; the others are read once for all columns"
    assert not remote_names(whole) and whole.meta_info == {"step": 3}
    assert_equal(whole, batch_of()[[4, 3, 0]])


def test_a_result_is_separated_into_facts_and_a_chunk():
    facts, chunk = separate(batch_of())
    assert chunk.keys() == set(batch_of().tensors) - {"attention_mask"}
    sent = pickle.dumps(facts)
    assert not any(values.tobytes() in sent for values in chunk.values() if values.nbytes > 16)
    assert_equal(attach_chunks(pickle.loads(sent), [(MemoryChunk(chunk),)]), batch_of())
    nothing = DataProto.from_dict({"rm_scores": torch.ones(3)}, {"uid": ["a", "b", "c"]})
    same, chunk = separate(nothing)
    assert chunk == {} and same.tensors["rm_scores"].tolist() == [1, 1, 1]


def test_a_pickled_batch_has_its_values():
    assert_equal(pickle.loads(pickle.dumps(remote_batch())), batch_of())


def test_a_new_tensor_replaces_remote_values():
    batch = remote_batch()
    batch = batch.with_columns({"old_log_probs": torch.zeros_like(batch.padded("old_log_probs"))})
    assert "old_log_probs" not in remote_names(batch)
    assert batch.packed("old_log_probs").tolist() == [0] * sum(LENGTHS)
    batch = write_values(batch, [range(6)], MemoryChunk)
    assert "old_log_probs" in remote_names(batch) and batch.packed("old_log_probs").tolist() == [0] * sum(LENGTHS)


def test_columns_that_are_remote_already_are_not_written_again():
    batch, sizes = remote_batch(), []

    def write(chunk):
        sizes.append(sorted(chunk))
        return MemoryChunk(chunk)

    batch = batch.with_packed({"advantages": torch.ones(sum(LENGTHS))})
    written = write_values(batch, [[0, 1, 2], [3, 4, 5]], write)
    assert sizes == [["advantages"]] * 2
    assert write_values(written, [[0, 1, 2], [3, 4, 5]], write) is written and len(sizes) == 2
    assert "advantages" not in remote_names(batch), "the batch itself does not change"


def test_padded_tensors_become_remote_without_padding():
    padded = batch_of()
    tensors = {name: tensor.clone() for name, tensor in padded.tensors.items()}
    batch, chunks = DataProto.from_dict(tensors, padded.non_tensor_batch), []
    batch = write_values(batch, [[5, 4, 3, 2, 1, 0]], lambda chunk: chunks.append(MemoryChunk(chunk)) or chunks[-1])
    assert len(chunks[0].chunk["responses"]) == sum(LENGTHS)
    assert_equal(batch, padded)
    assert batch.tensors["values"].dtype == torch.bfloat16 and COLUMNS["values"].dtype == torch.float32


def is_of_rows(batch, name):
    return isinstance(batch.tensors.stored[name].values, RowValues)


def test_samples_are_written_without_a_copy_of_all_rows():
    batch = batch_of()
    assert is_of_rows(batch, "response_mask") and is_of_rows(batch, "teacher_topk_log_probs")
    chosen = batch[[5, 2, 2, 0]]
    assert is_of_rows(chosen, "old_log_probs")
    assert_equal(chosen, batch_of()[[5, 2, 2, 0]])
    batch = write_values(batch, [[4, 0], [1, 2, 5, 3]], MemoryChunk)
    assert remote_names(batch) == set(batch.tensors) - {"attention_mask"}
    assert_equal(batch, batch_of())


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8), data=st.data())
@settings(max_examples=50)
def test_rows_in_arrays_have_the_values_of_lists(lengths, data):
    random = np.random.default_rng(0)
    arrays = {
        "prompts": [random.integers(1, 200, 3).astype(np.int32) for _ in lengths],
        "responses": [random.integers(1, 1 << 20, length).astype(np.int32) for length in lengths],
        "rollout_log_probs": [random.normal(size=length).astype(np.float32) for length in lengths],
    }
    lists = {name: [row.tolist() for row in rows] for name, rows in arrays.items()}
    row = data.draw(st.integers(0, len(lengths) - 1))
    arrays["responses"][row] = arrays["responses"][row].tolist()  # as the padding token of an empty response
    of_arrays, of_lists = (DataProto(ragged_columns(rows, {"prompts": 7})) for rows in (arrays, lists))
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6))
    for change in (
        lambda batch: batch,
        lambda batch: batch[rows],
        lambda batch: DataProto.concat([batch, batch[rows]]),
        lambda batch: pickle.loads(pickle.dumps(batch)),
    ):
        left, right = change(of_arrays), change(of_lists)
        assert left.row_lengths("responses").tolist() == right.row_lengths("responses").tolist()
        for name in right.tensors:
            torch.testing.assert_close(left.tensors[name], right.tensors[name], rtol=0, atol=0)


def test_a_part_with_few_of_many_chunks_travels_with_their_references_only():
    lengths = [3, 1, 2, 4, 1, 2, 3, 1]
    batch = batch_of(lengths)
    batch = write_values(batch, [[row] for row in range(8)], MemoryChunk)
    few, many = batch[[6, 1]], batch[[0, 2, 4, 6]]
    (detached, (own,)), (rest, (shared,)) = detach_chunks(few), detach_chunks(many)
    assert len(own) == 2 and len(shared) == 8  # one list for all columns of prompts and of responses
    assert_equal(fetch_values(attach_chunks(pickle.loads(pickle.dumps(detached)), [own])), batch_of(lengths)[[6, 1]])
    assert_equal(fetch_values(attach_chunks(rest, [shared])), batch_of(lengths)[[0, 2, 4, 6]])
