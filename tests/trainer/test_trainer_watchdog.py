"""Watchdog with stalls of real processes: named ranks, files, and the end of the run."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time

import psutil
import pytest
from support.expected_errors import raises
from support.waits import wait_until

from megarl.base.errors import StallError
from megarl.cluster.agent_runners import replica_processes
from megarl.cluster.processes import collect_stacks, kill_processes
from megarl.cluster.resources import ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup, wait_ready
from megarl.config.schema.run import WatchdogConfig
from megarl.models import ParallelLayout
from megarl.rewards.calling import FunctionSpec, RewardTask
from megarl.rewards.pool import RewardPool
from megarl.rewards.pool.jobs import RewardJob
from megarl.rewards.registry import FunctionTraits
from megarl.rollout.interface import Completion, Request, SamplingParams
from megarl.rollout.router import Router
from megarl.tracing import PHASE, TRACER, TracingOptions, span, tracer, unwatch_process, watch_process
from megarl.tracing.stacks import STOPPED, process_state
from megarl.tracing.stall import explain_stall
from megarl.trainer.records import watchdog
from megarl.trainer.records.watchdog import RECOVERY_S, LaterLimits, PhaseLimits, Watchdog

RANKS = 3
HANGING = "tests.cluster.hanging_workers.Hanging"
LIMIT_S = 600
"""Longer than any phase of these tests: they put the clock forward."""


@pytest.fixture(scope="module")
def pool(forked_workers):
    with RaySession(num_cpus=2) as session:
        placed = session.place([ResourcePool("main", "cpu", [2])])["main"]
        placed.processes.options = TracingOptions(watched=True)
        yield placed


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 0.2)
    TRACER.follow_thread()  # an earlier test may have followed the thread of an engine
    watch_process(TracingOptions(watched=True))
    yield
    unwatch_process()


class Clock:
    """The clock of the watchdog and the tracer."""

    def __init__(self):
        self.ahead_ns = self.looks = 0

    def __getattr__(self, name):
        return getattr(time, name)

    def monotonic_ns(self):
        self.looks += threading.current_thread().name == "watchdog"
        return time.monotonic_ns() + self.ahead_ns

    def put_forward(self, seconds):
        self.ahead_ns += seconds * 10**9

    def put_forward_when(self, condition, seconds):
        """Put the clock forward once a condition holds, while the caller waits for something else."""
        threading.Thread(target=lambda: (wait_until(condition), self.put_forward(seconds)), daemon=True).start()

    def wait_for_watchdog(self):
        """Wait until the watchdog has checked the phase."""
        seen = self.looks + 2  # the check of the first look may be under way
        wait_until(lambda: self.looks >= seen)


@pytest.fixture
def clock(monkeypatch):
    """A clock that is put forward; for the watchdog the machine never sleeps meanwhile."""
    clock = Clock()
    for module in (watchdog, tracer):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(watchdog, "ASLEEP_S", 1e6)
    return clock


@pytest.fixture
def start(pool):
    """Starts three ranks of a role; what hangs is killed afterwards."""
    groups: list[WorkerGroup] = []

    def start_group(role):
        groups.append(WorkerGroup(role, HANGING, {}, ParallelLayout(dp=RANKS), pool, threads=2))
        wait_ready(groups[-1:])
        return groups[-1]

    yield start_group
    kill_processes(pool.processes)
    for group in groups:
        group.shutdown()
    pool.processes.groups.clear()


def stall_of(folder):
    """The summary of the only stall, and the other files by name."""
    (stall,) = (folder / "stalls").iterdir()
    texts = {file.name: file.read_text(encoding="utf-8") for file in stall.iterdir()}
    return texts.pop("summary.txt"), texts


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("user code", r"is in update arg0=2 arg1=1, at hang \(tests/cluster/hanging_workers\.py:\d+\)"),
        ("holds Python's lock", r"is in update arg0=2 arg1=1, at hang \(tests/cluster/hanging_workers\.py:\d+\)"),
        ("stopped", r"\(pid \d+ on [\d.]+\) is stopped in update arg0=2 arg1=1; `kill -CONT \d+` there resumes it"),
    ],
)
def test_the_stalled_rank_is_named_and_the_run_ends(start, pool, tmp_path, clock, how, words):
    group = start("actor")
    pids = {member.rank: member.pid for member in pool.processes.members()}
    keys = WatchdogConfig(timeout_s=None, phases={"update_actor": LIMIT_S}, action="end")
    line = (
        rf"  actor rank 1 {words}; actor ranks 0, 2 wait for it in all_reduce #3 of all ranks \[0, 1, 2\](, for \d+ s)?"
    )
    with (
        raises("worker.phase-stalled", error=StallError) as error,
        Watchdog(keys, tmp_path, pool.processes, lambda text: None),
        span("step", PHASE),
        span("update_actor", PHASE),
    ):
        clock.put_forward_when(
            lambda: re.match(line, f"  {explain_stall(collect_stacks(pool.processes))}"), LIMIT_S + 1
        )
        group.update(2, 1, how)
    summary, stacks = stall_of(tmp_path)
    assert summary.strip() == error.value.text
    lines = summary.splitlines()
    assert re.match(r"update_actor has taken \d+ s, its limit is 600 s", lines[0])
    assert re.fullmatch(line, lines[1])
    assert set(stacks) == {"driver-0.txt", *(f"actor-{rank}.txt" for rank in range(RANKS))}
    assert "all_reduce #3 of all ranks [0, 1, 2]" in stacks["actor-0.txt"] and "in update" in stacks["actor-0.txt"]
    assert "test_trainer_watchdog.py" in stacks["driver-0.txt"]
    assert ("in hang" in stacks["actor-1.txt"]) == (how != "stopped")
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids.values()))


def test_action_report_lets_the_run_continue(start, pool, tmp_path, clock):
    group, messages = start("critic"), []
    stopped = next(member.pid for member in pool.processes.members() if member.rank == 2)
    with Watchdog(WatchdogConfig(timeout_s=LIMIT_S), tmp_path, pool.processes, messages.append):
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: process_state(stopped) == STOPPED)
        pending = group.submit("update", 1)
        with span("update_critic", PHASE):
            clock.put_forward(LIMIT_S + 1)
            wait_until(lambda: bool(messages))
            os.kill(stopped, signal.SIGCONT)
            assert pending.result() == [None] * RANKS
        # Three times as long as the limit, and yet no phase is.
        for _ in range(8):
            with span("update_actor", PHASE):
                group.update(3)
                clock.put_forward(LIMIT_S * 3 // 8)
                clock.wait_for_watchdog()
    assert len(messages) == 1 and f"critic rank 2 (pid {stopped} on" in messages[0]


def test_a_stalled_reward_function_is_named(pool, tmp_path, clock):
    (tmp_path / "mine.py").write_text(
        "import time\ndef score(*a, **k):\n    while True:\n        time.sleep(1)\n", encoding="utf-8"
    )
    spec = FunctionSpec(f"{tmp_path}/mine.py:score")
    keys = WatchdogConfig(timeout_s=None, phases={"reward": LIMIT_S}, action="end")
    with RewardPool([spec], [FunctionTraits()], 1, 0) as rewards:
        with (
            raises(
                "worker.phase-stalled", "reward process rank 0", "mine.py:score tasks=1", "at score (", "mine.py:4)"
            ),
            Watchdog(keys, tmp_path, pool.processes, lambda text: None),
            span("reward", PHASE),
        ):
            clock.put_forward_when(lambda: "at score" in explain_stall(collect_stacks(pool.processes)), LIMIT_S + 1)
            rewards.run([RewardJob(0, RewardTask("a", "b", "c", {}))])
        assert rewards.pids == []


def test_a_stalled_engine_is_named(start, pool, tmp_path, clock):
    group = start("rollout")
    keys = WatchdogConfig(timeout_s=None, phases={"gen": LIMIT_S}, action="end")

    async def ask():
        async with Router({1: replica_processes(group)[1]}, 1, timeout_s=600) as router:
            await router.generate([1], SamplingParams(max_new_tokens=1), seed=0)

    with (
        raises("worker.phase-stalled", "rollout rank 1 is in generate, at hang (", "hanging_workers.py") as error,
        Watchdog(keys, tmp_path, pool.processes, lambda text: None),
        span("gen", PHASE),
    ):
        clock.put_forward_when(lambda: "at hang" in explain_stall(collect_stacks(pool.processes)), LIMIT_S + 1)
        asyncio.run(ask())
    assert "idle: rollout rank 0, rollout rank 2" in error.value.text


def test_a_dead_rank_is_named(start, pool):
    start("actor").submit("update", 1, 0, "user code")
    pid = next(member.pid for member in pool.processes.members() if member.rank == 0)
    wait_until(lambda: "ranks 1, 2 wait" in explain_stall(collect_stacks(pool.processes)))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid))
    assert explain_stall(collect_stacks(pool.processes)).startswith(f"actor rank 0 (pid {pid}) is gone")


def test_time_of_a_stopped_process_does_not_count(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "ASLEEP_S", 0.3)
    messages: list[str] = []
    keys = WatchdogConfig(timeout_s=3)
    with Watchdog(keys, tmp_path, pool.processes, messages.append), span("gen", PHASE):
        pid = os.fork()
        if pid == 0:  # continues its parent after a while, as a user's `fg` does
            while process_state(os.getppid()) != STOPPED:
                time.sleep(0.01)
            time.sleep(4)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)
    os.waitpid(pid, 0)
    assert messages == [] and not (tmp_path / "stalls").exists()


def test_a_phase_that_has_not_completed_yet_is_reported_at_once_and_ends_the_run_before_the_collective_fails(
    pool, tmp_path, clock
):
    """The first pass may compile; the second is known to be short."""
    messages: list[str] = []
    later = LaterLimits(collective_s=watchdog.REPORT_S + 4 * LIMIT_S)
    keys = WatchdogConfig(timeout_s=LIMIT_S, action="end")
    with Watchdog(keys, tmp_path, pool.processes, messages.append, later), span("step", PHASE):
        with span("update_actor", PHASE):
            clock.put_forward(LIMIT_S + 1)
            wait_until(lambda: messages)
            clock.wait_for_watchdog()
        assert len(messages) == 1 and "the run ends after 2400 s, unless update_actor goes on before" in messages[0]
    with (
        raises("worker.phase-stalled", "values has taken", "2400 s (trainer.watchdog)"),
        Watchdog(keys, tmp_path, pool.processes, messages.append, later),
        span("values", PHASE),
    ):
        clock.put_forward(4 * LIMIT_S + 1)
        time.sleep(120)
    # A phase of normal length that stalls later does not wait that long.
    with (
        raises("worker.phase-stalled", "adv has taken 6", " 600 s (trainer.watchdog)"),
        Watchdog(keys, tmp_path, pool.processes, messages.append, later),
    ):
        with span("adv", PHASE):
            pass
        with span("adv", PHASE):
            clock.put_forward(LIMIT_S + 1)
            time.sleep(120)


def test_finished_requests_are_progress(pool, tmp_path, clock):
    class Slow:
        def __init__(self):
            self.requests: list[Request] = []

        async def accept(self, client, requests, aborted):
            self.requests = list(requests)

        async def completions(self, client, wait_s):
            clock.put_forward(LIMIT_S // 2)
            await asyncio.to_thread(clock.wait_for_watchdog)
            return [Completion(request.request_id, [1], [0.0], "stop", 1) for request in self.requests]

    async def ask():
        async with Router({0: Slow()}, 1, timeout_s=600) as router:
            await asyncio.gather(
                *(router.generate([1], SamplingParams(max_new_tokens=1), seed=seed) for seed in range(7))
            )

    keys, messages = WatchdogConfig(timeout_s=LIMIT_S), list[str]()
    with Watchdog(keys, tmp_path, pool.processes, messages.append), span("gen", PHASE):
        asyncio.run(ask())
    assert messages == []


def test_limits_are_per_phase_and_double():
    limits = PhaseLimits(WatchdogConfig(timeout_s=10, phases={"gen": 60, "testing": None}))
    assert (limits.of("gen"), limits.of("testing"), limits.of("adv")) == (60, None, 10)
    limits.double("gen")
    limits.double("adv")
    limits.double("testing")
    assert (limits.of("gen"), limits.of("testing"), limits.of("adv"), limits.of("ref")) == (120, None, 20, 10)
    assert limits.any and not PhaseLimits(WatchdogConfig(timeout_s=None, phases={"gen": None})).any


def test_limits_follow_the_history_of_the_run_below_the_limit_of_collectives():
    limits = PhaseLimits(WatchdogConfig(phases={"gen": 60}), LaterLimits(1800))
    assert limits.of("update_actor") == 240
    for seconds, limit in [(100, 240), (400, 800), (300, 800), (1000, 1740), (3000, 3750)]:
        limits.observe("update_actor", seconds)
        limits.observe("gen", seconds)
        assert (limits.of("update_actor"), limits.of("gen"), limits.of("values")) == (limit, 60, 240)


def test_the_run_ends_after_first_passes_and_after_the_recovery_of_replicas():
    later = LaterLimits(1800, {"gen": 180, "update_weights": 600})
    limits = PhaseLimits(WatchdogConfig(phases={"testing": 900, "save_checkpoint": None}), later)
    ends = {
        phase: [limits.end_of(phase, completed) for completed in (False, True)]
        for phase in ("update_actor", "gen", "update_weights", "testing", "save_checkpoint")
    }
    assert ends == {
        "update_actor": [1740, 240],
        "gen": [1740, 240 + 180 + RECOVERY_S],
        "update_weights": [1740, 240 + 600 + RECOVERY_S],
        "testing": [900, 900],
        "save_checkpoint": [None, None],
    }
    limits.double("update_actor")
    assert (limits.of("update_actor"), limits.end_of("update_actor", True)) == (480, 240), "reports delay no end"


def test_the_time_of_a_finished_phase_is_observed(pool, tmp_path, clock):
    keys = WatchdogConfig(timeout_s=LIMIT_S)
    with Watchdog(keys, tmp_path, pool.processes, lambda text: None) as guard:
        with span("old_log_prob", PHASE):
            clock.put_forward(400)
            clock.wait_for_watchdog()
        clock.wait_for_watchdog()
    limit = guard.limits.of("old_log_prob")
    assert limit is not None and 800 <= limit <= 1000
