from contextlib import nullcontext

import numpy as np
import pytest
import torch
from ray._private.worker import global_worker
from support.expected_errors import raises
from support.node_callers import calls_by_node
from support.object_store import store_bytes
from support.waits import wait_until

from megarl.base.errors import WorkerError
from megarl.cluster.calls import WorkerFailed
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.stored_chunks import RunValues, StoredChunk
from megarl.cluster.worker_group import WorkerGroup, wait_ready
from megarl.data import DataProto
from megarl.data.columns import column_widths
from megarl.data.ragged import RemoteValues, RowPlaces
from megarl.models import ParallelLayout
from tests.cluster import plain_workers
from tests.cluster.plain_workers import samples


@pytest.fixture(scope="module")
def pool(forked_workers):
    with RaySession(num_cpus=2) as session:
        yield session.place([ResourcePool("main", "cpu", [2])])["main"]


@pytest.fixture(scope="module", params=["called by rank", "called by node"])
def group(pool, request):
    with calls_by_node(4) if request.param == "called by node" else nullcontext():
        group = WorkerGroup("echo", "tests.cluster.plain_workers.Echo", {}, ParallelLayout(tp=2, dp=2), pool)
    wait_ready([group])
    yield group
    group.shutdown()


@pytest.fixture
def writes(monkeypatch):
    """Number of values in each chunk that the driver writes."""
    sizes, write = [], StoredChunk.write

    def counting(chunk):
        sizes.append(sum(map(len, chunk.values())))
        return write(chunk)

    monkeypatch.setattr(StoredChunk, "write", counting)
    return sizes


def sums_of(batch):
    return [row.double().cumsum(0).tolist() for row in batch.unpadded("responses")]


def rows_of(batch, name="values"):
    return [row.tolist() for row in batch.unpadded(name)]


def is_remote(batch, name):
    return isinstance(batch.tensors.stored[name].values, RemoteValues)


def test_results_stay_in_the_store_until_they_are_read(group):
    batch = samples([4, 1, 7, 2, 5])
    batch = batch.union(group.add_up(batch))
    assert is_remote(batch, "values")
    assert column_widths(batch.tensors.shapes) == (3, 7) and batch.tensors.shapes["values"].shape == (5, 7)
    assert rows_of(batch) == sums_of(batch)
    assert batch.batch["values"][1].tolist() == [*sums_of(batch)[1], 0, 0, 0, 0, 0, 0]


def test_rows_move_without_their_values(group, writes):
    batch = group.store("add_up", samples([4, 1, 7, 2, 5, 3]))
    batch = batch.union(group.add_up(batch))
    assert sum(writes) == 6 * 3 + 22, "the driver has written each token once"
    moved = DataProto.concat([batch.reorder([5, 0, 3, 1, 4, 2]), batch.repeat(2)[[1, 0, 9]]])
    again = moved.select(["prompts", "responses", "attention_mask"]).union(group.add_up(moved))
    assert sum(writes) == 6 * 3 + 22, "the second call has sent references only"
    assert all(is_remote(moved, name) for name in ("prompts", "responses", "values"))
    assert rows_of(again) == [[2 * value for value in row] for row in sums_of(moved)]
    assert rows_of(again)[0] == [2 * value for value in sums_of(batch)[5]]


def test_values_outlive_the_process_that_computed_them(pool):
    group = WorkerGroup("short", "tests.cluster.plain_workers.Echo", {}, ParallelLayout(), pool)
    batch = samples([50_000, 20])  # more than Ray keeps in the memory of the driver
    result = group.add_up(batch)
    group.shutdown()
    assert rows_of(batch.union(result)) == [torch.tensor(row).float().tolist() for row in _float_sums(batch)]


def _float_sums(batch):
    return [row.float().cumsum(0).tolist() for row in batch.unpadded("responses")]


def test_lost_values_are_named(pool):
    group = WorkerGroup("lost", "tests.cluster.light_workers.Sleeper", {}, ParallelLayout(), pool)
    wait_ready([group])
    pending = group.submit("sleep", 60.0)
    group.kill(0)
    values = RemoteValues(
        RowPlaces((StoredChunk(pending.calls[0].ref),), np.zeros(2, int), np.array([0, 3])), "values", ()
    )
    with raises("ray.values-lost", "resume from a checkpoint", error=WorkerError):
        values.fetch(np.array([3, 1]))
    group.shutdown()


def test_the_store_does_not_grow_with_steps(group):
    def step(seed):
        batch = samples([40_000, 100, 20_000, 3], seed)
        batch = batch.union(group.add_up(batch))
        group.add_up(batch.reorder([3, 1, 2, 0]))
        return batch

    held = step(0)
    size = 4 * 60_103 * 2  # responses and values, in 4 bytes each
    before = store_bytes()
    assert before >= size / 2  # Ray keeps small objects in the driver
    for seed in range(1, 11):
        step(seed)
    wait_until(lambda: store_bytes() <= before + size)
    assert rows_of(held) == _float_sums(held)
    del held
    wait_until(lambda: store_bytes() < size / 4)


READ = ("responses", "attention_mask")


def test_row_functions_run_on_the_owners_of_rows(group):
    batch = samples([4, 1, 7, 2, 5])
    columns, facts = group.row_map("add_up")(plain_workers.squares_of_rows, READ, batch, 0.5)
    assert {pid for pid, _ in facts} == {group.processes[0].pid, group.processes[2].pid}
    assert sorted(rows for _, rows in facts) == sorted(map(len, group.partition("add_up", batch).rows))
    assert is_remote(columns, "returns")
    expected = [row.float() ** 2 * 0.5 for row in batch.unpadded("responses")]
    torch.testing.assert_close(columns.tensors["sums"], torch.stack([row.sum() for row in expected]))
    assert rows_of(batch.with_columns(columns.select(["returns"]).tensors), "returns") == [
        row.tolist() for row in expected
    ]


def test_row_functions_get_whole_groups(group):
    batch = samples([4, 1, 7, 2, 5, 3])
    batch.non_tensor_batch["uid"] = np.array(["a", "b", "c", "a", "c", "b"], dtype=object)
    read = (*READ, "uid")
    columns, facts = group.row_map("add_up")(plain_workers.sums_of_groups, read, batch, group_by="uid")
    assert len(facts) == 2 and {uid for uids in facts for uid in uids} == {"a", "b", "c"}
    assert sum(map(len, facts)) == 3
    totals = {
        uid: sum(
            int(row.sum())
            for row, one in zip(batch.unpadded("responses"), batch.non_tensor_batch["uid"], strict=True)
            if one == uid
        )
        for uid in "abc"
    }
    assert columns.tensors["totals"].tolist() == [totals[uid] for uid in batch.non_tensor_batch["uid"]]


def test_row_functions_see_each_row_once(group):
    _, facts = group.row_map("add_up")(plain_workers.squares_of_rows, READ, samples([3]), 1.0)
    assert [rows for _, rows in facts] == [1], "the second rank has no row, instead of a copy"


def test_a_failing_row_function_is_named(pool):
    group = WorkerGroup("math", "tests.cluster.plain_workers.Echo", {}, ParallelLayout(), pool)
    with raises("worker.raised", "math rank 0", "failing_rows", "2 rows", "'responses'", error=WorkerFailed):
        group.row_map("add_up")(plain_workers.failing_rows, READ, samples([3, 2]))
    group.shutdown()


def test_ray_keeps_no_reference_of_a_call(group):
    batch = samples([30_000, 5])
    ref = group.add_up(batch).tensors.stored["values"].values.places.chunks[0].ref
    name = ref.hex().encode()
    assert name in global_worker.core_worker.get_all_reference_counts()
    del ref
    wait_until(lambda: name not in global_worker.core_worker.get_all_reference_counts())


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float64, np.uint8])
def test_a_column_of_few_runs_is_stored_small_and_read_bit_for_bit(dtype):
    values = np.zeros(100_000, dtype)
    values[[7, 50_000, 99_999]] = [3, 1, 5]
    if np.issubdtype(dtype, np.floating):
        values[[8, 9]] = [-0.0, np.nan]
    stored = RunValues.of(values)
    assert isinstance(stored, RunValues) and stored.nbytes <= 128
    dense = stored.dense()
    assert dense.dtype == values.dtype and dense.tobytes() == values.tobytes()


def test_other_columns_are_stored_as_they_are():
    late = np.where(np.arange(20_000) < 5000, 0, np.arange(20_000))
    for values in (
        np.arange(1000, dtype=np.float32),
        late,
        np.empty(0, np.int8),
        np.zeros((1000, 2), np.float32),
        np.zeros(2000, np.float32)[::2],
    ):
        assert RunValues.of(values) is values


def test_runs_in_chunks_are_read_as_values(pool):
    scores, mask = np.zeros(5000, np.float32), np.ones(5000, np.int8)
    scores[-1], mask[70:90] = 0.5, 0
    columns = {"scores": scores, "mask": mask, "ids": np.arange(5000, dtype=np.int32)}
    (chunk,) = StoredChunk.fetch([StoredChunk.write(columns)])
    assert {name: values.tolist() for name, values in chunk.items()} == {
        name: values.tolist() for name, values in columns.items()
    }
