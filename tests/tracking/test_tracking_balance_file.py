"""The file with what each data-parallel rank had to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.tracking.balance_file import BalanceFile, read_balance


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "balance.jsonl"
    file = BalanceFile(path)
    file.add(1, {"actor/tokens": [120, 118.0], "actor/update_actor_s": [0.123456, 12.0]})
    assert path.read_text() == '{"step":1,"actor/tokens":[120,118],"actor/update_actor_s":[0.1235,12]}\n'
    file.add(2, {"actor/tokens": [7, 8]})
    with path.open("a") as killed:
        killed.write('{"step":3,"actor/tok')
    assert read_balance(path) == {
        1: {"actor/tokens": [120.0, 118.0], "actor/update_actor_s": [0.1235, 12.0]},
        2: {"actor/tokens": [7.0, 8.0]},
    }
    assert read_balance(tmp_path / "none.jsonl") == {}


@pytest.mark.parametrize("line", ["{", "[1]", '{"actor/tokens": [1]}', '{"step": 1, "actor/tokens": 3}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "balance.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=r"balance\.jsonl, line 2: not a row of balance"):
        read_balance(path)


def test_a_run_starts_anew_or_goes_on_after_a_step(tmp_path: Path) -> None:
    path = tmp_path / "balance.jsonl"
    file = BalanceFile(path)
    for step in range(1, 6):
        file.add(step, {"actor/tokens": [step, step]})
    BalanceFile(path, resumed_step=3).add(4, {"actor/tokens": [40, 41]})
    assert list(read_balance(path)) == [1, 2, 3, 4] and read_balance(path)[4] == {"actor/tokens": [40, 41]}
    BalanceFile(path)
    assert not path.exists() and len(path.with_name("balance.jsonl.old").read_text().splitlines()) == 4


def test_the_file_stays_small_and_its_steps_evenly_spread(tmp_path: Path) -> None:
    path, limit = tmp_path / "balance.jsonl", 40_000
    file, lists = BalanceFile(path, limit_bytes=limit), {"actor/tokens": [1000 + rank for rank in range(256)]}
    for step in range(1, 201):
        file.add(step, lists)
        assert path.stat().st_size <= limit
    steps = list(read_balance(path))
    assert file.stride == 8 and steps == list(range(8, 201, 8))
    assert all(len(json.loads(line)["actor/tokens"]) == 256 for line in path.read_text().splitlines())
