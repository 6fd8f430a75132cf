import subprocess
import sys

import pytest
from support.expected_errors import raises

from megarl.sharding.placement import Placement, ProcessLocation, Routes, Slot, choose_transport, current_location

A0 = ProcessLocation("a", "GPU-0", ("GPU-0", "GPU-1"))
A1 = ProcessLocation("a", "GPU-1", ("GPU-0", "GPU-1"))
A2 = ProcessLocation("a", "GPU-2", ("GPU-2",))
B0 = ProcessLocation("b", "GPU-9", ("GPU-9",))
CPU_A, CPU_B = ProcessLocation("a"), ProcessLocation("b")


@pytest.mark.parametrize(
    ("source", "target", "transport"),
    [
        (A0, A0, "cuda_ipc"),  # they share a GPU
        (A0, A1, "cuda_ipc"),  # another GPU, which the target sees
        (A0, A2, "nccl"),  # one that it does not see
        (A0, B0, "nccl"),
        (CPU_A, CPU_A, "shared_memory"),
        (CPU_A, CPU_B, "gloo"),
        (A0, CPU_A, "shared_memory"),
        (A0, CPU_B, "gloo"),
    ],
)
def test_the_fastest_transport_is_chosen(source, target, transport):
    assert choose_transport(source, target) == transport
    assert Routes([source], [target]).between(0, 0) == transport


@pytest.mark.parametrize(
    ("transport", "source", "target", "problem"),
    [
        ("shared_memory", CPU_A, CPU_B, "nodes"),
        ("cuda_ipc", A0, B0, "nodes"),
        ("cuda_ipc", A0, CPU_A, "CPU"),
        ("cuda_ipc", A0, A2, "not see"),
        ("nccl", CPU_A, B0, "CPU"),
        ("nccl", A0, A0, "share a GPU"),
    ],
)
def test_an_impossible_transport_is_refused_with_both_ranks(transport, source, target, problem):
    with raises("sync.transport-unavailable", f"sync.transport={transport}", problem, "actor rank 0, rollout rank 1"):
        Routes([source], [source, target], transport).between(0, 1)


@pytest.mark.parametrize("transport", ["shared_memory", "inline", "gloo"])
def test_a_configured_transport_is_used(transport):
    assert Routes([CPU_A], [CPU_A], transport).between(0, 0) == transport


def test_a_process_group_is_joined_only_if_needed():
    assert not Routes([CPU_A, A0], [A1]).needs_rendezvous()
    assert Routes([CPU_A], [CPU_B]).needs_rendezvous()
    assert Routes([CPU_A], [CPU_A], "gloo").needs_rendezvous()
    assert not Routes([CPU_A], [CPU_B], "inline").needs_rendezvous()
    assert Routes([A0], [A0, A2]).needs_rendezvous()
    assert not Routes([A0, A2], [CPU_A]).needs_rendezvous()
    assert not Routes([A0, A2], [A2], "shared_memory").needs_rendezvous()


def test_placement_has_nodes_and_devices():
    assert Routes([A0, A1, B0], [A1, B0]).placement() == Placement(
        (Slot(0, 0), Slot(0, 1), Slot(1, 2)), (Slot(0, 1), Slot(1, 2))
    )
    # Two processes on a CPU share no memory that a sender could read.
    assert Routes([CPU_A, CPU_A], [CPU_A]).placement() == Placement((Slot(0, 0), Slot(0, 1)), (Slot(0, 2),))


def test_processes_of_one_kernel_and_namespace_are_on_one_node():
    code = "from megarl.sharding.placement import current_location; print(current_location().node)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert current_location("cpu") == ProcessLocation(other, "cpu", ())
