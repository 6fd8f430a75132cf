"""Saves and loads of an offloaded role read and write host memory; the files are those of a resident role."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megarl.megatron import shutdown_runtime
from megarl.megatron.checkpoint.pending_save import HostSnapshot
from megarl.megatron.checkpoint.sharded import begin_save, load_sharded
from megarl.megatron.checkpoint.storage import ItemWriter
from megarl.megatron.engine.offload import OPTIMIZER, PARAM, PARTS, Offloader
from megarl.megatron.runtime.memory import HostBuffer
from megarl.models import ParallelLayout
from tests.megatron.test_megatron_checkpoint import (
    TP2PP2,
    assert_same_bits,
    build,
    fill,
    load_and_train,
    rank_state,
    step,
)

DP2 = ParallelLayout(dp=2)
CPU = torch.device("cpu")

# ---- what runs in the processes


@contextmanager
def recorded(cls, name):
    """Arguments of each call of a method."""
    calls: list[Any] = []
    real = getattr(cls, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, name, lambda *args: (calls.append(args[1:]), real(*args))[1])
        yield calls


@contextmanager
def offloading_engine(place, layout, dtype, parts):
    """An engine whose offloaded tensors are spread over many chunks of host memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.megatron.runtime.memory.CHUNK_BYTES", 1008)
        try:
            yield build(place, layout, {"dtype": dtype, "offload": parts})
        finally:
            shutdown_runtime()


def save_both(place, layout, dtype, folder):
    """Saves with everything on the device, then with everything offloaded; and the continuation."""
    with offloading_engine(place, layout, dtype, PARTS) as engine:
        fill(engine)
        for number in range(2):
            step(engine, number)
            engine.offload()
        engine.offload_manager.onload(*PARTS)
        begin_save(engine, f"{folder}/resident", ["model", "optimizer", "extra", "hf_model"]).finish()
        engine.offload()
        with recorded(Offloader, "onload") as onloads:
            begin_save(engine, f"{folder}/offloaded", ["model", "optimizer", "extra", "hf_model"]).finish()
            snapshot = HostSnapshot(CPU)
            begin_save(engine, f"{folder}/background", snapshot=snapshot).finish()
        assert engine.offload_manager.offloaded == PARTS and not onloads
        assert snapshot._buffer.nbytes == 0  # nothing was copied a second time
        return rank_state(engine, range(2, 4))


def save_before_the_first_step(place, folder):
    """An offloaded optimizer without moments, as of an actor during the critic's warm-up."""
    with offloading_engine(place, DP2, "bfloat16", PARTS) as engine:
        fill(engine)
        engine.offload()
        with recorded(Offloader, "onload") as onloads:
            begin_save(engine, folder).finish()
        assert not onloads and device_bytes(engine) == 0
        return rank_state(engine, range(4))


def device_bytes(engine):
    """Bytes of all weights and optimizer tensors that are not emptied."""
    assert engine.optimizer is not None
    tensors = [param.data for chunk in engine.chunks for param in chunk.parameters()]
    for inner in engine.optimizer.inner_optimizers():
        tensors += [value for state in inner.state.values() for value in state.values() if value.dim()]
        tensors += [param for group in inner.param_groups for param in group["params"]]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def train_while_saving(place, folder, finish_first):
    """The next step's offload comes while the save is pending, or after it."""
    with offloading_engine(place, DP2, "bfloat16", PARTS) as engine:
        fill(engine)
        step(engine, 0)
        engine.offload()
        offloaders = [engine.offload_manager._offloaders[part] for part in (PARAM, OPTIMIZER)]
        before = [offloader.host for offloader in offloaders]
        may_write = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            real = ItemWriter.write
            patch.setattr(ItemWriter, "write", lambda writer: (may_write.wait(60), real(writer))[1])
            pending = begin_save(engine, folder, snapshot=HostSnapshot(CPU))
            if finish_first:
                may_write.set()
                pending.finish()
            first = rank_state(engine, range(1, 2))["steps"]
            engine.offload()
            may_write.set()
            if not finish_first:
                pending.finish()
        kept = [offloader.host is host for offloader, host in zip(offloaders, before, strict=True)]
        state = rank_state(engine, range(2, 4))
        return [kept, {**state, "steps": first + state["steps"]}]


def load_offloaded(place, layout, dtype, folder):
    with offloading_engine(place, layout, dtype, PARTS) as engine:
        engine.offload()
        with recorded(Offloader, "onload") as onloads:
            load_sharded(engine, folder)
        assert not onloads and device_bytes(engine) == 0
        return rank_state(engine, range(2, 4))


def resume(place, folder, first):
    """Load in a resident role, and continue with step ``first``."""
    try:
        engine = build(place, DP2, {"dtype": "bfloat16"}, seed=99)
        load_sharded(engine, folder)
        return rank_state(engine, range(first, 4))
    finally:
        shutdown_runtime()


def load_weights_only(place, folder, parts):
    """Adam restarts; its float32 weights are those of the checkpoint."""
    with offloading_engine(place, DP2, "bfloat16", parts) as engine:
        engine.offload()
        load_sharded(engine, folder, ["model"])
        engine.offload()
        return rank_state(engine, range(4))


def save_weights_only(place, folder):
    """Offloaded parts after a save of resident weights beside an offloaded optimizer."""
    with offloading_engine(place, DP2, "float32", (OPTIMIZER,)) as engine:
        fill(engine)
        step(engine, 0)
        engine.offload()
        begin_save(engine, folder, ["model"]).finish()
        return engine.offload_manager.offloaded


def copies_of_clean_weights(place):
    """Tensors copied to host memory by the offload after each phase."""
    with offloading_engine(place, DP2, "bfloat16", PARTS) as engine:
        fill(engine)
        counts = []
        with recorded(HostBuffer, "write") as writes:

            def end_phase():
                engine.offload()
                counts.append(sum(len(data) for (data,) in writes))
                writes.clear()

            end_phase()  # the first: weights and main weights
            engine.weights.named()
            end_phase()  # a weight sync
            step(engine, 0)
            end_phase()
            engine.weights.named()
            end_phase()
            with torch.no_grad():
                next(iter(engine.weights.parameters().values())).add_(1.0)
            end_phase()  # the caller may have changed them
        return counts


# ---- tests


def assert_same_training(actual, expected):
    """Same metrics, weights and optimizer state, without random generators."""
    for mine, other in zip(actual, expected, strict=True):
        assert all(mine[key] == other[key] for key in ("steps", "digest", "adam", "counts"))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("layout", "dtype"), [(TP2PP2, "float32"), (DP2, "bfloat16")])
def test_save_of_an_offloaded_role_is_the_same_to_the_byte_and_onloads_nothing(pool, tmp_path, layout, dtype):
    size = layout.world_size
    reports = pool.run(save_both, size, layout, dtype, str(tmp_path))
    resident = contents(tmp_path / "resident")
    assert len(resident) > 4 and contents(tmp_path / "offloaded") == resident
    data = {name for name in resident if name.endswith((".distcp", ".metadata"))}
    background = contents(tmp_path / "background")
    assert len(data) == size + 1 and all(background[name] == resident[name] for name in data)
    resumed = pool.run(load_and_train, size, layout, str(tmp_path / "offloaded"), {"dtype": dtype})
    assert_same_bits(resumed, reports)


@pytest.mark.parametrize(("layout", "dtype"), [(TP2PP2, "float32"), (DP2, "bfloat16")])
def test_load_into_an_offloaded_role_resumes_exactly_and_onloads_nothing(pool, tmp_path, layout, dtype):
    size = layout.world_size
    reports = pool.run(save_both, size, layout, dtype, str(tmp_path))
    resumed = pool.run(load_offloaded, size, layout, dtype, str(tmp_path / "resident"))
    assert_same_bits(resumed, reports)


def test_save_before_the_first_step_creates_the_moments_in_host_memory(pool, tmp_path):
    reports = pool.run(save_before_the_first_step, 2, str(tmp_path / "new"))
    resumed = pool.run(resume, 2, str(tmp_path / "new"), 0)
    assert_same_bits(resumed, reports)


@pytest.mark.parametrize("finish_first", [True, False])
def test_background_save_keeps_its_host_memory_until_it_is_written(pool, tmp_path, finish_first):
    results = pool.run(train_while_saving, 2, str(tmp_path / "saved"), finish_first)
    assert [kept for kept, _ in results] == [[finish_first, finish_first]] * 2
    resumed = pool.run(resume, 2, str(tmp_path / "saved"), 1)
    assert_same_training(resumed, [state for _, state in results])


def test_load_of_weights_alone_restarts_an_offloaded_optimizer(pool, tmp_path):
    pool.run(save_both, 2, DP2, "bfloat16", str(tmp_path))
    resident, offloaded = (pool.run(load_weights_only, 2, str(tmp_path / "resident"), parts) for parts in ((), PARTS))
    assert_same_training(offloaded, resident)


def test_save_of_weights_leaves_an_offloaded_optimizer_in_host_memory(pool, tmp_path):
    assert pool.run(save_weights_only, 2, str(tmp_path / "model")) == [(OPTIMIZER,)] * 2


def test_unchanged_weights_are_offloaded_without_a_copy(pool):
    for first, sync, update, second_sync, changed in pool.run(copies_of_clean_weights, 2):
        assert first > 0 and update > first  # the moments are new
        assert sync == second_sync == 0
        assert 0 < changed < first
