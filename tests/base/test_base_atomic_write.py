"""Atomic writes: a reader finds the old content or the new content, also after a kill."""

import pytest
from support.dying import run_and_die

from megarl.base import atomic_write as module
from megarl.base.atomic_write import atomic_write, atomic_write_text, replace_folder, restore_replaced_folder


def folder_of(path, content):
    path.mkdir()
    (path / "file").write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize("can_exchange", [True, False])
def test_folder_killed_at_any_change_is_old_or_new(can_exchange, tmp_path, monkeypatch):
    if not can_exchange:
        monkeypatch.setattr(module, "exchange_paths", lambda *_: False)
    contents, absent = [], 0
    for changes in range(20):
        root = folder_of(tmp_path / str(changes), "")
        path, finished = folder_of(root / "out", "old"), folder_of(root / ".unfinished", "new")
        died = run_and_die(changes, lambda path=path, finished=finished: replace_folder(finished, path))
        is_absent = not path.exists()
        assert restore_replaced_folder(path) == is_absent
        absent += is_absent
        contents.append((path / "file").read_text(encoding="utf-8"))
        if not died:
            break
    assert contents[0] == "old" and contents[-1] == "new" and contents == sorted(contents, reverse=True)
    assert absent == (0 if can_exchange else 1)
    assert [entry.name for entry in root.iterdir() if entry.name != "file"] == ["out"]


def test_failed_rename_keeps_the_old_folder(tmp_path):
    path = folder_of(tmp_path / "out", "old")
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "absent", path)
    assert (path / "file").read_text(encoding="utf-8") == "old" and not restore_replaced_folder(tmp_path / "nothing")


def test_file_is_replaced_whole_or_keeps_its_content(tmp_path):
    path = tmp_path / "file"
    atomic_write_text(path, "old")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as temporary:
        temporary.write_text("half", encoding="utf-8")
        raise ZeroDivisionError
    assert path.read_text(encoding="utf-8") == "old" and list(tmp_path.iterdir()) == [path]
    with atomic_write(path, flush=True, temporary=tmp_path / "other") as temporary:
        temporary.write_text("new", encoding="utf-8")
        assert path.read_text(encoding="utf-8") == "old" and temporary.name == "other"
    assert path.read_text(encoding="utf-8") == "new" and list(tmp_path.iterdir()) == [path]
