import os
import signal

import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises
from support.node_callers import calls_by_node

from megarl.cluster.calls import PerRank, WorkerFailed
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup, wait_ready
from megarl.data import DataProto
from megarl.models import ParallelLayout
from tests.cluster import plain_workers
from tests.cluster.plain_workers import samples

LAYOUT = ParallelLayout(tp=2, pp=2, dp=3)
OWNERS = [6, 8, 10]


@pytest.fixture(scope="module")
def pool(forked_workers):
    with RaySession(num_cpus=2) as session:
        yield session.place([ResourcePool("main", "cpu", [2])])["main"]


def echo_group(pool, role="echo"):
    return WorkerGroup(role, "tests.cluster.plain_workers.Echo", {}, LAYOUT, pool)


@pytest.fixture(scope="module")
def group(pool):
    """Twelve ranks on three nodes; DP rank 1 is on two of them, and the first node owns no results."""
    with calls_by_node(5):
        group = echo_group(pool)
    wait_ready([group])
    yield group
    group.shutdown()


def test_a_large_group_has_a_caller_on_each_node(pool, group):
    targets = group._call_targets()
    assert [target.ranks for target in targets] == [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9), (10, 11)]
    assert [target.share for target in targets] == [(0, 1, 2), (0, 1, 2), (2,)]
    assert [target.owned for target in targets] == [(), (0, 1), (2,)]
    small = echo_group(pool, "small")
    wait_ready([small])
    assert [target.ranks for target in small._call_targets()] == [(rank,) for rank in range(12)]
    small.shutdown()


def test_verbs_on_all_ranks(group):
    assert [card["rank"] for card in group.about()] == list(range(12))
    values = PerRank([ray.put(rank) if rank % 2 else rank for rank in range(12)])
    batch = samples([3, 1])
    answers = group.received(values, batch, ray.put("x"), note="same")
    assert [(rank, value, text, named) for rank, (value, _, text), named in answers] == [
        (rank, rank, "x", {"note": "same"}) for rank in range(12)
    ]
    for _, (_, received, _), _ in answers:
        assert received.batch["responses"].tolist() == batch.batch["responses"].tolist()
    assert group.who_answers() == OWNERS[0]


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=14), data=st.data())
def test_rows_and_results_of_verbs(group, lengths, data):
    batch = samples(lengths, len(lengths))
    sums = [row.float().cumsum(0) for row in batch.unpadded("responses")]
    if data.draw(st.booleans()):
        batch = group.store("add_up", batch)
    batch = batch.union(group.add_up(batch))
    assert [row.tolist() for row in batch.unpadded("values")] == [row.tolist() for row in sums]
    order = data.draw(st.permutations(range(len(lengths))))
    again = batch.reorder(order).select(["prompts", "responses", "attention_mask", "values"])
    doubled = again.select(["prompts", "responses", "attention_mask"]).union(group.add_up(again))
    assert [row.tolist() for row in doubled.unpadded("values")] == [(2 * sums[row]).tolist() for row in order]


def test_mini_batches_reach_all_ranks_of_a_dp_rank(group):
    batch = DataProto.from_dict(
        {"tokens": torch.arange(12)}, {"uid": [str(row) for row in range(12)]}, {"mini_batch_rows": 6}
    )
    assert group.learn(batch) == {"rows": 4, "mini_batch_rows": 6}
    chunks = group.last_chunk()
    assert sorted(map(int, chunks[0] + chunks[2] + chunks[4])) == list(range(12))
    for rank, rows in enumerate(chunks):
        assert rows == chunks[LAYOUT.rank(dp=LAYOUT.coordinate(rank).dp)]
        assert [int(row) < 6 for row in rows] == [True, True, False, False]


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_row_functions(group, rows):
    batch = samples([row % 4 + 1 for row in range(rows)])
    result, facts = group.row_map("add_up")(plain_workers.squares_of_rows, ["responses", "attention_mask"], batch, 3.0)
    squares = [(3.0 * row.float() ** 2).tolist() for row in batch.unpadded("responses")]
    assert [row.tolist() for row in batch.union(result).unpadded("returns")] == squares
    assert sum(count for _, count in facts) == rows and len({pid for pid, _ in facts}) == len(facts) == min(rows, 3)
    pids = {card["rank"]: card["pid"] for card in group.about()}
    assert [pid for pid, _ in facts] == [pids[owner] for owner in OWNERS[: len(facts)]]


def test_calls_by_rank_and_by_node_keep_their_order(group):
    """Ray orders the calls of one sender; the two ways have different ones."""
    pending = []
    for number in range(6):
        batch = DataProto.from_dict({"tokens": torch.arange(3)}, {"uid": [f"{number} {row}" for row in range(3)]})
        pending.append(group.submit("learn", batch))
        pending.append(group.submit_on([0, 11], "last_chunk"))
    for number, (_, chunks) in enumerate(zip(pending[::2], pending[1::2], strict=True)):
        assert [rows[0].split()[0] for rows in chunks.result()] == [str(number)] * 2


def test_a_failing_rank_is_named(group):
    with raises("worker.raised", "echo rank", "failing_rows", "ValueError", error=WorkerFailed):
        group.row_map("add_up")(plain_workers.failing_rows, ["responses"], samples([3, 1]))


def test_a_killed_caller_is_named(pool):
    with calls_by_node(6):
        group = WorkerGroup("sleeper", "tests.cluster.light_workers.Sleeper", {}, LAYOUT, pool)
    group.pid()
    pending = group.submit("sleep", 600)
    caller = group._call_targets()[1].info.pid
    os.kill(caller, signal.SIGKILL)
    with raises("worker.died", "sleeper ranks 6 to 11", f"pid {caller}", "sleep", error=WorkerFailed):
        pending.result(timeout_s=120)
    group.shutdown()


def test_a_group_with_replaced_processes_is_called_by_rank(pool):
    with calls_by_node(12):
        group = echo_group(pool, "replaced")
    assert group.who_answers() == OWNERS[0]
    before = [card["pid"] for card in group.about()]
    group.restart([1])
    after = [card["pid"] for card in group.about()]
    assert [rank for rank in range(12) if before[rank] != after[rank]] == [1]
    group.shutdown()
