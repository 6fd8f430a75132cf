from __future__ import annotations

import threading

import pytest
import torch
from megatron.core import parallel_state
from support.expected_errors import raises

from megarl.base.ports import free_port
from megarl.megatron import init_runtime, shutdown_runtime
from megarl.models import ParallelLayout


def test_layout_of_another_world_size_raises():
    with raises("layout.world-size", "TP2 PP1 DP1", "2 processes", 3):
        init_runtime(ParallelLayout(tp=2), 0, 3, "127.0.0.1", 1)


def test_unknown_device_raises():
    with raises("launch.unknown-device", "device='gpu'", "auto, cpu, cuda"):
        init_runtime(ParallelLayout(), 0, 1, "127.0.0.1", 1, device="gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_cuda_without_a_device_raises():
    with raises("launch.no-cuda", "device='cuda'"):
        init_runtime(ParallelLayout(), 0, 1, "127.0.0.1", 1, device="cuda")


def describe(place, layout):
    """Join a layout and leave it."""
    runtime = init_runtime(layout, place.rank, place.world_size, "127.0.0.1", place.port, device="cpu")
    ranks = {name: torch.distributed.get_process_group_ranks(group_of(runtime, name)) for name in GROUPS}
    seen = (tuple(runtime.coordinate), runtime.is_first_stage, runtime.is_last_stage, ranks)
    # Gloo beside NCCL binds to the host name's address, which other nodes may not reach.
    assert parallel_state._DATA_PARALLEL_GROUP_GLOO is None
    shutdown_runtime()
    return seen


def group_of(runtime, name):
    """A group that the runtime offers, or one that only Megatron-Core uses."""
    if name == "ep":
        return parallel_state.get_expert_model_parallel_group()
    if name == "edp":
        return parallel_state.get_expert_data_parallel_group()
    return getattr(runtime, f"{name}_group")


GROUPS = ("tp", "dp", "pp", "cp", "dp_cp", "ep", "etp", "edp")


def expected_groups(layout, rank):
    """Ranks that differ from ``rank`` only in the axes of each group."""

    def same(coordinate, *free):
        fixed = [axis for axis in coordinate(rank)._fields if axis not in free]
        stage = layout.coordinate(rank).pp
        return [
            other
            for other in range(layout.world_size)
            if all(getattr(coordinate(other), axis) == getattr(coordinate(rank), axis) for axis in fixed)
            and (layout.coordinate(other).pp == stage or "pp" in free)
        ]

    dense = {name: same(layout.coordinate, *name.split("_")) for name in ("tp", "dp", "pp", "cp", "dp_cp")}
    return dense | {name: same(layout.expert_coordinate, name) for name in ("ep", "etp", "edp")}


def test_groups_follow_the_layout_and_can_be_replaced(pool):
    layouts = [
        ParallelLayout(tp=2, pp=2),
        ParallelLayout(pp=2, dp=2, vpp=2),
        ParallelLayout(tp=2, cp=2, ep=4, etp=1),
        ParallelLayout(cp=2, dp=2, ep=2),
        ParallelLayout(cp=2, pp=2, ep=2),
    ]
    for layout in layouts:
        for rank, (coordinate, first, last, groups) in enumerate(pool.run(describe, 4, layout)):
            where = layout.coordinate(rank)
            assert (coordinate, first, last) == (tuple(where), where.pp == 0, where.pp == layout.pp - 1)
            assert groups == expected_groups(layout, rank), layout.describe()


def devices_of_groups(place):
    """Number of network devices of a rank's groups, in two runtimes after each other."""
    used = {}
    for port in (place.port, free_port()):
        runtime = init_runtime(ParallelLayout(), 0, 1, "127.0.0.1", port, device="cpu")
        for name in GROUPS:
            backend = group_of(runtime, name)._get_backend(torch.device("cpu"))
            used |= {id(device): device for device in backend.options._devices}
        shutdown_runtime()
        assert torch.distributed.distributed_c10d.ProcessGroupGloo is torch.distributed.ProcessGroupGloo
    return len(used)


def test_all_groups_of_a_process_share_one_device(pool):
    assert pool.run(devices_of_groups, 1) == [1]


def join_in_a_thread(place):
    failures: list[BaseException] = []

    def join():
        try:
            init_runtime(ParallelLayout(), 0, 1, "127.0.0.1", place.port, device="cpu")
            shutdown_runtime()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    thread.join()
    return repr(failures)


def test_runtime_starts_in_any_thread(pool):
    assert pool.run(join_in_a_thread, 1) == ["[]"]
