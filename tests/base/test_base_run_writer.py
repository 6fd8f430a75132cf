"""A full disk delays the files of a run and ends nothing; with space they are complete again.

``/dev/full`` accepts no byte, as a full disk; the kernel's limit of the file size stops a write in the middle.
"""

from __future__ import annotations

import io
import json
import logging
import os
import resource
import signal
from contextlib import contextmanager

import pytest

from megarl.base.logs import TimestampedStream, driver_log
from megarl.base.run_writer import RUN_WRITER, RunWriter
from megarl.tracing.trace_file import TraceFile, read_trace
from megarl.tracing.tracer import Event
from megarl.tracking.jsonl_files import BalanceFile, MetricsFile, read_balance, read_metrics
from megarl.tracking.sample_files import SampleFiles


@pytest.fixture(autouse=True)
def counted_anew():
    RUN_WRITER.reset()
    yield
    RUN_WRITER.close()
    RUN_WRITER.reset()


@contextmanager
def file_size_limit(size):
    """Let every write beyond a file size fail; Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_reported_once_and_the_file_catches_up_in_order(tmp_path):
    messages: list[str] = []
    writer, file = RunWriter(report=messages.append), tmp_path / "metrics.jsonl"
    file.symlink_to("/dev/full")
    writer.append(file, "1\n")
    writer.append(file, "2\n")
    assert writer.metrics() == {
        "run_files/failed_writes": 2.0,
        "run_files/waiting": 1.0,
        "run_files/dropped": 0.0,
    }
    writer.append(tmp_path / "other", "not blocked\n")
    assert (tmp_path / "other").read_text(encoding="utf-8") == "not blocked\n"
    file.unlink()
    writer.append(file, "3\n")
    assert file.read_text(encoding="utf-8") == "1\n2\n3\n"
    assert [message.split(";")[0] for message in messages] == [
        f"{file} cannot be written (No space left on device)",
        "the files of the run are written again",
    ]


def test_a_write_that_stops_in_the_middle_leaves_no_torn_line(tmp_path):
    writer, file = RunWriter(report=lambda text: None), tmp_path / "file"
    writer.append(file, "whole\n")
    with file_size_limit(10):
        writer.append(file, "torn by the disk\n")
        assert file.read_text(encoding="utf-8") == "whole\n"
        writer.replace(tmp_path / "report", "longer than ten bytes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    writer.retry()
    assert file.read_text(encoding="utf-8") == "whole\ntorn by the disk\n"
    assert (tmp_path / "report").read_text(encoding="utf-8") == "longer than ten bytes"


def test_the_memory_is_bounded_and_the_dropped_file_is_named(tmp_path):
    messages: list[str] = []
    writer = RunWriter(limit_bytes=100, report=messages.append)
    for name in ("samples", "metrics"):
        (tmp_path / name).symlink_to("/dev/full")
    writer.append(tmp_path / "metrics", "m" * 40)
    writer.append(tmp_path / "samples", "s" * 70)
    assert f"{tmp_path}/samples: 70 bytes that waited for space are dropped" in messages
    assert writer.metrics()["run_files/dropped"] == 1 and writer.is_waiting(tmp_path / "metrics")
    writer.close()
    assert messages[-1] == f"1 file of the run stay incomplete: {tmp_path}/metrics"


def test_every_record_of_a_run_survives_a_full_disk(tmp_path, caplog):
    """Metrics, balance, samples, timeline and log of a driver: nothing is raised, and nothing is missing afterwards."""
    with driver_log(tmp_path / "logs", "INFO"):
        metrics, balance = MetricsFile(tmp_path / "metrics.jsonl"), BalanceFile(tmp_path / "balance.jsonl")
        samples, trace = SampleFiles(tmp_path / "samples"), TraceFile(tmp_path / "timeline" / "trace.json", 0)

        def record(step):
            metrics.append(step, {"loss": step / 2})
            balance.add(step, {"actor/tokens": [step, step]})
            samples.add(step, [{"output": f"answer {step}"}])
            trace.write(1, [Event("X", f"step {step}", "phase", 0, 1000, "", {})])
            trace.flush()
            logging.getLogger("megarl").info("step %d ends", step)

        record(1)
        with file_size_limit(0):
            record(2)
            record(3)
        record(4)
        trace.close()
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0.5, 1.0, 1.5, 2.0]
    assert list(read_balance(tmp_path / "balance.jsonl")) == [1, 2, 3, 4]
    assert [json.loads((tmp_path / "samples" / f"{step}.jsonl").read_text(encoding="utf-8")) for step in (2, 3)] == [
        {"output": "answer 2"},
        {"output": "answer 3"},
    ]
    steps = [event["name"] for event in read_trace(tmp_path / "timeline") if event["ph"] == "X"]
    assert steps == [f"step {step}" for step in (1, 2, 3, 4)]
    log = (tmp_path / "logs" / "driver.log").read_text(encoding="utf-8")
    assert [line for line in log.splitlines() if line.endswith("ends")][:4] == [
        line for line in log.splitlines() if "step" in line and line.endswith("ends")
    ]
    assert log.count("cannot be written") == 1 and log.count("are written again") == 1


def test_output_of_a_worker_on_a_full_disk_is_lost_and_counted(tmp_path):
    log = os.open(tmp_path / "actor-0.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    descriptor, full = os.dup(log), os.open("/dev/full", os.O_WRONLY)
    raw = io.FileIO(descriptor, "w")
    stream = TimestampedStream(io.TextIOWrapper(raw, encoding="utf-8", line_buffering=True, write_through=True), "OUT")
    for target, line in ((log, "before"), (full, "lost"), (log, "after")):
        os.dup2(target, descriptor)
        stream.write(f"{line}\n")
        stream.flush()
    lines = (tmp_path / "actor-0.log").read_text(encoding="utf-8").splitlines()
    assert [line.split("OUT")[-1].strip() for line in lines] == [
        "before",
        "5 characters of output are missing here: the disk was full",
        "after",
    ]
    os.close(log)
    os.close(full)
