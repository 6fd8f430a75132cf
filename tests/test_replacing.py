"""Replacing a folder: whatever instant the process dies in, the old one or the new one is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from dying import run_and_die

from megarl import replacing
from megarl.replacing import put_in_place, restore_replaced


def folder_of(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


@pytest.mark.parametrize("can_exchange", [True, False])
def test_killed_at_every_change_a_folder_is_the_old_one_or_the_new_one(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(replacing, "exchange", lambda *_: False)
    found, absent = [], 0
    for changes in range(20):
        root = folder_of(tmp_path / str(changes), "")
        place, finished = folder_of(root / "out", "old"), folder_of(root / ".unfinished", "new")
        died = run_and_die(changes, lambda place=place, finished=finished: put_in_place(finished, place))
        is_absent = not place.exists()
        assert restore_replaced(place) == is_absent
        absent += is_absent
        found.append((place / "file").read_text())
        if not died:
            break
    assert found[0] == "old" and found[-1] == "new" and found == sorted(found, reverse=True)
    assert absent == (0 if can_exchange else 1)
    assert [path.name for path in root.iterdir() if path.name != "file"] == ["out"]


def test_what_cannot_be_renamed_stays(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "out", "old")
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "absent", place)
    assert (place / "file").read_text() == "old" and not restore_replaced(tmp_path / "nothing")
