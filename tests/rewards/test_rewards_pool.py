"""Reward functions in processes that hang and die, against what they do in this one."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megarl.errors import RewardError
from megarl.rewards.calling import FunctionSpec, Task
from megarl.rewards.outcome import BAD_SAMPLE, INFRASTRUCTURE, TIMEOUT, Outcome
from megarl.rewards.pool import InDriver, Job, RewardPool

FUNCTIONS = Path(__file__).with_name("pool_functions.py")
NAMES = ("naughty", "once_away", "whole_batch", "later", "meeting", "odd_results", "told")
LIMIT_S = 2.0
SPECS = [FunctionSpec(f"{FUNCTIONS}:{name}", {}, LIMIT_S, 8) for name in NAMES]


def task(text, truth="t"):
    return Task("d", text, truth, {"index": 1}, "p")


def jobs(name, *tasks):
    return [Job(NAMES.index(name), one if isinstance(one, Task) else task(one)) for one in tasks]


@pytest.fixture(scope="module")
def pool():
    traits = [spec.load().traits for spec in SPECS]
    with RewardPool(SPECS, traits, processes=2, max_retries=1, first=[0]) as running:
        yield running


def test_results_are_those_of_this_process_in_their_order(pool):
    texts = ["a" * (index % 7) for index in range(300)]
    found, counts = pool.run(jobs("naughty", *texts))
    assert [outcome.score for outcome in found] == [len(text) for text in texts]
    assert (counts.retries, counts.replaced) == (0, 0)
    assert {outcome.extras["process"] for outcome in found} <= set(pool.pids)
    for name in ("told", "odd_results"):
        here, _ = InDriver([spec.load() for spec in SPECS]).run(jobs(name, "x"))
        assert pool.run(jobs(name, "x"))[0] == here
    assert pool.run(jobs("told", "x"))[0][0].extras == {"told": ["d", "x", "t", {"index": 1, "seen": True}, "p"]}
    (odd,), _ = pool.run(jobs("odd_results", "x"))
    assert odd.extras == {
        "lock": "<built-in function localtime>",
        "bytes": "b'x'",
        "set": [1],
        "nested": {"1": [2, 3.5]},
        "big": str(2**70),
    }


def test_processes_are_kept_from_batch_to_batch(pool):
    before = set(pool.pids)
    calls: dict[int, int] = {}
    for _ in range(5):
        (outcome,), _ = pool.run(jobs("naughty", "x"))
        assert outcome.extras["calls"] > calls.get(outcome.extras["process"], 0)  # its module is the one it had
        calls[outcome.extras["process"]] = outcome.extras["calls"]
    assert set(pool.pids) == before
    assert pool.run([])[0] == []


def test_what_hangs_and_what_dies_takes_nothing_with_it(pool):
    texts = ["ok", "regex", "ok", "exit", "ok", "segfault", "wrong", "away", "ok"] * 2
    found, counts = pool.run(jobs("naughty", *texts))
    kinds = {"regex": TIMEOUT, "exit": INFRASTRUCTURE, "segfault": INFRASTRUCTURE, "wrong": BAD_SAMPLE}
    kinds |= {"away": INFRASTRUCTURE, "ok": None}
    assert [outcome.kind for outcome in found] == [kinds[text] for text in texts]
    by_text = dict(zip(texts, found, strict=True))
    assert by_text["ok"].score == 2
    assert by_text["regex"].failure == f"{FUNCTIONS}:naughty took longer than its 2 s"
    assert by_text["exit"].failure.endswith("naughty ended with status 3")
    assert by_text["segfault"].failure.endswith("naughty died of SIGSEGV")
    assert "KeyError: 'no such thing'" in by_text["wrong"].failure and "pool_functions.py:" in by_text["wrong"].failure
    # each of the six that are no sample's fault was tried twice, and each death and timeout cost a process
    assert counts.retries == 6 and counts.replaced == 2 + 2 * 4
    assert pool.run(jobs("naughty", "fine"))[0][0].score == 4


def test_an_infrastructure_failure_is_tried_again(pool, tmp_path):
    found, counts = pool.run(jobs("once_away", task("x", str(tmp_path / "a")), task("x", str(tmp_path / "b"))))
    assert found == [Outcome(1.0, {}), Outcome(1.0, {})] and counts.retries == 2
    waits = []
    here = InDriver([SPECS[1].load()], max_retries=1, sleep=waits.append)
    found, counts = here.run([Job(0, task("x", str(tmp_path / "c")))])
    assert found == [Outcome(1.0, {})] and counts.retries == 1 and waits == [0.2]
    assert InDriver([SPECS[1].load()]).run([Job(0, task("x", str(tmp_path / "d")))])[0][0].kind == INFRASTRUCTURE


def test_a_function_of_batches_sees_the_whole_batch(pool):
    texts = ["aaa", "b", "cc"] * 40
    found, _ = pool.run(jobs("whole_batch", *texts))
    assert [outcome.score for outcome in found] == [80, 0, 40] * 40 and found[0].extras == {"of": 120}
    found, counts = pool.run(jobs("whole_batch", "a", "regex"))
    assert [outcome.kind for outcome in found] == [TIMEOUT, TIMEOUT] and counts.replaced == 1


def test_coroutines_run_at_the_same_time_and_one_that_blocks_is_found(pool):
    found, _ = pool.run(jobs("meeting", *["8"] * 64))  # one after another none would go, and all run out of their time
    assert [outcome.score for outcome in found] == [8] * 64
    found, counts = pool.run(jobs("later", "0", "100", "0.1"))
    assert [outcome.kind for outcome in found] == [None, TIMEOUT, None] and counts.replaced == 0


def test_a_sample_that_cannot_be_sent_is_named(pool):
    lock = Task("d", "x", threading.Lock(), {})
    found, _ = pool.run(jobs("naughty", "a", lock, "b"))
    assert [outcome.kind for outcome in found] == [None, BAD_SAMPLE, None]
    assert "cannot be sent to the process that scores it: TypeError: cannot pickle" in found[1].failure


def test_what_a_function_started_ends_with_its_process():
    with RewardPool(SPECS[:1], [SPECS[0].load().traits], processes=1) as pool:
        (started,), _ = pool.run([Job(0, task("sleeping child"))])
        child = psutil.Process(int(started.score))
        assert child.is_running()
        (pid,) = pool.pids
    _, left = psutil.wait_procs([child], 10)
    assert not left or child.status() == psutil.STATUS_ZOMBIE
    assert not psutil.pid_exists(pid)


def test_a_function_that_is_gone_when_a_process_needs_it(tmp_path):
    file = tmp_path / "gone.py"
    file.write_text("def f(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    spec = FunctionSpec(f"{file}:f")
    traits = spec.load().traits
    file.unlink()
    with RewardPool([spec], [traits], 1) as pool, pytest.raises(RewardError, match=r"there is no file .*gone\.py"):
        pool.run([Job(0, task("x"))])


DRIVER = """
import sys, time
from megarl.rewards.calling import FunctionSpec, Task
from megarl.rewards.pool import Job, RewardPool
spec = FunctionSpec(sys.argv[1])
pool = RewardPool([spec], [spec.load().traits], 2)
pool.start()
pool.run([Job(0, Task("d", "x", "t", {}))])
print(*pool.pids, flush=True)
pool.run([Job(0, Task("d", "regex", "t", {}))] * 2)
"""


def test_no_process_outlives_a_driver_that_is_killed():
    command = [sys.executable, "-c", DRIVER, f"{FUNCTIONS}:naughty"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ) as driver:
        children = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(children) == 2
        time.sleep(0.3)  # both are in the regular expression
        driver.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(children, 10)
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]
