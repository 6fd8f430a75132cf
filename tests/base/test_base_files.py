"""Folders that can be written, also before they exist; the private folder, whatever another user puts there."""

import os
import stat
import tempfile
from pathlib import Path

import pytest
from support.expected_errors import raises

from megarl.base.files import nearest_folder, private_folder, write_error


def test_missing_folders_are_checked_at_their_nearest_parent(tmp_path):
    assert nearest_folder(tmp_path / "x" / "y") == tmp_path
    assert write_error(tmp_path / "x" / "y") == ""
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_written_have_a_reason(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "file is a file" in write_error(tmp_path / "file" / "checkpoints")
    assert write_error(Path("/proc/megarl")), "nobody can create a file there, not even root"
    with pytest.raises(NotADirectoryError):
        nearest_folder(tmp_path / "file" / "checkpoints")


NAME = f"megarl-{os.geteuid()}"


@pytest.fixture
def root(monkeypatch):
    """A short folder for temporary files."""
    folder = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    return Path(folder)


def test_it_is_made_for_this_user_only_and_found_again(root):
    folder = private_folder()
    assert folder == private_folder() == root / NAME
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_long_folder_for_temporary_files_is_replaced_and_a_long_explicit_one_refused(tmp_path, monkeypatch):
    long = str(tmp_path / ("x" * 60))
    monkeypatch.setattr(tempfile, "tempdir", long)
    assert private_folder() == Path("/tmp") / NAME
    with raises("disk.socket-path-length", long):
        private_folder(long)


def open_folder(path, root):
    path.mkdir()
    path.chmod(0o777)


def link(path, root):
    (root / "target").mkdir(0o700)
    path.symlink_to(root / "target")


def foreign(path, root):
    path.mkdir(0o700)
    os.chown(path, 12345, 12345)


FORGERIES = [
    (open_folder, "mode"),
    (link, "type"),
    (lambda path, root: os.mkfifo(path), "type"),
    (lambda path, root: path.write_text("", encoding="utf-8"), "type"),
]


@pytest.mark.parametrize(("forge", "fault"), [*FORGERIES, *([(foreign, "owner")] if os.geteuid() == 0 else [])])
def test_what_another_user_has_put_there_is_refused_at_once(root, forge, fault):  # type: ignore[no-untyped-def]
    forge(root / NAME, root)
    with raises(f"disk.private-folder-{fault}", root / NAME):
        private_folder()


def test_a_folder_that_cannot_be_made_is_named():
    with raises("disk.private-folder-create", "/nowhere"):
        private_folder("/nowhere")
