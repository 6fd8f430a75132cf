"""Ranks wait for slow files longer than a collective may take."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.expected_errors import raises
from support.release import of_release

from megarl.base.errors import CheckpointError
from megarl.megatron import shutdown_runtime
from megarl.megatron.checkpoint.sharded import begin_save, load_sharded
from megarl.megatron.checkpoint.storage import ItemWriter, _Reader
from megarl.megatron.runtime.store_barrier import StoreBarrier
from megarl.models import ParallelLayout
from megarl.models.hf_writer import HFWriter
from tests.megatron.test_megatron_checkpoint import build, fill

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
    monkeypatch.setattr("megarl.megatron.runtime.store_barrier._get_default_store", lambda: store)
    monkeypatch.setattr("megarl.megatron.runtime.store_barrier.LONGEST_WAIT_S", 0.05)
    with raises("checkpoint.rank-timeout", "0 s"):
        StoreBarrier(0, 2).wait_for_all()
    with raises("checkpoint.rank-timeout", "0 s"):
        StoreBarrier(1, 2).turns().wait()


def test_single_rank_waits_for_nothing():
    StoreBarrier(0, 1).wait_for_all()
