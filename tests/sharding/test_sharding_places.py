import subprocess
import sys

import pytest

from megarl.errors import ConfigError
from megarl.sharding import Placement, ProcessPlace, Routes, Slot
from megarl.sharding.places import choose_transport, this_place

A0 = ProcessPlace("a", "GPU-0", ("GPU-0", "GPU-1"))
A1 = ProcessPlace("a", "GPU-1", ("GPU-0", "GPU-1"))
A2 = ProcessPlace("a", "GPU-2", ("GPU-2",))
B0 = ProcessPlace("b", "GPU-9", ("GPU-9",))
CPU_A, CPU_B = ProcessPlace("a"), ProcessPlace("b")


@pytest.mark.parametrize(
    ("source", "target", "transport"),
    [
        (A0, A0, "cuda_ipc"),  # they share a GPU
        (A0, A1, "cuda_ipc"),  # another GPU, which the target sees
        (A0, A2, "shared_memory"),  # one that it does not see
        (A0, B0, "nccl"),
        (CPU_A, CPU_A, "shared_memory"),
        (CPU_A, CPU_B, "gloo"),
        (A0, CPU_A, "shared_memory"),
        (A0, CPU_B, "gloo"),
    ],
)
def test_the_shortest_way_is_chosen(source, target, transport):
    assert choose_transport(source, target) == transport
    assert Routes([source], [target]).between(0, 0) == transport


@pytest.mark.parametrize(
    ("transport", "source", "target", "problem"),
    [
        ("shared_memory", CPU_A, CPU_B, "different nodes"),
        ("cuda_ipc", A0, B0, "different nodes"),
        ("cuda_ipc", A0, CPU_A, "computes on the CPU"),
        ("cuda_ipc", A0, A2, "does not see the actor's GPU"),
        ("nccl", CPU_A, B0, "computes on the CPU"),
        ("nccl", A0, A0, "two processes that share a GPU"),
    ],
)
def test_a_way_that_does_not_lead_there_is_named(transport, source, target, problem):
    with pytest.raises(ConfigError, match=rf"sync\.transport={transport}: .*{problem}.*actor rank 0, rollout rank 1"):
        Routes([source], [source, target], transport).between(0, 1)


@pytest.mark.parametrize("transport", ["shared_memory", "inline", "gloo"])
def test_a_way_that_does_is_taken(transport):
    assert Routes([CPU_A], [CPU_A], transport).between(0, 0) == transport


def test_a_group_is_joined_only_where_somebody_may_need_it():
    assert not Routes([CPU_A, A0], [A1]).need_meeting()
    assert Routes([CPU_A], [CPU_B]).need_meeting()
    assert Routes([CPU_A], [CPU_A], "gloo").need_meeting()
    assert not Routes([CPU_A], [CPU_B], "inline").need_meeting()


def test_the_plan_is_told_nodes_and_devices():
    assert Routes([A0, A1, B0], [A1, B0]).placement() == Placement(
        (Slot(0, 0), Slot(0, 1), Slot(1, 2)), (Slot(0, 1), Slot(1, 2))
    )
    # Two processes on a CPU share no memory that a sender could read.
    assert Routes([CPU_A, CPU_A], [CPU_A]).placement() == Placement((Slot(0, 0), Slot(0, 1)), (Slot(0, 2),))


def test_processes_of_one_kernel_and_namespace_are_on_one_node():
    code = "from megarl.sharding.places import this_place; print(this_place().node)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert this_place("cpu") == ProcessPlace(other, "cpu", ())
