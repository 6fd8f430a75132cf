"""Timeline of real processes, including unresponsive and dead ones."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import ray

from megarl.cluster import processes
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup, wait_ready
from megarl.config.schema.run import TimelineConfig
from megarl.models import ParallelLayout
from megarl.ops.timeline.command import summarize
from megarl.tracing import TracingOptions, unwatch_process
from megarl.tracing.trace_file import read_trace
from megarl.trainer.records.tracing import Timeline


@pytest.fixture(scope="module")
def pool(forked_workers):
    with RaySession(num_cpus=2) as session:
        placed = session.place([ResourcePool("main", "cpu", [2])])["main"]
        placed.processes.options = TracingOptions(timeline=True)
        yield placed


@pytest.fixture
def group(pool):
    """Two ranks that can be stopped and killed."""
    sleepers = WorkerGroup("sleeper", "tests.cluster.light_workers.Sleeper", {}, ParallelLayout(dp=2), pool)
    wait_ready([sleepers])
    yield sleepers
    sleepers.shutdown()
    pool.processes.groups.clear()
    unwatch_process()


def recorded(folder):
    """What the run's timeline comes to, and the calls in it by process."""
    events = read_trace(folder)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    calls = dict.fromkeys(names.values(), 0)
    for event in events:
        calls[names[event["pid"]]] += event.get("cat") == "verb"
    return summarize(events), calls


def test_an_unresponsive_process_is_named_and_the_others_are_recorded(pool, group, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_COLLECT_S", 1.0)
    messages: list[str] = []
    timeline = Timeline(TimelineConfig(enable=True), tmp_path, messages.append)
    timeline.begin_step(pool.processes, 0)
    stopped, _ = group.pid()
    os.kill(stopped, signal.SIGSTOP)  # the first one in the queue, so the other one is collected after the time limit
    timeline.begin_step(pool.processes, 1)
    others = [ref for member, ref in timeline._pending if member.pid != stopped]
    assert ray.wait(others, num_returns=len(others), timeout=120)[1] == []  # they have answered by then
    timeline.begin_step(pool.processes, 2)
    host = next(member.host for member in pool.processes.members())
    assert messages == [
        f"timeline: no events of sleeper rank 0 (pid {stopped} on {host}): it did not answer within 1 s; the timeline "
        "lacks them"
    ]
    os.kill(stopped, signal.SIGCONT)
    monkeypatch.undo()
    timeline.close(pool.processes)
    assert len(messages) == 1, "what it recorded later is there"
    summary, calls = recorded(tmp_path)
    assert calls == {"driver": 0, "sleeper rank 0": 0, "sleeper rank 1": 1}
    (lacks,) = summary.left_out
    assert lacks.startswith("sleeper rank 0, until ") and lacks.endswith(
        "events left out: it did not answer within 1 s"
    )


def test_a_dead_process_is_named(pool, group, tmp_path):
    messages: list[str] = []
    timeline = Timeline(TimelineConfig(enable=True), tmp_path, messages.append)
    timeline.begin_step(pool.processes, 0)
    _, victim = group.pid()
    process = psutil.Process(victim)
    process.kill()
    process.wait()
    timeline.close(pool.processes)
    assert any(line.startswith("timeline: no events of sleeper rank 1") and "it is gone;" in line for line in messages)
    summary, calls = recorded(tmp_path)
    assert calls["sleeper rank 0"] == 1
    assert {line.split(", until ")[0] for line in summary.left_out} == {"sleeper rank 1"}


def test_a_failed_run_collects_no_events(pool, group, tmp_path):
    messages: list[str] = []
    timeline = Timeline(TimelineConfig(enable=True), tmp_path, messages.append)
    timeline.begin_step(pool.processes, 1)
    group.pid()
    timeline.close(None)
    (lacks,) = recorded(tmp_path)[0].left_out
    assert lacks.endswith("events of processes that were not collected before the run failed") and not messages
