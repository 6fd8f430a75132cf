"""Folders that can be written, also before they exist."""

from pathlib import Path

import pytest

from megarl.base.files import nearest_folder, write_error


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
