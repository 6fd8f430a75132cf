"""Asynchronous saves with real worker processes: late, failing and killed ones."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support.expected_errors import raises

from megarl.base.checkpoint_files import POINTER
from megarl.cluster.calls import WorkerFailed
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup, wait_ready
from megarl.config.schema.model import CheckpointConfig
from megarl.convert.conversion import ConversionOptions, convert
from megarl.convert.open import open_source
from megarl.convert.source import MEGARL
from megarl.models import ParallelLayout
from megarl.trainer.state import checkpoint_saver
from megarl.trainer.state.checkpoint_manifest import Retention, Score
from megarl.trainer.state.checkpoint_saver import CheckpointSaver
from megarl.trainer.state.checkpoint_store import CheckpointStore


@pytest.fixture(scope="module")
def pool(forked_workers):
    with RaySession(num_cpus=2) as session:
        yield session.place([ResourcePool("main", "cpu", [2])])["main"]


@pytest.fixture(scope="module")
def control(tmp_path_factory):
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="module")
def actor(pool, control):
    return start(pool, control)


def start(pool, control):
    arguments = {"control": str(control)}
    group = WorkerGroup("actor", "tests.trainer.slow_savers.SlowSaver", arguments, ParallelLayout(dp=2), pool)
    wait_ready([group])
    return group


class Run:
    """A saver in a folder of its own."""

    def __init__(self, folder, control, in_background=True, retention=None):
        self.store = CheckpointStore(folder, retention)
        self.messages: list[str] = []
        saved = {"actor": CheckpointConfig(async_save=in_background)}
        self.saver = CheckpointSaver(self.store, saved, self.messages.append)
        self.control = control
        self.set(go=True, full=False)

    def set(self, **files):
        for name, there in files.items():
            (self.control / name).touch() if there else (self.control / name).unlink(missing_ok=True)

    def begin(self, step, group, score=None):
        self.saver.begin(step, [group], lambda folder: (folder / "own").write_text(str(step), encoding="utf-8"), score)  # type: ignore[arg-type,return-value]

    def complete(self):
        """Metrics of the save under way, completed as training does: by looking now and then."""
        while not (metrics := self.saver.take_metrics()):
            self.saver.advance()
        return metrics

    @property
    def hidden(self):
        return [name for name in os.listdir(self.store.root) if name.startswith(".")]


@pytest.fixture
def run(tmp_path, control):
    return Run(tmp_path / "checkpoints", control)


def test_training_continues_until_all_workers_have_written(run, actor):
    run.set(go=False)
    run.begin(1, actor, Score("acc", 0.5))
    assert run.saver.score_under_way == Score("acc", 0.5)
    for _ in range(3):
        run.saver.advance()
        assert run.store.steps() == [] and run.saver.take_metrics() == {} and len(run.hidden) == 1
    run.set(go=True)
    metrics = run.complete()
    assert run.store.resolve("auto") == run.saver.newest == run.store.root / "global_step_1"
    assert metrics["checkpoint/write_s"] == 1.5 and metrics["checkpoint/failed_saves"] == 0
    assert metrics["checkpoint/gb"] == pytest.approx(2 * len(b"halfwhole") / 2**30)
    assert metrics["checkpoint/blocked_s"] > 0 and run.saver.slowest_s == metrics["checkpoint/blocked_s"] + 1.5
    assert run.saver.take_metrics() == {} and run.messages == [] and run.hidden == []


def test_a_synchronous_save_completes_at_once(tmp_path, control, actor):
    run = Run(tmp_path, control, in_background=False)
    run.begin(1, actor)
    assert run.store.steps() == [1] and run.saver.take_metrics()


def test_the_next_save_waits_for_the_pending_one(run, actor):
    run.set(go=False)
    run.begin(1, actor)
    threading.Timer(0.2, lambda: run.set(go=True)).start()
    run.begin(2, actor)
    assert 1 in run.store.steps()
    run.saver.wait()
    assert run.store.steps() == [1, 2] and (run.store.root / POINTER).read_text(encoding="utf-8") == "2\n"


def test_a_storage_slower_than_the_save_frequency_delays_training_and_is_reported(run, actor, monkeypatch):
    """Saves neither pile up nor get lost: each waits for the one before."""
    now, submit = 0.0, WorkerGroup.submit

    def submit_and_write(group, verb, *arguments):
        """Let the workers write when the saver waits for them, and some seconds pass on its clock."""
        nonlocal now
        if verb == "finish_checkpoint" and not now:
            now = 7.0
            run.set(go=True)
        return submit(group, verb, *arguments)

    monkeypatch.setattr(WorkerGroup, "submit", submit_and_write)
    monkeypatch.setattr(checkpoint_saver, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(checkpoint_saver, "LATE_S", 5.0)
    run.set(go=False)
    run.begin(1, actor)
    run.begin(2, actor)
    assert run.store.steps() == [1] and len(run.hidden) == 1, "one save is pending"
    run.begin(3, actor)
    run.saver.wait()
    assert run.store.steps() == [1, 2, 3]
    assert run.saver.take_metrics()["checkpoint/waited_s"] == 7.0
    (message,) = run.messages
    assert message.startswith("the checkpoint of step 1 was still being written at step 2: training waited 7")
    assert "raise trainer.save_freq" in message


def test_a_full_disk_is_reported_and_the_old_checkpoint_stays(run, actor):
    run.begin(1, actor)
    run.complete()
    run.set(full=True)
    run.begin(2, actor)
    assert run.complete()["checkpoint/failed_saves"] == 1
    (message,) = run.messages
    assert "checkpoint of step 2 was not saved" in message and "No space left on device" in message
    assert f"Training continues; kept: {run.store.root}/global_step_1" in message
    assert run.saver.failure and run.store.resolve("auto").name == "global_step_1" and run.hidden == []
    run.set(full=False)
    run.begin(3, actor)
    assert run.complete()["checkpoint/failed_saves"] == 1 and run.saver.failure is None
    assert run.store.resolve("auto").name == "global_step_3"


def test_a_failure_in_the_driver_keeps_the_old_checkpoint(run, actor, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    run.saver.begin(1, [actor], full)
    run.store.root.rmdir()
    run.store.root.touch()  # in the way
    run.begin(2, actor)
    run.store.root.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: full(Path()))
        run.begin(3, actor)
        run.saver.wait()
    assert [f"step {step} was not saved" in message for step, message in enumerate(run.messages, start=1)] == [True] * 3
    assert run.saver.failed == 3 and run.store.steps() == [] and run.hidden == []
    assert run.saver.take_metrics()["checkpoint/failed_saves"] == 3
    run.begin(4, actor)
    run.complete()
    assert run.store.steps() == [4]


def test_the_export_converts_written_files_in_the_background(run, actor, arithmetic):
    """The actor's tensors are written by the driver here, by the conversion, which engines read as their own."""
    saved = CheckpointConfig(async_save=True, save_contents=["model", "hf_model"])
    saver = CheckpointSaver(run.store, {"actor": saved}, run.messages.append)

    def save(step, damage=False):
        def write_own(folder):
            convert(open_source(arithmetic / "model"), folder / "actor", MEGARL, ConversionOptions())
            if damage:
                next((folder / "actor").glob("*.distcp")).write_bytes(b"short")

        saver.begin(step, [actor], write_own)
        while not (metrics := saver.take_metrics()):
            saver.advance()
        return metrics

    assert save(1)["checkpoint/failed_saves"] == 0, run.messages
    whole = run.store.resolve("must", None, ["actor"])
    exported = load_file(whole / "actor" / "huggingface" / "model.safetensors")
    expected = load_file(arithmetic / "model" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert (whole / "actor" / "huggingface" / "tokenizer.json").is_file()

    assert save(2, damage=True)["checkpoint/failed_saves"] == 1
    (message,) = run.messages
    assert "step 2 was not saved: the Hugging Face export failed" in message and ".distcp" in message
    assert run.store.resolve("must") == whole and run.hidden == []


def test_a_killed_writer_leaves_the_old_checkpoint(tmp_path, pool, control, actor):
    """With room for one checkpoint, the last good one stays until a later save is complete."""
    newest = Retention({"actor": 1})
    run = Run(tmp_path / "checkpoints", control, retention=newest)
    victim = start(pool, control)
    run.begin(1, victim)
    run.complete()
    run.set(go=False)
    run.begin(2, victim)
    os.kill(victim.process()[0], signal.SIGKILL)
    with pytest.raises(WorkerFailed, match="actor rank 0"):
        run.saver.wait()
    assert len(run.hidden) == 1
    assert (run.store.root / POINTER).read_text(encoding="utf-8").strip() == "1"
    after = Run(run.store.root, control, retention=newest)
    assert after.store.resolve("auto").name == "global_step_1"
    after.store.verify(after.store.resolve("auto"))
    with raises("checkpoint.no-manifest", run.store.root / run.hidden[0] / "manifest.json"):
        after.store.verify(run.store.root / run.hidden[0])
    after.begin(2, actor)
    after.complete()
    assert after.store.steps() == [2] and after.hidden == []
