"""Background saves during training, selected contents, and exports."""

import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.base.errors import CheckpointError
from megarl.base.files import read_entry
from megarl.megatron import shutdown_runtime
from megarl.megatron.checkpoint.pending_save import HostSnapshot
from megarl.megatron.checkpoint.role_state import read_state
from megarl.megatron.checkpoint.sharded import begin_save, load_sharded
from megarl.megatron.checkpoint.storage import Item, ItemWriter, TensorBlock
from megarl.megatron.runtime.memory import TensorMemory
from megarl.models import ParallelLayout
from tests.megatron.test_megatron_checkpoint import (
    TP2PP2,
    assembled,
    assert_same_bits,
    build,
    fill,
    load_and_train,
    rank_state,
    step,
)

DP2, TP2 = ParallelLayout(dp=2), ParallelLayout(tp=2)


# ---- what runs in the processes


def train_while_saving(place, layout, folder):
    """Two saves with one snapshot's memory; each is written only after further training."""
    try:
        engine = build(place, layout, {})
        fill(engine)
        snapshot, may_write = HostSnapshot(torch.device("cpu")), threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            real = ItemWriter.write
            patch.setattr(ItemWriter, "write", lambda writer: (may_write.wait(300), real(writer))[1])
            step(engine, 0)
            first = begin_save(engine, f"{folder}/1", snapshot=snapshot)
            size = snapshot._buffer.nbytes
            step(engine, 1)
            assert not first.is_written
            may_write.set()
            first.finish()
            may_write.clear()
            second = begin_save(engine, f"{folder}/2", snapshot=snapshot)
            reports = rank_state(engine, range(2, 4))
            assert not second.is_written
            may_write.set()
            written = second.finish()
        assert snapshot._buffer.nbytes == size > 0 and second.is_written
        return {**reports, "entries": written.entries, "seconds": written.seconds}
    finally:
        shutdown_runtime()


def save_on_a_full_disk(place, folder, in_background):
    """The kernel rejects rank 1's files beyond 8 KiB; then space is available again."""
    try:
        engine = build(place, DP2, {})
        fill(engine)
        step(engine, 0)
        snapshot = HostSnapshot(torch.device("cpu")) if in_background else None
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if place.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        with pytest.raises(CheckpointError) as caught:
            begin_save(engine, f"{folder}/full", snapshot=snapshot).finish()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        after = step(engine, 1)
        begin_save(engine, f"{folder}/room", snapshot=snapshot).finish()
        return [str(caught.value), after, rank_state(engine, range(2, 4))]
    finally:
        shutdown_runtime()


def save_parts(place, folder, source):
    try:
        engine = build(place, TP2, {})
        fill(engine)
        step(engine, 0)
        begin_save(engine, f"{folder}/model", ["model"]).finish()
        entries = begin_save(engine, f"{folder}/both", ["model", "hf_model"], copy_from=source).finish().entries
        begin_save(engine, f"{folder}/export", ["hf_model"]).finish()
        for name, entry in entries.items():
            assert read_entry(Path(folder) / "both" / name) == entry, name
        assert ("huggingface/model.safetensors" in entries) == (place.rank == 0)
        return {name: param.clone() for name, param in engine.weights.named().items()}
    finally:
        shutdown_runtime()


def load_parts(place, folder, contents):
    """Learning rate, Adam's count and weights after loading, or the message of the error."""
    try:
        engine = build(place, ParallelLayout(), {})
        try:
            load_sharded(engine, folder, contents)
        except CheckpointError as error:
            return str(error)
        assert engine.optimizer is not None
        weights = {name: param.clone() for name, param in engine.weights.named().items()}
        return engine.optimizer.steps, engine.optimizer.next_lr, weights, first_step_is_adams(engine)
    finally:
        shutdown_runtime()


def first_step_is_adams(engine):
    """Whether a step has the size of Adam's first one, about the learning rate, so that no moment was kept."""
    before = {name: param.clone() for name, param in engine.weights.named().items()}
    lr = engine.optimizer.next_lr
    step(engine, 5)
    moved = max((param - before[name]).abs().max().item() for name, param in engine.weights.named().items())
    return moved < 1.5 * lr or lr == 0


def export_on_a_full_disk(place, folder):
    """The export's first file, or its folder, cannot be created; no rank hangs."""
    messages = []
    try:
        engine = build(place, TP2, {})
        fill(engine)
        for number, target in enumerate(
            ("megarl.models.hf_writer.save_file", "megarl.models.hf_writer.HFWriter.__enter__")
        ):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as caught:
                patch.setattr(target, refuse)
                begin_save(engine, f"{folder}/{number}", ["model", "hf_model"]).finish()
            messages.append(str(caught.value))
        return messages
    finally:
        shutdown_runtime()


def refuse(*args, **kwargs):
    raise OSError(28, "No space left on device")


# ---- tests


def test_background_save_writes_the_state_at_its_start(pool, tmp_path):
    reports = pool.run(train_while_saving, 4, TP2PP2, str(tmp_path))
    resumed = pool.run(load_and_train, 4, TP2PP2, str(tmp_path / "2"), {})
    assert_same_bits(resumed, reports)
    for number, rank in enumerate(reports):
        assert {f"__{number}_0.distcp", f"random_{number:05d}.safetensors"} <= rank["entries"].keys()
        assert rank["seconds"] > 0
    everything = {name: entry for rank in reports for name, entry in rank["entries"].items()}
    files = [path.relative_to(tmp_path / "2").as_posix() for path in (tmp_path / "2").rglob("*") if path.is_file()]
    assert sorted(everything) == sorted(files) and sum(len(rank["entries"]) for rank in reports) == len(files)
    assert all(read_entry(tmp_path / "2" / name) == entry for name, entry in everything.items())


@pytest.mark.parametrize("in_background", [True, False])
def test_full_disk_raises_on_every_rank_and_training_continues(in_background, pool, tmp_path):
    (first, *_), (second, *_) = results = pool.run(save_on_a_full_disk, 2, str(tmp_path), in_background)
    assert first == second and "rank 1" in first and "File too large" in first, first
    assert first.endswith("[checkpoint.rank-failed]")
    resumed = pool.run(load_and_train, 2, DP2, str(tmp_path / "room"), {})
    assert_same_bits(resumed, [reports for _, _, reports in results])


def test_save_and_load_of_selected_contents(pool, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}", encoding="utf-8")
    saved = assembled(pool.run(save_parts, 2, str(tmp_path), str(tmp_path / "source")), TP2)
    (taken,) = pool.run(load_parts, 1, str(tmp_path / "model"), ["model"])
    steps, lr, weights, is_first = taken
    assert (steps, lr, is_first) == (0, 1e-2, True)  # the warm-up's only step
    for name, tensor in assembled([weights], ParallelLayout()).items():
        assert torch.equal(tensor, saved[name]), name
    exported = load_file(tmp_path / "both" / "huggingface" / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())
    assert (tmp_path / "both" / "huggingface" / "tokenizer.json").is_file()
    (message,) = pool.run(load_parts, 1, str(tmp_path / "both"), ["model", "optimizer", "extra"])
    assert message == (
        f"loading {tmp_path / 'both'} failed on rank 0: checkpoint {tmp_path / 'both'} has no optimizer and no extra: "
        "it was saved with save_contents=[model, hf_model]; leave optimizer and extra out of load_contents "
        "[resume.missing-contents]"
    )
    (message,) = pool.run(load_parts, 1, str(tmp_path / "export"), ["model"])
    assert "no model" in message and message.endswith("[resume.missing-contents]")
    assert read_state(tmp_path / "export").contents == ("hf_model",)


def test_failed_export_raises_on_every_rank(pool, tmp_path):
    for messages in pool.run(export_on_a_full_disk, 2, str(tmp_path)):
        assert ["No space left on device" in message for message in messages] == [True, True], messages
        codes = [message.rpartition("[")[2] for message in messages]
        assert codes == ["disk.export-write]", "checkpoint.rank-failed]"], messages


@pytest.mark.parametrize("chunk_bytes", [16, 100, 2**20])
def test_snapshots_keep_values_and_memory(monkeypatch, chunk_bytes):
    monkeypatch.setattr("megarl.megatron.runtime.memory.CHUNK_BYTES", chunk_bytes)
    snapshot = HostSnapshot(torch.device("cpu"))
    tensors = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(0), torch.randn(2, 2, dtype=torch.float64)]
    for tensor in tensors * 2:
        items = [weight_item(t) for t in tensors]
        copies = snapshot.take(items)
        held = snapshot._buffer.nbytes
        expected = [t.clone() for t in tensors]
        tensor.zero_() if tensor.numel() else None
        assert all(torch.equal(copy.data, was) for copy, was in zip(copies, expected, strict=True))
        assert snapshot._buffer.nbytes == held


def weight_item(tensor):
    shape = tuple(tensor.shape)
    return Item(
        "weight/x", shape, TensorBlock("x", (0,) * tensor.dim(), shape, 0), TensorMemory((tensor.view(-1),), False)
    )


def test_snapshot_of_items_larger_than_a_chunk_wastes_less_than_a_chunk(monkeypatch):
    """A page-locked allocation is rounded up to a power of two: 2.2 GB in one piece would take 4 GB."""
    monkeypatch.setattr("megarl.megatron.runtime.memory.CHUNK_BYTES", 1024)
    snapshot = HostSnapshot(torch.device("cpu"))
    tensors = [torch.randn(5, 77), torch.randn(3), torch.randn(999)]
    copies = snapshot.take([weight_item(tensor) for tensor in tensors])
    total = sum(tensor.nbytes for tensor in tensors)
    assert total <= snapshot._buffer.nbytes < total + 1024 + 16 * len(tensors)
    assert all(piece.untyped_storage().nbytes() == 1024 for copy in copies for piece in copy.memory.pieces)
    assert all(torch.equal(copy.data, tensor) for copy, tensor in zip(copies, tensors, strict=True))
