"""A stray file of a file system or desktop harms no checkpoint; other foreign files and hostile manifests do."""

import logging

import pytest
from support.expected_errors import raises

from megarl.trainer.state.checkpoint_manifest import MANIFEST, is_whole, read_manifest
from megarl.trainer.state.checkpoint_store import CheckpointStore


@pytest.fixture
def checkpoint(tmp_path):
    with CheckpointStore(tmp_path).saving(4) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "data").write_bytes(b"x" * 100)
        (folder / "actor" / ".nfs00000000000000ab00000001").write_text(
            "a file that was open when it was removed", encoding="utf-8"
        )
    return tmp_path / "global_step_4"


@pytest.mark.parametrize(
    "name", [".nfs0000000000a1b2c300000001", ".DS_Store", "Thumbs.db", "._data", "desktop.ini", ".fuse_hidden00ab"]
)
def test_a_file_of_a_file_system_or_desktop_is_ignored(checkpoint, name, caplog):
    (checkpoint / "actor" / name).write_text("", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        CheckpointStore(checkpoint.parent).verify(checkpoint, ["actor"])
    assert f"actor/{name}" in caplog.text and is_whole(checkpoint)
    assert list(read_manifest(checkpoint).files) == ["actor/data"]


@pytest.mark.parametrize("name", [".nfs-not-hexadecimal", "DS_Store", "weights.pt", "._", "Thumbs.db.pt"])
def test_any_other_file_is_named(checkpoint, name):
    (checkpoint / "actor" / name).write_text("", encoding="utf-8")
    with raises("checkpoint.corrupt-file", f"actor/{name}"):
        CheckpointStore(checkpoint.parent).verify(checkpoint)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[" * 100_000, "checkpoint.unreadable-file"),
        ('{"a":' * 100_000, "checkpoint.unreadable-file"),
        ('{"format": 1, "step": 1e999}', "checkpoint.malformed-manifest"),
    ],
)
def test_a_hostile_manifest_is_an_ordinary_error(checkpoint, text, code):
    (checkpoint / MANIFEST).write_text(text, encoding="utf-8")
    with raises(code, MANIFEST):
        CheckpointStore(checkpoint.parent).verify(checkpoint)
    assert not is_whole(checkpoint)
