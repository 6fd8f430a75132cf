import json
import math
import signal
import subprocess
import sys

import pytest

from megarl.tracking import MetricsFile, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def write(path, steps, resumed_step=None, value=1.0):
    file = MetricsFile(path, resumed_step)
    for step in steps:
        file.append(step, {"loss": value * step})
    file.close()


def test_rows_come_back_in_order_one_line_each(path):
    write(path, [0, 1, 2])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": step, "loss": float(step)} for step in range(3)
    ]
    assert read_metrics(path) == [{"step": step, "loss": float(step)} for step in range(3)]
    assert read_metrics(path.with_name("other.jsonl")) == []


def test_numbers_that_json_lacks_survive_as_valid_json(path):
    file = MetricsFile(path)
    file.append(1, {"nan": math.nan, "up": math.inf, "down": -math.inf, "exact": 0.1 + 0.2})
    file.close()
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (row,) = read_metrics(path)
    assert math.isnan(row["nan"]) and row["up"] == math.inf and row["down"] == -math.inf and row["exact"] == 0.1 + 0.2


def test_parts_of_one_step_are_merged(path):
    file = MetricsFile(path)
    file.append(1, {"a": 1.0, "b": 1.0})
    file.append(1, {"b": 2.0})
    file.close()
    assert read_metrics(path) == [{"step": 1, "a": 1.0, "b": 2.0}]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "{", '{"step": 3, "loss": ', "3", '{"loss": 1.0}'])
def test_a_torn_last_line_is_left_out_and_one_in_the_middle_is_an_error(path, torn):
    write(path, [1, 2])
    with path.open("a") as file:
        file.write(torn)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    with path.open("a") as file:
        file.write('\n{"step": 4, "loss": 1.0}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3"):
        read_metrics(path)


def test_resume_drops_what_will_be_logged_again(path):
    write(path, range(1, 8))
    with path.open("a") as file:
        file.write('{"step": 8, "lo')
    write(path, [6, 7, 8], resumed_step=5, value=10.0)
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        *((step, float(step)) for step in range(1, 6)),
        (6, 60.0), (7, 70.0), (8, 80.0),
    ]  # fmt: skip
    assert not list(path.parent.glob("*.partial"))


def test_a_new_run_moves_the_old_rows_aside(path):
    write(path, [1, 2])
    write(path, [1])
    assert len(read_metrics(path)) == 1
    assert len(read_metrics(path.with_name("metrics.jsonl.old"))) == 2


def test_a_killed_process_loses_no_row_it_wrote(path):
    script = (
        "import sys, os, signal; from megarl.tracking.metrics_file import MetricsFile\n"
        "file = MetricsFile(sys.argv[1])\n"
        "for step in range(5): file.append(step, {'x': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, path], check=False).returncode == -signal.SIGKILL
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]
