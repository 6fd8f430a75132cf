from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from support.expected_errors import raises
from support.release import of_release

from megarl.base.errors import CheckpointError
from megarl.base.ports import free_port
from megarl.megatron import init_runtime, shutdown_runtime
from megarl.megatron.checkpoint.sharded import begin_save, load_sharded
from megarl.megatron.checkpoint.storage import ItemWriter, _Reader
from megarl.megatron.runtime.process_groups import StoreBarrier
from megarl.models import ParallelLayout
from megarl.models.hf_writer import HFWriter
from tests.megatron.test_megatron_checkpoint import build, fill


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
    seen = (tuple(runtime.coordinate), runtime.is_last_stage, ranks)
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
        for rank, (coordinate, last, groups) in enumerate(pool.run(describe, 4, layout)):
            where = layout.coordinate(rank)
            assert (coordinate, last) == (tuple(where), where.pp == layout.pp - 1)
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


TP2 = ParallelLayout(tp=2)
COLLECTIVE_S, SLOW_S = 3.0, 4.5
SLOW = {"export": (HFWriter, "_finish", 0), "write": (ItemWriter, "write", 1), "read": (_Reader, "_read_files", 1)}
"""Methods that read or write files, with the rank on which they are slow."""


def save_and_load(place, folder, case):
    """Save, export and load while the first call of a method takes longer than a collective may."""
    cls, name, slow_rank = SLOW[case]
    real, calls = getattr(cls, name), []

    def slow(*args):
        calls.append(name)
        time.sleep(SLOW_S if len(calls) == 1 else 0)
        return real(*args)

    try:
        engine = build(place, TP2, {})
        fill(engine)
        for group in (dist.group.WORLD, engine.runtime.tp_group):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_S), group)
        with pytest.MonkeyPatch.context() as patch:
            if place.rank == slow_rank:
                patch.setattr(cls, name, slow)
            begin_save(engine, folder, ["model", "hf_model"]).finish()
            load_sharded(engine, folder, ["model"])
        return len(calls)
    finally:
        shutdown_runtime()


def export_to_an_existing_folder(place, folder):
    try:
        engine = build(place, TP2, {})
        fill(engine)
        with pytest.raises(CheckpointError) as caught:
            engine.export_hf(folder)
        return str(caught.value)
    finally:
        shutdown_runtime()


def collective_after(place, seconds):
    """A collective in which one rank arrives late; shows that the groups' time limit is in force."""
    try:
        build(place, TP2, {})
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_S), dist.group.WORLD)
        time.sleep(seconds if place.rank == 1 else 0)
        with pytest.raises(RuntimeError):
            dist.all_gather_object([None, None], place.rank)
    finally:
        shutdown_runtime()


@pytest.mark.parametrize("case", of_release(["write"], [case for case in SLOW if case != "write"]))
def test_files_may_take_longer_than_a_collective(pool, tmp_path, case):
    calls = pool.run(save_and_load, 2, str(tmp_path / "saved"), case)
    assert calls[SLOW[case][2]] > 0 and calls[1 - SLOW[case][2]] == 0


def test_late_rank_fails_a_collective(pool):
    pool.run(collective_after, 2, SLOW_S)


def test_failed_export_is_raised_on_the_ranks_that_wait_for_rank_0(pool, tmp_path):
    first, waiting = pool.run(export_to_an_existing_folder, 2, str(tmp_path))
    assert str(tmp_path) in first and first.endswith("[checkpoint.export-exists]")
    assert str(tmp_path) in waiting and waiting.endswith("[checkpoint.rank-failed]")


def test_rank_that_never_comes_ends_the_wait(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr("megarl.megatron.runtime.process_groups._get_default_store", lambda: store)
    monkeypatch.setattr("megarl.megatron.runtime.process_groups.LONGEST_WAIT_S", 0.05)
    with raises("checkpoint.rank-timeout", "0 s"):
        StoreBarrier(0, 2).wait_for_all()
    with raises("checkpoint.rank-timeout", "0 s"):
        StoreBarrier(1, 2).turns().wait()


def test_single_rank_waits_for_nothing():
    StoreBarrier(0, 1).wait_for_all()
