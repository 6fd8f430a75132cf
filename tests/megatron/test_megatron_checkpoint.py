"""Restored roles resume bit for bit in the same layout, and within 1e-5 in another."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import random
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from support.distributed import ProcessPool
from support.release import of_release
from support.valid_layouts import paired_layouts

from megarl.base.checkpoint_files import read_index
from megarl.base.errors import CheckpointError
from megarl.megatron import (
    MegatronEngine,
    MegatronOptions,
    OptimizerOptions,
    OverlapOptions,
    PackedMicroBatch,
    init_runtime,
    shutdown_runtime,
)
from megarl.megatron.checkpoint.sharded import begin_save, load_sharded, saved_items
from megarl.megatron.checkpoint.storage import tensor_shapes
from megarl.megatron.engine.optimizer import state_shards
from megarl.megatron.runtime import cuda_on_cpu
from megarl.models import ParallelLayout, WeightMap, parse_model_config

VOCAB = 70  # padded to 80 rows at TP1, to 96 at TP2
TP2PP2 = ParallelLayout(tp=2, pp=2)
ADAM = {"lr": 1e-2, "min_lr": 1e-3, "weight_decay": 0.1, "decay_style": "cosine", "warmup_steps": 1, "total_steps": 6}


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A checkpoint of a tied model after two steps in TP2PP2, and each rank's continuation."""
    folder = tmp_path_factory.mktemp("saved") / "actor"
    return folder, pool.run(train_and_save, 4, TP2PP2, str(folder), {}, timeout=400)


# ---- what runs in the processes


def model_config(tied=True, layers=2, hidden=32):
    raw = {
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
    }
    return parse_model_config(raw)


def build(place, layout, options, seed=1):
    runtime = init_runtime(
        layout, place.rank, place.world_size, "127.0.0.1", place.port, device="cpu", seed=seed, timeout_s=60
    )
    adam = OptimizerOptions(**ADAM, use_distributed_optimizer=options.get("distributed", True))
    engine = MegatronEngine(
        model_config(options.get("tied", True), options.get("layers", 2), options.get("hidden", 32)),
        layout,
        runtime,
        MegatronOptions(
            dtype=getattr(torch, options.get("dtype", "float32")),
            value_head=options.get("value_head", False),
            optimizer=adam if options.get("optimizer", True) else None,
            overlap=OverlapOptions(options.get("overlap", False), options.get("overlap", False), bucket_size=3000),
            offload=options.get("offload", ()),
        ),
    )
    with torch.no_grad():
        for param in engine.weights.named().values():
            param.fill_(float("nan"))  # whatever is not loaded shows
    return engine


def fill(engine):
    """Set the same weights in every layout."""
    full = {}
    for number, (name, shape) in enumerate(sorted(engine.weight_map.hf_shapes().items())):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 0.1
        full[name] = values + 1 if name.endswith("norm.weight") else values
    local = engine.weights.named()
    with torch.no_grad():
        for param in engine.weight_map.megatron_params(engine.runtime.layout, engine.runtime.rank):
            local[param.name].zero_()
            for piece in param.pieces:
                source = full[piece.hf_name][tuple(map(slice, piece.start, piece.stop))]
                stop = [at + size for at, size in zip(piece.at, piece.shape, strict=True)]
                local[param.name][tuple(map(slice, piece.at, stop))] = source.to(local[param.name].dtype)
    if engine.optimizer is not None:
        engine.weights_changed()


def step(engine, number):
    """One step over eight rows; exact metrics."""
    generator = torch.Generator().manual_seed(100 + number)
    rows = [(torch.randint(VOCAB, (3,), generator=generator), torch.randint(VOCAB, (4,), generator=generator))
            for _ in range(8)]  # fmt: skip
    mine = rows[engine.runtime.coordinate.dp :: engine.runtime.layout.dp]
    batches = [PackedMicroBatch.from_rows(mine[i : i + 2]) for i in range(0, len(mine), 2)]

    def loss(outputs, micro_batch):
        if hasattr(outputs, "values"):
            value = (outputs.values - micro_batch.targets / VOCAB).square().sum() / 32
        else:
            value = -outputs.log_probs.sum() / 32
        return value, {"loss": value}

    metrics = engine.forward_backward(batches, loss)
    result = engine.optimizer_step()
    assert not result.skipped
    return metrics["loss"].hex(), result.grad_norm.hex(), result.lr.hex()


def digest(tensors):
    sha = hashlib.sha256()
    for name in sorted(tensors):
        raw = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        sha.update(name.encode() + raw.numpy().tobytes())
    return sha.hexdigest()


def rank_state(engine, numbers):
    """Draw random numbers, take steps, and return the full state of this rank."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    draws = [random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()]
    with cuda_on_cpu.active(), get_cuda_rng_tracker().fork():
        draws.append(torch.rand(1).item())
    before = {name: param.clone() for name, param in engine.weights.named().items()}
    steps = [step(engine, number) for number in numbers]
    assert engine.optimizer is not None
    shards = state_shards(engine.optimizer, engine.weights.parameters())
    inner = [part.optimizer for part in engine.optimizer.megatron.chained_optimizers]
    states = [state for optimizer in inner for state in optimizer.state.values()]
    return {
        "draws": draws,
        "steps": steps,
        "before": before,
        "weights": {name: param.clone() for name, param in engine.weights.named().items()},
        "digest": digest(engine.weights.named()),
        "adam": digest({f"{n}/{kind}": t for n, shard in shards.items() for kind, t in shard.tensors.items()}),
        "counts": sorted({float(state["step"]) for state in states}),
        "shared": len(states) - len({state["step"].data_ptr() for state in states}),
        "padding": all(not t.any() for t in padding(engine, shards)),
    }


def padding(engine, shards):
    local = engine.weights.named()
    for param in engine.weight_map.megatron_params(engine.runtime.layout, engine.runtime.rank):
        real = max((piece.at[0] + piece.shape[0] for piece in param.pieces), default=0)
        yield local[param.name][real:]
        if param.name in shards:
            shard, start = shards[param.name], real * int(np.prod(param.shape[1:]))
            yield from (tensor[max(0, start - shard.start) :] for tensor in shard.tensors.values())


def train_and_save(place, layout, folder, options):
    try:
        engine = build(place, layout, options)
        fill(engine)
        random.seed(place.rank), np.random.seed(place.rank + 10), random.gauss(0, 1), np.random.randn()
        for number in range(2):
            step(engine, number)
        begin_save(engine, folder).finish()
        return rank_state(engine, range(2, 4))
    finally:
        shutdown_runtime()


def load_and_train(place, layout, folder, options):
    try:
        engine = build(place, layout, options, seed=99)
        load_sharded(engine, folder)
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
        return {**rank_state(engine, range(2, 4)), "process": os.getpid()}
    finally:
        shutdown_runtime()


def load_forward_only(place, layout, folder):
    try:
        engine = build(place, layout, {"optimizer": False})
        load_sharded(engine, folder)
        return {name: param.clone() for name, param in engine.weights.named().items()}
    finally:
        shutdown_runtime()


def failing_load(place, layout, folder, options):
    """The message of this rank's error."""
    try:
        engine = build(place, layout, options)
        with pytest.raises(CheckpointError) as caught:
            load_sharded(engine, folder)
        return str(caught.value)
    finally:
        shutdown_runtime()


def failing_save(place, layout, folder, how):
    """Messages of two failed saves; then a successful save by the same processes."""
    messages = []
    try:
        engine = build(place, layout, {})
        fill(engine)
        for number in range(2):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as caught:
                if place.rank == layout.world_size - 1 - number:
                    break_writing(patch, how)
                begin_save(engine, f"{folder}/{number}").finish()
            messages.append(str(caught.value))
        step(engine, 0)
        begin_save(engine, f"{folder}/fine").finish()
        return messages
    finally:
        shutdown_runtime()


def break_writing(patch, how):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if how == "random":
        patch.setattr("megarl.megatron.checkpoint.role_state.save_file", full)
    elif how == "data":
        patch.setattr(torch, "save", full)
    elif how == "disagreement":
        patch.setattr("megarl.megatron.checkpoint.sharded.check_steps", full)


# ---- assembling what ranks hold


def assembled(results, layout, layers=2):
    """Hugging Face tensors from the local ones of all ranks, which must agree on overlaps."""
    weight_map = WeightMap(model_config(layers=layers))
    full = {name: torch.full(shape, float("nan")) for name, shape in weight_map.hf_shapes().items()}
    for rank, local in enumerate(results):
        for param in weight_map.megatron_params(layout, rank):
            for piece in param.pieces:
                stop = [at + size for at, size in zip(piece.at, piece.shape, strict=True)]
                here = local[param.name][tuple(map(slice, piece.at, stop))].float()
                reference_part = full[piece.hf_name][tuple(map(slice, piece.start, piece.stop))]
                torch.testing.assert_close(
                    here[~reference_part.isnan()], reference_part[~reference_part.isnan()], rtol=0, atol=1e-6
                )
                reference_part.copy_(here)
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full


def assert_same_bits(resumed, uninterrupted):
    for rank, (actual, expected) in enumerate(zip(resumed, uninterrupted, strict=True)):
        for key in ("draws", "steps", "digest", "adam", "counts"):
            assert actual[key] == expected[key], f"{key} of rank {rank}"
        assert actual["counts"] == [4.0]
        assert actual["shared"] == 0
        assert actual["padding"]


def assert_close(resumed, uninterrupted):
    expected = [[float.fromhex(value) for value in metrics] for metrics in uninterrupted[0]["steps"]]
    for actual in resumed:
        steps = [[float.fromhex(value) for value in metrics] for metrics in actual["steps"]]
        np.testing.assert_allclose(steps, expected, rtol=1e-5)
        assert actual["padding"]
        assert actual["shared"] == 0


# ---- tests


@pytest.mark.release(twin="tests/megatron/test_megatron_checkpoint.py::test_resume_is_bit_exact")
def test_resume_is_bit_exact_in_fresh_processes(saved):
    folder, uninterrupted = saved
    fresh = ProcessPool(4)
    try:
        resumed = fresh.run(load_and_train, 4, TP2PP2, str(folder), {}, timeout=400)
    finally:
        fresh.close()
    assert len({result["process"] for result in resumed}) == 4
    assert_same_bits(resumed, uninterrupted)


OPTIONS: list[dict[str, Any]] = [
    {"overlap": True},
    {"value_head": True},
    {"dtype": "bfloat16", "tied": False},
    {"distributed": False},
    {"tied": False},
    {"dtype": "bfloat16", "distributed": False},
]


PAIRS = list(zip(paired_layouts(model_config(layers=4), 4), itertools.cycle(OPTIONS), strict=False))


@pytest.mark.parametrize(
    ("layout", "options"),
    of_release(PAIRS[::2], PAIRS[1::2]),
    ids=lambda value: value.describe() if isinstance(value, ParallelLayout) else " ".join(value),
)
def test_resume_is_bit_exact(layout, options, pool, tmp_path):
    folder, options = str(tmp_path / "role"), {"layers": 4, **options}
    uninterrupted = pool.run(train_and_save, layout.world_size, layout, folder, options)
    assert_same_bits(pool.run(load_and_train, layout.world_size, layout, folder, options), uninterrupted)


@pytest.mark.parametrize(
    "layout", [ParallelLayout(), *paired_layouts(model_config(layers=2), 4)], ids=ParallelLayout.describe
)
def test_checkpoint_resumes_in_another_layout(layout, saved, pool):
    folder, uninterrupted = saved
    resumed = pool.run(load_and_train, layout.world_size, layout, str(folder), {})
    assert_close(resumed, uninterrupted)
    for key, tolerance in (("before", 0.0), ("weights", 1e-5)):
        expected = assembled([rank[key] for rank in uninterrupted], TP2PP2)
        for name, tensor in assembled([rank[key] for rank in resumed], layout).items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (ParallelLayout(dp=2), {"value_head": True}),
        (ParallelLayout(cp=2), {"value_head": True}),
        (ParallelLayout(cp=2), {"distributed": False}),
    ],
    ids=str,
)
def test_data_parallel_checkpoint_resumes_tensor_parallel(layout, options, pool, tmp_path):
    uninterrupted = pool.run(train_and_save, 2, layout, str(tmp_path / "role"), options)
    resumed = pool.run(load_and_train, 4, TP2PP2, str(tmp_path / "role"), {**options, "distributed": True})
    assert_close(resumed, uninterrupted)


@pytest.mark.parametrize(
    "interleaved_first",
    [
        True,
        pytest.param(
            False,
            marks=pytest.mark.release(
                twin="tests/megatron/test_megatron_checkpoint.py::"
                "test_interleaved_and_single_process_checkpoints_are_interchangeable"
            ),
        ),
    ],
)
def test_interleaved_and_single_process_checkpoints_are_interchangeable(interleaved_first, pool, tmp_path):
    layouts = [ParallelLayout(pp=2, vpp=2), ParallelLayout()]
    first, second = layouts if interleaved_first else reversed(layouts)
    folder, options = str(tmp_path / "role"), {"layers": 4}
    uninterrupted = pool.run(train_and_save, first.world_size, first, folder, options)
    resumed = pool.run(load_and_train, second.world_size, second, folder, options)
    assert_close(resumed, uninterrupted)
    for key, tolerance in (("before", 0.0), ("weights", 1e-5)):
        expected = assembled([rank[key] for rank in uninterrupted], first, layers=4)
        for name, tensor in assembled([rank[key] for rank in resumed], second, layers=4).items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance)


def test_engine_without_optimizer_loads_the_weights(saved, pool):
    folder, uninterrupted = saved
    loaded = assembled(pool.run(load_forward_only, 1, ParallelLayout(), str(folder)), ParallelLayout())
    for name, tensor in assembled([rank["before"] for rank in uninterrupted], TP2PP2).items():
        assert torch.equal(loaded[name], tensor), name


def test_every_tensor_is_stored_once_by_hugging_face_name(saved):
    index = read_index(saved[0])
    shapes = tensor_shapes(index)
    expected = WeightMap(model_config()).hf_shapes()
    assert shapes == {"weight": expected, "exp_avg": expected, "exp_avg_sq": expected}
    for key, stored in index.state_dict_metadata.items():
        elements = np.zeros(tuple(stored.size), dtype=int)
        for chunk in stored.chunks:
            elements[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
        assert (elements == 1).all(), key


# Damages of a checkpoint: each returns the fault in the error's code, and a value that the message names.


def truncate(folder):
    os.truncate(folder / "__1_0.distcp", 200)
    return "truncated-file", "__1_0.distcp is truncated: 200 bytes"


def garble(folder):
    content = bytearray((folder / "__2_0.distcp").read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)
    (folder / "__2_0.distcp").write_bytes(content)
    return "corrupt-file", "__2_0.distcp"


def remove(folder):
    (folder / "__3_0.distcp").unlink()
    return "missing-file", "__3_0.distcp"


def remove_index(folder):
    (folder / ".metadata").unlink()
    return "missing-index", ".metadata"


def cut_index(folder):
    os.truncate(folder / ".metadata", 500)
    return "malformed-index", ".metadata"


def hostile_index(folder):
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {folder / 'owned'}",)

    (folder / ".metadata").write_bytes(pickle.dumps(Attack()))
    return "unsafe-pickle", "'posix.system'"


def escaping_index(folder):
    index = read_index(folder)
    for info in index.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return "file-outside", "'../__"


def hole_in_index(folder):
    index = read_index(folder)
    index.state_dict_metadata["exp_avg/model.norm.weight"].chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return "elements-missing", "'exp_avg/model.norm.weight': the checkpoint has 0 of 32"


def hostile_shard(folder):
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {folder / 'owned'}",)

    index = read_index(folder)
    torch.save(Attack(), folder / "__0_0.distcp")
    for info in index.storage_data.values():
        if info.relative_path == "__0_0.distcp":
            info.offset, info.length = 0, (folder / "__0_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return "corrupt-file", "__0_0.distcp is damaged: Weights only load failed"


def no_state(folder):
    (folder / "state.json").unlink()
    return "missing-state", "state.json"


def odd_state(folder):
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    (folder / "state.json").write_text(json.dumps({**state, "layout": {"tp": 2, "sideways": 3}}), encoding="utf-8")
    return "malformed-state", "state.json"


def future_state(folder):
    (folder / "state.json").write_text('{"format": 7}', encoding="utf-8")
    return "other-format", "format=7, this megarl reads 1"


DAMAGES = [truncate, garble, remove, remove_index, cut_index, hostile_index, escaping_index, hole_in_index,
           hostile_shard, no_state, odd_state, future_state]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_checkpoint_raises_on_every_rank(damage, saved, pool, tmp_path):
    folder = tmp_path / "role"
    shutil.copytree(saved[0], folder)
    fault, named = damage(folder)
    for message in pool.run(failing_load, 2, ParallelLayout(tp=2), str(folder), {}):
        assert named in message and message.endswith(f"[checkpoint.{fault}]"), message
    assert not (folder / "owned").exists()


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_damaged_random_state_raises(damage, saved, pool, tmp_path):
    folder = tmp_path / "role"
    shutil.copytree(saved[0], folder)
    if damage == "missing":
        (folder / "random_00002.safetensors").unlink()
    else:
        os.truncate(folder / "random_00002.safetensors", 1000)
    for message in pool.run(failing_load, 4, TP2PP2, str(folder), {}):
        assert "rank 2" in message and "random_00002.safetensors" in message
        assert message.endswith("[checkpoint.random-state]")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hidden": 64}, "'model.embed_tokens.weight' has shape [70, 32] in the checkpoint, has shape [70, 64]"),
        ({"layers": 1}, "'model.layers.1.input_layernorm.weight' has shape [32] in the checkpoint, is absent here"),
        ({"layers": 4}, "'model.layers.2.input_layernorm.weight' is absent in the checkpoint, has shape [32] here"),
        ({"tied": False}, "'lm_head.weight' is absent in the checkpoint"),
        ({"value_head": True}, "'score.weight' is absent in the checkpoint"),
    ],
    ids=str,
)
def test_checkpoint_of_another_model_raises(options, expected, saved, pool):
    (message,) = pool.run(failing_load, 1, ParallelLayout(), str(saved[0]), options)
    assert expected in message and message.endswith("[resume.other-model]"), message


def test_checkpoint_in_another_number_format_raises(saved, pool):
    (message,) = pool.run(failing_load, 1, ParallelLayout(), str(saved[0]), {"dtype": "bfloat16"})
    assert message == (
        f"loading {saved[0]} failed on rank 0: checkpoint {saved[0]} has dtype=float32, this run dtype=bfloat16: they "
        "must agree [resume.other-dtype]"
    )


@pytest.mark.parametrize("how", ["random", "data", "disagreement"])
def test_failed_save_raises_on_every_rank(how, pool, tmp_path):
    results = pool.run(failing_save, 4, TP2PP2, str(tmp_path), how)
    for messages in results:
        assert all("No space left on device" in message for message in messages), messages
        assert all(message.endswith("[checkpoint.rank-failed]") for message in messages), messages
        assert ["rank 3" in messages[0], "rank 2" in messages[1]] == [True, True], messages
    resumed = pool.run(load_and_train, 1, ParallelLayout(), str(tmp_path / "fine"), {})
    assert resumed[0]["padding"]


def test_save_that_misses_a_block_raises_on_every_rank(pool, tmp_path):
    for message in pool.run(save_without_a_block, 2, ParallelLayout(tp=2), str(tmp_path / "role")):
        assert "'weight/model.norm.weight'" in message and message.endswith("[checkpoint.tensor-not-written]")
    assert not list(tmp_path.rglob("*.distcp")) and not list(tmp_path.rglob(".metadata"))


def save_without_a_block(place, layout, folder):
    """The message of a save in which no rank contributes the last norm."""

    def incomplete(*args):
        return [item for item in saved_items(*args) if item.key != "weight/model.norm.weight"]

    try:
        engine = build(place, layout, {})
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as caught:
            patch.setattr("megarl.megatron.checkpoint.sharded.saved_items", incomplete)
            begin_save(engine, folder).finish()
        return str(caught.value)
    finally:
        shutdown_runtime()


def test_nonempty_folder_raises(saved, pool):
    (message,) = pool.run(save_into, 1, str(saved[0]))
    assert str(saved[0]) in message and message.endswith("[checkpoint.folder-not-empty]")


def save_into(place, folder):
    try:
        engine = build(place, ParallelLayout(), {})
        with pytest.raises(CheckpointError) as caught:
            begin_save(engine, folder).finish()
        return str(caught.value)
    finally:
        shutdown_runtime()
