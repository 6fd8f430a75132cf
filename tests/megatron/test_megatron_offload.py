"""Offloaded parts return bit for bit, and training is unaffected."""

import gc
import os
from contextlib import contextmanager

import pytest
import torch
from engine_cases import Setup, engine, micro_batches, policy_loss
from family_cases import MODELS
from tiny_models import rows, save_model

from megarl.megatron import MegatronEngine, OptimizerOptions, OutputOptions
from megarl.megatron.engine.offload import GRAD, OPTIMIZER, PARAM, PARTS, Offloader, OffloadManager
from megarl.megatron.engine.optimizer import state_shards
from megarl.megatron.engine.options import OverlapOptions
from megarl.models import ParallelLayout

CPU = torch.device("cpu")


@pytest.mark.parametrize("chunk_bytes", [16, 64, 2**20])
def test_offload_and_onload_restore_every_byte_in_place(monkeypatch, chunk_bytes):
    monkeypatch.setattr("megarl.megatron.runtime.memory.CHUNK_BYTES", chunk_bytes)
    base = torch.randn(11)
    view, half, alone = base[3:8].view(5, 1), torch.randn(5).bfloat16(), torch.randn(3, requires_grad=True)
    before = [tensor.detach().clone() for tensor in (base, half, alone)]
    offloader = Offloader(lambda: [view, half, base, alone], CPU)
    for _ in range(2):
        assert offloader.offload() == offloader.offload() == 44 + 10 + 12  # a storage that two share counts once
        assert offloader.is_offloaded and not any(tensor.untyped_storage().nbytes() for tensor in (base, half, alone))
        offloader.onload()
        offloader.onload()
        assert all(torch.equal(a, b) for a, b in zip((base, half, alone), before, strict=True))
        view.fill_(7.0)  # still a view; and the next round takes what is there then
        offloader.mark_changed()
        assert (base[3:8] == 7.0).all()
        before[0] = base.clone()


def test_discarded_storages_return_as_zeros():
    buffer = torch.ones(4)
    offloader = Offloader(lambda: [buffer], CPU, keep=False)
    assert offloader.offload() == 16
    offloader.onload()
    assert torch.equal(buffer, torch.zeros(4))


def test_memory_shared_with_numpy_is_not_offloaded():
    free, pinned = torch.ones(4), torch.ones(4)
    array = pinned.numpy()
    offloader = Offloader(lambda: [free, pinned], CPU)
    assert offloader.offload() == 16 and array.tolist() == [1.0] * 4
    offloader.onload()
    assert torch.equal(free, pinned)


def test_inference_model_offloads_weights_only():
    layer = torch.nn.Linear(2, 2)
    manager = OffloadManager([layer], None, PARTS, CPU)
    assert manager.offload() == {PARAM: 24}
    assert manager.offloaded == (PARAM,)
    manager.onload(*PARTS)
    assert manager.offloaded == ()


@contextmanager
def small_chunks():
    """Chunks so small that every storage is spread over several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.megatron.runtime.memory.CHUNK_BYTES", 1000)
        yield


def steps(place, path, setup, parts):
    """Forward, three steps and an export, with an offload after each phase and before each call."""
    setup = setup._replace(offload=parts)
    with small_chunks(), engine(place, path, setup) as built:
        mine = micro_batches(rows(), setup, built.runtime.coordinate.dp, setup.layout.dp)
        results = []
        for _ in range(3):
            built.offload_manager.offload()
            built.forward(mine)
            built.offload_manager.offload()
            assert built.offload_manager.offloaded == tuple(part for part in PARTS if part in parts)
            built.forward_backward(mine, policy_loss, OutputOptions(with_entropy=True))
            results.append(built.optimizer_step())
        freed = built.offload_manager.offload()
        assert built.optimizer is not None
        weights = built.weights.to_host()
        check_bytes(built, freed, weights)
        built.offload_manager.onload(*PARTS)
        shards = state_shards(built.optimizer, built.weights.parameters())
        state = {f"{name}/{kind}": t.clone() for name, shard in shards.items() for kind, t in shard.tensors.items()}
        return results, weights | state


def threads_left(place):
    """Engines and threads of a process that has left its groups."""
    gc.collect()
    engines = sum(isinstance(thing, MegatronEngine) for thing in gc.get_objects())
    return engines, len(os.listdir("/proc/self/task"))


def check_bytes(built, freed, weights):
    """The released bytes equal the computed ones, up to the padding of Megatron's buffers."""
    count = sum(weight.numel() for weight in weights.values())
    width = built.options.dtype.itemsize
    adam = 8 if width == 4 else 12  # two moments, and float32 weights beside half-precision ones
    if PARAM in freed:
        assert count * width <= freed[PARAM] < 1.2 * count * width
    if GRAD in freed:
        assert 4 * count <= freed[GRAD] < 1.2 * 4 * count
    if OPTIMIZER in freed:
        # Data-parallel ranks hold shards of different sizes; together they hold all, of experts each rank its own.
        replicas = 1 if built.options.optimizer.use_distributed_optimizer else built.runtime.layout.dp
        experts = sum(weight.numel() for name, weight in weights.items() if ".experts." in name)
        total = built.all_reduce_dp(torch.tensor([freed[OPTIMIZER], experts])).tolist()
        assert total[0] == adam * replicas * (count - experts + total[1])


REPEATED = pytest.mark.release(twin="tests/megatron/test_megatron_offload.py::test_offload_keeps_training_bit_exact")


@pytest.mark.parametrize(
    ("layout", "family", "dtype", "distributed", "overlap"),
    [
        pytest.param(ParallelLayout(dp=2), "llama", torch.float32, True, OverlapOptions(), marks=REPEATED),
        (ParallelLayout(dp=2), "llama", torch.bfloat16, True, OverlapOptions(grad_reduce=True, param_gather=True)),
        (ParallelLayout(tp=2), "llama", torch.bfloat16, False, OverlapOptions()),
        pytest.param(ParallelLayout(pp=2), "llama", torch.float32, True, OverlapOptions(), marks=REPEATED),
        (ParallelLayout(dp=2, ep=2), "qwen3_moe", torch.float32, True, OverlapOptions()),
    ],
)
def test_offload_keeps_training_bit_exact(
    pool,
    tmp_path,
    layout,
    family,
    dtype,
    distributed,
    overlap,
):
    save_model(tmp_path, **MODELS.get(family, {"family": family}))
    adam = OptimizerOptions(lr=1e-2, use_distributed_optimizer=distributed)
    setup = Setup(layout, dtype=dtype, optimizer=adam, overlap=overlap)
    before = pool.run(threads_left, layout.world_size)
    plain = pool.run(steps, layout.world_size, tmp_path, setup, ())
    for parts in (PARTS, (OPTIMIZER,), (PARAM,)):
        for (steps_here, held), (steps_there, kept) in zip(
            pool.run(steps, layout.world_size, tmp_path, setup, parts), plain, strict=True
        ):
            assert steps_here == steps_there
            assert held.keys() == kept.keys() and len(held) > 10
            assert all(torch.equal(held[name], kept[name]) for name in kept)
    # A layout's groups have about fifty threads; those of the last of four engines may still be there.
    for (engines, threads), (engines_then, threads_then) in zip(
        pool.run(threads_left, layout.world_size), before, strict=True
    ):
        assert engines <= engines_then + 1 and threads < threads_then + 100
