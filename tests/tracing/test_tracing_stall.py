"""Diagnosis from boards and stacks; tests/trainer/test_trainer_watchdog.py has processes that really hang."""

from hypothesis import given
from hypothesis import strategies as st

from megarl.tracing.board import BoardContent, GroupCount, OpenSpan, describe_ranks, parse_ranks
from megarl.tracing.stacks import Frame, ProcessReport, thread_frames
from megarl.tracing.stall import ObservedProcess, describe_frames, explain_stall, unreachable_process

DP, TP = "data-parallel [0, 1, 2, 3]", "tensor-model-parallel [0, 1]"


def seen(rank, *spans, state="sleeping", counts=None, taken_s=0):
    groups = {group: GroupCount(group, count, "all_reduce") for group, count in (counts or {}).items()}
    board = BoardContent([OpenSpan(name, 0) for name in spans], groups)
    frames = (Frame("/usr/lib/python3/threading.py", 9, "wait"), Frame("/my/code.py", 7, "work"))
    return ObservedProcess(
        "actor", rank, "10.0.0.1", ProcessReport(100 + rank, state, board, frames=frames, taken_ns=int(taken_s * 1e9))
    )


def test_rank_missing_from_a_collective_is_named_with_its_location():
    waiting = [seen(rank, "update_actor", f"all_reduce #7 of {DP}") for rank in (0, 2, 3)]
    lines = explain_stall([waiting[0], seen(1, "update_actor", "backward number=3"), *waiting[1:]])
    assert lines.splitlines() == [
        "actor rank 1 is in update_actor > backward number=3, at wait < work (/my/code.py:7); "
        f"actor ranks 0, 2, 3 wait for it in all_reduce #7 of {DP}",
        f"actor ranks 0, 2, 3 wait in all_reduce #7 of {DP}",
    ]


def test_chain_of_waits_ends_at_the_culprit():
    """0 waits for 1 in one group, 1 for 3 in another; 3 is stopped."""
    processes = [
        seen(0, "update_actor", f"all_reduce #4 of {TP}"),
        seen(1, "update_actor", f"all_reduce #2 of {DP}"),
        seen(2, "update_actor", f"all_reduce #2 of {DP}"),
        seen(3, "update_actor", state="stopped"),
    ]
    first, *others = explain_stall(processes).splitlines()
    assert first.startswith("actor rank 3 (pid 103 on 10.0.0.1) is stopped in update_actor; `kill -CONT 103` there")
    assert first.endswith(f"actor ranks 1, 2 wait for it in all_reduce #2 of {DP}")
    assert not any(line.startswith("actor rank 1 is") for line in others)


def test_rank_that_passed_the_collective_is_not_blamed():
    """As under NCCL: the call returns at once, and the process hangs when it needs the result."""
    processes = [
        seen(0, "update_actor", f"all_reduce #9 of {TP}", counts={TP: 9}),
        seen(1, "update_actor", "optimizer step", counts={TP: 9}),
    ]
    assert "wait for it" not in explain_stall(processes)
    behind = [processes[0], seen(1, "update_actor", "optimizer step", counts={TP: 8})]
    assert explain_stall(behind).startswith("actor rank 1 is in update_actor > optimizer step")


def test_different_orders_of_collectives_are_reported():
    processes = [
        seen(0, "update_actor", "all_reduce #5 of pipeline [0, 1]"),
        seen(1, "update_actor", f"barrier #5 of {TP}"),
    ]
    lines = explain_stall(processes).splitlines()
    assert len(lines) == 2 and all("the ranks call collectives in different orders" in line for line in lines)


def test_waits_that_began_during_the_collection_are_not_in_different_orders():
    """A slow host is observed seconds after the others: its rank may have passed the collective meanwhile."""
    processes = [
        seen(0, "update_actor", "all_reduce #5 of pipeline [0, 1]", taken_s=3),
        seen(1, "update_actor", f"barrier #5 of {TP}", taken_s=5),
    ]
    assert "different orders" in explain_stall(processes, 3.0)
    assert "different orders" not in explain_stall(processes, 4.0)


def test_unreachable_node_and_stopped_engine_process():
    child = ProcessReport(7, "stopped", command="sglang::scheduler")
    engine = ProcessReport(6, "sleeping", BoardContent([OpenSpan("exchange", 0)]), children=(child,))
    lost = ObservedProcess("critic", 0, "10.0.0.2", unreachable_process(5))
    lines = explain_stall([lost, ObservedProcess("rollout", 1, "10.0.0.1", engine)]).splitlines()
    assert lines[0] == "critic rank 0 (pid 5): its node 10.0.0.2 does not reply"
    assert (
        lines[1]
        == "rollout rank 1 on 10.0.0.1 is in exchange, without a stack; its process 7 is stopped: sglang::scheduler"
    )


def test_known_frames_are_described():
    inner = Frame("/usr/lib/python3.11/socket.py", 3, "readinto")
    assert describe_frames([inner, Frame("/usr/lib/python3.11/http/client.py", 1, "begin")]).startswith(
        "waits for an HTTP reply at"
    )
    wait = Frame("/x/ray/_private/worker.py", 5, "get")
    assert describe_frames([wait]) == "waits for Ray at get (ray/_private/worker.py:5)"
    verb = [Frame("/x/mine.py", 7, "hang"), Frame("/x/ray/_private/worker.py", 9, "main_loop")]
    assert describe_frames(verb) == "at hang (/x/mine.py:7)"


def test_frames_are_those_of_the_followed_thread():
    dump = (
        'Thread 0x0000000000007f01 [serving] (most recent call first):\n  File "/a/mine.py", line 5 in inner\n'
        '  File "/a/mine.py", line 9 in outer\n\n'
        'Current thread 0x0000000000007f02 (most recent call first):\n  File "/a/other.py", line 1 in idle\n'
    )
    assert thread_frames(dump, 0x7F01) == (Frame("/a/mine.py", 5, "inner"), Frame("/a/mine.py", 9, "outer"))
    assert thread_frames(dump, 0x7F02) == (Frame("/a/other.py", 1, "idle"),)
    assert thread_frames(dump, 0) == thread_frames(dump, 0x7F02)
    assert thread_frames(dump, 0x7F03) == ()


@given(
    st.lists(st.integers(0, 5000), unique=True, max_size=20), st.integers(0, 9), st.integers(1, 70), st.integers(0, 600)
)
def test_ranks_are_parsed_from_their_text(any_ranks, first, step, count):
    assert parse_ranks(describe_ranks(any_ranks)) == tuple(any_ranks)
    evenly = list(range(first, first + step * count, step))
    assert parse_ranks(describe_ranks(evenly)) == tuple(evenly)
    assert len(describe_ranks(evenly)) < 50, "fits on a board, however large the group is"


def test_hosts_are_named_if_there_are_several_with_the_time_that_others_wait():
    def on(host, rank, *spans):
        board = BoardContent([OpenSpan(name, 40 * 10**9) for name in spans], {})
        return ObservedProcess("actor", rank, host, ProcessReport(rank, "sleeping", board, taken_ns=100 * 10**9))

    slow, waiting = on("10.0.0.2", 1, "update_actor"), on("10.0.0.1", 0, "update_actor", f"all_reduce #7 of {DP}")
    [line, _] = explain_stall([waiting, slow]).splitlines()
    assert line.startswith("actor rank 1 on 10.0.0.2 is in update_actor")
    assert line.endswith(f"actor rank 0 waits for it in all_reduce #7 of {DP}, for 60 s")
