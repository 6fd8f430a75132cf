"""The metrics file and the balance file."""

import json
import math
import signal
import subprocess
import sys

import pytest

from megarl.tracking import MetricsFile, read_metrics
from megarl.tracking.jsonl_files import BalanceFile, read_balance


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def write(path, steps, resumed_step=None, value=1.0):
    file = MetricsFile(path, resumed_step)
    for step in steps:
        file.append(step, {"loss": value * step})


def test_metrics_rows_are_read_back_in_order(path):
    write(path, [0, 1, 2])
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [
        {"step": step, "loss": float(step)} for step in range(3)
    ]
    assert read_metrics(path) == [{"step": step, "loss": float(step)} for step in range(3)]
    assert read_metrics(path.with_name("other.jsonl")) == []


def test_non_finite_metrics_survive_as_valid_json(path):
    file = MetricsFile(path)
    file.append(1, {"nan": math.nan, "up": math.inf, "down": -math.inf, "exact": 0.1 + 0.2})
    json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (row,) = read_metrics(path)
    assert math.isnan(row["nan"]) and row["up"] == math.inf and row["down"] == -math.inf and row["exact"] == 0.1 + 0.2


def test_metrics_of_one_step_are_merged(path):
    file = MetricsFile(path)
    file.append(1, {"a": 1.0, "b": 1.0})
    file.append(1, {"b": 2.0})
    assert read_metrics(path) == [{"step": 1, "a": 1.0, "b": 2.0}]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "{", '{"step": 3, "loss": ', "3", '{"loss": 1.0}'])
def test_truncated_last_metrics_line_is_skipped_and_broken_lines_are_errors(path, torn):
    write(path, [1, 2])
    with path.open("a", encoding="utf-8") as file:
        file.write(torn)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    with path.open("a", encoding="utf-8") as file:
        file.write('\n{"step": 4, "loss": 1.0}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3"):
        read_metrics(path)


def test_resume_drops_metrics_after_the_checkpoint(path):
    write(path, range(1, 8))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 8, "lo')
    write(path, [6, 7, 8], resumed_step=5, value=10.0)
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        *((step, float(step)) for step in range(1, 6)),
        (6, 60.0), (7, 70.0), (8, 80.0),
    ]  # fmt: skip
    assert not list(path.parent.glob("*.tmp-*"))


def test_new_run_renames_the_old_metrics_file(path):
    write(path, [1, 2])
    write(path, [1])
    assert len(read_metrics(path)) == 1
    assert len(read_metrics(path.with_name("metrics.jsonl.old"))) == 2


def test_killed_process_loses_no_written_metrics(path):
    script = (
        "import sys, os, signal; from megarl.tracking.jsonl_files import MetricsFile\n"
        "file = MetricsFile(sys.argv[1])\n"
        "for step in range(5): file.append(step, {'x': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, path], check=False).returncode == -signal.SIGKILL
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]


def test_balance_rows_are_read_back(tmp_path):
    path = tmp_path / "balance.jsonl"
    file = BalanceFile(path)
    file.add(1, {"actor/tokens": [120, 118.0], "actor/update_actor_s": [0.123456, 12.0]})
    assert (
        path.read_text(encoding="utf-8") == '{"step":1,"actor/tokens":[120,118],"actor/update_actor_s":[0.1235,12]}\n'
    )
    file.add(2, {"actor/tokens": [7, 8]})
    with path.open("a", encoding="utf-8") as killed:
        killed.write('{"step":3,"actor/tok')
    assert read_balance(path) == {
        1: {"actor/tokens": [120.0, 118.0], "actor/update_actor_s": [0.1235, 12.0]},
        2: {"actor/tokens": [7.0, 8.0]},
    }
    assert read_balance(tmp_path / "none.jsonl") == {}


@pytest.mark.parametrize("line", ["{", "[1]", '{"actor/tokens": [1]}', '{"step": 1, "actor/tokens": 3}'])
def test_broken_balance_line_is_named(tmp_path, line):
    path = tmp_path / "balance.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"balance\.jsonl, line 2: not a row of balance"):
        read_balance(path)


def test_balance_file_of_new_and_resumed_runs(tmp_path):
    path = tmp_path / "balance.jsonl"
    file = BalanceFile(path)
    for step in range(1, 6):
        file.add(step, {"actor/tokens": [step, step]})
    BalanceFile(path, resumed_step=3).add(4, {"actor/tokens": [40, 41]})
    assert list(read_balance(path)) == [1, 2, 3, 4] and read_balance(path)[4] == {"actor/tokens": [40, 41]}
    BalanceFile(path)
    assert not path.exists() and len(path.with_name("balance.jsonl.old").read_text(encoding="utf-8").splitlines()) == 4


def test_balance_file_stays_below_its_limit(tmp_path):
    path, limit = tmp_path / "balance.jsonl", 40_000
    file, lists = BalanceFile(path, limit_bytes=limit), {"actor/tokens": [1000 + rank for rank in range(256)]}
    for step in range(1, 201):
        file.add(step, lists)
        assert path.stat().st_size <= limit
    steps = list(read_balance(path))
    assert file.stride == 8 and steps == list(range(8, 201, 8))
    assert all(len(json.loads(line)["actor/tokens"]) == 256 for line in path.read_text(encoding="utf-8").splitlines())
