"""Faults that a checkpoint folder must survive, with real kills of real processes."""

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from functools import partial

import pytest
from support.dying import run_and_die
from support.expected_errors import raises

from megarl.base import atomic_write as replacing
from megarl.base.checkpoint_files import POINTER
from megarl.base.files import FileEntry
from megarl.trainer.state.checkpoint_manifest import MANIFEST, BestBy, Retention, Score
from megarl.trainer.state.checkpoint_store import BEST_POINTER, CheckpointStore


def fill(folder, step):
    for role in ("actor", "critic"):
        (folder / role).mkdir()
        (folder / role / "shard_0.bin").write_bytes(bytes([step]) * 5000)
    (folder / "trainer_state.json").write_text(json.dumps({"step": step}), encoding="utf-8")


def save(store, step):
    with store.saving(step) as folder:
        fill(folder, step)
    return store.root / f"global_step_{step}"


def step_of(folder):
    return None if folder is None else json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["step"]


def hidden(root):
    return [name for name in os.listdir(root) if name.startswith(".")]


def test_layout_manifest_and_pointer(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    folder = save(store, 3)
    assert folder == tmp_path / "run" / "global_step_3"
    assert (tmp_path / "run" / POINTER).read_text(encoding="utf-8").strip() == "3"
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    assert sorted(manifest["files"]) == ["actor/shard_0.bin", "critic/shard_0.bin", "trainer_state.json"]
    for name, (size, digest) in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert size == len(content)
        assert digest == hashlib.blake2b(content, digest_size=32).hexdigest()
    assert not hidden(store.root)
    assert store.resolve("auto") == folder


def test_nothing_saved_starts_at_step_zero(tmp_path):
    assert CheckpointStore(tmp_path / "absent").resolve("auto") is None
    assert CheckpointStore(tmp_path).resolve("auto") is None


def test_folders_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = save(CheckpointStore("run"), 1)
    assert CheckpointStore("run").resolve("auto") == tmp_path / "run" / "global_step_1" == folder
    assert CheckpointStore("run").resolve("resume_path", "run/global_step_1") == folder


def test_resume_modes(tmp_path):
    store = CheckpointStore(tmp_path)
    first, second = save(store, 1), save(store, 2)
    assert store.resolve("auto") == second
    assert store.resolve("disable") is None
    assert store.resolve("resume_path", first) == first
    with raises("checkpoint.no-folder", tmp_path / "global_step_9"):
        store.resolve("resume_path", tmp_path / "global_step_9")
    with raises("checkpoint.no-manifest", tmp_path / MANIFEST):
        store.resolve("resume_path", tmp_path)
    with raises("resume.no-path", "trainer.resume_from_path", "trainer.resume_mode=resume_path"):
        store.resolve("resume_path")
    with raises("config.value-out-of-limits", "'sometimes'", "auto, must, disable, resume_path"):
        store.resolve("sometimes")


def truncate(folder):
    os.truncate(folder / "actor" / "shard_0.bin", 100)
    return "checkpoint.corrupt-file", "actor/shard_0.bin has 100 bytes, 5000"


def flip_a_bit(folder):
    content = bytearray((folder / "critic" / "shard_0.bin").read_bytes())
    content[2500] ^= 4
    (folder / "critic" / "shard_0.bin").write_bytes(content)
    return "checkpoint.corrupt-file", "critic/shard_0.bin: content"


def remove(folder):
    (folder / "trainer_state.json").unlink()
    return "checkpoint.corrupt-file", "trainer_state.json is missing"


def add(folder):
    (folder / "actor" / "shard_1.bin").write_bytes(b"x")
    return "checkpoint.corrupt-file", "actor/shard_1.bin is not part"


def link(folder):
    (folder / "actor" / "shard_1.bin").symlink_to("/etc/passwd")
    return "checkpoint.link-or-device", "actor/shard_1.bin"


def remove_manifest(folder):
    (folder / MANIFEST).unlink()
    return "checkpoint.no-manifest", MANIFEST


def cut_manifest(folder):
    os.truncate(folder / MANIFEST, 60)
    return "checkpoint.unreadable-file", MANIFEST


def edit_manifest(folder):
    text = (folder / MANIFEST).read_text(encoding="utf-8")
    (folder / MANIFEST).write_text(text.replace('"step": 2', '"step": 7'), encoding="utf-8")
    return "checkpoint.corrupt-manifest", MANIFEST


def strange_manifest(folder):
    (folder / MANIFEST).write_text('{"format": 1, "files": [], "digest": ""}', encoding="utf-8")
    return "checkpoint.malformed-manifest", MANIFEST


def future_manifest(folder):
    (folder / MANIFEST).write_text('{"format": 99}', encoding="utf-8")
    return "checkpoint.other-format", f"{MANIFEST}: format=99"


DAMAGES = [truncate, flip_a_bit, remove, add, link, remove_manifest, cut_manifest, edit_manifest, strange_manifest,
           future_manifest]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named_and_the_older_checkpoint_is_used(damage, tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    newest = save(store, 2)
    code, named = damage(newest)
    with raises(code, newest, named):
        store.verify(newest)
    with raises(code, newest, named):
        store.resolve("resume_path", newest)
    with caplog.at_level(logging.WARNING):
        assert step_of(store.resolve("auto")) == 1
    assert "global_step_1, because" in caplog.text
    assert "global_step_2" in caplog.text


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    store = CheckpointStore(tmp_path)
    truncate(save(store, 1))
    flip_a_bit(save(store, 2))
    with raises("resume.nothing-complete", "critic/shard_0.bin", "actor/shard_0.bin", "trainer.resume_mode=disable"):
        store.resolve("auto")


def test_a_renamed_checkpoint_is_rejected(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1).rename(tmp_path / "global_step_5")
    with raises("checkpoint.renamed-folder") as caught:
        store.verify(tmp_path / "global_step_5")
    assert str(caught.value) == (
        f"checkpoint {tmp_path}/global_step_5 holds step 1: it was renamed; name it global_step_1 "
        "[checkpoint.renamed-folder]"
    )


@pytest.mark.parametrize("pointer", ["", "garbage", "9", "-1", "2 3", "\u0662", "1e3", None])
def test_a_bad_pointer_falls_back_loudly_to_the_newest(pointer, tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    save(store, 1), save(store, 2)
    (tmp_path / POINTER).unlink()
    if pointer is not None:
        (tmp_path / POINTER).write_text(pointer, encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert step_of(store.resolve("auto")) == 2
    assert POINTER in caplog.text or "names step 9" in caplog.text


def test_a_pointer_to_nothing_is_not_step_zero(tmp_path):
    store = CheckpointStore(tmp_path)
    shutil.rmtree(save(store, 4))
    with raises("resume.nothing-complete", POINTER, "step 4", tmp_path / "global_step_4"):
        store.resolve("auto")


def test_a_pointer_set_back_by_hand_is_followed(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1), save(store, 2)
    (tmp_path / POINTER).write_text("1", encoding="utf-8")
    assert step_of(store.resolve("auto")) == 1


def test_retention_keeps_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, Retention({"actor": 2, "critic": 2}))
    for step in (1, 2, 3, 4):
        save(store, step)
        assert store.steps() == [s for s in (1, 2, 3, 4) if step - 1 <= s <= step]
    assert not hidden(tmp_path)


def test_retention_ignores_damaged_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path, Retention({"actor": 2, "critic": 2}))
    save(store, 1)
    truncate(save(store, 2))
    save(store, 3)
    assert store.steps() == [1, 2, 3]


def test_retention_counts_by_time_of_saving(tmp_path):
    """A run that went back repeats lower steps: the higher ones are the older ones."""
    save(CheckpointStore(tmp_path), 10), save(CheckpointStore(tmp_path), 20)
    store = CheckpointStore(tmp_path, Retention({"actor": 2, "critic": 2}))
    save(store, 1)
    assert store.steps() == [1, 20]
    assert step_of(store.resolve("auto")) == 1
    (tmp_path / POINTER).unlink()
    assert step_of(store.resolve("auto")) == 1


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_removes_its_own_checkpoints_only(tmp_path):
    best = BestBy("val/acc")
    other = CheckpointStore(tmp_path, Retention(best=best), "other")
    with other.saving(10, Score("val/acc", 0.9)) as folder:
        fill(folder, 10)
    before = tree(tmp_path / "global_step_10")
    store = CheckpointStore(tmp_path, Retention({"actor": 1, "critic": 1}, best), "mine")
    for step, value in ((1, 0.1), (2, 0.2), (3, 0.1)):
        with store.saving(step, Score("val/acc", value)) as folder:
            fill(folder, step)
    assert store.steps() == [2, 3, 10] and store.own_steps() == [2, 3]
    assert store.best().step == 2 and (tmp_path / BEST_POINTER).read_text(encoding="utf-8") == "2\n"
    assert tree(tmp_path / "global_step_10") == before
    with raises("checkpoint.other-run", tmp_path / "global_step_10", "trainer.overwrite_output=true"):
        save(store, 10)
    assert tree(tmp_path / "global_step_10") == before and not hidden(tmp_path)


def test_a_resumed_run_prunes_the_checkpoints_before_it(tmp_path):
    for step in (1, 2):
        save(CheckpointStore(tmp_path, None, "mine"), step)
    save(CheckpointStore(tmp_path, Retention({"actor": 2, "critic": 2}), "mine"), 3)
    assert CheckpointStore(tmp_path).steps() == [2, 3]


def test_overwrite_replaces_other_runs_at_the_first_save(tmp_path):
    save(CheckpointStore(tmp_path, None, "other"), 10)
    truncate(save(CheckpointStore(tmp_path, None, "other"), 20))
    store = CheckpointStore(tmp_path, None, "mine", overwrite=True)
    with raises("checkpoint.save-failed", "disk full"), store.saving(10):
        raise OSError("disk full")
    assert store.steps() == [10, 20], "the save failed"
    save(store, 10)
    assert store.steps() == [10] and (tmp_path / "global_step_10" / "run_id").read_text(encoding="utf-8") == "mine"
    assert store.resolve("auto") == tmp_path / "global_step_10"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_older_checkpoint_loses_one_role_and_stays_complete(can_exchange, tmp_path, monkeypatch):
    if not can_exchange:
        monkeypatch.setattr(replacing, "exchange_paths", lambda *_: False)
    store = CheckpointStore(tmp_path, Retention({"actor": 2, "critic": 1}))
    first, second = save(store, 1), save(store, 2)
    assert sorted(path.name for path in first.iterdir()) == ["actor", MANIFEST, "trainer_state.json"]
    assert (second / "critic").is_dir() and not hidden(tmp_path)
    store.verify(first, ["actor"])
    with raises("checkpoint.missing-role", first, "critic", "trainer.max_critic_ckpt_to_keep"):
        store.resolve("resume_path", first, ["actor", "critic"])
    truncate(second)
    with raises("resume.nothing-complete", "actor/shard_0.bin has 100 bytes", "global_step_1 holds no critic"):
        store.resolve("auto", None, ["actor", "critic"])


def test_the_best_checkpoint_keeps_all_roles_and_a_pointer(tmp_path):
    store = CheckpointStore(tmp_path, Retention({"actor": 1, "critic": 1}, BestBy("val/acc")))
    for step, value in enumerate([0.3, 0.9, 0.5, 0.1], start=1):
        with store.saving(step, Score("val/acc", value)) as folder:
            fill(folder, step)
        assert (tmp_path / BEST_POINTER).read_text(encoding="utf-8") == f"{min(step, 2)}\n"
    assert store.steps() == [2, 4] and store.best().step == 2
    store.verify(tmp_path / "global_step_2", ["actor", "critic"])
    assert step_of(store.resolve("auto")) == 4


def test_resume_mode_must_needs_a_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path)
    with raises("resume.no-checkpoint") as caught:
        store.resolve("must")
    assert str(caught.value) == (
        f"trainer.resume_mode=must, but there is no checkpoint in {tmp_path}: check trainer.default_local_dir, or "
        "start a new run with trainer.resume_mode=auto [resume.no-checkpoint]"
    )
    save(store, 1)
    assert step_of(store.resolve("must")) == 1


def test_entries_of_hashed_files_are_checked_by_size_only(tmp_path):
    store = CheckpointStore(tmp_path)
    for number, entries in enumerate(
        [{"actor/shard_0.bin": FileEntry(4999, "")}, {"actor/shard_7.bin": FileEntry(1, "")}]
    ):
        fill(store.begin(number), number)
        with raises("checkpoint.save-failed", *entries):
            store.commit(number, entries)
    assert store.steps() == []
    fill(store.begin(3), 3)
    digest = hashlib.blake2b(bytes([3]) * 5000, digest_size=32).hexdigest()
    store.commit(3, {"actor/shard_0.bin": FileEntry(5000, digest)})
    store.verify(tmp_path / "global_step_3")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_saving_a_step_again_replaces_it(can_exchange, tmp_path, monkeypatch):
    if not can_exchange:
        monkeypatch.setattr(replacing, "exchange_paths", lambda *_: False)
    store = CheckpointStore(tmp_path, Retention({"actor": 1}))
    save(store, 2)
    with store.saving(2) as folder:
        fill(folder, 2)
        (folder / "actor" / "shard_0.bin").write_bytes(b"new")
    assert (store.resolve("auto") / "actor" / "shard_0.bin").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["global_step_2", POINTER]


def test_commit_without_begin(tmp_path):
    with raises("checkpoint.not-started", "step 1"):
        CheckpointStore(tmp_path).commit(1)


def test_an_error_in_the_body_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(RuntimeError, match="worker"), store.saving(2) as folder:
        fill(folder, 2)
        raise RuntimeError("worker died")
    assert sorted(os.listdir(tmp_path)) == ["global_step_1", POINTER]


@pytest.mark.parametrize(
    ("call", "after"), [("mkdir", 0), ("rename", 0), ("replace", 0), *(("fsync", after) for after in range(10))]
)
def test_no_space_left_keeps_the_old_one(call, after, tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    real, calls = getattr(os, call), []

    def full(*args):
        calls.append(args)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, call, full)
    with raises("checkpoint.save-failed", tmp_path, "step 2", "No space left on device"):
        save(store, 2)
    monkeypatch.undo()
    assert not hidden(tmp_path)
    # The last flush of all comes after the pointer was moved.
    assert step_of(store.resolve("auto")) == (2 if (call, after) == ("fsync", 9) else 1)
    save(store, 2)
    assert step_of(store.resolve("auto")) == 2


def test_a_full_device_while_the_workers_write(tmp_path):
    """The real thing: a file size limit makes the kernel refuse the write in a process of its own."""
    script = """
import resource, signal, sys
from megarl.base.errors import CheckpointError
from megarl.trainer.state.checkpoint_store import CheckpointStore
store = CheckpointStore(sys.argv[1])
with store.saving(1) as folder:
    (folder / "weights").write_bytes(b"1" * 4096)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    with store.saving(2) as folder:
        (folder / "weights").write_bytes(b"2" * 100000)
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert "step 2" in done.stdout and "File too large" in done.stdout, done.stderr
    assert done.stdout.endswith("[checkpoint.save-failed]\n")
    assert sorted(os.listdir(tmp_path)) == ["global_step_1", POINTER]


def test_killed_while_the_workers_write(tmp_path):
    script = """
import sys, time
from megarl.trainer.state.checkpoint_store import CheckpointStore
folder = CheckpointStore(sys.argv[1]).begin(2)
with open(folder / "weights", "wb") as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(600)
"""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    assert len(hidden(tmp_path)) == 1
    # Another process that is still alive keeps its unfinished folder.
    store.begin(3)
    store.abort(3)
    assert len(hidden(tmp_path)) == 1
    process.kill()
    process.wait()
    process.stdout.close()
    assert step_of(store.resolve("auto")) == 1
    store.begin(3)
    assert hidden(tmp_path) == [f".global_step_3.tmp-{os.getpid()}"]


@pytest.mark.parametrize(
    ("again", "can_exchange"),
    [(False, True), (True, True), (True, False)],
    ids=["a new step", "the same step again", "where names cannot be exchanged"],
)
def test_killed_at_every_change_to_the_disk(again, can_exchange, tmp_path, monkeypatch):
    """Whatever instant the process dies in, the old checkpoint or the new one is found whole, and saving goes on.

    The pointer changes last: until then it names the old checkpoint, even if the new one is complete.
    """
    if not can_exchange:
        monkeypatch.setattr(replacing, "exchange_paths", lambda *_: False)
    deaths, unpublished, seen = 0, 0, set()
    for changes in range(60):
        root = tmp_path / str(changes)
        save(CheckpointStore(root), 1)
        save(CheckpointStore(root), 2)
        old = (root / "global_step_2" / MANIFEST).read_text(encoding="utf-8")
        store = CheckpointStore(root, Retention({"actor": 2, "critic": 2}))
        died = run_and_die(changes, partial(save, store, 2 if again else 3))
        found = CheckpointStore(root).resolve("auto")
        assert found is not None
        seen.add("old" if (found / MANIFEST).read_text(encoding="utf-8") == old else "new")
        assert step_of(found) in ((2,) if again else (2, 3))
        pointer = int((root / POINTER).read_text(encoding="utf-8"))
        complete = (root / "global_step_3" / MANIFEST).exists()
        assert pointer == 2 or (pointer == 3 and complete)
        unpublished += complete and pointer == 2
        save(CheckpointStore(root, Retention({"actor": 2, "critic": 2})), 4)
        assert not hidden(root)
        assert step_of(CheckpointStore(root).resolve("auto")) == 4
        if not died:
            break
        deaths += 1
    else:
        pytest.fail("the save never finished")
    assert deaths >= 10
    assert seen == {"old", "new"}
    assert again or unpublished, "no death between the data and the pointer"
